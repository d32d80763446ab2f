"""Compares what a solution returned with what was expected, and describes the difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from .._base import show_type
from .._layout import Layout, show_shape
from .._mesh import normal_spec, show_mesh, show_spec

_LONGEST = 240
# Several devices sum in a different order than one.
_RELATIVE, _ABSOLUTE = 2e-4, 1e-5


def difference(returned: Any, expected: Any) -> str | None:
    """Returns a description of how `returned` differs from `expected`, or None if it does not.

    Arrays and floats are compared with a tolerance, equivalent specs are equal, and a list may
    stand in for a tuple.

    Example:
        >>> from shardwise.learn._compare import difference
        >>> difference((8, 4.0), (8, 4))
        'item 1 is the float 4.0, expected the int 4'
    """
    return _difference(returned, expected, "it")


def _difference(returned: Any, expected: Any, what: str) -> str | None:
    if expected is None:
        return None if returned is None else f"{what} is {show(returned)}, expected None"
    if returned is None:
        return f"{what} is None: is a return missing?" if what == "it" else f"{what} is None"
    if isinstance(expected, P):
        return _spec_difference(returned, expected, what)
    if isinstance(expected, jax.Array | np.ndarray):
        return _array_difference(returned, expected, what)
    if isinstance(expected, Mapping):
        return _mapping_difference(returned, expected, what)
    if isinstance(expected, tuple | list):
        return _sequence_difference(returned, expected, what)
    return _plain_difference(returned, expected, what)


def _spec_difference(returned: Any, expected: P, what: str) -> str | None:
    if not isinstance(returned, P):
        return f"{what} is {_kind(returned)}, expected a PartitionSpec"
    if normal_spec(returned) == normal_spec(expected):
        return None
    return f"{what} is {show_spec(returned)}, expected {show_spec(normal_spec(expected))}"


def _array_difference(returned: Any, expected: Any, what: str) -> str | None:
    try:
        # A list or a Python number is not an array on a device.
        if not isinstance(returned, jax.Array | np.ndarray | np.generic):
            raise TypeError
        got, want = np.asarray(returned), np.asarray(expected)
    except (TypeError, ValueError, RuntimeError):
        return f"{what} is {_kind(returned)}, expected an array of {show_shape(expected)}"
    if got.shape != want.shape:
        return f"{what} has shape {got.shape}, expected {want.shape}"
    if got.dtype != want.dtype:
        return f"{what} has dtype {got.dtype}, expected {want.dtype}"
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        wrong = got != want
    else:
        got, want = got.astype(np.float64), want.astype(np.float64)
        scale = np.abs(want[np.isfinite(want)]).max(initial=0.0)
        close = np.isclose(
            got, want, rtol=_RELATIVE, atol=_ABSOLUTE + scale * _RELATIVE, equal_nan=True
        )
        wrong = ~close
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    where = f" at index {index}" if index else ""
    count = f" ({int(wrong.sum())} of {wrong.size} numbers differ)" if wrong.size > 1 else ""
    return f"{what} is {_number(got[index])}{where}, expected {_number(want[index])}{count}"


def _mapping_difference(returned: Any, expected: Mapping[Any, Any], what: str) -> str | None:
    if not isinstance(returned, Mapping):
        return f"{what} is {_kind(returned)}, expected a dict"
    for key in expected:
        if key not in returned:
            return f"{what} has no key {key!r}"
    for key in returned:
        if key not in expected:
            return f"{what} has an unexpected key {key!r}"
    for key, value in expected.items():
        found = _difference(returned[key], value, f"the value at {key!r}")
        if found:
            return found
    return None


def _sequence_difference(returned: Any, expected: Any, what: str) -> str | None:
    # A spec does not count as a tuple, though it looks like one.
    if not isinstance(returned, tuple | list) or isinstance(returned, P):
        return f"{what} is {_kind(returned)}, expected {show_type(expected)}"
    if len(returned) != len(expected):
        items = "1 item" if len(returned) == 1 else f"{len(returned)} items"
        return f"{what} has {items}, expected {len(expected)}"
    for i, (got, want) in enumerate(zip(returned, expected, strict=True)):
        found = _difference(got, want, f"item {i}" if what == "it" else f"{what}, item {i},")
        if found:
            return found
    return None


def _plain_difference(returned: Any, expected: Any, what: str) -> str | None:
    if isinstance(returned, jax.Array | np.ndarray) and returned.ndim == 0:
        returned = returned.item()
    elif isinstance(returned, np.generic):
        returned = returned.item()
    if isinstance(expected, float) and isinstance(returned, int | float):
        same = math.isclose(returned, expected, rel_tol=1e-6, abs_tol=1e-9)
    else:
        same = type(returned) is type(expected) and returned == expected
    if same:
        return None
    if type(returned) is type(expected):
        return f"{what} is {show(returned)}, expected {show(expected)}"
    return f"{what} is {_kind(returned)}, expected the {type(expected).__name__} {show(expected)}"


def show(value: Any) -> str:
    """Returns a value as source text, or the contents of an array, shortened if long."""
    try:
        text = _show(value)
    except Exception:  # a repr that the user defined
        text = show_type(value)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _show(value: Any) -> str:
    if isinstance(value, P):
        return show_spec(value)
    if isinstance(value, Mesh | AbstractMesh):
        return f"mesh of {show_mesh(value)}"
    if isinstance(value, Layout):
        return f"layout on {show_mesh(value.mesh)}"
    if isinstance(value, jax.Array | np.ndarray):
        numbers_ = np.array2string(np.asarray(value), precision=5, threshold=16, edgeitems=2)
        return f"{show_shape(value)} {numbers_}"
    if isinstance(value, nnx.Module):
        return type(value).__name__
    if isinstance(value, Mapping) and not isinstance(value, nnx.State):
        return "{" + ", ".join(f"{k!r}: {_show(v)}" for k, v in value.items()) + "}"
    if type(value) in (tuple, list):
        inner = ", ".join(_show(v) for v in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    return repr(value)


def _kind(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array of {show_shape(value)}"
    if isinstance(value, P):
        return f"the PartitionSpec {show_spec(value)}"
    text = show(value)
    if len(text) > _LONGEST // 4:
        return show_type(value)
    return f"the {type(value).__name__} {text}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float | np.floating) else str(value)
