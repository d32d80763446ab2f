"""A digest of an array that does not depend on how it is split.

Orbax writes arrays without a checksum of their values, so a bit that flips on disk would be
restored as if it had been trained. Each element's bits are multiplied by an odd number of their
place and summed modulo 2**32: any one changed element changes the sum for certain, and any mesh
computes the same one, each device from what it holds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ._spec import padded, spec_axes

_ODD = 2654435761


def digests(arrays: Mapping[str, jax.Array]) -> Callable[[], dict[str, int]]:
    """Returns a function that waits for the digest of each array, and returns them by name.

    The arrays lie on one mesh, and may be given away as soon as this returns.
    """
    shardings: list[Any] = [x.sharding for x in arrays.values()]
    parts = [
        _parts_on(sharding.mesh, sharding.spec)(x)
        for sharding, x in zip(shardings, arrays.values(), strict=True)
    ]
    total = _total_on(shardings[0].mesh)(parts)
    return lambda: dict(zip(arrays, np.asarray(total).tolist(), strict=True))


@functools.lru_cache(maxsize=256)
def _parts_on(mesh: Mesh, spec: P) -> Any:
    """Returns a program that gives each device's part of a digest, with no collective.

    One for each kind of array: a single program for all of them is several times slower on the
    CPU, where its devices wait for each other.
    """
    body = functools.partial(_part_sum, spec=spec, mesh=mesh)
    every = P(mesh.axis_names)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=every, check_vma=False))


@functools.lru_cache(maxsize=8)
def _total_on(mesh: Mesh) -> Any:
    # Whole on every device, so that each process can read it.
    return jax.jit(
        lambda parts: jnp.stack(parts).sum(axis=1, dtype=jnp.uint32),
        out_shardings=NamedSharding(mesh, P()),
    )


def _part_sum(part: jax.Array, *, spec: P, mesh: Mesh) -> jax.Array:
    """Returns what one device adds to a digest: nothing, if another one has the same part."""
    axes = padded(spec, part.ndim)
    total = _words(part)
    for dim in reversed(range(total.ndim)):
        size = total.shape[dim]
        mine = axes[dim] if dim < part.ndim else ()  # beyond are the words of one element
        start = jax.lax.axis_index(mine) * size if mine else 0
        place = jnp.arange(size, dtype=jnp.uint32) + jnp.uint32(start)
        # Odd for each dim, hence odd for the element.
        weights = (place * jnp.uint32(_ODD)) | jnp.uint32(1)
        total = jnp.sum(total * weights, axis=-1, dtype=jnp.uint32)
    used = set(itertools.chain(*spec_axes(spec)))
    for axis in mesh.axis_names:
        if axis not in used:
            total = jnp.where(jax.lax.axis_index(axis) == 0, total, 0)
    return total[None]


def _words(array: jax.Array) -> jax.Array:
    """Returns the bits of the elements as unsigned words of 32 bits."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype.name.startswith("float4"):
        array = jax.lax.bitcast_convert_type(array, jnp.uint4)
    # Booleans, and numbers of less than a byte, have no bits of their own to look at.
    if array.dtype == jnp.bool_ or array.dtype.name in ("int2", "uint2", "int4", "uint4"):
        return array.astype(jnp.int32).astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
