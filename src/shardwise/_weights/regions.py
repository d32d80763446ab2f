"""The algebra of regions: which bytes of a tensor are which part of a leaf.

A tensor in a file is one run of elements. Reshaping, permuting and slicing it only changes how its
indices are computed, so the result is described by *factors*: each dim is a list of (size, stride)
pairs, the outermost first, whose strides count elements of the file. A dim usually has one factor; it
has more when a reshape joins dims that are not adjacent in the file.

A shard's part of that is a box of indices, and a box is a nested loop over factors. Sorted by
stride, the inner loops show what is contiguous in the file.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

Box = tuple[tuple[int, int], ...]
"""A range of indices for each dim."""

Factors = tuple[tuple[int, int], ...]


# Elements between separate runs in memory, see `Block.spread`.
_PAD = 64


class CannotView(ValueError):
    """A transform does not fit the shape, or cannot be expressed by strides."""


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """A tensor of a file, seen through reshapes, permutations and slices.

    Attributes:
        offset: the element of the file's tensor at index zero.
        dims: the factors of each dim.
    """

    offset: int
    dims: tuple[Factors, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is seen."""
        return tuple(math.prod(size for size, _ in factors) for factors in self.dims)

    def permute(self, order: Sequence[int]) -> View:
        """Returns the view with its dims in another order, as `np.transpose` does."""
        if len(order) != len(self.dims):
            raise CannotView(f"permute {tuple(order)} is for {len(order)} dims")
        return View(self.offset, tuple(self.dims[dim] for dim in order))

    def split(self, dim: int, start: int, stop: int) -> View:
        """Returns the part of a dim from `start` to `stop`."""
        shape = self.shape
        if not 0 <= dim < len(shape) or not 0 <= start <= stop <= shape[dim]:
            raise CannotView(f"split ({dim}, {start}, {stop}) is outside of {shape}")
        factors = self.dims[dim]
        if len(factors) != 1:
            raise CannotView(f"split ({dim}, {start}, {stop}) cuts a dim of several parts")
        ((_, stride),) = factors
        cut = ((stop - start, stride),)
        dims = (*self.dims[:dim], cut, *self.dims[dim + 1 :])
        return View(self.offset + start * stride, dims)

    def reshape(self, shape: Sequence[int]) -> View:
        """Returns the view with another shape, as `np.reshape` does, in row-major order."""
        sizes, total = list(shape), math.prod(self.shape)
        if sizes.count(-1) == 1:
            known = math.prod(size for size in sizes if size != -1)
            if known == 0 or total % known:
                raise CannotView(f"reshape {tuple(shape)} does not divide {total} elements")
            sizes[sizes.index(-1)] = total // known
        if any(size < 0 for size in sizes) or math.prod(sizes) != total:
            raise CannotView(f"reshape {tuple(shape)} has not {total} elements")
        if total == 0:
            return View(self.offset, tuple(((size, 0),) for size in sizes))
        left = _joined(factor for factors in self.dims for factor in factors)
        dims: list[Factors] = []
        for size in reversed(sizes):
            taken: list[tuple[int, int]] = []
            need = size
            while need > 1:
                have, stride = left.pop()
                if have <= need:
                    if need % have:
                        raise CannotView(
                            f"reshape {tuple(shape)} after a permutation mixes dims that are not "
                            f"adjacent in the file"
                        )
                    taken.append((have, stride))
                    need //= have
                else:
                    if have % need:
                        raise CannotView(
                            f"reshape {tuple(shape)} after a permutation mixes dims that are not "
                            f"adjacent in the file"
                        )
                    taken.append((need, stride))
                    left.append((have // need, stride * need))
                    need = 1
            dims.append(tuple(reversed(taken)) or ((1, 0),))
        return View(self.offset, tuple(reversed(dims)))


def view_of(shape: Sequence[int]) -> View:
    """Returns the view of a stored tensor as it is."""
    dims, stride = [], 1
    for size in reversed(shape):
        dims.append(((size, stride),))
        stride *= size
    return View(0, tuple(reversed(dims)))


def _joined(factors: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns factors, the outermost first, with those joined that are adjacent in the file."""
    found: list[tuple[int, int]] = []
    for size, stride in factors:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A view of a tensor, placed in a leaf.

    Attributes:
        view: the view, with a dim for each of the leaf's; those of one index have size 1.
        box: where it is in the leaf.
    """

    view: View
    box: Box


def place(view: View, shape: Sequence[int], index: Sequence[int], at: Sequence[object]) -> Piece:
    """Returns a view placed in a leaf.

    Args:
        view: the view.
        shape: the leaf's shape.
        index: indices on its leading dims.
        at: for each following dim None, an index, or (start, stop).

    Raises:
        CannotView: it does not fit.
    """
    entries = [*index, *at]
    if len(entries) > len(shape):
        raise CannotView(f"{len(entries)} indices are given for {len(shape)} dims")
    entries += [None] * (len(shape) - len(entries))
    got, left = view.shape, list(view.dims)
    dims: list[Factors] = []
    box: list[tuple[int, int]] = []
    for size, entry in zip(shape, entries, strict=True):
        if isinstance(entry, int):
            start, stop = entry, entry + 1
            dims.append(((1, 0),))
        else:
            start, stop = entry if isinstance(entry, tuple) else (0, size)
            if not left:
                raise CannotView("it has fewer dims than the leaf")
            dims.append(left.pop(0))
        if not 0 <= start <= stop <= size:
            raise CannotView(f"index {entry} is outside of a dim of {size}")
        box.append((start, stop))
    wanted = tuple(b - a for (a, b), e in zip(box, entries, strict=True) if not isinstance(e, int))
    if left or got != wanted:
        raise CannotView(f"it is {got}, where {wanted} is needed")
    return Piece(View(view.offset, tuple(dims)), tuple(box))


def meet(one: Box, other: Box) -> Box | None:
    """Returns the indices that two boxes share, or None."""
    both = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        low, high = max(a, c), min(b, d)
        if low >= high:
            return None
        both.append((low, high))
    return tuple(both)


def volume(box: Box) -> int:
    """Returns how many indices a box has."""
    return math.prod(stop - start for start, stop in box)


def join_boxes(boxes: Iterable[Box]) -> list[Box]:
    """Returns disjoint boxes, with those joined that make up a larger one."""
    found = sorted(set(boxes))
    rank = len(found[0]) if found else 0
    for dim in reversed(range(rank)):
        if len(found) == 1:
            break
        lines: dict[Box, list[tuple[int, int]]] = {}
        for box in found:
            lines.setdefault(box[:dim] + box[dim + 1 :], []).append(box[dim])
        found = []
        for rest, ranges in lines.items():
            ranges.sort()
            joined = [ranges[0]]
            for start, stop in ranges[1:]:
                if start == joined[-1][1]:
                    joined[-1] = (joined[-1][0], stop)
                else:
                    joined.append((start, stop))
            found += [(*rest[:dim], pair, *rest[dim:]) for pair in joined]
    return sorted(found)


def loops_of(piece: Piece, box: Box) -> Iterator[Box]:
    """Yields a box of the leaf, inside of the piece's, as boxes over the piece's factors."""
    parts = []
    for factors, (start, stop), (first, _) in zip(piece.view.dims, box, piece.box, strict=True):
        parts.append(_ranges([size for size, _ in factors], start - first, stop - first))
    for combined in itertools.product(*parts):
        yield tuple(pair for ranges in combined for pair in ranges)


def strides_of(piece: Piece) -> list[int]:
    """Returns the stride in the file of each factor, in elements, in the order of `loops_of`."""
    return [stride for factors in piece.view.dims for _, stride in factors]


def leaf_strides(piece: Piece, shape: Sequence[int]) -> list[int]:
    """Returns the stride of each factor in an array of the leaf's rank and this shape."""
    found: list[int] = []
    step = 1
    for factors, size in zip(reversed(piece.view.dims), reversed(shape), strict=True):
        inner = step
        for count, _ in reversed(factors):
            found.append(inner)
            inner *= count
        step *= size
    return found[::-1]


def _ranges(sizes: Sequence[int], start: int, stop: int) -> list[Box]:
    """Returns a range of a dim as ranges over its factors."""
    if len(sizes) == 1:
        return [((start, stop),)]
    inner = math.prod(sizes[1:])
    first, last = -(-start // inner), stop // inner
    found: list[Box] = []
    if first > last:  # within one index of the outer factor
        rows = _ranges(sizes[1:], start - last * inner, stop - last * inner)
        return [((last, last + 1), *row) for row in rows]
    if start < first * inner:
        rows = _ranges(sizes[1:], start - (first - 1) * inner, inner)
        found += [((first - 1, first), *row) for row in rows]
    if first < last:
        found.append(((first, last), *((0, size) for size in sizes[1:])))
    if last * inner < stop:
        rows = _ranges(sizes[1:], 0, stop - last * inner)
        found += [((last, last + 1), *row) for row in rows]
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Some of a region: what is read at once, and where each element of it is.

    Attributes:
        box: the indices over the factors.
        extents: the runs of elements that are read, in the file: (first, count).
        pitch: from where one run is in memory to where the next is.
        strides: the stride of each factor there.
    """

    box: Box
    extents: tuple[tuple[int, int], ...]
    pitch: int
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements it has in memory."""
        return len(self.extents) * self.pitch

    def spread(self, dim: int, strides: Sequence[int], pad: int) -> Block | None:
        """Returns the block with each row of a dim a little further apart in memory.

        Rows whose distance is a power of two share a few lines of a cache, which makes a
        transpose several times slower.

        Args:
            dim: the dim.
            strides: the factors' strides in the file.
            pad: how many elements there are between rows.
        """
        row = strides[dim]
        inner = [d for d, stride in enumerate(strides) if stride < row]
        width = 1 + sum((self.box[d][1] - self.box[d][0] - 1) * strides[d] for d in inner)
        ((first, count),) = self.extents
        whole = all(stride % row == 0 for stride in strides if stride >= row)
        if width > row or not whole:
            return None
        starts = range(0, count, row)
        moved = [s if s < row else s // row * (row + pad) for s in self.strides]
        extents = tuple((first + start, min(row, count - start)) for start in starts)
        return Block(self.box, extents, row + pad, tuple(moved))


@dataclasses.dataclass(frozen=True, slots=True)
class _Cut:
    """How a box over factors is cut into blocks.

    Attributes:
        order: the factors, by stride in the file.
        step: how many indices of each a block takes.
        inside: the stride of each within what is read, where that is one run.
        skipped: the factors along which a block has several runs.
        elements: how many elements all blocks read.
    """

    order: list[int]
    step: list[int]
    inside: list[int]
    skipped: list[int]
    elements: int


def _cut(loop: Box, strides: Sequence[int], gap: int, limit: int) -> _Cut:
    order = sorted(range(len(loop)), key=lambda d: strides[d])
    inside, step = [0] * len(loop), [1] * len(loop)
    skipped: list[int] = []
    extent = held = elements = 1
    apart = is_cut = False
    for dim in order:
        count, stride = loop[dim][1] - loop[dim][0], strides[dim]
        if count == 1:
            continue
        if is_cut:
            elements *= count
            continue
        if not apart and stride - extent <= gap:
            take = min(count, max(1, (limit - extent) // stride + 1))
            inside[dim] = stride
            blocks, rest = divmod(count, take)
            elements = blocks * (extent + (take - 1) * stride)
            elements += (extent + (rest - 1) * stride) if rest else 0
            extent += (take - 1) * stride
            held = extent
        else:
            apart = True
            take = min(count, max(1, limit // held))
            elements *= count
            held *= take
            if take > 1:
                skipped.append(dim)
        step[dim] = take
        is_cut = take < count
    return _Cut(order, step, inside, skipped, elements)


def read_elements(loop: Box, strides: Sequence[int], gap: int, limit: int) -> int:
    """Returns how many elements `blocks_of` reads (exact)."""
    return _cut(loop, strides, gap, limit).elements


def blocks_of(
    loop: Box, strides: Sequence[int], offset: int, gap: int, limit: int
) -> Iterator[Block]:
    """Yields a box over factors in blocks of at most `limit` elements, in the order of the file.

    Args:
        loop: the box.
        strides: the factors' strides in the file.
        offset: the element of the file at index zero of all factors.
        gap: how many unwanted elements between two runs are read rather than skipped.
        limit: the most elements of a block.
    """
    cut = _cut(loop, strides, gap, limit)
    outer = [d for d in reversed(cut.order) if cut.step[d] < loop[d][1] - loop[d][0]]
    within = [d for d in cut.order if d not in cut.skipped]
    box = list(loop)
    grids = [range(loop[dim][0], loop[dim][1], cut.step[dim]) for dim in outer]
    for starts in itertools.product(*grids):
        for dim, start in zip(outer, starts, strict=True):
            box[dim] = (start, min(start + cut.step[dim], loop[dim][1]))
        first = offset + sum(pair[0] * s for pair, s in zip(box, strides, strict=True))
        length = 1 + sum((box[d][1] - box[d][0] - 1) * strides[d] for d in within)
        pitch = length + (_PAD if cut.skipped else 0)
        inside, held = list(cut.inside), pitch
        for dim in cut.skipped:
            inside[dim] = held
            held *= box[dim][1] - box[dim][0]
        runs = [range(box[d][1] - box[d][0]) for d in reversed(cut.skipped)]
        steps = [strides[d] for d in reversed(cut.skipped)]
        extents = tuple(
            (first + sum(i * s for i, s in zip(at, steps, strict=True)), length)
            for at in itertools.product(*runs)
        )
        yield Block(tuple(box), extents, pitch, tuple(inside))
