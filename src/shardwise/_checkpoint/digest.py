"""A digest of an array that does not depend on how it is sharded.

Orbax writes arrays without a checksum of their values, so a bit that flips on disk would be
restored unnoticed. Every 32-bit word of every element is encrypted, together with its position, by
Threefry-2x32 with a key derived from its position, and the two output words are each summed modulo
2**32, for 64 bits in total. The order of the sum does not matter, so every mesh computes the same
digest, each device from its own shards. The cipher is not linear, so changes cancel only by chance.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._jax import on_device
from .._mesh import padded, spec_axes

ALGORITHM = "threefry2x32-20-sum64"
_ROUNDS = 20
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
# The CPU backend queues 32 programs, and blocks the caller when there are more.
_PROGRAMS = 24
# Arrays with shards of up to this many elements share one cipher: compiling one takes a quarter of
# a second, and a model has many small arrays.
_SMALL = 4096

Pair = tuple[Any, Any]


class Digest(NamedTuple):
    """The digest of an array's values, and whether they are all finite."""

    value: str
    finite: bool


class _Kind(NamedTuple):
    """All that a program needs to know about an array."""

    shape: tuple[int, ...]
    dtype: str
    spec: P


def digests(arrays: Mapping[str, jax.Array]) -> Callable[[], dict[str, Digest]]:
    """Returns a function that waits for the digest of each array, and returns them by name.

    The arrays must be on one mesh, and may be donated as soon as this returns.
    """
    shardings: dict[str, Any] = {name: x.sharding for name, x in arrays.items()}
    mesh = next(iter(shardings.values())).mesh
    small: list[str] = []
    large: dict[_Kind, list[str]] = {}
    for name, x in arrays.items():
        if math.prod(shardings[name].shard_shape(x.shape)) <= _SMALL:
            small.append(name)
        else:
            large.setdefault(_kind(x), []).append(name)
    groups = [small] if small else []
    together = _together(list(map(len, large.values())))
    for names in large.values():
        groups += [names[start : start + together] for start in range(0, len(names), together)]
    parts = []
    for names in groups:
        kinds = tuple(_kind(arrays[name]) for name in names)
        parts.append(_parts_on(mesh, kinds)(*(arrays[name] for name in names)))
    total = _total_on(mesh)(parts)

    def wait() -> dict[str, Digest]:
        rows = dict(zip(itertools.chain(*groups), np.asarray(total).tolist(), strict=True))
        found = {name: rows[name] for name in arrays}
        return {name: Digest(f"{a:08x}{b:08x}", not bad) for name, (a, b, bad) in found.items()}

    return wait


def _kind(array: jax.Array) -> _Kind:
    sharding: Any = array.sharding
    return _Kind(array.shape, str(array.dtype), sharding.spec)


