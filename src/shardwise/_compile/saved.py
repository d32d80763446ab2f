"""Reads a saved compilation, and rejects damaged or foreign files."""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from typing import Any, TypeVar

from .._base import public, read_json, show_type
from .._check import Finding, Findings
from .._hlo import Collective, Source
from .._memory import Buffer, LiveMemory
from .._time import StepTime
from .result import FORMAT, Compiled, Memory

T = TypeVar("T")
_RENAMED = {"target": "chips"}


@public
def load_compiled(path: str | os.PathLike[str]) -> Compiled:
    """Returns the compilation that `Compiled.save` wrote, without its program.

    Raises:
        ValueError: the file is damaged, or not a saved compilation.

    Example:
        >>> import tempfile, jax, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        >>> layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), "dp")
        >>> compiled = sw.compile(make, layout, inputs=jax.ShapeDtypeStruct((8, 16), "float32"))
        >>> path = tempfile.mkdtemp() + "/compiled.json"
        >>> compiled.save(path)
        >>> bool(sw.diff(sw.load_compiled(path), compiled))
        False
    """
    name = os.fspath(path)
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{name} is not a saved compilation: {why}") from error
    try:
        try:
            return _compiled(found)
        except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error
    except ValueError as error:
        raise ValueError(
            f"{name} is not a saved compilation: {error}; "
            f"compiled.save and shardwise compile --save write one"
        ) from error


def _compiled(found: Any) -> Compiled:
    if not isinstance(found, dict):
        raise ValueError(f"it contains {show_type(found)} instead of an object")
    if "leaves" in found and "memory" not in found:
        raise ValueError("it is a layout, for sw.load_layout")
    if found.get("format") == 1:
        found = _upgraded(found)
    if found.get("format", FORMAT) != FORMAT:
        raise ValueError(f"it has format {found['format']!r}, but this version reads {FORMAT}")
    _require(found, ("format", "memory", "collectives", "buffers", "findings"), "it")
    seen = found["collectives"] is not None
    fields = {
        **found,
        "memory": None if found["memory"] is None else _made(Memory, found["memory"], "memory"),
        "collectives": _rows(Collective, found["collectives"] or [], "collectives"),
        "buffers": _rows(Buffer, found["buffers"], "buffers"),
        "findings": Findings(_rows(Finding, found["findings"], "findings")),
        "not_counted": found.get("not_counted", {}),
        "time": _part(StepTime, found, "time"),
        "live": _part(LiveMemory, found, "live"),
    }
    made = _made(Compiled, fields, "it")
    # Derived fields are saved too: if they disagree with the rest, the file was changed.
    again = json.loads(json.dumps(made.to_dict()))
    for name in ("fits", "spare_bytes", "by_axis"):
        if found.get(name) != again[name]:
            raise ValueError(f"it is damaged: its {name!r} does not agree with its other fields")
    if made.has_program != seen or (made.memory and not _adds_up(made.memory)):
        raise ValueError("it is damaged: its numbers do not agree with each other")
    return made


def _part(kind: Any, found: dict[str, Any], name: str) -> Any:
    if found.get(name) is None:
        return None
    try:
        return kind.from_dict(found[name])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its {name!r} is damaged ({error})") from error


def _upgraded(found: dict[str, Any]) -> dict[str, Any]:
    """Returns what version 0.1 saved, with the current field names."""
    found = {_RENAMED.get(name, name): value for name, value in found.items()}
    rows = found.get("collectives")
    if isinstance(rows, list):
        found["collectives"] = [
            {("sent_bytes" if name == "bytes" else name): value for name, value in row.items()}
            if isinstance(row, dict)
            else row
            for row in rows
        ]
    return {**found, "format": FORMAT}


def _adds_up(memory: Memory) -> bool:
    beyond = memory.outputs - memory.aliased
    return memory.peak == memory.arguments + beyond + memory.temporaries


def _rows(kind: type[T], rows: Any, name: str) -> tuple[T, ...]:
    if not isinstance(rows, list):
        raise ValueError(f"its {name!r} is {show_type(rows)} instead of a list")
    return tuple(_made(kind, row, f"{name}[{i}]") for i, row in enumerate(rows))


def _made(kind: type[T], row: Any, where: str) -> T:
    """Returns a dataclass with the fields in `row`, each of which must have its declared type."""
    if not isinstance(row, dict):
        raise ValueError(f"its {where!r} is {show_type(row)} instead of an object")
    hints = typing.get_type_hints(kind, localns={"Layout": object, "Machine": object})
    fields = {}
    for field in dataclasses.fields(typing.cast(Any, kind)):
        if field.name not in row:
            no_default = field.default is field.default_factory is dataclasses.MISSING
            if no_default:
                raise ValueError(f"{where} has no {field.name!r}")
            continue
        value, hint = row[field.name], hints[field.name]
        if hint is Source:
            value = _made(Source, value, f"{where}.{field.name}")
        elif typing.get_origin(hint) is tuple and isinstance(value, list):
            value = tuple(value)
        if not _is_a(value, hint):
            raise ValueError(f"{field.name!r} of {where} is {str(value)[:40]!r}")
        fields[field.name] = value
    return kind(**fields)


def _is_a(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_is_a(value, each) for each in inner)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_a(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(each, inner[1]) for each in value.values())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _require(row: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in names:
        if name not in row:
            raise ValueError(f"{where} has no {name!r}")
