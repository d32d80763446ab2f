"""The jaxpr of a shard_map body, traced by JAX's own shard_map over devices that need not exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from .._jax import opened
from .._mesh import Axes
from .stacked import Sizes, Stacked, in_order, split


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """Where a body runs.

    Attributes:
        mesh: all axes and their sizes.
        manual: the manual axes, over which the body can communicate, in the mesh's order.
        typed: whether JAX tracks the axes along which values vary (`check_vma`).
    """

    mesh: AbstractMesh
    manual: Axes
    typed: bool

    @property
    def sizes(self) -> Sizes:
        """The sizes of the manual axes."""
        return {axis: self.mesh.shape[axis] for axis in self.manual}


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """A traced body.

    Attributes:
        jaxpr: the program on local values; its inputs are the closed-over arrays, then the
            arguments.
        consts: the closed-over arrays.
        out_tree: the structure of what the body returns.
        out_varying: for each output, the axes along which JAX considers it varying.
    """

    jaxpr: Any
    consts: list[Any]
    out_tree: Any
    out_varying: list[Axes]


def plain_mesh(mesh: Any) -> AbstractMesh:
    """Returns an abstract mesh with the axes of `mesh`, all of them Auto."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return AbstractMesh(tuple(mesh.shape.values()), tuple(mesh.axis_names), axis_types=types)


def varying(aval: Any) -> frozenset[str]:
    """Returns the axes along which JAX considers a value varying."""
    return aval.manual_axis_type.varying


def cast(x: Any, axes: Iterable[str]) -> Any:
    """Returns `x` typed as also varying along `axes`."""
    more = tuple(sorted(set(axes) - varying(jax.typeof(x))))
    return jax.lax.pcast(x, more, to="varying") if more else x


def trace_body(
    fn: Callable[..., Any], arrays: Sequence[Any], specs: Sequence[P], setting: Setting
) -> Body:
    """Returns the traced body of `jax.shard_map(fn, in_specs=specs)` for these global arrays."""
    found: dict[str, Any] = {}

    def local(*leaves: Any) -> list[Any]:
        flat, found["tree"] = jax.tree.flatten(fn(*leaves))
        flat = [jnp.asarray(out) for out in flat]
        found["varying"] = [in_order(varying(jax.typeof(out)), setting.sizes) for out in flat]
        # A leading dim for the devices lets any output be returned, whatever it varies along.
        return [out[None] for out in flat]

    mapped = jax.shard_map(
        local,
        mesh=setting.mesh,
        in_specs=tuple(specs),
        out_specs=P(setting.manual),
        axis_names=set(setting.manual),
        check_vma=setting.typed,
    )
    # A mesh that the caller has set, with axes of other types, must not affect the simulation.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        closed = jax.make_jaxpr(mapped)(*(_shape(a) for a in arrays))
    outer, outer_consts = opened(closed)
    (eqn,) = outer.eqns or [None]
    if eqn is None:  # nothing is returned: JAX drops the whole body
        return Body(None, [], found["tree"], [])
    values = dict(zip(outer.constvars, outer_consts, strict=True))
    operands = eqn.invars[: len(eqn.invars) - len(arrays)]
    consts = [values[v] if v in values else v.val for v in operands]
    return Body(eqn.params["jaxpr"], consts, found["tree"], found["varying"])


def trace_local(
    fn: Callable[..., Any], stacked: Sequence[Stacked], declared: Sequence[Axes], setting: Setting
) -> Body:
    """Returns the traced body of a function of stacked values.

    Args:
        fn: a function of local values.
        stacked: the stacked arguments.
        declared: for each, the axes along which JAX considers it varying, which may be more than
            those along which it really does.
        setting: the mesh.
    """

    def local(*leaves: Any) -> Any:
        args = []
        for leaf, s, axes in zip(leaves, stacked, declared, strict=True):
            leaf = leaf.reshape(s.local_shape)
            args.append(cast(leaf, axes) if setting.typed else leaf)
        return fn(*args)

    return trace_body(local, [s.value for s in stacked], [P(*s.axes) for s in stacked], setting)


def as_arguments(stacked: Sequence[Stacked], sizes: Sizes) -> list[Stacked]:
    """Returns stacked values in the form that the body of `trace_local` takes."""
    return [split(s.value, P(*s.axes), sizes) for s in stacked]


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(array)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