def _together(counts: Sequence[int]) -> int:
    """Returns how many arrays of a kind each program takes, to limit the number of programs."""
    most = max(counts, default=1)
    fits = (n for n in range(1, most) if sum(-(-c // n) for c in counts) < _PROGRAMS)
    return next(fits, most)


@functools.lru_cache(maxsize=256)
def _parts_on(mesh: Mesh, kinds: tuple[_Kind, ...]) -> Any:
    """Returns a program for each device's contribution to some digests, without collectives."""

    def body(*parts: jax.Array) -> jax.Array:
        if math.prod(parts[0].shape) <= _SMALL:
            return _sums_of_small(parts, kinds, mesh)[None]
        if len(parts) == 1:
            return _sum_of(parts[0], kinds[0], mesh)[None, None]

        # All of one kind: a loop compiles one cipher for all of them.
        def one(index: Any, sums: jax.Array) -> jax.Array:
            part = jax.lax.switch(index, [lambda part=part: part for part in parts])
            return sums.at[index].set(_sum_of(part, kinds[0], mesh))

        empty = jnp.zeros((len(parts), 3), jnp.uint32)
        return jax.lax.fori_loop(0, len(parts), one, empty)[None]

    specs, every = tuple(kind.spec for kind in kinds), P(mesh.axis_names)
    each = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=every, check_vma=False)
    return jax.jit(lambda *arrays: each(*map(on_device, arrays)))


@functools.lru_cache(maxsize=8)
def _total_on(mesh: Mesh) -> Any:
    # Replicated, so that each process can read it.
    return jax.jit(
        lambda parts: jnp.concatenate(parts, axis=1).sum(axis=0, dtype=jnp.uint32),
        out_shardings=NamedSharding(mesh, P()),
    )


def _sum_of(part: jax.Array, kind: _Kind, mesh: Mesh) -> jax.Array:
    """Returns what one device contributes to a digest, and whether it has non-finite values."""
    first = _is_first([kind], mesh)[0]
    if mesh.devices.flat[0].platform != "cpu":
        return jnp.where(first, _sum_of_part(part, kind), 0)
    # Virtual devices share the cores, so skip what would not be counted.
    return jax.lax.cond(first, lambda: _sum_of_part(part, kind), lambda: jnp.zeros(3, jnp.uint32))


def _sum_of_part(part: jax.Array, kind: _Kind) -> jax.Array:
    coordinates = _coordinates(part, kind)
    last = coordinates[-1] if coordinates else jnp.uint32(0)
    total = jnp.zeros(3, jnp.uint32)
    for number, word in enumerate(words_of(part)):
        key: Pair = _seed(kind, number)
        for pair in _pairs(coordinates[:-1]):
            key = _threefry(key, pair)
        encrypted = _threefry(key, (word, last))
        # In one pass over the array, which is also the fastest way to sum it on the CPU.
        sums: Any = (*(jnp.broadcast_to(x, part.shape) for x in encrypted), _not_finite(part))
        for dim in reversed(range(part.ndim)):
            sums = jax.lax.reduce(sums, (jnp.uint32(0),) * 3, _add, (dim,))
        total = jnp.stack(_add(tuple(total), sums))
    return total


def _sums_of_small(parts: Sequence[jax.Array], kinds: Sequence[_Kind], mesh: Mesh) -> jax.Array:
    """Returns the same for several small arrays, with one cipher for all of them."""
    width = max(part.size for part in parts)
    by_dtype: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds):
        by_dtype.setdefault(kind.dtype, []).append(index)
    # A row for each word of each array, as long as the largest.
    owners: list[int] = []
    seeds, words, bad = [], [], []
    for indices in by_dtype.values():
        flat = [jnp.pad(parts[i].reshape(-1), (0, width - parts[i].size)) for i in indices]
        stacked = jnp.stack(flat)
        for number, word in enumerate(words_of(stacked)):
            owners += indices
            seeds += [_seed(kinds[i], number) for i in indices]
            words.append(word)
            bad.append(_not_finite(stacked))
    rank = max(part.ndim for part in parts)
    sizes, strides = np.ones((2, len(parts), rank + 1), np.uint32)
    splits: dict[tuple[str, ...], int] = {(): 0}
    split = np.zeros(sizes.shape, np.int32)
    for index, (part, kind) in enumerate(zip(parts, kinds, strict=True)):
        for dim, axes in enumerate(padded(kind.spec, part.ndim)):
            sizes[index, dim] = part.shape[dim]
            strides[index, dim] = math.prod(part.shape[dim + 1 :])
            split[index, dim] = splits.setdefault(tuple(axes), len(splits))
    begin = jnp.stack([_index(axes) for axes in splits])[split] * sizes
    place = jnp.arange(width, dtype=jnp.uint32)[None]

    def coordinate(dims: Any) -> jax.Array:
        at = np.asarray(owners), np.asarray(dims)
        return place // strides[at][:, None] % sizes[at][:, None] + begin[at][:, None]

    key: Pair = tuple(jnp.asarray(np.array(seeds, np.uint32)[:, i, None]) for i in (0, 1))  # pyright: ignore[reportAssignmentType]
    # Dims before the last one; the coordinate of a dim that an array does not have is 0.
    leading = np.array([max(parts[i].ndim - 1, 0) for i in owners])
    for first in range(0, max(leading), 2):
        pair = tuple(coordinate(np.where(d < leading, d, rank)) for d in (first, first + 1))
        deeper = _threefry(key, (pair[0], pair[1]))
        has = (first < leading)[:, None]
        key = jnp.where(has, deeper[0], key[0]), jnp.where(has, deeper[1], key[1])
    last = coordinate([parts[i].ndim - 1 if parts[i].ndim else rank for i in owners])
    a, b = _threefry(key, (jnp.concatenate(words), last))
    in_array = place < np.array([parts[i].size for i in owners])[:, None]
    zero = jnp.uint32(0)
    lanes = (jnp.where(in_array, a, zero), jnp.where(in_array, b, zero), jnp.concatenate(bad))
    rows = jnp.stack(jax.lax.reduce(lanes, (zero,) * 3, _add, (1,)), axis=-1)
    totals = jnp.zeros((len(parts), 3), jnp.uint32).at[np.asarray(owners)].add(rows)
    return jnp.where(_is_first(kinds, mesh)[:, None], totals, 0)


def _threefry(key: Pair, block: Pair) -> Pair:
    """Returns a block of two words, encrypted by Threefry-2x32 (Salmon et al., 2011)."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    a, b = block[0] + keys[0], block[1] + keys[1]
    for number in range(_ROUNDS):
        bits = _ROTATIONS[number // 4 % 2][number % 4]
        a = a + b
        b = ((b << jnp.uint32(bits)) | (b >> jnp.uint32(32 - bits))) ^ a
        if number % 4 == 3:
            turn = number // 4 + 1
            a, b = a + keys[turn % 3], b + keys[(turn + 1) % 3] + jnp.uint32(turn)
    return a, b


def _seed(kind: _Kind, number: int) -> Pair:
    """Returns the initial key for a word of an array with this shape and dtype."""
    text = f"{kind.dtype}{list(kind.shape)}{number}".encode()
    words = np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), "<u4")
    return words[0], words[1]


def _index(axes: Sequence[str]) -> jax.Array:
    """Returns the index of this device along some mesh axes."""
    return jnp.uint32(jax.lax.axis_index(tuple(axes)) if axes else 0)


def _coordinates(part: jax.Array, kind: _Kind) -> list[jax.Array]:
    """Returns, for each dim, the positions of the elements in the full array."""
    found = []
    for dim, axes in enumerate(padded(kind.spec, part.ndim)):
        size = part.shape[dim]
        place = jnp.arange(size, dtype=jnp.uint32) + _index(axes) * jnp.uint32(size)
        found.append(place.reshape([-1 if d == dim else 1 for d in range(part.ndim)]))
    return found


def _pairs(coordinates: Sequence[Any]) -> list[Pair]:
    padded_out = [*coordinates, jnp.uint32(0)]
    pairs = [(padded_out[i], padded_out[i + 1]) for i in range(0, len(coordinates), 2)]
    return [jnp.broadcast_arrays(*pair) for pair in pairs]  # pyright: ignore[reportReturnType]


def _is_first(kinds: Sequence[_Kind], mesh: Mesh) -> jax.Array:
    """Returns, for each array, whether this is the first device that holds its shard."""
    here = jnp.stack([jax.lax.axis_index(axis) == 0 for axis in mesh.axis_names])
    used = [set(itertools.chain(*spec_axes(kind.spec))) for kind in kinds]
    return (here | np.array([[axis in axes for axis in mesh.axis_names] for axes in used])).all(1)


def _add(a: Any, b: Any) -> Any:
    # The third says whether anything is not finite: a count could overflow to 0.
    return a[0] + b[0], a[1] + b[1], a[2] | b[2]


def _not_finite(part: jax.Array) -> jax.Array:
    if not jnp.issubdtype(part.dtype, jnp.inexact):
        return jnp.zeros(part.shape, jnp.uint32)
    return (~jnp.isfinite(part)).astype(jnp.uint32)


def words_of(array: jax.Array) -> list[jax.Array]:
    """Returns the bits of the elements: for each 32-bit word of an element, one array."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return [*words_of(array.real), *words_of(array.imag)]
    if array.dtype.name.startswith("float4"):
        array = jax.lax.bitcast_convert_type(array, jnp.uint4)
    # The bits of booleans, and of types smaller than a byte, cannot be accessed directly.
    if array.dtype == jnp.bool_ or array.dtype.name in ("int2", "uint2", "int4", "uint4"):
        return [array.astype(jnp.int32).astype(jnp.uint32)]
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    words = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    return [words] if words.ndim == array.ndim else [words[..., i] for i in range(words.shape[-1])]
