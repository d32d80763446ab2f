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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ._spec import padded, spec_axes

_ODD = 2654435761
# As few that the CPU, which takes 32 at a time, does not keep the caller waiting for them; one
# for all arrays is several times slower there, its devices in each other's way.
_PROGRAMS = 24


class Digest(NamedTuple):
    """What is known of an array's values."""

    sum: int
    finite: bool


def digests(arrays: Mapping[str, jax.Array]) -> Callable[[], dict[str, Digest]]:
    """Returns a function that waits for the digest of each array, and returns them by name.

    The arrays lie on one mesh, and may be given away as soon as this returns.
    """
    values = list(arrays.values())
    shardings: list[Any] = [x.sharding for x in values]
    mesh = shardings[0].mesh
    size = -(-len(values) // _PROGRAMS)
    parts = []
    for start in range(0, len(values), size):
        specs = tuple(sharding.spec for sharding in shardings[start : start + size])
        parts.append(_parts_on(mesh, specs)(*values[start : start + size]))
    total = _total_on(mesh)(parts)

    def wait() -> dict[str, Digest]:
        found = np.asarray(total).tolist()
        return {name: Digest(sum, not bad) for name, (sum, bad) in zip(arrays, found, strict=True)}

    return wait


@functools.lru_cache(maxsize=256)
def _parts_on(mesh: Mesh, specs: tuple[P, ...]) -> Any:
    """Returns a program that gives each device's part of some digests, with no collective."""

    def body(*parts: jax.Array) -> jax.Array:
        sums = [_part_sum(x, spec=s, mesh=mesh) for x, s in zip(parts, specs, strict=True)]
        return jnp.stack(sums)[None]

    every = P(mesh.axis_names)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=every, check_vma=False))


@functools.lru_cache(maxsize=8)
def _total_on(mesh: Mesh) -> Any:
    # Whole on every device, so that each process can read it.
    return jax.jit(
        lambda parts: jnp.concatenate(parts, axis=1).sum(axis=0, dtype=jnp.uint32),
        out_shardings=NamedSharding(mesh, P()),
    )


def _part_sum(part: jax.Array, *, spec: P, mesh: Mesh) -> jax.Array:
    """Returns what one device adds to a digest, and its count of numbers that are not finite.

    It adds nothing if another device has the same part.
    """
    axes = padded(spec, part.ndim)
    total = _words(part)
    bad = jnp.zeros(part.shape, jnp.uint32)
    if jnp.issubdtype(part.dtype, jnp.inexact):
        bad = (~jnp.isfinite(part)).astype(jnp.uint32)
    words = total.ndim - part.ndim  # dims of the words of one element
    bad = jnp.broadcast_to(bad.reshape(part.shape + (1,) * words), total.shape)
    for dim in reversed(range(total.ndim)):
        size = total.shape[dim]
        mine = axes[dim] if dim < part.ndim else ()
        start = jax.lax.axis_index(mine) * size if mine else 0
        place = jnp.arange(size, dtype=jnp.uint32) + jnp.uint32(start)
        # Odd for each dim, hence odd for the element.
        weights = (place * jnp.uint32(_ODD)) | jnp.uint32(1)
        # Both in one pass over the array, which on the CPU is also the fastest way to sum it.
        total, bad = jax.lax.reduce(
            (total * weights, bad), (jnp.uint32(0), jnp.uint32(0)), _add_both, (dim,)
        )
    used = set(itertools.chain(*spec_axes(spec)))
    for axis in mesh.axis_names:
        if axis not in used:
            total = jnp.where(jax.lax.axis_index(axis) == 0, total, 0)
    return jnp.stack([total, bad])


def _add_both(a: Any, b: Any) -> Any:
    return a[0] + b[0], a[1] + b[1]


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
