"""What one leaf's move consists of: pieces of shards, from which device to which, and when."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from .._mesh import AnyMesh, padded
from .._nnx import array_bytes

# For each dim, where it starts and where it ends.
Box = tuple[tuple[int, int], ...]
Boxes = Mapping[int, Box]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the devices of a mesh are.

    Attributes:
        axes: the names of the mesh's axes.
        ids: the devices, in the order of the mesh.
        coordinates: for each of them, its place along each axis.
    """

    axes: tuple[str, ...]
    ids: tuple[int, ...]
    coordinates: Any

    def boxes(self, shape: Sequence[int], spec: P, sizes: Mapping[str, int]) -> Boxes:
        """Returns the part of an array that each device holds."""
        columns = []
        for size, names in zip(shape, padded(spec, len(shape)), strict=True):
            part = np.zeros(len(self.ids), int)
            parts = 1
            for name in names:
                part = part * sizes[name] + self.coordinates[:, self.axes.index(name)]
                parts *= sizes[name]
            each = size // parts
            columns.append([(int(p) * each, (int(p) + 1) * each) for p in part])
        if not columns:
            return {device: () for device in self.ids}
        return dict(zip(self.ids, zip(*columns, strict=True), strict=True))

    def between(self, one: int, other: int) -> tuple[str, ...] | None:
        """Returns the axes along which two devices differ; None if one is not on the mesh."""
        rows = self._rows
        if one not in rows or other not in rows:
            return None
        differ = self.coordinates[rows[one]] != self.coordinates[rows[other]]
        return tuple(name for name, is_other in zip(self.axes, differ, strict=True) if is_other)

    @functools.cached_property
    def _rows(self) -> dict[int, int]:
        return {device: row for row, device in enumerate(self.ids)}


