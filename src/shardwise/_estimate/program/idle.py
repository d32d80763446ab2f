"""Products of which some mesh axes split nothing, as XLA's partitioner computes them.

Shardy gathers a weight over the axis that splits it, and scatters its gradient over it. XLA's
partitioner looks at groups of devices in place of axes: where a product leaves other axes idle, and
these have a multiple of as many devices, it takes them for the work of that axis. The weight moves
to the idle axes by a permute and is gathered over them; its gradient is computed in parts by the
idle devices, summed in parts, and moves to where it belongs then.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from .partitioning import Op, Program

_PRODUCTS = ("dot_general", "convolution")
_Axes = tuple[tuple[str, int], ...]


def idle_used(program: Program, ops: Sequence[Op]) -> list[Op]:
    """Returns the operations with collectives of weights over axes that products leave idle."""
    readers: dict[int, list[Op]] = {}
    _add_readers(ops, readers)
    return _rewritten(program, ops, readers)


def _add_readers(ops: Sequence[Op], readers: dict[int, list[Op]]) -> None:
    for op in ops:
        for value in {*op.operands, *op.after}:
            readers.setdefault(value, []).append(op)
        _add_readers(op.body, readers)


def _rewritten(
    program: Program, ops: Sequence[Op], readers: Mapping[int, Sequence[Op]]
) -> list[Op]:
    shapes = program.shapes
    found: list[Op] = []
    places: dict[tuple[int, ...], int] = {}  # of products, by what they make
    gone: set[int] = set()
    for op in ops:
        if op.kind == "while":
            op = dataclasses.replace(op, body=_rewritten(program, op.body, readers))
        elif op.kind in _PRODUCTS:
            places[op.results] = len(found)
        elif op.kind == "all-gather" and len(op.results) == len(op.dims) == 1:
            others = _for_weight(op, readers.get(op.results[0], ()))
            if others:
                (result,), (dim,) = op.results, op.dims
                part, moved = len(shapes), len(shapes) + 1
                dims = list(shapes[result].dims)
                dims[dim] = -(-dims[dim] // _size(others))
                shapes[part] = shapes[moved] = dataclasses.replace(shapes[result], dims=tuple(dims))
                found.append(
                    dataclasses.replace(op, kind="all_slice", results=(part,), axes=others)
                )
                found.append(_permute(op, part, moved, (*op.axes, *others)))
                op = dataclasses.replace(op, operands=(moved,), axes=others)
        elif op.kind == "all-reduce" and op.operands in places:
            place = places[op.operands]
            others, kept = _for_gradient(op, found[place], readers)
            if kept is not None:
                mine, total = len(shapes), len(shapes) + 1
                shapes[mine] = shapes[total] = shapes[kept.results[0]]
                found[place] = dataclasses.replace(found[place], results=(mine,))
                found.append(dataclasses.replace(op, operands=(mine,), results=(total,)))
                op = _permute(op, total, kept.results[0], (*op.axes, *others))
                gone.add(id(kept))
        elif id(op) in gone:
            continue
        found.append(op)
    return found


def _for_weight(gather: Op, products: Sequence[Op]) -> _Axes:
    """Returns the axes that all products of a gathered weight leave idle, to be used for it."""
    idle: set[_Axes] = set()
    for product in products:
        if "split" not in product.attributes:
            return ()
        place = product.operands.index(gather.results[0])
        weight, beside = (product.attributes["split"][p] for p in (place, 1 - place))
        if beside - weight != set(gather.axes):
            return ()
        idle.add(product.axes)
    return _multiple(idle, gather.axes)


def _for_gradient(
    total: Op, product: Op, readers: Mapping[int, Sequence[Op]]
) -> tuple[_Axes, Op | None]:
    """Returns the axes that a product leaves idle, to be used for its sum, and what keeps a part of it."""
    kept = readers.get(total.results[0], ())
    if len(readers[total.operands[0]]) > 1 or len(kept) != 1 or "split" not in product.attributes:
        return (), None
    left, right, made = product.attributes["split"]
    if kept[0].kind != "all_slice" or kept[0].axes != total.axes:
        return (), None
    if (left & right) - made != set(total.axes):
        return (), None
    others = _multiple({product.axes}, total.axes)
    return others, kept[0] if others else None


def _multiple(idle: set[_Axes], axes: _Axes) -> _Axes:
    if len(idle) != 1:
        return ()
    (others,) = idle
    return others if _size(others) % _size(axes) == 0 else ()


def _permute(op: Op, value: int, result: int, axes: _Axes) -> Op:
    return Op("collective-permute", (value,), (result,), axes=axes, location=op.location)


def _size(axes: _Axes) -> int:
    return math.prod(size for _, size in axes)
