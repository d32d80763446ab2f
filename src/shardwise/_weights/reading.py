"""Reading: the bytes that the shards of this process need, from the files into their buffers.

A tensor is read in blocks, by several threads. Where a block's runs are long, `preadv` writes them
straight into the buffers of the shards; where they are short (a split of the last dim, a
transpose) or are cast, a block is read once, and scattered to all shards that need some of it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import ml_dtypes
import numpy as np

from .header import File, Tensor, damaged
from .regions import (
    Block,
    Box,
    Piece,
    blocks_of,
    join_boxes,
    leaf_strides,
    loops_of,
    meet,
    read_elements,
    strides_of,
    volume,
)

BLOCK_BYTES = 2**22
MOST_BLOCK_BYTES = 2**23
_ROWS = 128
# A page: the file system reads it anyway, and a call for less costs more.
GAP_BYTES = 4096
_DIRECT_BYTES = 2**14
_FAR_BYTES = 1024
_PAD_BYTES = 128
_TURNED = 2**14  # elements: fewer are not worth a call of XLA
_ALIGNMENT = 64  # from which XLA uses a buffer of the host as it is
MOST_BUFFERS = 1024  # IOV_MAX


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A tensor of a file, as a piece of a leaf."""

    tensor: Tensor
    piece: Piece


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


def empty_shards(boxes: Sequence[Box], dtype: np.dtype, *, zeros: bool) -> list[Shard]:
    """Returns parts of a leaf, which XLA's CPU devices use without another copy.

    Args:
        boxes: the parts.
        dtype: their dtype.
        zeros: whether they are zero at first.
    """
    sizes = [volume(box) * dtype.itemsize for box in boxes]
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    # One allocation: its pages are large, and are only zeroed when they are first written to.
    make = np.zeros if zeros else np.empty
    raw = make(places[-1] + _ALIGNMENT, np.uint8)
    raw = raw[-raw.ctypes.data % _ALIGNMENT :]
    return [
        Shard(box, raw[place : place + size], dtype)
        for box, place, size in zip(boxes, places, sizes, strict=False)
    ]


def reads_halves(sources: Iterable[Source], dtype: np.dtype) -> bool:
    """Returns whether the shards must be zero at first: bfloat16 is read into float32's high half."""
    return dtype == np.float32 and any(s.tensor.numpy_dtype == _BF16 for s in sources)


def block_elements(piece: Piece, parts: Sequence[Box], size: int, is_cast: bool) -> int:
    """Returns the most elements of a block.

    A block that is scattered is small, but if it is transposed it has enough rows for the
    runs that it becomes; one that is read straight into shards is large.

    Args:
        piece: the piece.
        parts: the parts of it that are read.
        size: the bytes of an element.
        is_cast: whether it is cast.
    """
    row = next((f[-1][1] for f in reversed(piece.view.dims) if f[-1][0] > 1), 1)
    if row > 1:
        return max(BLOCK_BYTES, min(_ROWS * row * size, MOST_BLOCK_BYTES)) // size
    run = 1
    for factors, (start, stop) in zip(reversed(piece.view.dims), reversed(parts[0]), strict=True):
        if factors[-1] != (1, 0):
            run *= stop - start
            if factors[-1][0] != stop - start:
                break
    straight = not is_cast and run * size >= _DIRECT_BYTES
    return (MOST_BLOCK_BYTES if straight else BLOCK_BYTES) // size


