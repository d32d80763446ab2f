"""What the compilers make of a program before anything is fused, other than removing what is dead.

A TPU's products read bfloat16 unless they ask for more precision. So its compiler stores in bfloat16
what nothing but such products read, also where it is only moved in between: gathered, sent around a
ring, sliced, carried by a loop. A GPU's gathers what is narrow, and casts it to a wider dtype then.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..._hlo import Shape
from ..program import Op, Program, numbers_of, rotated
from .graph import COLLECTIVES
from .tpu import WIDE

# A result of these is as precise as the operands that are given here; None for all of them.
_MOVES: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("all-gather", "all-to-all", "collective-permute", "all_slice")),
    **dict.fromkeys(("broadcast_in_dim", "concatenate", "convert", "copy", "maximum", "minimum")),
    **dict.fromkeys(("optimization_barrier", "pad", "reshape", "reverse", "slice", "transpose")),
    **dict.fromkeys(("abs", "clamp", "negate", "select", "sharding_constraint")),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
}

_SENDS = ("all-gather", "all-to-all", "collective-permute")


def rewritten(program: Program, *, gpu: bool) -> Program:
    """Returns the program as one of the two compilers computes it."""
    if gpu:
        shapes = dict(program.shapes)
        ops = rotated(_added_up(_scattered_into(program.ops), shapes), shapes)
        ops = _gathered_again(_cast_last(ops, shapes), shapes)
        return dataclasses.replace(program, ops=ops, shapes=shapes)
    ops = _selected(_gathered_once(program.ops), program.shapes)
    return _in_bfloat16(dataclasses.replace(program, ops=ops))


def _scattered_into(ops: Sequence[Op]) -> list[Op]:
    """Returns the operations with scatters into a sum's other term, in place of scatters into zeros.

    As in the gradient of chosen logits, which is added to that of their normalisation.
    """
    made = {value: op for op in ops for value in op.results}
    users = Counter(value for op in ops for value in op.operands)
    found: list[Op] = []
    for op in ops:
        if op.kind == "while":
            op = dataclasses.replace(op, body=_scattered_into(op.body))
        elif op.kind == "add":
            for value, other in (op.operands, op.operands[::-1]):
                scatter = made.get(value)
                if scatter is None or scatter.kind != "scatter" or users[value] != 1:
                    continue
                zeros = made.get(scatter.operands[0])
                if zeros is not None and zeros.kind in ("constant", "broadcast_in_dim"):
                    found = [each for each in found if each is not scatter]
                    operands = (other, *scatter.operands[1:])
                    op = dataclasses.replace(scatter, operands=operands, results=op.results)
                    break
        found.append(op)
    return found


def _added_up(ops: Sequence[Op], shapes: Mapping[int, Shape]) -> list[Op]:
    """Returns the operations with sums of products in place of products of a vector, or of a few terms.

    A GPU's compiler fuses them with what is around them.
    """
    found = []
    for op in ops:
        if op.kind == "while":
            op = dataclasses.replace(op, body=_added_up(op.body, shapes))
        elif op.kind == "dot_general" and is_added_up(op, shapes):
            numbers = numbers_of(op)
            first = max((0, 1), key=lambda side: shapes[op.operands[side]].size)
            operands = (op.operands[first], op.operands[1 - first])
            kind, dims = "reduce", {"dimensions": f"array<i64: {str(numbers[first])[1:-1]}>"}
            if not numbers[0]:
                kind, dims = "multiply", {}
            op = dataclasses.replace(op, kind=kind, operands=operands, attributes=dims, axes=())
        found.append(op)
    return found


def is_added_up(product: Op, shapes: Mapping[int, Shape]) -> bool:
    """Returns whether a product is one of a vector, or sums a few terms."""
    left, right = (shapes[value] for value in product.operands[:2])
    numbers = numbers_of(product)
    summed = math.prod(left.dims[d] for d in numbers[0])
    batch = math.prod(left.dims[d] for d in numbers[2])
    return batch * summed >= min(left.size, right.size) or summed <= 4


def _cast_last(ops: Sequence[Op], shapes: dict[int, Shape]) -> list[Op]:
    """Returns the operations with data sent before casts to a wider dtype, and no data sent twice."""
    sent: dict[tuple[Any, ...], int] = {}
    casts = {op.results[0]: op for op in ops if op.kind == "convert"}
    found = []
    for op in ops:
        moves = op.kind in _SENDS and len(op.results) == 1
        cast = casts.get(op.operands[0]) if moves else None
        if op.kind == "while":
            op = dataclasses.replace(op, body=_cast_last(op.body, shapes))
        elif moves:
            (result,) = op.results
            dims = shapes[result].dims
            key = (op.kind, op.axes, op.dims, dims, op.attributes.get("pairs"))
            if cast is None:
                sent[*op.operands, *key] = result
            elif shapes[cast.operands[0]].nbytes < shapes[op.operands[0]].nbytes:
                (narrow,) = cast.operands
                moved = sent.get((narrow, *key))
                if moved is None:
                    sent[narrow, *key] = moved = len(shapes)
                    shapes[moved] = Shape(shapes[narrow].dtype, dims)
                    found.append(dataclasses.replace(op, operands=(narrow,), results=(moved,)))
                op = Op("convert", (moved,), (result,), location=cast.location)
        found.append(op)
    return found


def _gathered_again(ops: Sequence[Op], shapes: dict[int, Shape]) -> list[Op]:
    """Returns the operations with large weights gathered twice, for their last product too.

    The partitioner gathers a weight that is split over other axes as well in another way if it is
    so much larger than the activations that it is multiplied with, and then does not see that both
    gathers are one. How much larger was seen in small programs on meshes of 8 x 2 and 4 x 4.
    """
    products: dict[int, list[int]] = {}
    for place, op in enumerate(ops):
        if op.kind == "dot_general":
            for value in set(op.operands):
                products.setdefault(value, []).append(place)
    found = list(ops)
    before: dict[int, Op] = {}
    for op in ops:
        if op.kind != "all-gather" or len(op.results) != 1 or len(op.dims) != 1:
            continue
        (value,), near = op.results, products.get(op.results[0], [])
        if len(near) < 2:
            continue
        split = found[near[0]].attributes.get("split")
        if not split:
            continue
        # The partitioner looks at each batch of a product by itself.
        weight = split[found[near[0]].operands.index(value)] - frozenset.intersection(*split)
        others = math.prod(size for _, size in weight)
        if others < 2:
            continue
        if shapes[value].nbytes < others * _beside(found[near[0]], value, op.dims[0], shapes):
            continue
        again, last = len(shapes), found[near[-1]]
        shapes[again] = shapes[value]
        before[near[-1]] = dataclasses.replace(op, results=(again,))
        operands = tuple(again if v == value else v for v in last.operands)
        found[near[-1]] = dataclasses.replace(last, operands=operands)
    made = []
    for place, op in enumerate(found):
        if op.kind == "while":
            op = dataclasses.replace(op, body=_gathered_again(op.body, shapes))
        made += [before[place], op] if place in before else [op]
    return made


def _beside(product: Op, weight: int, dim: int, shapes: Mapping[int, Shape]) -> int:
    """Returns the bytes of what a product reads or makes that has a dim of its weight."""
    side = product.operands.index(weight)
    if dim in numbers_of(product)[side]:
        return shapes[product.operands[1 - side]].nbytes
    return shapes[product.results[0]].nbytes


def _gathered_once(ops: Sequence[Op]) -> list[Op]:
    """Returns the operations with filters gathered as they are, once for both passes.

    A TPU's convolutions turn a filter around as they read it: the gradient towards their input
    needs no other one.
    """
    readers: dict[int, list[Op]] = {}
    for op in ops:
        for value in op.operands:
            readers.setdefault(value, []).append(op)

    def is_filter(value: int) -> bool:
        near = readers.get(value, [])
        return bool(near) and all(
            (op.kind == "convolution" and op.operands[1] == value)
            or (op.kind in ("all-gather", "reverse") and is_filter(op.results[0]))
            for op in near
        )

    same: dict[int, int] = {}
    gathers: dict[tuple[object, ...], int] = {}
    found = []
    for op in ops:
        if op.kind == "while":
            op = dataclasses.replace(op, body=_gathered_once(op.body))
        operands = tuple(same.get(value, value) for value in op.operands)
        if operands != op.operands:
            op = dataclasses.replace(op, operands=operands)
        if (
            op.kind in ("all-gather", "reverse")
            and len(op.results) == 1
            and is_filter(op.results[0])
        ):
            if op.kind == "reverse":
                same[op.results[0]] = operands[0]
                continue
            key = (operands, op.axes, op.dims)
            if key in gathers:
                same[op.results[0]] = gathers[key]
                continue
            gathers[key] = op.results[0]
        found.append(op)
    return found


def _selected(ops: Sequence[Op], shapes: Mapping[int, Shape]) -> list[Op]:
    """Returns the operations with comparisons in place of scatters of one element into each row.

    Such as the gradient of the chosen logits.
    """
    found = []
    for op in ops:
        if op.kind == "while":
            op = dataclasses.replace(op, body=_selected(op.body, shapes))
        elif op.kind == "scatter" and len(op.operands) == 3:
            whole, added = shapes[op.results[0]], shapes[op.operands[2]]
            if any(n > 1 and whole.size == n * added.size for n in whole.dims):
                op = dataclasses.replace(op, kind="select", axes=())
        found.append(op)
    return found


def _in_bfloat16(program: Program) -> Program:
    """Returns the program with the shapes that a TPU's compiler gives its values."""
    wide = set(program.outputs)
    while True:
        before = len(wide)
        _widen(program.ops, wide)
        if len(wide) == before:
            break
    shapes = {
        value: Shape("bf16", shape.dims)
        if shape.dtype == "f32" and shape.dims and value not in wide
        else shape
        for value, shape in program.shapes.items()
    }
    shapes |= {value: program.shapes[value] for value in program.arguments}
    ops = _cast_first(program.ops, program.shapes, shapes)
    return dataclasses.replace(program, ops=ops, shapes=shapes)


