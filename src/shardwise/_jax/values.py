"""User values in messages: shapes and dtypes, never the contents of an array."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

LIMIT = 160
_ITEMS = 4


def show_value(value: Any, limit: int = LIMIT) -> str:
    """Returns a value in at most `limit` characters: `(int32[8,128], {'cache': float32[4,1024]})`.

    Args:
        value: anything: an array, a pytree of them, a module.
        limit: the maximum length of the text.
    """
    return shorten(_show(value, 0), limit)


def shorten(text: str, limit: int = LIMIT) -> str:
    """Returns text truncated to at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def _show(value: Any, depth: int) -> str:
    if isinstance(value, nnx.Variable):
        value = value.get_value()
    if isinstance(value, np.generic | P):
        return repr(value)
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if depth > 4:
        return "…"
    if isinstance(value, Mapping):
        return (
            "{"
            + _join([f"{k!r}: {_show(v, depth + 1)}" for k, v in _first(value.items())], value)
            + "}"
        )
    if isinstance(value, tuple | list):
        inside = _join([_show(v, depth + 1) for v in _first(value)], value)
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, nnx.Module) or dataclasses.is_dataclass(value):
        name = value.__name__ if isinstance(value, type) else type(value).__name__
        return f"{name}(...)"
    return shorten(repr(value), 60)


def _first(items: Any) -> list[Any]:
    return [item for item, _ in zip(items, range(_ITEMS), strict=False)]


def _join(shown: list[str], value: Any) -> str:
    more = len(value) - len(shown)
    return ", ".join([*shown, f"… {more} more"] if more > 0 else shown)
