"""The values of all simulated devices as one array, with a leading dim for each axis they vary on.

An axis without such a dim is one along which all devices hold the same value. A replicated weight
is therefore stored and multiplied once, however many devices are simulated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from .._mesh import Axes, padded, spec_axes

Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Stacked:
    """The local values of all simulated devices.

    Attributes:
        value: the local arrays, stacked, with one leading dim for each of `axes`.
        axes: the mesh axes along which devices may hold different values, in the mesh's order.
    """

    value: Any
    axes: Axes = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape that one device sees."""
        return tuple(self.value.shape[len(self.axes) :])


def is_traced(value: Any) -> bool:
    """Returns whether a value is a tracer: it belongs to a jit, grad or vmap under way."""
    return isinstance(value, Tracer)


def in_order(axes: Iterable[str], sizes: Sizes) -> Axes:
    """Returns the axes in the mesh's order, each once."""
    wanted = set(axes)
    return tuple(axis for axis in sizes if axis in wanted)


def union(stacked: Iterable[Stacked], sizes: Sizes) -> Axes:
    """Returns the axes along which any of the values varies."""
    return in_order((axis for s in stacked for axis in s.axes), sizes)


def product(axes: Iterable[str], sizes: Sizes) -> int:
    """Returns how many devices these axes span."""
    return math.prod(sizes[axis] for axis in axes)


def widen(stacked: Stacked, axes: Iterable[str], sizes: Sizes) -> Stacked:
    """Returns the same value with a leading dim for each of `axes` as well."""
    wanted = in_order((*stacked.axes, *axes), sizes)
    if wanted == stacked.axes:
        return stacked
    value = jnp.expand_dims(
        stacked.value, [i for i, a in enumerate(wanted) if a not in stacked.axes]
    )
    shape = (*(sizes[a] for a in wanted), *stacked.local_shape)
    return Stacked(jnp.broadcast_to(value, shape), wanted)


def widened(stacked: Sequence[Stacked], axes: Sequence[Axes], sizes: Sizes) -> list[Any]:
    """Returns the stacked arrays, each widened to its entry of `axes`."""
    return [widen(s, a, sizes).value for s, a in zip(stacked, axes, strict=True)]


def gather_axes(stacked: Stacked, names: Sequence[str], sizes: Sizes) -> tuple[Any, Axes]:
    """Returns the array with `names` flattened into one dim after the others, and the others."""
    stacked = widen(stacked, names, sizes)
    rest = tuple(a for a in stacked.axes if a not in names)
    order = [stacked.axes.index(a) for a in (*rest, *names)]
    ndim = len(stacked.axes)
    value = jnp.transpose(stacked.value, [*order, *range(ndim, stacked.value.ndim)])
    shape = (*value.shape[: len(rest)], product(names, sizes), *stacked.local_shape)
    return value.reshape(shape), rest


def scatter_axes(value: Any, rest: Axes, names: Sequence[str], sizes: Sizes) -> Stacked:
    """Undoes `gather_axes`."""
    at = len(rest)
    local = value.shape[at + 1 :]
    value = value.reshape(*value.shape[:at], *(sizes[a] for a in names), *local)
    have = (*rest, *names)
    axes = in_order(have, sizes)
    order = [have.index(a) for a in axes]
    return Stacked(jnp.transpose(value, [*order, *range(len(axes), value.ndim)]), axes)


def split(array: Any, spec: P, sizes: Sizes) -> Stacked:
    """Returns the shards of a global array under a valid spec."""
    entries = padded(spec, array.ndim)
    shape: list[int] = []
    device_dims: dict[str, int] = {}
    local_dims: list[int] = []
    for size, entry in zip(array.shape, entries, strict=True):
        for axis in entry:
            device_dims[axis] = len(shape)
            shape.append(sizes[axis])
        local_dims.append(len(shape))
        shape.append(size // product(entry, sizes))
    axes = in_order(device_dims, sizes)
    if not axes:
        return Stacked(array)
    order = [*(device_dims[a] for a in axes), *local_dims]
    return Stacked(jnp.transpose(array.reshape(shape), order), axes)


def join(stacked: Stacked, spec: P, sizes: Sizes) -> Any:
    """Returns the global array; the shards must not vary along an axis that `spec` leaves out."""
    named = [axis for entry in spec_axes(spec) for axis in entry]
    stacked = widen(stacked, named, sizes)
    entries = padded(spec, len(stacked.local_shape))
    order: list[int] = []
    for dim, entry in enumerate(entries):
        order += [*(stacked.axes.index(a) for a in entry), len(stacked.axes) + dim]
    shape = [s * product(e, sizes) for s, e in zip(stacked.local_shape, entries, strict=True)]
    return jnp.transpose(stacked.value, order).reshape(shape)


def spread(fn: Callable[..., Any], args: Sequence[Stacked], sizes: Sizes) -> list[Stacked]:
    """Applies a function of local values, which has no collectives, on every device."""
    axes = union(args, sizes)
    for axis in reversed(axes):
        dims = tuple(0 if axis in a.axes else None for a in args)
        fn = jax.vmap(fn, in_axes=dims, axis_size=sizes[axis])
    return [Stacked(out, axes) for out in fn(*(a.value for a in args))]


def one_by_one(
    fn: Callable[..., Any], args: Sequence[Stacked], axes: Axes, sizes: Sizes
) -> list[Stacked]:
    """Applies a function on the devices along `axes` one at a time, instead of all at once.

    Args:
        fn: takes the coordinates along `axes`, and `args` without those axes; returns a list.
        args: the stacked arguments.
        axes: the axes to step along.
        sizes: the sizes of the mesh's axes.
    """
    coords = [Stacked(jnp.arange(sizes[a], dtype="int32"), (a,)) for a in axes]
    moved = [i for i, a in enumerate(args) if set(a.axes) & set(axes)]
    flat, rests = [], []
    for stacked in [*coords, *(args[i] for i in moved)]:
        value, rest = gather_axes(stacked, axes, sizes)
        flat.append(jnp.moveaxis(value, len(rest), 0))
        rests.append(rest)
    found: list[Axes] = []

    def step(now: list[Any]) -> list[Any]:
        inner = list(args)
        for i, value, rest in zip(moved, now[len(axes) :], rests[len(axes) :], strict=True):
            inner[i] = Stacked(value, rest)
        outs = fn(dict(zip(axes, now, strict=False)), inner)
        found[:] = [out.axes for out in outs]
        return [out.value for out in outs]

    values = jax.lax.map(step, flat)
    return [
        scatter_axes(jnp.moveaxis(value, 0, len(rest)), rest, axes, sizes)
        for value, rest in zip(values, found, strict=True)
    ]


def values_of(stacked: Sequence[Stacked]) -> list[Any]:
    """Returns the stacked arrays."""
    return [s.value for s in stacked]


def like(stacked: Sequence[Stacked], values: Sequence[Any]) -> list[Stacked]:
    """Returns `values` stacked along the same axes."""
    return [Stacked(v, s.axes) for s, v in zip(stacked, values, strict=True)]


def axes_of(*parts: Sequence[Stacked]) -> list[list[Axes]]:
    """Returns the axes of the values in each part."""
    return [[s.axes for s in part] for part in parts]
