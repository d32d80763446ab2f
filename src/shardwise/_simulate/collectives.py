"""The collectives of a shard_map body, on the values of all simulated devices at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import opened, sub_jaxprs
from .._mesh import Axes
from .held import Held, Sizes, gather_axes, in_order, product, scatter_axes, spread

# JAX has several primitives for one collective: by what it knows of the operand and the result
# (invariant, reduced, unreduced), and by whether it is waited for at once (start).
_KINDS = {
    "psum": "psum",
    "psum_invariant": "psum",
    "unreduced_psum": "psum",
    "pmax": "pmax",
    "unreduced_pmax": "pmax",
    "pmin": "pmin",
    "unreduced_pmin": "pmin",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "reduce_scatter": "psum_scatter",
    "unreduced_reduce_scatter": "psum_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "ppermute",
    "pbroadcast": "pbroadcast",
    "pbroadcast_dynamic": "pbroadcast",
}
# They change what JAX knows of a value, and not the value.
CASTS = frozenset(
    {
        "pvary",
        "preduced",
        "reduced_vary_cast",
        "reduced_vary_cast_p",
        "vary_unreduced_cast",
        "vary_unreduced_cast_p",
        *(f"{name}_done" for name in ("all_gather", "psum", "reduce_scatter", "all_to_all")),
        *(f"{name}_done" for name in ("ppermute", "pbroadcast")),
    }
)
# No axis of a mesh has a blank in its name.
_GROUP, _MEMBER = "group of devices", "member of a group"
UNKNOWN = frozenset({"ragged_all_to_all", "psend", "precv", "call_hi_primitive", "linear_call"})


@dataclasses.dataclass(frozen=True, slots=True)
class TracedCollective:
    """One collective of a jaxpr.

    Attributes:
        kind: which.
        axes: the axes that it runs over, major first.
        params: the primitive's.
        dims: dims of the local value that it reduces too: JAX makes them of the axes of a vmap.
    """

    kind: str
    axes: Axes
    params: dict[str, Any]
    dims: tuple[int, ...] = ()

    @property
    def groups(self) -> Any:
        """The groups of devices that it runs in, or None for all of them."""
        return self.params.get("axis_index_groups")

    def devices(self, sizes: Sizes) -> int:
        """Returns how many devices take part in each."""
        return len(self.groups[0]) if self.groups else product(self.axes, sizes)


def as_collective(eqn: Any) -> TracedCollective | None:
    """Returns the collective that an equation is, or None."""
    kind = _KINDS.get(eqn.primitive.name.removesuffix("_start"))
    if kind is None:
        return None
    names = eqn.params.get("axes", eqn.params.get("axis_name"))
    names = (names,) if isinstance(names, str) else tuple(names)
    axes = tuple(a for a in names if isinstance(a, str))
    return TracedCollective(
        kind, axes, dict(eqn.params), tuple(d for d in names if isinstance(d, int))
    )


def waiting_axes(jaxpr: Any, sizes: Sizes) -> set[str]:
    """Returns the axes along which devices must all run a jaxpr, since they wait for each other.

    A permute waits for every device of the mesh, whatever its axis: XLA meets all of them at once.
    """
    found: set[str] = set()
    for eqn in opened(jaxpr)[0].eqns:
        if collective := as_collective(eqn):
            found.update(sizes if collective.kind == "ppermute" else collective.axes)
        for inner in sub_jaxprs(eqn):
            found |= waiting_axes(inner, sizes)
    return found


def axes_after(collective: TracedCollective, before: Axes, sizes: Sizes) -> Axes:
    """Returns the axes along which the result may differ."""
    names = collective.axes
    if collective.kind == "ppermute":
        same = _changes_nothing(collective, before, sizes)
        return before if same else in_order((*before, *names), sizes)
    if collective.groups or collective.kind in ("psum_scatter", "all_to_all"):
        return in_order((*before, *names), sizes)
    return tuple(a for a in before if a not in names)


def collect(collective: TracedCollective, held: Held, others: Sequence[Held], sizes: Sizes) -> Held:
    """Returns what the devices hold after a collective.

    Args:
        collective: which.
        held: what they hold before.
        others: further operands: the source of a broadcast.
        sizes: the mesh's axes.
    """
    if collective.groups:
        return _in_groups(collective, held, sizes)
    if collective.kind == "ppermute":
        collective = _as_run(collective, sizes)
    names, kind = collective.axes, collective.kind
    if kind in ("psum", "pmax", "pmin"):
        # The axes along which all hold the same need no dim to be reduced.
        present = [a for a in names if a in held.axes]
        value, rest = gather_axes(held, present, sizes)
        at = len(rest)
        value = _REDUCE[kind](value, (at, *(at + 1 + d for d in collective.dims)))
        copies = product(names, sizes) // product(present, sizes)
        if kind == "psum" and copies > 1:
            value = value * jnp.asarray(np.asarray(copies).astype(value.dtype))
        return Held(value, rest)
    if kind == "ppermute" and _changes_nothing(collective, held.axes, sizes):
        return held
    value, rest = gather_axes(held, names, sizes)
    at = len(rest)
    if kind == "all_gather":
        return Held(_all_gather(value, at, collective.params), rest)
    if kind == "psum_scatter":
        return scatter_axes(_psum_scatter(value, at, collective.params), rest, names, sizes)
    if kind == "all_to_all":
        return scatter_axes(_all_to_all(value, at, collective.params), rest, names, sizes)
    if kind == "ppermute":
        source = {to: of for of, to in collective.params["perm"]}
        return scatter_axes(_ppermute(value, at, source), rest, names, sizes)
    if others:
        (source,) = others
        index, there = gather_axes(source, [a for a in names if a in source.axes], sizes)
        # The source is the same on all that take part; along other axes it may differ.
        root = Held(jnp.take(index, 0, axis=len(there)), there)
        (out,) = spread(lambda v, i: [jnp.take(v, i, axis=0)], [Held(value, rest), root], sizes)
        return out
    return Held(jnp.take(value, collective.params["source"], axis=at), rest)


def _sum(value: Any, dims: int | tuple[int, ...]) -> Any:
    return jnp.sum(value, axis=dims, dtype=value.dtype)


def _no_derivative(name: str, reduce: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Returns a reduction that cannot be differentiated, as the real one cannot."""

    def run(value: Any, dims: Any) -> Any:
        fn = jax.custom_jvp(lambda v: reduce(v, axis=dims))

        @functools.partial(fn.defjvp, symbolic_zeros=True)
        def rule(primals: Any, tangents: Any) -> Any:
            (primal,), (tangent,) = primals, tangents
            if type(tangent).__name__ != "SymbolicZero":
                raise NotImplementedError(
                    f"Differentiation rule for '{name}' not implemented: JAX has none, simulated "
                    f"or real"
                )
            out = fn(primal)
            return out, jax.custom_derivatives.SymbolicZero(jax.typeof(out).to_tangent_aval())

        return fn(value)

    return run


