"""Targets of the command line: `path/to/file.py:name` or `package.module:name`."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._base import (
    add_folder,
    at_line_of,
    beside,
    is_users,
    load_file,
    parse_json,
    shadowed,
    show_type,
    tell_error,
)
from .._nnx import Recipe

_FORM = "write path/to/file.py:name or package.module:name"


def load_target(target: str) -> Any:
    """Returns what a target names: a factory, a model, or a `Recipe`.

    Raises:
        ValueError: the file, the module or the name is not there, or importing it failed.
    """
    found = load_name(target)
    if not (isinstance(found, Recipe | nnx.Module) or callable(found)):
        raise ValueError(
            f"target {target!r} is {show_type(found)}: name a factory, an nnx.Module or a Recipe"
        )
    return found


def load_name(target: str) -> Any:
    """Returns whatever a target names.

    Raises:
        ValueError: the file, the module or the name is not there, or importing it failed.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"target {target!r} does not name a factory: {_FORM}")
    if ".py:" in place:
        raise ValueError(f"target {target!r} has two names after its file: {_FORM}")
    with contained(f"importing {place}"):
        module = _load_file(place) if place.endswith(".py") else _load_module(place)
    found: Any = module
    for step in name.split("."):
        try:
            found = getattr(found, step)
        except AttributeError:
            names = [n for n in dir(found) if not n.startswith("_") and _is_target(found, n)]
            near = difflib.get_close_matches(step, names, n=3) or names[:5]
            hint = f"; it has {', '.join(near)}" if near else "; it defines no such names"
            raise ValueError(f"target {target!r}: {place} has no {step!r}{hint}") from None
    return found


@contextlib.contextmanager
def contained(what: str) -> Iterator[None]:
    """While entered, the user's code cannot end the process, move it elsewhere, or go on twice.

    Args:
        what: is done, for the error: `importing model.py`.

    Raises:
        ValueError: it called `sys.exit` or `os._exit`.
    """
    process, folder, leave = os.getpid(), os.getcwd(), os._exit

    def refuse(status: int) -> None:
        if os.getpid() != process:  # a child of its own may end as it likes
            leave(status)
        raise _Left(status)

    os._exit = refuse  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    except (_Left, SystemExit) as error:
        call = "os._exit" if isinstance(error, _Left) else "sys.exit"
        raise ValueError(
            f"{what} called {call}({error.args[0] if error.args else ''})"
            f"{at_line_of(error)}, which would end shardwise: leave it out, or put it under "
            f'if __name__ == "__main__"'
        ) from error
    finally:
        os._exit = leave
        if os.getpid() != process:  # the target has forked: one of two is enough
            leave(0)
        # Paths on the command line are relative to where it was started.
        with contextlib.suppress(OSError):
            os.chdir(folder)


class _Left(BaseException):
    """`os._exit` was called."""


def _is_target(place: Any, name: str) -> bool:
    found = getattr(place, name, None)
    return callable(found) or isinstance(found, Recipe | nnx.Module)


_SHAPES = (
    "write dtype[shape], such as int32[8,128], several joined by ;, with names as in "
    'tokens=int32[8,128], or an argument that is a dict as {"x": "float32[8,16]"}'
)
_DTYPES = (
    "float32", "bfloat16", "float16", "float64", "int32", "int64", "int8", "int16", "uint8",
    "uint16", "uint32", "uint64", "bool", "complex64", "complex128",
)  # fmt: skip


def parse_inputs(text: str) -> tuple[Any, ...] | dict[str, Any]:
    """Returns the inputs written as `int32[8,128]`, several joined by `;`.

    With names (`tokens=int32[8,128]`) they are keyword arguments; an argument written as JSON is a
    dict or a list of them.

    Raises:
        ValueError: it is not of that form.
    """
    found: list[tuple[str, Any]] = []
    for part in text.split(";"):
        named = re.match(r"\s*([A-Za-z_]\w*)\s*=(.*)", part, re.DOTALL)
        name, written = (named[1], named[2]) if named else ("", part)
        found.append((name, _parse_input(written.strip(), text)))
    names = [name for name, _ in found]
    if not any(names):
        return tuple(value for _, value in found)
    if not all(names):
        raise ValueError(
            f"--inputs {text!r} has some arguments with names and some without: name all or none"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"--inputs {text!r} names an argument twice: give each once")
    return dict(found)


def _parse_input(written: str, text: str) -> Any:
    if written[:1] in ("{", "["):
        try:
            tree = parse_json(written)
        except ValueError as error:
            raise ValueError(f"--inputs {text!r:.200}: {error}") from None
        return _parse_tree(tree, text)
    return _parse_array(written, text)


