"""Where simulated devices differ though they should not, and by how much."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._spec import Axes

# Devices that add up the same numbers in another order differ by rounding; that is no mistake.
_ROUNDING = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Two devices that hold different values.

    Attributes:
        axes: the axes along which devices differ.
        devices: the coordinates of the two that differ most.
        values: what they hold at `index`.
        index: where in the local array.
        size: the largest difference, or None where it is no number.
    """

    axes: Axes
    devices: tuple[Mapping[str, int], Mapping[str, int]]
    values: tuple[Any, Any]
    index: tuple[int, ...]
    size: float | None


def find_difference(value: Any, held_axes: Axes, axes: Axes) -> Difference | None:
    """Returns the largest difference between devices along `axes`, or None if they agree.

    Args:
        value: what the devices hold, a dim for each of `held_axes` first.
        held_axes: the axes of those dims.
        axes: those along which all should be the same.
    """
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    inexact = jnp.issubdtype(array.dtype, jnp.inexact)
    eps = float(jnp.finfo(array.dtype).eps) if inexact else 0.0
    wide = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    finite = np.abs(wide[np.isfinite(wide)])
    tolerance = _ROUNDING * eps * finite.max(initial=0.0)
    differing: list[str] = []
    worst = 0.0, "", ()
    for axis in axes:
        off = _from_first(array, wide, held_axes.index(axis))
        at = np.unravel_index(int(np.argmax(off)), off.shape) if off.size else ()
        if at and off[at] > tolerance:
            differing.append(axis)
            worst = max(worst, (float(off[at]), axis, tuple(int(i) for i in at)))
    if not differing:
        return None
    size, axis, other = worst
    first = list(other)
    first[held_axes.index(axis)] = 0
    ndim = len(held_axes)
    return Difference(
        tuple(differing),
        (dict(zip(held_axes, first, strict=False)), dict(zip(held_axes, other, strict=False))),
        (array[tuple(first)], array[other]),
        other[ndim:],
        size if np.isfinite(size) else None,
    )


def show_difference(difference: Difference) -> str:
    """Returns the two devices, what they hold and where, in words."""
    one, two = (_show_device(d) for d in difference.devices)
    a, b = (_show_value(v) for v in difference.values)
    where = f" at index {difference.index}" if difference.index else ""
    by = "" if difference.size is None else f", a difference of {difference.size:.6g}"
    return f"device {one} has {a} and device {two} has {b}{where}{by}"


def _from_first(array: np.ndarray, wide: np.ndarray, dim: int) -> np.ndarray:
    """Returns how far each device is from the first along `dim`: infinitely, where one has NaN."""
    first, wide_first = np.take(array, [0], axis=dim), np.take(wide, [0], axis=dim)
    with np.errstate(invalid="ignore"):
        off = np.abs(wide - wide_first)
        same = (array == first) | (np.isnan(wide) & np.isnan(wide_first))
    return np.where(same, 0.0, np.where(np.isfinite(off), off, np.inf))


def _show_device(coordinates: Mapping[str, int]) -> str:
    return "(" + ", ".join(f"{a}={i}" for a, i in coordinates.items()) + ")"


def _show_value(value: Any) -> str:
    return f"{value:.6g}" if np.asarray(value).dtype.kind in "fc" else str(value)
