"""The digest of checkpoints in format 1, kept to read them.

Each element's bits are multiplied by an odd number that depends on their position, and summed
modulo 2**32. That sum is linear, so some changes cancel, such as an even number of flipped signs.
New checkpoints use the digest in `digest.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._mesh import padded, spec_axes

_ODD = 2654435761


def sums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """Returns the sum of each array, by name."""
    found = {}
    for name, array in arrays.items():
        sharding: Any = array.sharding
        found[name] = _sum_on(sharding.mesh, sharding.spec)(array)
    return {name: int(np.asarray(total)) for name, total in found.items()}


@functools.lru_cache(maxsize=256)
def _sum_on(mesh: Mesh, spec: P) -> Any:
    def body(part: jax.Array) -> jax.Array:
        return _part_sum(part, spec=spec, mesh=mesh)[None]

    every = P(mesh.axis_names)
    parts = jax.shard_map(body, mesh=mesh, in_specs=(spec,), out_specs=every, check_vma=False)
    return jax.jit(
        lambda array: parts(array).sum(dtype=jnp.uint32), out_shardings=NamedSharding(mesh, P())
    )


def _part_sum(part: jax.Array, *, spec: P, mesh: Mesh) -> jax.Array:
    axes = padded(spec, part.ndim)
    total = _words(part)
    for dim in reversed(range(total.ndim)):
        size = total.shape[dim]
        mine = axes[dim] if dim < part.ndim else ()
        start = jax.lax.axis_index(mine) * size if mine else 0
        place = jnp.arange(size, dtype=jnp.uint32) + jnp.uint32(start)
        weights = (place * jnp.uint32(_ODD)) | jnp.uint32(1)
        total = (total * weights).sum(axis=dim, dtype=jnp.uint32)
    used = set(itertools.chain(*spec_axes(spec)))
    for axis in mesh.axis_names:
        if axis not in used:
            total = jnp.where(jax.lax.axis_index(axis) == 0, total, 0)
    return total


def _words(array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype.name.startswith("float4"):
        array = jax.lax.bitcast_convert_type(array, jnp.uint4)
    if array.dtype == jnp.bool_ or array.dtype.name in ("int2", "uint2", "int4", "uint4"):
        return array.astype(jnp.int32).astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
