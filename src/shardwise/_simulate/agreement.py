"""Finds simulated devices that disagree where they should agree, and reports by how much."""

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
from .stacked import Stacked, is_traced

# Devices that add the same numbers in a different order differ by rounding, which is not an error.
_ROUNDING, _ROUNDING_OF_FEW_BITS = 32, 1.5


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Two devices that hold different values.

    Attributes:
        axes: the mesh axes along which devices differ.
        devices: the coordinates of the two that differ most.
        values: what they hold at `index`.
        index: the position in the local array.
        size: the largest difference, or None if it is not finite.
    """

    axes: Axes
    devices: tuple[Mapping[str, int], Mapping[str, int]]
    values: tuple[Any, Any]
    index: tuple[int, ...]
    size: float | None


def find_difference(value: Any, device_axes: Axes, axes: Axes) -> Difference | None:
    """Returns the largest difference between devices along `axes`, or None if they agree.

    Args:
        value: the stacked values, with one leading dim for each of `device_axes`.
        device_axes: the mesh axes of the leading dims.
        axes: the axes along which all devices should agree.
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
        off = _from_first(array, wide, device_axes.index(axis))
        at = np.unravel_index(int(np.argmax(off)), off.shape) if off.size else ()
        if at and off[at] > tolerance:
            differing.append(axis)
            worst = max(worst, (float(off[at]), axis, tuple(int(i) for i in at)))
    if not differing:
        return None
    size, axis, other = worst
    first = list(other)
    first[device_axes.index(axis)] = 0
    ndim = len(device_axes)
    return Difference(
        tuple(differing),
        (dict(zip(device_axes, first, strict=False)), dict(zip(device_axes, other, strict=False))),
        (array[tuple(first)], array[other]),
        other[ndim:],
        size if np.isfinite(size) else None,
    )


def show_difference(difference: Difference) -> str:
    """Returns a sentence that names the two devices, what they hold and where."""
    one, two = (_show_device(d) for d in difference.devices)
    a, b = (_show_value(v) for v in difference.values)
    where = f" at index {difference.index}" if difference.index else ""
    by = "" if difference.size is None else f", a difference of {difference.size:.6g}"
    return f"device {one} has {a} and device {two} has {b}{where}{by}"


class AgreementCheck:
    """Checks what the devices of one call must agree on, as soon as the values are known."""

    def __init__(self, mesh: str, eager: bool):
        """Takes the mesh as text, and whether the call runs eagerly rather than under a trace."""
        self._mesh, self._eager = mesh, eager
        self._found: dict[tuple[str, str], Finding] = {}
        self._waits = False

    def outputs(self, path: str, spec: P, stacked: Stacked) -> None:
        """Compares an output along the axes that its spec leaves out (SW501)."""
        axes = axes_left_out(stacked.axes, spec)
        if axes:
            self._look(stacked, functools.partial(self._not_same, path, spec, axes, stacked.axes))

    def ways(self, stacked: Stacked, axes: Axes, line: str) -> None:
        """Compares a predicate along the axes over which devices wait for each other (SW503)."""
        self._look(stacked, functools.partial(self._split_ways, axes, stacked.axes, line))

    def findings(self, outs: Sequence[Stacked]) -> list[Finding]:
        """Waits for `outs` where needed, then returns what was found."""
        if self._waits:
            jax.block_until_ready([out.value for out in outs])
            jax.effects_barrier()
        return list(self._found.values())

    def _look(self, stacked: Stacked, judge: Callable[[Any], Finding | None]) -> None:
        if not is_traced(stacked.value):
            self._keep(judge(stacked.value))
        elif self._eager:  # inside a loop: the values exist only at run time
            self._waits = True
            jax.debug.callback(lambda value: self._keep(judge(value)), stacked.value)
        else:
            jax.debug.callback(lambda value: _raise(judge(value)), stacked.value)

    def _keep(self, finding: Finding | None) -> None:
        if finding is not None:
            self._found.setdefault((finding.code, finding.path), finding)

    def _not_same(
        self, path: str, spec: P, axes: Axes, device_axes: Axes, value: Any
    ) -> Finding | None:
        difference = find_difference(value, device_axes, axes)
        if difference is None:
            return None
        missing = " and ".join(difference.axes)
        return make_finding(
            "SW501",
            path,
            f"{show_spec(spec)} says that all devices along axis {_quoted(difference.axes)} hold the "
            f"same value, but {show_difference(difference)}",
            f"name {missing} in out_specs, or make them agree: psum, pmean or pmax over it",
            f"local shape {tuple(value.shape[len(device_axes) :])}  mesh {self._mesh}",
        )

    def _split_ways(self, axes: Axes, device_axes: Axes, line: str, value: Any) -> Finding | None:
        difference = find_difference(value, device_axes, axes)
        if difference is None:
            return None
        return make_finding(
            "SW503",
            line,
            f"devices along axis {_quoted(difference.axes)} take different branches of a cond or "
            f"while_loop that contains a collective they must all reach: "
            f"{show_difference(difference)}",
            "real devices would deadlock: move the collective out, or branch on a value that is "
            "the same on all of them",
            f"mesh {self._mesh}",
        )


def unproven(path: str, spec: P, varying: Axes, stacked: Stacked, mesh: str) -> Finding | None:
    """Returns SW502 if devices agree along an axis but JAX considers the value varying along it."""
    axes = axes_left_out(varying, spec)
    if not axes:
        return None
    return make_finding(
        "SW502",
        path,
        f"{show_spec(spec)} leaves out axis {_quoted(axes)}, along which the devices agree here, but "
        f"JAX cannot prove it and will raise an error",
        "pass check_vma=False to jax.shard_map, or end with a psum, pmean or pmax over it",
        f"local shape {stacked.local_shape}  mesh {mesh}",
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
    """Returns how far each device is from the first along `dim`: infinity where only one is NaN."""
    first, wide_first = np.take(array, [0], axis=dim), np.take(wide, [0], axis=dim)
    with np.errstate(invalid="ignore"):
        off = np.abs(wide - wide_first)
        same = (array == first) | (np.isnan(wide) & np.isnan(wide_first))
    return np.where(same, 0.0, np.where(np.isfinite(off), off, np.inf))


def _show_device(coordinates: Mapping[str, int]) -> str:
    return "(" + ", ".join(f"{a}={i}" for a, i in coordinates.items()) + ")"


def _show_value(value: Any) -> str:
    return f"{value:.6g}" if np.asarray(value).dtype.kind in "fc" else str(value)
