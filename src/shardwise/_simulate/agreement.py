"""Where simulated devices differ though they should not, by how much, and how that is told."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from .._check import Finding, Findings, make_finding
from .._mesh import Axes, show_spec, spec_axes
from .held import Held, is_traced

# Devices that add up the same numbers in another order differ by rounding; that is no mistake.
_ROUNDING, _ROUNDING_OF_FEW_BITS = 32, 1.5


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
    tolerance = (_ROUNDING if eps < 1e-4 else _ROUNDING_OF_FEW_BITS) * eps * finite.max(initial=0.0)
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


class AgreementCheck:
    """What the devices of one call must agree on, looked at as soon as there are values."""

    def __init__(self, mesh: str, eager: bool):
        """Keeps how the mesh is shown, and whether values are there when the call returns."""
        self._mesh, self._eager = mesh, eager
        self._found: dict[tuple[str, str], Finding] = {}
        self._waits = False

    def outputs(self, path: str, spec: P, held: Held) -> None:
        """Compares an output along the axes that its spec leaves out (SW501)."""
        axes = axes_left_out(held.axes, spec)
        if axes:
            self._look(held, functools.partial(self._not_same, path, spec, axes, held.axes))

    def ways(self, held: Held, axes: Axes, line: str) -> None:
        """Compares a predicate along the axes that devices wait for each other over (SW503)."""
        self._look(held, functools.partial(self._split_ways, axes, held.axes, line))

    def findings(self, outs: Sequence[Held]) -> list[Finding]:
        """Returns what was found, once `outs` are there."""
        if self._waits:
            jax.block_until_ready([out.value for out in outs])
            jax.effects_barrier()
        return list(self._found.values())

    def _look(self, held: Held, judge: Callable[[Any], Finding | None]) -> None:
        if not is_traced(held.value):
            self._keep(judge(held.value))
        elif self._eager:  # within a loop: the values come, but not to us
            self._waits = True
            jax.debug.callback(lambda value: self._keep(judge(value)), held.value)
        else:
            jax.debug.callback(lambda value: _raise(judge(value)), held.value)

    def _keep(self, finding: Finding | None) -> None:
        if finding is not None:
            self._found.setdefault((finding.code, finding.path), finding)

    def _not_same(
        self, path: str, spec: P, axes: Axes, held_axes: Axes, value: Any
    ) -> Finding | None:
        difference = find_difference(value, held_axes, axes)
        if difference is None:
            return None
        missing = " and ".join(difference.axes)
        return make_finding(
            "SW501",
            path,
            f"{show_spec(spec)} says that all devices along axis {_quoted(difference.axes)} hold the "
            f"same, but {show_difference(difference)}",
            f"name {missing} in out_specs, or make them agree: psum, pmean or pmax over it",
            f"local shape {tuple(value.shape[len(held_axes) :])}  mesh {self._mesh}",
        )

    def _split_ways(self, axes: Axes, held_axes: Axes, line: str, value: Any) -> Finding | None:
        difference = find_difference(value, held_axes, axes)
        if difference is None:
            return None
        return make_finding(
            "SW503",
            line,
            f"devices along axis {_quoted(difference.axes)} go different ways at a cond or while_loop "
            f"with a collective inside that they must all reach: {show_difference(difference)}",
            "real devices would wait for each other for ever: move the collective out, or decide by "
            "a value that is the same on all of them",
            f"mesh {self._mesh}",
        )


def unproven(path: str, spec: P, varying: Axes, held: Held, mesh: str) -> Finding | None:
    """Returns SW502 where devices agree along an axis but JAX takes the value to vary along it."""
    axes = axes_left_out(varying, spec)
    if not axes:
        return None
    return make_finding(
        "SW502",
        path,
        f"{show_spec(spec)} leaves out axis {_quoted(axes)}, along which the devices agree here, but "
        f"JAX cannot prove it and will refuse",
        "give jax.shard_map check_vma=False, or end with a psum, pmean or pmax over it",
        f"local shape {held.local_shape}  mesh {mesh}",
    )


def axes_left_out(axes: Axes, spec: P) -> Axes:
    """Returns those of `axes` that a spec does not name."""
    named = {axis for entry in spec_axes(spec) for axis in entry}
    return tuple(a for a in axes if a not in named)


def _raise(finding: Finding | None) -> None:
    Findings((finding,) if finding else ()).raise_if_errors()


def _quoted(axes: Axes) -> str:
    return " and ".join(map(repr, axes))


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
