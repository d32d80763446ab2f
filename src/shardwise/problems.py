"""The four problems of the seed documents, solved with the library.

Each function has the arguments and the result that its document states. Each also has a
counterpart, `…_for_real`, which runs on devices what the first only computes.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ._layout import by_rank, layout
from ._mesh import mesh
from ._place import init
from ._simulate import simulate

_RULE = by_rank({2: P(None, "model"), 1: P("model")})


def state_to_sharded_layout(seed: float, x: Any, features: float) -> jax.Array:
    """Returns `[number of leaves]` in the layout of an `nnx.Linear`: kernel and bias.

    Args:
        seed: cast to int.
        x: an array of shape `(N, in_dim)`; only its last dim is used.
        features: cast to int; the width of the output.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardwise import problems
        >>> problems.state_to_sharded_layout(0.0, jnp.ones((4, 8)), 16.0).tolist()
        [2.0]
    """
    plan = layout(_linear(seed, x, features), mesh("model=1", on="none"), _RULE)
    return jnp.array([float(len(jax.tree.leaves(plan.specs)))])


def state_to_sharded_layout_for_real(seed: float, x: Any, features: float) -> jax.Array:
    """Returns the same, counted on live arrays that are placed as the layout says.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardwise import problems
        >>> problems.state_to_sharded_layout_for_real(0.0, jnp.ones((4, 8)), 16.0).tolist()
        [2.0]
    """
    make, here = _linear(seed, x, features), mesh({"model": -1})
    plan = layout(make, here, _RULE)
    arrays = jax.tree.leaves(nnx.split(init(make, plan))[1])
    specs = jax.tree.leaves(plan.specs)
    placed = [
        array.sharding.is_equivalent_to(NamedSharding(here, spec), array.ndim)
        for array, spec in zip(arrays, specs, strict=True)
    ]
    return jnp.array([float(sum(placed))])


def partition_spec_layout(num_devices: float, kernel_in: float, kernel_out: float) -> jax.Array:
    """Returns `[kernel_in, kernel_out // num_devices]`: a kernel's shard under `P(None, "model")`.

    Args:
        num_devices: cast to int; the size of the axis `model`.
        kernel_in: cast to int.
        kernel_out: cast to int; divisible by `num_devices`.

    Example:
        >>> from shardwise import problems
        >>> problems.partition_spec_layout(4.0, 8.0, 16.0).tolist()
        [8.0, 4.0]
    """
    devices, rows, columns = _kernel(num_devices, kernel_in, kernel_out)
    make = _linear(0, np.zeros((1, rows)), columns)
    plan = layout(make, mesh({"model": devices}, on="none"), _RULE)
    return jnp.array([float(size) for size in plan["kernel"].shard_shape])


def partition_spec_layout_for_real(
    num_devices: float, kernel_in: float, kernel_out: float
) -> jax.Array:
    """Returns the same, read from a kernel placed on that many CPU devices.

    Example:
        >>> from shardwise import problems
        >>> problems.partition_spec_layout_for_real(4.0, 8.0, 16.0).tolist()
        [8.0, 4.0]
    """
    devices, rows, columns = _kernel(num_devices, kernel_in, kernel_out)
    sharding = NamedSharding(mesh({"model": devices}, on=f"cpu:{devices}"), P(None, "model"))
    kernel = jax.device_put(jnp.zeros((rows, columns)), sharding)
    return jnp.array([float(size) for size in kernel.addressable_shards[0].data.shape])


def shard_map_simulate(seed: float, x: Any, num_shards: float, features: float) -> jax.Array:
    """Returns `nnx.Linear` applied to `x`, with the batch split into shards, flattened.

    Args:
        seed: cast to int.
        x: an array of shape `(N, in_dim)`, N divisible by `num_shards`.
        num_shards: cast to int.
        features: cast to int; the width of the output.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardwise import problems
        >>> problems.shard_map_simulate(0.0, jnp.ones((4, 8)), 2.0, 3.0).shape
        (12,)
    """
    x, shards = _shards(x, num_shards)
    axes = mesh({"data": shards}, on="none")
    return _map_linear(simulate, seed, x, features, axes)


def shard_map_simulate_for_real(
    seed: float, x: Any, num_shards: float, features: float
) -> jax.Array:
    """Returns the same, computed by `jax.shard_map` on that many CPU devices.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardwise import problems
        >>> problems.shard_map_simulate_for_real(0.0, jnp.ones((4, 8)), 2.0, 3.0).shape
        (12,)
    """
    x, shards = _shards(x, num_shards)
    axes = mesh({"data": shards}, on=f"cpu:{shards}")
    return _map_linear(jax.shard_map, seed, x, features, axes)


def mesh_init_simulate(seed: float, x: Any, features: float, mesh_axes: float) -> jax.Array:
    """Returns `[features, mesh_axes, number of leaves]` for an `nnx.Linear` on a mesh.

    Args:
        seed: cast to int.
        x: an array of shape `(N, in_dim)`; only its last dim is used.
        features: cast to int; the width of the output.
        mesh_axes: cast to int; the size of the mesh's only axis.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardwise import problems
        >>> problems.mesh_init_simulate(0.0, jnp.ones((4, 8)), 16.0, 4.0).tolist()
        [16.0, 4.0, 2.0]
    """
    size = _count(mesh_axes, "mesh_axes")
    plan = layout(_linear(seed, x, features), mesh({"model": size}, on="none"), _RULE)
    width = plan["kernel"].shape[-1]
    return jnp.array([float(width), float(plan.mesh.size), float(len(plan.leaves))])


def mesh_init_simulate_for_real(
    seed: float, x: Any, features: float, mesh_axes: float
) -> jax.Array:
    """Returns the same, read from a model initialised into its shards on that many CPU devices.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardwise import problems
        >>> problems.mesh_init_simulate_for_real(0.0, jnp.ones((4, 8)), 16.0, 4.0).tolist()
        [16.0, 4.0, 2.0]
    """
    size = _count(mesh_axes, "mesh_axes")
    make = _linear(seed, x, features)
    model = init(make, layout(make, mesh({"model": size}, on=f"cpu:{size}"), _RULE))
    arrays = jax.tree.leaves(nnx.split(model)[1])
    devices = {shard.device for array in arrays for shard in array.addressable_shards}
    width = arrays[-1].shape[-1]
    return jnp.array([float(width), float(len(devices)), float(len(arrays))])


def _map_linear(run: Any, seed: float, x: Any, features: float, axes: Any) -> jax.Array:
    """Returns a linear layer applied to `x` with its batch split, by `run`, simulated or real."""
    graphdef, state = nnx.split(_linear(seed, x, features)())
    step = run(
        lambda state, local_x: nnx.merge(graphdef, state)(local_x),
        mesh=axes,
        in_specs=(P(), P("data", None)),
        out_specs=P("data", None),
    )
    return step(state, x).reshape(-1)


def _linear(seed: float, x: Any, features: float) -> Any:
    key, width = _integer(seed, "seed"), _count(features, "features")
    if not -(2**63) <= key < 2**63:
        raise ValueError(f"seed must fit in 64 bits, got {seed!r}")
    in_dim = _matrix(x).shape[-1]
    return lambda: nnx.Linear(in_dim, width, rngs=nnx.Rngs(key))


def _kernel(num_devices: float, kernel_in: float, kernel_out: float) -> tuple[int, int, int]:
    devices = _count(num_devices, "num_devices")
    rows, columns = _count(kernel_in, "kernel_in"), _count(kernel_out, "kernel_out")
    if columns % devices:
        raise ValueError(
            f"kernel_out is {columns}, which cannot be split evenly over {devices} devices: "
            f"use a multiple of num_devices"
        )
    return devices, rows, columns


def _shards(x: Any, num_shards: float) -> tuple[jax.Array, int]:
    x, shards = _matrix(x), _count(num_shards, "num_shards")
    if x.shape[0] % shards:
        raise ValueError(
            f"x has {x.shape[0]} rows, which cannot be split evenly into {shards} shards: "
            f"use a multiple of num_shards"
        )
    return x, shards


def _matrix(x: Any) -> jax.Array:
    shape, dtype = np.shape(x), getattr(x, "dtype", None) or np.asarray(x).dtype
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"x must have shape (N, in_dim) and not be empty, got shape {shape}")
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise ValueError(f"x must be an array of real numbers, got dtype {dtype}")
    return jnp.asarray(x)


def _count(value: float, name: str) -> int:
    number = _integer(value, name)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")
    return number


def _integer(value: float, name: str) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return int(value)