def _cast_first(
    ops: Sequence[Op], before: Mapping[int, Shape], shapes: dict[int, Shape]
) -> list[Op]:
    """Returns the operations with what is sent in bfloat16 cast first, and float32 products marked."""
    found = []
    for op in ops:
        if op.kind == "while":
            op = dataclasses.replace(op, body=_cast_first(op.body, before, shapes))
        elif op.kind in COLLECTIVES and len(op.operands) == len(op.results) == 1:
            (sent,), (made,) = op.operands, op.results
            if shapes[sent].dtype == "f32" and shapes[made].dtype == "bf16":
                cast = len(shapes)
                shapes[cast] = Shape("bf16", shapes[sent].dims)
                found.append(Op("convert", (sent,), (cast,), location=op.location))
                op = dataclasses.replace(op, operands=(cast,))
        elif op.kind in ("dot_general", "convolution"):
            if all(before[v].dtype == "f32" for v in (*op.operands[:2], *op.results)):
                op = dataclasses.replace(op, attributes={**op.attributes, WIDE: "true"})
        found.append(op)
    return found


def _widen(ops: Sequence[Op], wide: set[int]) -> None:
    """Adds the values that something reads in full precision, from the last operation on."""
    for op in reversed(ops):
        if op.kind == "while":
            for values in zip(op.operands, op.inside, op.after, op.results, strict=True):
                if any(value in wide for value in values[1:]):
                    wide.update(values)
            _widen(op.body, wide)
        elif op.kind in ("dot_general", "convolution") and not _is_precise(op):
            continue
        elif op.kind in _MOVES:
            read = _MOVES[op.kind]
            moved = op.operands if read is None else tuple(op.operands[place] for place in read)
            wide.update(value for value in op.operands if value not in moved)
            if any(value in wide for value in op.results):
                wide.update(moved)
        else:
            wide.update(op.operands)


def _is_precise(product: Op) -> bool:
    precision = product.attributes.get("precision_config", "")
    return "HIGH" in precision or "algorithm" in product.attributes