def wanted_bytes(sources: Iterable[Source], boxes: Sequence[Box], dtype: Any) -> int:
    """Returns the bytes that are read for these parts of a leaf (exact)."""
    total = 0
    for source in sources:
        item = item_of(source.tensor)
        size = item.itemsize
        strides = strides_of(source.piece)
        parts = [part for box in boxes if (part := meet(source.piece.box, box)) is not None]
        if not parts:
            continue
        limit = block_elements(source.piece, parts, size, item != dtype)
        for box in join_boxes(parts):
            for loop in loops_of(source.piece, box):
                total += size * read_elements(loop, strides, GAP_BYTES // size, limit)
    return total


class Reader:
    """Threads that read blocks of open files.

    Attributes:
        in_flight_bytes: the most bytes that are in memory besides the shards.
    """

    workers = max(2, min(8, os.cpu_count() or 2))
    # A block as it was read, transposed and, if it is cast, up to twice as large.
    in_flight_bytes = 4 * workers * MOST_BLOCK_BYTES

    def __init__(self, workers: int | None = None) -> None:
        """Starts no thread yet."""
        self._pool = ThreadPoolExecutor(workers or self.workers, "shardwise-weights")
        self._local = threading.local()
        self._open: dict[File, int] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def require_unchanged(self) -> None:
        """Raises if a file is not what it was when its header was read.

        Raises:
            FileFault: a file has changed.
        """
        for file, fd in self._open.items():
            file.require_unchanged(fd)

    def fill(self, sources: Iterable[Source], shards: Sequence[Shard]) -> Iterator[Future[int]]:
        """Yields the reads that fill some shards of one leaf; each returns its bytes.

        Raises:
            FileFault: a file cannot be opened, or has changed.
        """
        for source in sources:
            tensor, piece = source.tensor, source.piece
            item = item_of(tensor)
            scatters = scatters_of(piece, shards)
            if not scatters:
                continue
            fd = self._file(tensor.file)
            strides = strides_of(piece)
            parts = [scatter.box for scatter in scatters]
            size = item.itemsize
            limit = block_elements(piece, parts, size, item != scatters[0].shard.dtype)
            for box in join_boxes(parts):
                for loop in loops_of(piece, box):
                    gap = GAP_BYTES // size
                    blocks = blocks_of(loop, strides, piece.view.offset, gap, limit)
                    for block in blocks:
                        yield self._pool.submit(
                            self._read, fd, tensor, item, block, strides, scatters
                        )

    def _file(self, file: File) -> int:
        if file not in self._open:
            try:
                fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise damaged(
                    file.path, f"the file cannot be opened any more: {error.strerror}"
                ) from error
            self._open[file] = fd
            file.require_unchanged(fd)
        return self._open[file]

    def _read(
        self,
        fd: int,
        tensor: Tensor,
        item: np.dtype,
        block: Block,
        strides: Sequence[int],
        scatters: Sequence[Scatter],
    ) -> int:
        size = item.itemsize
        copies = [copy for scatter in scatters for copy in scatter.within(block)]
        segments: list[tuple[int, memoryview]] | None = []
        for copy in copies:
            found = copy.segments(strides, block, item)
            if found is None:
                segments = None
                break
            segments += found
        total = sum(count for _, count in block.extents) * size
        if segments is not None:
            self._read_straight(fd, tensor, block, segments, size)
            return total
        runs = block.extents
        if len(runs) == 1:
            block = _spread(block, copies, strides, size)
        staged = self._staging(block.elements * size)
        memory = staged.data
        parts = [
            memory[n * block.pitch * size :][: count * size]
            for n, (_, count) in enumerate(block.extents)
        ]
        if len(runs) == 1:
            _fill(fd, parts, tensor.start + runs[0][0] * size, tensor)
        else:
            for (first, _), part in zip(runs, parts, strict=True):
                _fill(fd, [part], tensor.start + first * size, tensor)
        if len(copies) > 1:
            staged, block = _turned_block(staged, block, copies[0], item)
        for copy in copies:
            copy.read(staged, block, item)
        return total

    def _read_straight(
        self,
        fd: int,
        tensor: Tensor,
        block: Block,
        segments: list[tuple[int, memoryview]],
        size: int,
    ) -> None:
        segments.sort(key=lambda pair: pair[0])
        number = 0
        for first, count in block.extents:
            buffers: list[memoryview] = []
            place = first
            while number < len(segments) and segments[number][0] < first + count:
                start, view = segments[number]
                if start > place:
                    buffers.append(memoryview(bytearray((start - place) * size)))
                buffers.append(view)
                place = start + len(view) // size
                number += 1
            if place < first + count:
                buffers.append(memoryview(bytearray((first + count - place) * size)))
            _fill(fd, buffers, tensor.start + first * size, tensor)

    def _staging(self, size: int) -> np.ndarray:
        held = getattr(self._local, "staging", None)
        if held is None or held.nbytes < size:
            held = self._local.staging = np.empty(max(size, BLOCK_BYTES), np.uint8)
        return held[:size]


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

    def within(self, block: Block) -> Iterator[_Copy]:
        """Yields what this shard gets of a block."""
        for loop in self.loops:
            box = meet(loop, block.box)
            if box is not None:
                yield _Copy(self, box)

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


def _spread(block: Block, copies: Sequence[_Copy], strides: Sequence[int], size: int) -> Block:
    """Returns a block with its rows spread, if it is transposed and they are far apart."""
    here = copies[0].scatter.strides
    for dim, (start, stop) in enumerate(copies[0].box):
        if here[dim] == 1 and stop - start > 1 and strides[dim] * size >= _FAR_BYTES:
            return block.spread(dim, strides, _PAD_BYTES // size) or block
    return block


def _turned_block(
    staged: np.ndarray, block: Block, copy: _Copy, item: np.dtype
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
class _Copy:
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
        if outer and run * item.itemsize < _DIRECT_BYTES:
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
        if item == _BF16 and dtype == np.float32:
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


_BF16 = np.dtype(ml_dtypes.bfloat16)
# Copied as unsigned integers: NumPy's own loops are faster than those of added dtypes.
_PLAIN = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}


def _strided(
    data: np.ndarray, dtype: np.dtype, shape: tuple[int, ...], first: int, strides: Sequence[int]
) -> np.ndarray:
    """Returns elements of a buffer; `first` and the strides count elements."""
    size = dtype.itemsize
    return np.ndarray(shape, dtype, data.data, first * size, tuple(s * size for s in strides))


def item_of(tensor: Tensor) -> np.dtype:
    dtype = tensor.numpy_dtype
    assert dtype is not None, "a preflight refuses dtypes that do not fill bytes"
    return dtype


def _fill(fd: int, buffers: list[memoryview], offset: int, tensor: Tensor) -> None:
    """Reads a run of the file into buffers, one after the other.

    Raises:
        FileFault: the file cannot be read, or ends before.
    """
    first = 0
    while first < len(buffers):
        try:
            count = os.preadv(fd, buffers[first : first + MOST_BUFFERS], offset)
        except OSError as error:
            raise damaged(
                tensor.file.path, f"{tensor.key} cannot be read: {error.strerror}"
            ) from error
        if count == 0:
            raise damaged(
                tensor.file.path,
                f"the file ends at byte {offset}, within {tensor.key}",
                "it was cut off after its header was read: copy it again",
            )
        offset += count
        while first < len(buffers) and count >= len(buffers[first]):
            count -= len(buffers[first])
            first += 1
        if count:
            buffers[first] = buffers[first][count:]
