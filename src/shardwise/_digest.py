"""A digest of an array that does not depend on how it is split.

Orbax writes arrays without a checksum of their values, so a bit that flips on disk would be
restored as if it had been trained. Each element's bits are multiplied by an odd number of their
place and summed modulo 2**32: any one changed element changes the sum for certain, and any mesh
computes the same one, each device from what it holds.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

_ODD = 2654435761


def digests(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the digest of each array: scalars on the devices, perhaps still being computed."""
    return {name: _digest_on(_mesh(array))(array) for name, array in arrays.items()}


def _mesh(array: jax.Array) -> Any:
    return array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None


@functools.lru_cache(maxsize=8)
def _digest_on(mesh: Any) -> Any:
    # Whole on every device, so that each process can read it.
    return jax.jit(_digest, out_shardings=None if mesh is None else NamedSharding(mesh, P()))


def _digest(array: jax.Array) -> jax.Array:
    words = _words(array)
    place = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(words.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        place = place + along * jnp.uint32(stride % 2**32)
        stride *= words.shape[dim]
    return jnp.sum(words * ((place * jnp.uint32(_ODD)) | jnp.uint32(1)), dtype=jnp.uint32)


def _words(array: jax.Array) -> jax.Array:
    """Returns the bits of the elements as unsigned words of 32 bits."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    size = array.dtype.itemsize
    # Booleans, and numbers of less than a byte, have no bits of their own to look at.
    if array.dtype == jnp.bool_ or array.dtype.name in ("int2", "uint2", "int4", "uint4"):
        return array.astype(jnp.int32).astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32)
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
