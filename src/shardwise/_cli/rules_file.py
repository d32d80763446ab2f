"""Rules in a TOML file: path patterns, logical names and a strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

from .._base import BYTES_FORM, parse_bytes, read_toml
from .._layout import Logical
from .._mesh import parse_spec

_FORM = (
    'a rules file may have strategy = "fsdp", min_bytes = "64KiB", a table [logical] with '
    'mlp = "model" or embed = [], and tables [[rules]] with "**.kernel" = "P(None, \'model\')"'
)


@dataclasses.dataclass(frozen=True, slots=True)
class RulesFile:
    """The contents of a rules file.

    Attributes:
        rules: dicts from path patterns to specs, in order.
        logical: the mesh axes of each logical name.
        strategy: the name of a strategy, or None.
        min_bytes: the size from which that strategy splits leaves (fsdp, zero1, zero2), or None for its default.
    """

    rules: list[Any]
    logical: Logical
    strategy: str | None
    min_bytes: int | None = None


def read_rules(path: str | os.PathLike[str]) -> RulesFile:
    """Returns the rules of a TOML file.

    Raises:
        ValueError: the file cannot be read, or its contents are not of the expected form.
    """
    try:
        data = read_toml(path)
    except OSError as error:
        raise ValueError(f"rules file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"rules file {path}: {error}") from error
    unknown = [key for key in data if key not in ("strategy", "min_bytes", "logical", "rules")]
    if unknown:
        raise ValueError(f"rules file {path} has an unknown key {unknown[0]!r}: {_FORM}")
    strategy, logical, tables = data.get("strategy"), data.get("logical", {}), data.get("rules", [])
    if isinstance(tables, dict):
        tables = [tables]
    well_formed = (
        (strategy is None or isinstance(strategy, str))
        and isinstance(logical, dict)
        and isinstance(tables, list)
        and all(isinstance(table, dict) for table in tables)
    )
    if not well_formed:
        raise ValueError(f"rules file {path} does not have the expected form: {_FORM}")
    rules = []
    for table in tables:
        for pattern, spec in table.items():
            if not isinstance(spec, str):
                raise ValueError(
                    f"rules file {path} maps pattern {pattern!r} to {spec!r}: "
                    f"write the spec as a string, such as \"P(None, 'model')\""
                )
        rules.append({pattern: parse_spec(spec) for pattern, spec in table.items()})
    return RulesFile(rules, logical, strategy, _min_bytes(path, data.get("min_bytes")))


def _min_bytes(path: str | os.PathLike[str], given: Any) -> int | None:
    if given is None:
        return None
    if isinstance(given, str | int) and not isinstance(given, bool):
        with contextlib.suppress(ValueError):
            return parse_bytes(str(given))
    raise ValueError(f"rules file {path} has min_bytes = {given!r}: {BYTES_FORM}")
