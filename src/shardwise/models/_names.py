"""Names on dims: of parameters, which a layout reads, and of activations, which it decides."""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from .._jax import active_axis_rules

NAMES = ("vocab", "embed", "heads", "kv_heads", "depth", "mlp", "experts", "layers")

# Each parameter's own rules: a name that a layout is told nothing of splits nothing.
UNMAPPED = tuple((name, None) for name in NAMES)


def named(value: jax.Array, *names: str | None) -> nnx.Param:
    """Returns a parameter whose dims have these names.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardwise.models._names import named
        >>> named(jnp.ones((8, 32)), "embed", "mlp").out_sharding
        ('embed', 'mlp')
    """
    assert len(names) == value.ndim, (names, value.shape)
    param = nnx.Param(value)
    # Set afterwards: Flax would place a variable that is made with names, and so ask for a mesh.
    param.set_metadata(out_sharding=names, sharding_rules=UNMAPPED)
    return param


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Returns `x`, each dim held to the axes that Flax's active logical rules give its name.

    A dim whose name has no rule is left to the compiler, as is one that its axes do not divide;
    without rules or without a mesh of Auto axes, nothing happens. `sw.train_step` sets both.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardwise.models._names import constrain
        >>> constrain(jnp.ones((8, 32)), "batch", "embed").shape
        (8, 32)
    """
    mesh = auto_mesh()
    if mesh is None:
        return x
    axes = axes_of(x.shape, names, mesh)
    if not any(axes):
        return x
    return jax.lax.with_sharding_constraint(x, P(*(a or P.UNCONSTRAINED for a in axes)))


def gather(x: jax.Array, *names: str | None) -> jax.Array:
    """Returns a parameter as activations meet it: dims whose name has no rule are whole.

    What only stores a parameter in parts (FSDP) is undone; dims of no name are left to the
    compiler. Without rules or without a mesh of Auto axes, nothing happens.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardwise.models._names import gather
        >>> gather(jnp.ones((256, 32)), "vocab", "embed").shape
        (256, 32)
    """
    mesh = auto_mesh()
    if mesh is None or not active_axis_rules():
        return x
    axes = axes_of(x.shape, names, mesh)
    left = P.UNCONSTRAINED
    spec = (left if name is None else a or None for name, a in zip(names, axes, strict=True))
    return jax.lax.with_sharding_constraint(x, P(*spec))


def auto_mesh() -> AbstractMesh | None:
    """Returns the mesh that is set, if the compiler alone decides on all its axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None
    return mesh


def axes_of(
    shape: tuple[int, ...], names: tuple[str | None, ...], mesh: AbstractMesh
) -> list[tuple[str, ...]]:
    """Returns the axes of `mesh` that split each dim: known, used once, and dividing it."""
    rules: dict[str, Any] = dict(active_axis_rules())
    found: list[tuple[str, ...]] = []
    used: set[str] = set()
    for size, name in zip(shape, names, strict=True):
        to = rules.get(name) if name is not None else None
        wanted = (to,) if isinstance(to, str) else tuple(to or ())
        axes = tuple(axis for axis in wanted if axis in mesh.shape and axis not in used)
        if size % math.prod(mesh.shape[axis] for axis in axes):
            axes = ()
        used.update(axes)
        found.append(axes)
    return found
