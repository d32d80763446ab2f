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
from .held import Held, Sizes, in_order, split


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """Where a body runs.

    Attributes:
        mesh: all axes and their sizes.
        manual: the axes whose devices the body sees, in the mesh's order.
        typed: whether JAX keeps track of the axes along which values vary (`check_vma`).
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
        jaxpr: of local values; its inputs are the closed-over arrays, then the arguments.
        consts: the closed-over arrays.
        out_tree: the structure of what it returns.
        out_varying: for each output, the axes along which JAX takes it to vary.
    """

    jaxpr: Any
    consts: list[Any]
    out_tree: Any
    out_varying: list[Axes]


def plain_mesh(mesh: Any) -> AbstractMesh:
    """Returns the axes of any mesh, without devices and all Auto."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return AbstractMesh(tuple(mesh.shape.values()), tuple(mesh.axis_names), axis_types=types)


def varying(aval: Any) -> frozenset[str]:
    """Returns the axes along which JAX takes a value to vary."""
    return aval.manual_axis_type.varying


def cast(x: Any, axes: Iterable[str]) -> Any:
    """Returns `x` typed as varying along `axes` too."""
    more = tuple(sorted(set(axes) - varying(jax.typeof(x))))
    return jax.lax.pcast(x, more, to="varying") if more else x


def trace_body(
    fn: Callable[..., Any], arrays: Sequence[Any], specs: Sequence[P], setting: Setting
) -> Body:
    """Returns the traced body of `jax.shard_map(fn, in_specs=specs)` of global arrays."""
    found: dict[str, Any] = {}

    def local(*leaves: Any) -> list[Any]:
        flat, found["tree"] = jax.tree.flatten(fn(*leaves))
        flat = [jnp.asarray(out) for out in flat]
        found["varying"] = [in_order(varying(jax.typeof(out)), setting.sizes) for out in flat]
        # With a dim of its own for the devices any output can be returned, whatever it varies along.
        return [out[None] for out in flat]

    mapped = jax.shard_map(
        local,
        mesh=setting.mesh,
        in_specs=tuple(specs),
        out_specs=P(setting.manual),
        axis_names=set(setting.manual),
        check_vma=setting.typed,
    )
    # A mesh that the caller has set, with axes of other types, is none of the simulation's business.
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
    fn: Callable[..., Any], held: Sequence[Held], declared: Sequence[Axes], setting: Setting
) -> Body:
    """Returns the traced body of a function of what the devices hold.

    Args:
        fn: of local values.
        held: what the devices hold.
        declared: for each, the axes along which JAX takes it to vary: more than it does, perhaps.
        setting: the mesh.
    """

    def local(*leaves: Any) -> Any:
        args = []
        for leaf, h, axes in zip(leaves, held, declared, strict=True):
            leaf = leaf.reshape(h.local_shape)
            args.append(cast(leaf, axes) if setting.typed else leaf)
        return fn(*args)

    return trace_body(local, [h.value for h in held], [P(*h.axes) for h in held], setting)


def as_arguments(held: Sequence[Held], sizes: Sizes) -> list[Held]:
    """Returns held values as the body of `trace_local` takes them."""
    return [split(h.value, P(*h.axes), sizes) for h in held]


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(array)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