_REDUCE: dict[str, Callable[[Any, Any], Any]] = {
    "psum": _sum,
    "pmax": _no_derivative("pmax", jnp.max),
    "pmin": _no_derivative("pmin", jnp.min),
}


def _all_gather(value: Any, at: int, params: dict[str, Any]) -> Any:
    dim = at + params["all_gather_dimension"]
    value = jnp.moveaxis(value, at, dim)
    if not params["tiled"]:
        return value
    shape = list(value.shape)
    shape[dim : dim + 2] = [shape[dim] * shape[dim + 1]]
    return value.reshape(shape)


def _psum_scatter(value: Any, at: int, params: dict[str, Any]) -> Any:
    devices = value.shape[at]
    value = _sum(value, at)
    dim = at + params["scatter_dimension"]
    if params["tiled"]:
        shape = list(value.shape)
        shape[dim : dim + 1] = [devices, shape[dim] // devices]
        value = value.reshape(shape)
    return jnp.moveaxis(value, dim, at)


def _all_to_all(value: Any, at: int, params: dict[str, Any]) -> Any:
    devices = value.shape[at]
    cut, glue = at + 1 + params["split_axis"], at + 1 + params["concat_axis"]
    shape = list(value.shape)
    shape[cut : cut + 1] = [devices, shape[cut] // devices]
    # To the front: the receiver; then the sender, before the dim that it is concatenated along.
    value = jnp.moveaxis(value.reshape(shape), cut, at)
    value = jnp.moveaxis(value, at + 1, glue)
    shape = list(value.shape)
    shape[glue : glue + 2] = [shape[glue] * shape[glue + 1]]
    return value.reshape(shape)


def _ppermute(value: Any, at: int, source: dict[int, int]) -> Any:
    devices = value.shape[at]
    pieces: list[Any] = []
    start = 0
    while start < devices:
        # Neighbours that come from neighbours move as one: a rotation is two slices.
        first, stop = source.get(start), start + 1
        while stop < devices and source.get(stop) == (
            None if first is None else first + stop - start
        ):
            stop += 1
        if first is None:
            shape = (*value.shape[:at], stop - start, *value.shape[at + 1 :])
            pieces.append(jnp.zeros(shape, value.dtype))
        else:
            pieces.append(jax.lax.slice_in_dim(value, first, first + stop - start, axis=at))
        start = stop
    return jnp.concatenate(pieces, axis=at) if len(pieces) > 1 else pieces[0]


def _as_run(collective: TracedCollective, sizes: Sizes) -> TracedCollective:
    """Returns a permute as JAX runs it, or refuses it as JAX does.

    The axes are in the mesh's order, and a negative number counts from the last device.
    """
    devices, perm = product(collective.axes, sizes), collective.params["perm"]
    if not all(-devices <= i < devices for pair in perm for i in pair):
        raise IndexError(f"ppermute names a device that is not among {devices}: {perm}")
    pairs = tuple((int(of) % devices, int(to) % devices) for of, to in perm)
    if any(len(set(ends)) < len(pairs) for ends in zip(*pairs, strict=True)):
        raise ValueError(f"ppermute names a device twice as source or as destination: {perm}")
    ordered = in_order(collective.axes, sizes)
    if ordered != collective.axes and getattr(jax.config, "jax_raise_on_ppermute_sort_diff", False):
        raise ValueError(
            f"ppermute is over axes {collective.axes}, in another order than the mesh's {ordered}: "
            f"jax.shard_map refuses that, name them as the mesh does"
        )
    return dataclasses.replace(collective, axes=ordered, params=collective.params | {"perm": pairs})


def _changes_nothing(permute: TracedCollective, before: Axes, sizes: Sizes) -> bool:
    """Returns whether every device gets from another what all of them hold."""
    all_send = len(permute.params["perm"]) == product(permute.axes, sizes)
    return all_send and set(permute.axes).isdisjoint(before)


def _in_groups(collective: TracedCollective, held: Held, sizes: Sizes) -> Held:
    """Returns the result of a collective within groups of devices: an axis for the group is made."""
    groups = np.asarray(collective.groups)
    value, rest = gather_axes(held, collective.axes, sizes)
    at = len(rest)
    value = jnp.take(value, groups.reshape(-1), axis=at)
    value = value.reshape(*value.shape[:at], *groups.shape, *value.shape[at + 1 :])
    inner_sizes = {
        **{a: sizes[a] for a in rest},
        _GROUP: groups.shape[0],
        _MEMBER: groups.shape[1],
    }
    params = {k: v for k, v in collective.params.items() if k != "axis_index_groups"}
    inner = TracedCollective(collective.kind, (_MEMBER,), params)
    out = collect(inner, Held(value, (*rest, _GROUP, _MEMBER)), (), inner_sizes)
    value, _ = gather_axes(out, (_GROUP, _MEMBER), inner_sizes)
    back = np.argsort(groups.reshape(-1))
    return scatter_axes(jnp.take(value, back, axis=at), rest, collective.axes, sizes)
