"""Names of dims: those of parameters, which a layout reads, and those of activations."""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from .._jax import active_axis_rules
from .._mesh import STAGES

NAMES = ("vocab", "embed", "heads", "kv_heads", "depth", "mlp", "experts", "layers")

# The default rules of each parameter: a name that the layout does not map splits nothing.
UNMAPPED = tuple((name, None) for name in (*NAMES, "batch"))


def named(value: jax.Array, *names: str | None, kind: Any = nnx.Param) -> Any:
    """Returns a parameter, or a variable of another kind, whose dims have these names.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardwise.models._names import named
        >>> named(jnp.ones((8, 32)), "embed", "mlp").out_sharding
        ('embed', 'mlp')
    """
    assert len(names) == value.ndim, (names, value.shape)
    param = kind(value)
    # Set afterwards: Flax would place a variable that is created with names, which needs a mesh.
    param.set_metadata(out_sharding=names, sharding_rules=UNMAPPED)
    return param


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Returns `x` with each dim constrained to the axes that Flax's logical rules map its name to.

    A dim whose name has no rule is left to the compiler, as is one that its axes do not divide.
    Without rules, or without a mesh of Auto axes, nothing happens. `sw.train_step` sets both.

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
    """Returns a parameter as the computation needs it: dims whose name has no rule are gathered.

    This undoes splits that only save memory (FSDP). Dims without a name are left to the compiler.
    Without rules, or without a mesh of Auto axes, nothing happens.

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


def in_pipeline() -> bool:
    """Returns whether a pipeline is being traced, whose stages `vmap` runs."""
    return dict(active_axis_rules()).get(STAGES) == ()


def auto_mesh() -> AbstractMesh | None:
    """Returns the current mesh if all its axes are Auto, else None."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None
    return mesh


def axes_of(
    shape: tuple[int, ...], names: tuple[str | None, ...], mesh: AbstractMesh
) -> list[tuple[str, ...]]:
    """Returns the axes that split each dim: on `mesh`, not used yet, and dividing it evenly.

    A dim that its axes do not divide is left to the compiler: a constraint on an activation
    changes no number, and what must divide is refused before, parameters by `sw.check` (SW104) and
    the batch when it is laid out.
    """
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