def place_of(mesh: AnyMesh, ids: Sequence[int]) -> Place:
    """Returns where these devices are on a mesh."""
    shape = tuple(mesh.shape.values())
    coordinates = np.stack(np.unravel_index(np.arange(mesh.size), shape), axis=-1)
    return Place(tuple(mesh.axis_names), tuple(ids), coordinates)


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of an array that one device gets from another one, or from its own old shard.

    Attributes:
        source: the device that holds it.
        target: the device that gets it.
        box: the part of the array.
    """

    source: int
    target: int
    box: Box


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """How one array gets from the shards that devices hold to those that they are to hold.

    Attributes:
        dtype: the array's dtype.
        old: the part of the array that each device holds.
        new: the part that each device is to hold.
        aliased: devices whose shard is already the new one.
        waves: the pieces, in the order in which they are copied; those of a wave at the same time.
        by_pair: bytes from one device to another.
        by_axis: bytes between devices that differ along these axes.
        taken: bytes of new shards, by device.
        freed: bytes of old shards that are not needed any more, by device.
        reused: bytes of old shards that are new ones too, by device.
    """

    dtype: Any
    old: Boxes
    new: Boxes
    aliased: frozenset[int]
    waves: tuple[tuple[Piece, ...], ...]
    by_pair: Mapping[tuple[int, int], int]
    by_axis: Mapping[str, int]
    taken: Mapping[int, int]
    freed: Mapping[int, int]
    reused: Mapping[int, int]

    @functools.cached_property
    def devices(self) -> list[int]:
        """The devices of both sides."""
        return list(dict.fromkeys([*self.old, *self.new]))

    def held(self, device: int) -> int:
        """Returns the bytes that a device holds before."""
        return self.freed.get(device, 0) + self.reused.get(device, 0)

    def is_alone(self, piece: Piece, chunk: int) -> bool:
        """Returns whether a piece becomes a new shard as it is, without a buffer to write it to."""
        if piece.box != self.new[piece.target]:
            return False
        light = piece.source == piece.target or piece.box == self.old[piece.source]
        return light or _box_bytes(piece.box, self.dtype) <= chunk

    def steps(self, chunk: int) -> Iterator[tuple[Piece, ...]]:
        """Yields the waves, with pieces that are larger than `chunk` cut up."""
        for wave in self.waves:
            parts = [
                iter((piece,)) if self.is_alone(piece, chunk) else _cut(piece, self.dtype, chunk)
                for piece in wave
            ]
            for step in itertools.zip_longest(*parts):
                yield tuple(piece for piece in step if piece is not None)

    def count_steps(self, chunk: int) -> int:
        """Returns how many steps there are."""
        found = 0
        for wave in self.waves:
            cut = [p.box for p in wave if not self.is_alone(p, chunk)]
            found += max((_count_cuts(box, self.dtype, chunk) for box in set(cut)), default=1)
        return found

    def temporary(self, chunk: int) -> dict[int, int]:
        """Returns the most bytes of pieces that are under way on each device."""
        most: Counter[int] = Counter()
        for wave in self.waves:
            now: Counter[int] = Counter()
            for piece in wave:
                single = self.is_alone(piece, chunk)
                first = piece if single else next(_cut(piece, self.dtype, chunk))
                size = _box_bytes(first.box, self.dtype)
                local = piece.source == piece.target
                if first.box != self.old[piece.source] and not (single and local):
                    now[piece.source] += size  # a copy of a part of the shard
                if not local and not single:
                    now[piece.target] += size  # received, and then written to the new shard
            for device, size in now.items():
                most[device] = max(most[device], size)
        return dict(most)


def exchange_of(dtype: Any, old: Boxes, new: Boxes, place: Place, elsewhere: str) -> Exchange:
    """Returns how an array moves.

    Args:
        dtype: the array's dtype.
        old: the part that each device holds.
        new: the part that each device is to hold.
        place: where the new devices are.
        elsewhere: what bytes from devices that are not on the new mesh are listed under.
    """
    holders: dict[Box, list[int]] = {}
    for device, box in old.items():
        holders.setdefault(box, []).append(device)
    sides = [_Side({box[dim] for box in holders}) for dim in range(len(next(iter(old.values()))))]
    aliased = frozenset(device for device, box in new.items() if old.get(device) == box)
    load: Counter[int] = Counter()
    by_pair: Counter[tuple[int, int]] = Counter()
    by_axis: Counter[str] = Counter()
    queues: list[list[Piece]] = []
    nearest: dict[tuple[int, int], tuple[str, ...] | None] = {}

    def between(one: int, other: int) -> tuple[str, ...] | None:
        if (one, other) not in nearest:
            nearest[one, other] = place.between(one, other)
        return nearest[one, other]

    for number, (target, box) in enumerate(new.items()):
        if target in aliased:
            continue
        pieces = []
        for held in itertools.product(
            *(side.overlapping(x) for side, x in zip(sides, box, strict=True))
        ):
            shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, box, strict=True))
            source = _source(holders[held], target, load, between)
            size = array_bytes([b - a for a, b in shared], dtype)
            if source != target:
                load[source] += size
                by_pair[source, target] += size
                axes = between(source, target)
                by_axis[elsewhere if axes is None else ",".join(axes)] += size
            pieces.append(Piece(source, target, shared))
        start = number % len(pieces) if pieces else 0  # so that not all read from the same one
        queues.append(pieces[start:] + pieces[:start])
    waves = tuple(
        tuple(piece for piece in wave if piece is not None)
        for wave in itertools.zip_longest(*queues)
    )
    return Exchange(
        dtype=dtype,
        old=old,
        new=new,
        aliased=aliased,
        waves=waves,
        by_pair=by_pair,
        by_axis=by_axis,
        taken={d: _box_bytes(box, dtype) for d, box in new.items() if d not in aliased},
        freed={d: _box_bytes(box, dtype) for d, box in old.items() if d not in aliased},
        reused={d: _box_bytes(box, dtype) for d, box in old.items() if d in aliased},
    )


class _Side:
    """The parts that one dim is split into."""

    def __init__(self, parts: set[tuple[int, int]]):
        self.parts = sorted(parts)

    def overlapping(self, wanted: tuple[int, int]) -> list[tuple[int, int]]:
        start, stop = wanted
        return [part for part in self.parts if part[0] < stop and start < part[1]]


def _source(holders: Sequence[int], target: int, load: Counter[int], between: Any) -> int:
    """Returns the holder that a device takes a piece from: itself, or one that is near and idle."""
    if target in holders:
        return target

    def cost(holder: int) -> tuple[int, int, int]:
        axes = between(holder, target)
        return (99 if axes is None else len(axes), load[holder], holder)

    return min(holders, key=cost)


def _cut(piece: Piece, dtype: Any, chunk: int) -> Iterator[Piece]:
    """Yields parts of a piece of at most `chunk` bytes, or of one element."""
    sizes = [b - a for a, b in piece.box]
    if array_bytes(sizes, dtype) <= chunk or math.prod(sizes) <= 1:
        yield piece
        return
    dim = next(i for i, size in enumerate(sizes) if size > 1)
    row = max(1, array_bytes([1 if i == dim else size for i, size in enumerate(sizes)], dtype))
    rows = max(1, chunk // row)
    first, last = piece.box[dim]
    for start in range(first, last, rows):
        box = list(piece.box)
        box[dim] = (start, min(last, start + rows))
        yield from _cut(Piece(piece.source, piece.target, tuple(box)), dtype, chunk)


def _count_cuts(box: Box, dtype: Any, chunk: int) -> int:
    return sum(1 for _ in _cut(Piece(0, 0, box), dtype, chunk))


def _box_bytes(box: Box, dtype: Any) -> int:
    return array_bytes([stop - start for start, stop in box], dtype)
