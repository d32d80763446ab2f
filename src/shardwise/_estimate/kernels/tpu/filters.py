"""Convolutions of which a TPU's compiler computes parts, while shards of their filters travel.

A part has a few of the filter's features: of those that are summed, or of those that are made. The
activations are cut alike, into pieces in which either the features or the images of the batch fill
registers. Where those are the images, the whole array is copied into that order, and padded.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from ...._hlo import Shape, convolution_flops
from ...program import Op, forward_of, numbers_of, written

# The lanes of a TPU's registers, and their rows.
LANES, ROWS = 128, 8
# The attribute of products that the program computes in float32.
WIDE = "in_float32"
# How often each weight is used on all devices together, at least: seen with 8 and 16 devices, in
# convolutions of 1 x 1 and 3 x 3 (in parts with 4,267, at once with 4,096), and twice as often in
# float32 (9,216 and 8,221).
FEWEST = 4200
# The operation that copies an array into the order in which images fill registers, or back.
RELAYOUT = "relayout"


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """The array of activations that a convolution in parts reads or makes in pieces.

    Attributes:
        value: the array.
        made: whether the convolution makes it.
        gradient: whether the convolution makes the gradient of a filter.
        pixels: its pixels in all images of one place in the batch.
        batch: how many images it has.
        features: how many features.
        piece: how many of them are in one piece.
        itemsize: the bytes of an element: two where it is read, as products read bfloat16.
    """

    value: int
    made: bool
    gradient: bool
    pixels: int
    batch: int
    features: int
    piece: int
    itemsize: int

    @property
    def by_image(self) -> bool:
        """Whether the images fill the lanes of registers, in place of a piece's features."""
        ours, theirs = self._registers(self.piece)
        return ours < theirs or (ours == theirs and not self.made)

    @property
    def piece_bytes(self) -> int:
        """The bytes of a piece, with what pads it."""
        return self.pixels * self.itemsize * min(self._registers(self.piece))

    @property
    def padded(self) -> tuple[int, int, int]:
        """The dims of the whole array where images fill the lanes."""
        return (self.pixels, _up(self.features, ROWS), _up(self.batch, LANES))

    def _registers(self, features: int) -> tuple[int, int]:
        by_image = _up(features, ROWS) * _up(self.batch, LANES)
        return by_image, _up(features, LANES) * _up(self.batch, ROWS)


def cut_of(op: Op, collective: Op, shapes: Mapping[int, Shape]) -> Cut | None:
    """Returns the activations that a convolution has in pieces, by the collective of its filter."""
    if len(collective.dims) != 1:
        return None
    lhs, rhs, out = labels_of(op, shapes)
    dim = collective.dims[0]
    gradient = is_filter_gradient(op, shapes)
    if collective.kind != "all-gather":
        # The gradient of a filter: its dims are the features of both operands.
        if not gradient or dim >= len(out) or out[dim] not in "bf":
            return None
        first = out[dim] == "b"
        value, names = op.operands[0 if first else 1], lhs if first else rhs
        batch, features = ("f", "b") if first else ("i", "o")
    else:
        if gradient or dim >= len(rhs) or rhs[dim] not in "io":
            return None
        first = rhs[dim] == "i"
        value, names = (op.operands[0], lhs) if first else (op.results[0], out)
        batch, features = "b", "f"
    shape = shapes[value]
    images, count = shape.dims[names.index(batch)], shape.dims[names.index(features)]
    parts = math.prod(size for _, size in collective.axes)
    made, itemsize = value == op.results[0], shape.nbytes // max(1, shape.size)
    return Cut(
        value=value,
        made=made,
        gradient=gradient,
        pixels=shape.size // max(1, images * count),
        batch=images,
        features=count,
        piece=-(-count // parts),
        itemsize=itemsize if made else min(2, itemsize),
    )


def is_in_parts(op: Op, parts: int, shapes: Mapping[int, Shape]) -> bool:
    """Returns whether a convolution is computed in so many parts if it waits for shards on a ring."""
    if op.kind != "convolution" or op.manual or groups_of(op) > 1:
        return False
    left, right = (shapes[v] for v in op.operands[:2])
    out = shapes[op.results[0]]
    flops = convolution_flops(written(op, out), left, right, out) or 0
    weights = out if is_filter_gradient(op, shapes) else right
    fewest = 2 * FEWEST if WIDE in op.attributes else FEWEST
    return parts * flops > 2 * fewest * weights.size


def is_rarely_used(product: Op, weights: int, parts: int, shapes: Mapping[int, Shape]) -> bool:
    """Returns whether a product has too few rows to be computed in parts, as a small classifier."""
    out, first = shapes[product.results[0]], shapes[product.operands[0]]
    flops = 2 * out.size * math.prod(first.dims[d] for d in numbers_of(product)[0])
    return parts * flops <= 2 * FEWEST * weights


def splits_features(op: Op, dims: Sequence[int], shapes: Mapping[int, Shape]) -> bool:
    """Returns whether these dims of a filter's gradient are one of its features."""
    out = labels_of(op, shapes)[2]
    return len(dims) == 1 and out[dims[0]] in "bf"


def shares_gather(op: Op, shapes: Mapping[int, Shape]) -> bool:
    """Returns whether the forward and the backward pass use one gather of a filter.

    They do if both are a plain product of it, unless each casts it for itself.
    """
    lhs, _, out = labels_of(op, shapes)
    read, made = (
        [shapes[value].dims[names.index(c)] for c in names if c.isdigit()]
        for value, names in ((op.operands[0], lhs), (op.results[0], out))
    )
    return taps_of(op, shapes) == 1 and read == made and WIDE not in op.attributes


def taps_of(op: Op, shapes: Mapping[int, Shape]) -> int:
    """Returns how many pixels a convolution's filter covers."""
    _, rhs, out = labels_of(op, shapes)
    names, value = (rhs, op.operands[1])
    if is_filter_gradient(op, shapes):
        names, value = out, op.results[0]
    return math.prod(shapes[value].dims[names.index(c)] for c in names if c.isdigit())


def is_filter_gradient(op: Op, shapes: Mapping[int, Shape]) -> bool:
    """Returns whether a convolution makes the gradient of a filter."""
    left, right = (shapes[v] for v in op.operands[:2])
    made = written(op, shapes[op.results[0]])
    return forward_of(made, left, right)[2] == "BackwardFilter"


def labels_of(op: Op, shapes: Mapping[int, Shape]) -> tuple[str, str, str]:
    """Returns what each dim of a convolution's operands and result is, in the letters of HLO."""
    text = written(op, shapes[op.results[0]]).attribute("dim_labels")
    lhs, rhs, out = re.split("_|->", text)
    return lhs, rhs, out


def groups_of(op: Op) -> int:
    """Returns in how many groups of features a convolution is computed."""
    counts = (op.attributes.get(f"{name}_group_count", "1") for name in ("feature", "batch"))
    return max(int((re.findall(r"\d+", text) or ["1"])[0]) for text in counts)


def _up(size: int, tile: int) -> int:
    return -(-size // tile) * tile
