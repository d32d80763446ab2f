"""What simulated devices hold: one array, with a leading dim for each axis along which they differ.

An axis without such a dim is one along which every device holds the same, so that a replicated
weight is stored and multiplied once, however many devices are simulated.
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
class Held:
    """The local values of all simulated devices.

    Attributes:
        value: the local arrays, stacked; a dim for each of `axes` comes first.
        axes: the axes along which devices may hold different values, in the mesh's order.
    """

    value: Any
    axes: Axes = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape that one device sees."""
        return tuple(self.value.shape[len(self.axes) :])


def is_traced(value: Any) -> bool:
    """Returns whether a value is not there yet: it is inside a jit, a grad or a vmap."""
    return isinstance(value, Tracer)


def in_order(axes: Iterable[str], sizes: Sizes) -> Axes:
    """Returns the axes in the mesh's order, each once."""
    wanted = set(axes)
    return tuple(axis for axis in sizes if axis in wanted)


def union(held: Iterable[Held], sizes: Sizes) -> Axes:
    """Returns the axes along which any of them differs."""
    return in_order((axis for h in held for axis in h.axes), sizes)


def product(axes: Iterable[str], sizes: Sizes) -> int:
    """Returns how many devices these axes span."""
    return math.prod(sizes[axis] for axis in axes)


def widen(held: Held, axes: Iterable[str], sizes: Sizes) -> Held:
    """Returns the same with a dim for each of `axes` too."""
    wanted = in_order((*held.axes, *axes), sizes)
    if wanted == held.axes:
        return held
    value = jnp.expand_dims(held.value, [i for i, a in enumerate(wanted) if a not in held.axes])
    shape = (*(sizes[a] for a in wanted), *held.local_shape)
    return Held(jnp.broadcast_to(value, shape), wanted)


def widened(held: Sequence[Held], axes: Sequence[Axes], sizes: Sizes) -> list[Any]:
    """Returns the values of each with a dim for each of its axes."""
    return [widen(h, a, sizes).value for h, a in zip(held, axes, strict=True)]


def gather_axes(held: Held, names: Sequence[str], sizes: Sizes) -> tuple[Any, Axes]:
    """Returns the value with `names` as one flat dim behind the dims of all other axes, and those."""
    held = widen(held, names, sizes)
    rest = tuple(a for a in held.axes if a not in names)
    order = [held.axes.index(a) for a in (*rest, *names)]
    ndim = len(held.axes)
    value = jnp.transpose(held.value, [*order, *range(ndim, held.value.ndim)])
    shape = (*value.shape[: len(rest)], product(names, sizes), *held.local_shape)
    return value.reshape(shape), rest


def scatter_axes(value: Any, rest: Axes, names: Sequence[str], sizes: Sizes) -> Held:
    """Returns the inverse of `gather_axes`."""
    at = len(rest)
    local = value.shape[at + 1 :]
    value = value.reshape(*value.shape[:at], *(sizes[a] for a in names), *local)
    have = (*rest, *names)
    axes = in_order(have, sizes)
    order = [have.index(a) for a in axes]
    return Held(jnp.transpose(value, [*order, *range(len(axes), value.ndim)]), axes)


def split(array: Any, spec: P, sizes: Sizes) -> Held:
    """Returns the shards of a global array under a spec without faults."""
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
        return Held(array)
    order = [*(device_dims[a] for a in axes), *local_dims]
    return Held(jnp.transpose(array.reshape(shape), order), axes)


def join(held: Held, spec: P, sizes: Sizes) -> Any:
    """Returns the global array of shards; `held` differs along no axis that `spec` leaves out."""
    named = [axis for entry in spec_axes(spec) for axis in entry]
    held = widen(held, named, sizes)
    entries = padded(spec, len(held.local_shape))
    order: list[int] = []
    for dim, entry in enumerate(entries):
        order += [*(held.axes.index(a) for a in entry), len(held.axes) + dim]
    shape = [s * product(e, sizes) for s, e in zip(held.local_shape, entries, strict=True)]
    return jnp.transpose(held.value, order).reshape(shape)


def spread(fn: Callable[..., Any], args: Sequence[Held], sizes: Sizes) -> list[Held]:
    """Returns what each device gets from a function of local values without collectives."""
    axes = union(args, sizes)
    for axis in reversed(axes):
        dims = tuple(0 if axis in a.axes else None for a in args)
        fn = jax.vmap(fn, in_axes=dims, axis_size=sizes[axis])
    return [Held(out, axes) for out in fn(*(a.value for a in args))]


def one_by_one(
    fn: Callable[..., Any], args: Sequence[Held], axes: Axes, sizes: Sizes
) -> list[Held]:
    """Returns what each device gets, the devices along `axes` in turn, as real ones run apart.

    Args:
        fn: of the coordinates along `axes` and of `args` without those axes; returns a list.
        args: what the devices hold.
        axes: the axes to step along.
        sizes: the mesh's.
    """
    coords = [Held(jnp.arange(sizes[a], dtype="int32"), (a,)) for a in axes]
    moved = [i for i, a in enumerate(args) if set(a.axes) & set(axes)]
    flat, rests = [], []
    for held in [*coords, *(args[i] for i in moved)]:
        value, rest = gather_axes(held, axes, sizes)
        flat.append(jnp.moveaxis(value, len(rest), 0))
        rests.append(rest)
    found: list[Axes] = []

    def step(now: list[Any]) -> list[Any]:
        inner = list(args)
        for i, value, rest in zip(moved, now[len(axes) :], rests[len(axes) :], strict=True):
            inner[i] = Held(value, rest)
        outs = fn(dict(zip(axes, now, strict=False)), inner)
        found[:] = [out.axes for out in outs]
        return [out.value for out in outs]

    values = jax.lax.map(step, flat)
    return [
        scatter_axes(jnp.moveaxis(value, 0, len(rest)), rest, axes, sizes)
        for value, rest in zip(values, found, strict=True)
    ]


def values_of(held: Sequence[Held]) -> list[Any]:
    """Returns the stacked arrays."""
    return [h.value for h in held]


def like(held: Sequence[Held], values: Sequence[Any]) -> list[Held]:
    """Returns other stacked arrays with the same axes."""
    return [Held(v, h.axes) for h, v in zip(held, values, strict=True)]


def axes_of(*parts: Sequence[Held]) -> list[list[Axes]]:
    """Returns the axes alone."""
    return [[h.axes for h in part] for part in parts]
