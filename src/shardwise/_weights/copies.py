"""Between a block of a file and the shards: what is copied where, transposed and cast on the way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from .regions import Block, Box, Piece, leaf_strides, loops_of, meet

_DIRECT_BYTES = 2**14
_FAR_BYTES = 1024
_PAD_BYTES = 128
_TURNED = 2**14  # elements: fewer are not worth a call of XLA


@dataclasses.dataclass(slots=True)
class Shard:
    """A part of a leaf in the host's memory.

    Attributes:
        box: which part.
        data: its bytes, in row-major order.
        dtype: its dtype.
    """

    box: Box
    data: np.ndarray
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def array(self) -> np.ndarray:
        """The bytes as an array."""
        return self.data.view(self.dtype).reshape(self.shape)


def is_long(size: int) -> bool:
    """Returns whether a run of so many bytes is worth a buffer of its own in a call of the system."""
    return size >= _DIRECT_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Scatter:
    """A shard that gets some of a piece.

    Attributes:
        shard: the shard.
        piece: the piece.
        box: the part of the leaf that is in both.
        loops: the same, over the piece's factors.
        strides: the stride of each factor in the shard.
    """

    shard: Shard
    piece: Piece
    box: Box
    loops: list[Box]
    strides: list[int]

    def within(self, block: Block) -> Iterator[Copy]:
        """Yields what this shard gets of a block."""
        for loop in self.loops:
            box = meet(loop, block.box)
            if box is not None:
                yield Copy(self, box)

    def position(self, box: Box) -> int:
        """Returns where the first element of a box over factors is in the shard."""
        # The piece's first index in the shard may be negative: the shard begins after it.
        place, step = 0, 1
        for (first, _), (start, stop) in zip(
            reversed(self.piece.box), reversed(self.shard.box), strict=True
        ):
            place += (first - start) * step
            step *= stop - start
        return place + sum(pair[0] * s for pair, s in zip(box, self.strides, strict=True))


def spread(block: Block, copies: Sequence[Copy], strides: Sequence[int], size: int) -> Block:
    """Returns a block with its rows spread, if it is transposed and they are far apart."""
    here = copies[0].scatter.strides
    for dim, (start, stop) in enumerate(copies[0].box):
        if here[dim] == 1 and stop - start > 1 and strides[dim] * size >= _FAR_BYTES:
            return block.spread(dim, strides, _PAD_BYTES // size) or block
    return block


def turned_block(
    staged: np.ndarray, block: Block, copy: Copy, item: np.dtype
) -> tuple[np.ndarray, Block]:
    """Returns a block in the order of the leaf, if several shards get transposed parts of it."""
    here = copy.scatter.strides
    order = sorted(range(len(here)), key=lambda dim: (-here[dim], dim))
    whole = dataclasses.replace(copy, box=block.box)
    seen = whole.in_block(staged, block, item).transpose(order)
    wide = [dim for dim, size in enumerate(seen.shape) if size > 1]
    if not wide or not _is_turned(
        seen[tuple(slice(None) if d in wide else 0 for d in range(seen.ndim))]
    ):
        return staged, block
    strides = [0] * len(here)
    turned = _turned(seen)
    if turned is seen:
        return staged, block
    for dim, stride in zip(order, turned.strides, strict=True):
        strides[dim] = stride // item.itemsize
    moved = dataclasses.replace(
        block, extents=((0, turned.size),), pitch=turned.size, strides=tuple(strides)
    )
    return turned.reshape(-1).view(np.uint8), moved


def scatters_of(piece: Piece, shards: Iterable[Shard]) -> list[Scatter]:
    """Returns the shards that have some of a piece."""
    return [
        Scatter(shard, piece, box, list(loops_of(piece, box)), leaf_strides(piece, shard.shape))
        for shard in shards
        if (box := meet(piece.box, shard.box)) is not None
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A box over factors that goes from a block to a shard."""

    scatter: Scatter
    box: Box

    def segments(
        self, strides: Sequence[int], block: Block, item: np.dtype
    ) -> list[tuple[int, memoryview]] | None:
        """Returns the runs as (first element in the file, where it goes); None if they are short."""
        shard, here = self.scatter.shard, self.scatter.strides
        if shard.dtype != item:
            return None
        run, outer = 1, []
        for dim in sorted(range(len(self.box)), key=lambda d: strides[d]):
            count = self.box[dim][1] - self.box[dim][0]
            if count == 1:
                continue
            if not outer and strides[dim] == run == here[dim]:
                run *= count
            else:
                outer.append(dim)
        if outer and not is_long(run * item.itemsize):
            return None
        file = block.extents[0][0] + sum(
            (pair[0] - start[0]) * s
            for pair, start, s in zip(self.box, block.box, strides, strict=True)
        )
        starts = np.array([[file], [self.scatter.position(self.box)]], np.int64)
        for dim in outer:
            steps = np.arange(self.box[dim][1] - self.box[dim][0])
            moved = np.array([[strides[dim]], [here[dim]]]) * steps
            starts = (starts[:, :, None] + moved[:, None, :]).reshape(2, -1)
        data, size = shard.data.data, item.itemsize
        return [
            (source, data[target * size : (target + run) * size])
            for source, target in zip(*starts.tolist(), strict=True)
        ]

    def read(self, staged: np.ndarray, block: Block, item: np.dtype) -> None:
        """Copies what was read to the shard, with a cast if the dtypes differ."""
        dtype = self.scatter.shard.dtype
        if item == BF16 and dtype == np.float32:
            # A bfloat16 is the high half of a float32, whose low half is zero already.
            half = np.dtype(np.uint16)
            first = 2 * self.scatter.position(self.box) + 1
            strides = [2 * stride for stride in self.scatter.strides]
            target = _strided(self.scatter.shard.data, half, self._shape, first, strides)
            _copy(target, self.in_block(staged, block, half))
            return
        same = item == dtype
        source = self.in_block(staged, block, _PLAIN[item.itemsize] if same else item)
        target = self._in_shard(_PLAIN[dtype.itemsize] if same else dtype)
        _copy(target, source)

    def write(self, staged: np.ndarray, block: Block, item: np.dtype) -> None:
        """Copies the shard's part to what is written, with a cast if the dtypes differ."""
        dtype = self.scatter.shard.dtype
        same = item == dtype
        target = self.in_block(staged, block, _PLAIN[item.itemsize] if same else item)
        source = self._in_shard(_PLAIN[dtype.itemsize] if same else dtype)
        _copy(target, source)

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    def in_block(self, staged: np.ndarray, block: Block, dtype: np.dtype) -> np.ndarray:
        """Returns the part of a block that this copy is of."""
        pairs = zip(self.box, block.box, block.strides, strict=True)
        first = sum((own[0] - start[0]) * stride for own, start, stride in pairs)
        return _strided(staged, dtype, self._shape, first, block.strides)

    def _in_shard(self, dtype: np.dtype) -> np.ndarray:
        first = self.scatter.position(self.box)
        return _strided(self.scatter.shard.data, dtype, self._shape, first, self.scatter.strides)


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copies elements, with a cast if the dtypes differ."""
    kept = tuple(0 if size == 1 else slice(None) for size in target.shape)
    target, source = target[(*kept, ...)], source[(*kept, ...)]
    order = sorted(range(target.ndim), key=lambda dim: -target.strides[dim])
    target, source = target.transpose(order), source.transpose(order)
    if _is_turned(source):
        source = _turned(source)
    if source.dtype != target.dtype:
        # What overflows becomes infinite, as in JAX; a preflight warns of it.
        with np.errstate(over="ignore", invalid="ignore"):
            source = source.astype(target.dtype)
    np.copyto(target, source)


def _is_turned(source: np.ndarray) -> bool:
    """Returns whether an array without dims of size 1 is worth transposing by XLA."""
    size = source.dtype.itemsize
    short = source.ndim < 2 or source.size < _TURNED
    return not short and source.strides[-1] != size and size in (1, 2, 4)


def _turned(source: np.ndarray) -> np.ndarray:
    """Returns an array in row-major order. XLA transposes two to ten times as fast as NumPy."""
    device = _host_device()
    if device is None:
        return source
    with jax.transfer_guard("allow"):  # to the host's own memory
        turned = jax.device_put(source.view(_PLAIN[source.dtype.itemsize]), device)
        return np.asarray(turned).view(source.dtype)


@functools.cache
def _host_device() -> Any:
    """Returns a CPU device of this process; None where JAX was told to start no CPU backend."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


BF16 = np.dtype(ml_dtypes.bfloat16)
# Copied as unsigned integers: NumPy's own loops are faster than those of added dtypes.
_PLAIN = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}


def _strided(
    data: np.ndarray, dtype: np.dtype, shape: tuple[int, ...], first: int, strides: Sequence[int]
) -> np.ndarray:
    """Returns elements of a buffer; `first` and the strides count elements."""
    size = dtype.itemsize
    return np.ndarray(shape, dtype, data.data, first * size, tuple(s * size for s in strides))