def _parse_tree(tree: Any, text: str) -> Any:
    if isinstance(tree, dict) and tree:
        return {name: _parse_tree(value, text) for name, value in tree.items()}
    if isinstance(tree, list) and tree:
        return [_parse_tree(value, text) for value in tree]
    if isinstance(tree, str):
        return _parse_array(tree, text)
    raise ValueError(f"--inputs {text!r} has {tree!r}: {_SHAPES}")


def _parse_array(written: str, text: str) -> jax.ShapeDtypeStruct:
    match = re.fullmatch(r"\s*(\w+)\[\s*((?:\d+\s*(?:,\s*\d+\s*)*)?)\]\s*", written, re.ASCII)
    wrong = ValueError(f"--inputs {text!r} has {written.strip()!r}: {_SHAPES}")
    if match is None:
        raise wrong
    try:
        dtype = jnp.dtype(match[1])
    except TypeError:
        near = difflib.get_close_matches(match[1], _DTYPES, n=1)
        hint = f"did you mean {near[0]}?" if near else "give one such as float32 or int32"
        raise ValueError(
            f"--inputs {text!r} has {match[1]!r}, which is not a dtype: {hint}"
        ) from None
    sizes = [size.strip() for size in match[2].split(",") if size.strip()]
    if any(len(size) > 12 for size in sizes) or math.prod(map(int, sizes)) >= 2**53:
        raise ValueError(f"--inputs {text!r} has {written.strip()!r}: no array is that large")
    if 0 in map(int, sizes):
        raise ValueError(f"--inputs {text!r} has {written.strip()!r}: a size must be at least 1")
    return jax.ShapeDtypeStruct(tuple(map(int, sizes)), dtype)


def _load_file(place: str) -> ModuleType:
    path = Path(place)
    if path.is_dir():
        raise ValueError(f"target file {place} is a folder: {_FORM}")
    if not path.is_file():
        raise ValueError(f"target file {place} does not exist")
    try:
        module = load_file(place)
    except Exception as error:
        raise ValueError(_failed(place, error, str(path.parent))) from error
    _tell_shadowed(str(path.parent))
    return module


def _load_module(place: str) -> ModuleType:
    if not all(step.isidentifier() for step in place.split(".")):
        raise ValueError(f"target module {place!r} is not the name of a module: {_FORM}")
    first = place.partition(".")[0]
    if first not in sys.modules and importlib.util.find_spec(first) is None:
        # Otherwise an installed target would let files of the current folder be imported too.
        add_folder(os.getcwd())
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            if Path(place).is_file():
                raise ValueError(
                    f"target file {place} is not taken for Python: its name must end in .py"
                ) from error
            raise ValueError(
                f"target module {place} does not exist (looked in the current folder and among "
                f"installed packages); a file is named as path/to/file.py:name"
            ) from error
        raise ValueError(_failed(place, error, os.getcwd())) from error
    except Exception as error:
        raise ValueError(_failed(place, error, os.getcwd())) from error
    here, found = beside(os.getcwd(), first), getattr(sys.modules[first], "__file__", None)
    if here is not None and found is not None and not os.path.samefile(here, found):
        tell_error(
            f"note: {first} is the module {found}, not {os.path.relpath(here)}: "
            f"write path/to/file.py:name for a file"
        )
    _tell_shadowed(os.getcwd())
    return module


def _failed(place: str, error: BaseException, folder: str) -> str:
    text = f"importing {place} failed: {type(error).__name__}: {error}{at_line_of(error)}"
    return "; ".join([text, *_shadowed(folder)])


def _tell_shadowed(folder: str) -> None:
    """Says which modules beside a target were passed over.

    Raises:
        ValueError: for those of another target, so that this one would be built of its parts.
    """
    for sentence, found in _shadowed(folder).items():
        if is_users(found):
            raise ValueError(sentence)
        tell_error(f"note: {sentence}")


def _shadowed(folder: str) -> dict[str, str]:
    """Returns a sentence for each module beside a target whose name another has, and that one."""
    sentences: dict[str, str] = {}
    for file, passed_over, found in shadowed(folder):
        name = os.path.relpath(passed_over, os.path.realpath(folder)).split(os.sep)[0]
        module = name.partition(".")[0]
        sentence = (
            f"{os.path.basename(file)} imports {module}, which is {found}, not {name} beside it: "
            f"rename {name} if that one is wanted"
        )
        sentences.setdefault(sentence, found)
    return sentences
