"""Reading: the bytes that the shards of this process need, from the files into their buffers.

A tensor is read in blocks, by several threads. Where a block's runs are long, `preadv` writes them
straight into the buffers of the shards; where they are short (a split of the last dim, a
transpose) or are cast, a block is read once, and scattered to all shards that need some of it.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from .copies import BF16, Scatter, Shard, is_long, scatters_of, spread, turned_block
from .files import File, Tensor, damaged
from .regions import (
    Block,
    Box,
    Piece,
    blocks_of,
    join_boxes,
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
_ALIGNMENT = 64  # from which XLA uses a buffer of the host as it is
MOST_BUFFERS = 1024  # IOV_MAX


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A tensor of a file, as a piece of a leaf."""

    tensor: Tensor
    piece: Piece


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
    return dtype == np.float32 and any(s.tensor.numpy_dtype == BF16 for s in sources)


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
    straight = not is_cast and is_long(run * size)
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
            block = spread(block, copies, strides, size)
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
            staged, block = turned_block(staged, block, copies[0], item)
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
