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
from .stacked import Sizes, Stacked, gather_axes, in_order, product, scatter_axes, spread

# JAX has several primitives for one collective, depending on the types of operand and result
# (invariant, reduced, unreduced) and on whether it is asynchronous (start).
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
# These change the type of a value, not the value itself.
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
# These names contain spaces so that no mesh axis can clash with them.
_GROUP, _MEMBER = "group of devices", "member of a group"
UNKNOWN = frozenset({"ragged_all_to_all", "psend", "precv", "call_hi_primitive", "linear_call"})


@dataclasses.dataclass(frozen=True, slots=True)
class TracedCollective:
    """One collective of a jaxpr.

    Attributes:
        kind: the name of the `jax.lax` function.
        axes: the axes that it runs over, major first.
        params: the parameters of the primitive.
        dims: dims of the local value that it also reduces; JAX adds them for the axes of a vmap.
    """

    kind: str
    axes: Axes
    params: dict[str, Any]
    dims: tuple[int, ...] = ()

    @property
    def groups(self) -> Any:
        """The groups of devices that it runs in, or None if all devices form one group."""
        return self.params.get("axis_index_groups")

    def devices(self, sizes: Sizes) -> int:
        """Returns how many devices take part in each group."""
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
    """Returns the axes along which devices wait for each other, so that all must run the jaxpr.

    A permute waits for every device of the mesh, whatever its axis: XLA synchronises all of them.
    """
    found: set[str] = set()
    for eqn in opened(jaxpr)[0].eqns:
        if collective := as_collective(eqn):
            found.update(sizes if collective.kind == "ppermute" else collective.axes)
        for inner in sub_jaxprs(eqn):
            found |= waiting_axes(inner, sizes)
    return found


def axes_after(collective: TracedCollective, before: Axes, sizes: Sizes) -> Axes:
    """Returns the axes along which the result may vary."""
    names = collective.axes
    if collective.kind == "ppermute":
        same = _changes_nothing(collective, before, sizes)
        return before if same else in_order((*before, *names), sizes)
    if collective.groups or collective.kind in ("psum_scatter", "all_to_all"):
        return in_order((*before, *names), sizes)
    return tuple(a for a in before if a not in names)


def collect(
    collective: TracedCollective, stacked: Stacked, others: Sequence[Stacked], sizes: Sizes
) -> Stacked:
    """Returns the result of a collective on all devices.

    Args:
        collective: the collective to run.
        stacked: its operand.
        others: further operands: the source of a broadcast.
        sizes: the sizes of the mesh's axes.
    """
    if collective.groups:
        return _in_groups(collective, stacked, sizes)
    if collective.kind == "ppermute":
        collective = _as_run(collective, sizes)
    names, kind = collective.axes, collective.kind
    if kind in ("psum", "pmax", "pmin"):
        # Axes along which all devices hold the same value have no dim to reduce.
        present = [a for a in names if a in stacked.axes]
        value, rest = gather_axes(stacked, present, sizes)
        at = len(rest)
        value = _REDUCE[kind](value, (at, *(at + 1 + d for d in collective.dims)))
        copies = product(names, sizes) // product(present, sizes)
        if kind == "psum" and copies > 1:
            value = value * jnp.asarray(np.asarray(copies).astype(value.dtype))
        return Stacked(value, rest)
    if kind == "ppermute" and _changes_nothing(collective, stacked.axes, sizes):
        return stacked
    value, rest = gather_axes(stacked, names, sizes)
    at = len(rest)
    if kind == "all_gather":
        return Stacked(_all_gather(value, at, collective.params), rest)
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
        # The source is the same on all participants; along other axes it may vary.
        root = Stacked(jnp.take(index, 0, axis=len(there)), there)
        (out,) = spread(lambda v, i: [jnp.take(v, i, axis=0)], [Stacked(value, rest), root], sizes)
        return out
    return Stacked(jnp.take(value, collective.params["source"], axis=at), rest)


def _sum(value: Any, dims: int | tuple[int, ...]) -> Any:
    return jnp.sum(value, axis=dims, dtype=value.dtype)


def _no_derivative(name: str, reduce: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Returns a reduction that, like the real one, cannot be differentiated."""

    def run(value: Any, dims: Any) -> Any:
        fn = jax.custom_jvp(lambda v: reduce(v, axis=dims))

        @functools.partial(fn.defjvp, symbolic_zeros=True)
        def rule(primals: Any, tangents: Any) -> Any:
            (primal,), (tangent,) = primals, tangents
            if type(tangent).__name__ != "SymbolicZero":
                raise NotImplementedError(
                    f"Differentiation rule for '{name}' not implemented: JAX has none on real "
                    f"devices either"
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
    # The receiver moves to the front, and the sender before the dim that is concatenated.
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
        # Adjacent devices that receive from adjacent devices move together: a rotation is two
        # slices.
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
    """Returns a permute in the form that JAX runs, or raises where JAX does.

    The axes are in the mesh's order, and negative device numbers count from the end.
    """
    devices, perm = product(collective.axes, sizes), collective.params["perm"]
    if not all(-devices <= i < devices for pair in perm for i in pair):
        raise IndexError(f"ppermute names a device outside 0..{devices - 1}: {perm}")
    pairs = tuple((int(of) % devices, int(to) % devices) for of, to in perm)
    if any(len(set(ends)) < len(pairs) for ends in zip(*pairs, strict=True)):
        raise ValueError(f"ppermute names a device twice as source or as destination: {perm}")
    ordered = in_order(collective.axes, sizes)
    if ordered != collective.axes and getattr(jax.config, "jax_raise_on_ppermute_sort_diff", False):
        raise ValueError(
            f"ppermute is over axes {collective.axes}, but the mesh orders them {ordered}: "
            f"jax.shard_map rejects that, name them in the mesh's order"
        )
    return dataclasses.replace(collective, axes=ordered, params=collective.params | {"perm": pairs})


def _changes_nothing(permute: TracedCollective, before: Axes, sizes: Sizes) -> bool:
    """Returns whether every device receives the value that it already has."""
    all_send = len(permute.params["perm"]) == product(permute.axes, sizes)
    return all_send and set(permute.axes).isdisjoint(before)


def _in_groups(collective: TracedCollective, stacked: Stacked, sizes: Sizes) -> Stacked:
    """Returns the result of a collective within groups: groups and members become two axes."""
    groups = np.asarray(collective.groups)
    value, rest = gather_axes(stacked, collective.axes, sizes)
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
    out = collect(inner, Stacked(value, (*rest, _GROUP, _MEMBER)), (), inner_sizes)
    value, _ = gather_axes(out, (_GROUP, _MEMBER), inner_sizes)
    back = np.argsort(groups.reshape(-1))
    return scatter_axes(jnp.take(value, back, axis=at), rest, collective.axes, sizes)
