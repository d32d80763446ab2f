"""What a GPU's compiler makes of arrays that are joined along a dim that is split over devices.

Two halves of one array, joined the other way round, are one permute of the whole. But the compiler
simplifies the program before it partitions it, and takes slices of a reshaped array before they are
reshaped: then it does not see the rotation, as in a pipeline's slots of microbatches, which are read
from a stack of slots. It joins such arrays, as any others, where another dim is split: both and
their result change places by all-to-alls.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ..._hlo import Shape
from .orders import dims_of
from .partitioning import Op

_PERMUTE = "collective-permute"


def rotated(
    ops: Sequence[Op], shapes: dict[int, Shape], made: Mapping[int, Op] | None = None
) -> list[Op]:
    """Returns the operations with what a GPU's compiler sends to join arrays along a split dim.

    Args:
        ops: the operations.
        shapes: of all values; those of new ones are added.
        made: what makes the values from outside of a loop.
    """
    made = {**(made or {}), **{value: op for op in ops for value in op.results}}
    found: list[Op] = []
    for op in ops:
        if op.kind == "while":
            op = dataclasses.replace(op, body=rotated(op.body, shapes, made))
        if op.kind != "concatenate" or not op.axes:
            found.append(op)
            continue
        # What a TPU's compiler would send is not sent.
        gone: set[int] = set()
        sources = [_source(value, op, made, gone) for value in op.operands]
        found = [each for each in found if not gone.intersection(each.results)]
        halves = [made.get(value) for value in sources]
        if _is_rotation(halves, made):
            found += _permuted(op, sources, shapes)
        else:
            found += _exchanged(op, sources, halves, shapes)
    return found


def _source(value: int, joined: Op, made: Mapping[int, Op], gone: set[int]) -> int:
    """Returns what is joined before it was permuted for that, and adds the permutes' results."""
    op = made.get(value)
    while op is not None and op.kind == _PERMUTE and op.location == joined.location:
        gone.add(value)
        (value,) = op.operands
        op = made.get(value)
    return value


def _is_rotation(halves: Sequence[Op | None], made: Mapping[int, Op]) -> bool:
    """Returns whether two slices of one array are joined, and the compiler sees that."""
    if len(halves) != 2 or any(half is None or half.kind != "slice" for half in halves):
        return False
    first, second = (half.operands[0] for half in halves if half is not None)
    whole = made.get(first)
    return first == second and (whole is None or whole.kind != "reshape")


def _permuted(op: Op, sources: Sequence[int], shapes: dict[int, Shape]) -> list[Op]:
    (result,), joined = op.results, len(shapes)
    shapes[joined] = shapes[result]
    return [
        dataclasses.replace(op, operands=tuple(sources), results=(joined,), axes=()),
        Op(_PERMUTE, (joined,), (result,), axes=op.axes, location=op.location, manual=op.manual),
    ]


def _exchanged(
    op: Op, sources: Sequence[int], halves: Sequence[Op | None], shapes: dict[int, Shape]
) -> list[Op]:
    """Returns an array that is joined where another dim is split, and split as before then."""
    (result,) = op.results
    ways = math.prod(size for _, size in op.axes)
    (joined_dim,) = op.dims
    whole = shapes[result].dims
    other = next((d for d, n in enumerate(whole) if d != joined_dim and n % ways == 0), None)
    kind = "all-to-all" if other is not None else "all-gather"

    def moved(value: int) -> Shape:
        dims = list(shapes[value].dims)
        dims[joined_dim] *= ways
        if other is not None:
            dims[other] //= ways
        return dataclasses.replace(shapes[value], dims=tuple(dims))

    found, given = [], []
    for value, half in zip(sources, halves, strict=True):
        if half is not None and half.kind == "slice" and any(dims_of(half, "start_indices")):
            shifted = len(shapes)
            shapes[shifted] = shapes[value]
            found.append(Op(_PERMUTE, (value,), (shifted,), axes=op.axes, location=op.location))
            value = shifted
        there = len(shapes)
        shapes[there] = moved(value)
        found.append(
            Op(kind, (value,), (there,), axes=op.axes, dims=(joined_dim,), location=op.location)
        )
        given.append(there)
    joined = len(shapes)
    shapes[joined] = moved(result)
    found.append(dataclasses.replace(op, operands=tuple(given), results=(joined,), axes=()))
    back = Op(
        "all_slice" if other is None else kind,
        (joined,),
        (result,),
        axes=op.axes,
        dims=(joined_dim,),
        location=op.location,
    )
    return [*found, back]
