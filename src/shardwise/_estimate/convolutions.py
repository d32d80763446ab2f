"""How long a TPU takes for convolutions: whole ones, and those that it computes in parts.

Read from the compiler's own cycles for some 150 convolutions of v5p, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .._hlo import Access, Shape
from .._time import Price
from .kernels import LANES, Kernel, groups_of, is_filter_gradient, labels_of, taps_of
from .program import Op, dims_of

# Pieces of fewer features take less than a whole tile.
_NARROW = 16
# How much slower than a fusion pieces are read, and how much faster they are put together.
_CUT, _JOINED, _READ = 1.3, 0.65, 0.55
# What pieces take of that where they are beside the cores.
_NEAR = 0.4
# Of a convolution whose groups have one feature each, what the gradient of its filter takes.
_GROUPED_GRADIENT = 0.27


def convolution_in_parts(
    kernel: Kernel, shapes: Mapping[int, Shape], pricer: Any, flops: int, *, near: bool
) -> Price:
    """Returns what a convolution takes that is computed while shards of its filter travel.

    Each part has two pieces of the activations, one for each direction of the ring. On chips that
    keep arrays beside their cores (`near`), these are there.
    """
    op, cut = kernel.op, kernel.cut
    assert cut is not None
    rows, other, rest = _sizes(kernel, shapes)
    taps = taps_of(op, shapes) * _tiles(2 * cut.piece, whole=True)
    products = _products(op, shapes, pricer, rows, taps, other) * _narrow(cut.piece)
    pieces = 2 * cut.piece_bytes * (_NEAR if near else 1.0)
    rest *= _NEAR if near else 1.0

    def streamed(moved: float, penalty: float = 1.0) -> float:
        return pricer.streamed(Access(int(moved), 0, 0), penalty).seconds

    if cut.made:
        # The dim of pieces is padded, so that half of the products are of nothing.
        products *= 1 if _is_dilated(op) else 2
        each = max(products, streamed(rest + pieces, _READ))
        each += streamed(4 * pieces / cut.itemsize, _JOINED)
    elif cut.gradient:
        products *= 2 if cut.value == op.operands[1] else 1
        each = max(products, streamed(rest + pieces, _READ))
        each += 2 * streamed(2 * _padded(shapes[op.results[0]]) / kernel.windowed)
    else:
        # Every second part adds its sum to the one before.
        products *= math.ceil(other) / other
        each = max(products, streamed(pieces + rest)) + streamed(rest) / 2
    if taps_of(op, shapes) > 1 and not cut.made:
        each += streamed(2 * pieces, _CUT) / 2
    moved = kernel.access.total
    return Price(kernel.windowed / 2 * each, "convolution", moved, flops)


def convolution_of_groups(
    kernel: Kernel, shapes: Mapping[int, Shape], pricer: Any, flops: int, moved: int
) -> Price | None:
    """Returns what a convolution takes whose groups are small: a tile has many, mostly zeros."""
    op = kernel.op
    if groups_of(op) == 1:
        return None
    _, rhs, out = labels_of(op, shapes)
    gradient = is_filter_gradient(op, shapes)
    # The activations that the forward pass makes, or their gradient.
    value, dim = (op.operands[1], rhs.index("o")) if gradient else (op.results[0], out.index("f"))
    features = shapes[value].dims[dim]
    filters = shapes[op.results[0] if gradient else op.operands[1]]
    if filters.size // max(1, features * taps_of(op, shapes)) >= LANES:
        return None
    rows = shapes[value].size // max(1, features)
    seconds = _products(op, shapes, pricer, rows, taps_of(op, shapes), math.ceil(features / LANES))
    seconds *= _GROUPED_GRADIENT if gradient else 1.0
    return Price(max(seconds, moved / pricer.bandwidth), "convolution", moved, flops)


def _sizes(kernel: Kernel, shapes: Mapping[int, Shape]) -> tuple[int, float, float]:
    """Returns the pixels that are computed, and the tiles and bytes of the other activations."""
    op, cut = kernel.op, kernel.cut
    assert cut is not None
    lhs, rhs, out = labels_of(op, shapes)
    if cut.gradient:
        places = ((op.operands[0], lhs.index("b")), (op.operands[1], rhs.index("o")))
    else:
        places = ((op.operands[0], lhs.index("f")), (op.results[0], out.index("f")))
    (value, dim) = next(place for place in places if place[0] != cut.value)
    other = shapes[value]
    pixels = [shapes[v].size // max(1, shapes[v].dims[d]) for v, d in places]
    # Where pixels are dilated, products are computed between them too.
    rows = min(pixels) if cut.gradient else pixels[1]
    return rows, _tiles(other.dims[dim]), _padded(other, dim)


def _products(
    op: Op, shapes: Mapping[int, Shape], pricer: Any, rows: int, taps: float, tiles: float
) -> float:
    """Returns the seconds of products of rows with so many tiles for each tap."""
    dtype = shapes[op.operands[0]].dtype
    left = Shape("bf16" if dtype == "f32" else dtype, (rows, int(taps * LANES)))
    right = Shape(left.dtype, (left.dims[1], LANES))
    flops = int(tiles * 2 * rows * left.dims[1] * LANES)
    return pricer.dot([left, right], [[1], [0], []], flops, 0).seconds


def _is_dilated(op: Op) -> bool:
    """Returns whether zeros lie between the pixels that a convolution reads."""
    return any(step > 1 for step in dims_of(op, "lhs_dilation"))


def _narrow(features: int) -> float:
    return min(1.0, max(0.5, features / _NARROW))


def _tiles(features: int, *, whole: bool = False) -> float:
    return math.ceil(features / LANES) if whole else max(1.0, features / LANES)


def _padded(shape: Shape, dim: int | None = None) -> float:
    """Returns the bytes of an array whose features fill the lanes of registers."""
    features = shape.dims[-1 if dim is None else dim]
    return shape.nbytes / max(1, features) * math.ceil(features / LANES) * LANES
