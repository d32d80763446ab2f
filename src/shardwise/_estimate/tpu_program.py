"""What a TPU's compiler makes of a program before anything is fused.

A TPU's products read bfloat16 unless they ask for more precision. So its compiler stores in bfloat16
what nothing but such products read, also where it is only moved in between: gathered, sent around a
ring, sliced, carried by a loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from .._hlo import Shape
from .partition import Op, Program

# A result of these is as precise as the operands that are given here; None for all of them.
_MOVES: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("all-gather", "all-to-all", "collective-permute", "all_slice")),
    **dict.fromkeys(("broadcast_in_dim", "concatenate", "convert", "copy", "maximum", "minimum")),
    **dict.fromkeys(("optimization_barrier", "pad", "reshape", "reverse", "slice", "transpose")),
    **dict.fromkeys(("abs", "clamp", "negate", "select", "sharding_constraint")),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
}


def selected(ops: Sequence[Op], shapes: Mapping[int, Shape]) -> list[Op]:
    """Returns the operations with comparisons in place of scatters of one element into each row.

    Such as the gradient of the chosen logits.
    """
    found = []
    for op in ops:
        if op.kind == "while":
            op = dataclasses.replace(op, body=selected(op.body, shapes))
        elif op.kind == "scatter" and len(op.operands) == 3:
            whole, added = shapes[op.results[0]], shapes[op.operands[2]]
            if any(n > 1 and whole.size == n * added.size for n in whole.dims):
                op = dataclasses.replace(op, kind="select", axes=())
        found.append(op)
    return found


def in_bfloat16(program: Program) -> Program:
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
    return dataclasses.replace(program, shapes=shapes)


def _widen(ops: Sequence[Op], wide: set[int]) -> None:
    """Adds the values that something reads in full precision, from the last operation on."""
    for op in reversed(ops):
        if op.kind == "while":
            for values in zip(op.operands, op.inside, op.after, op.results, strict=True):
                if any(value in wide for value in values[1:]):
                    wide.update(values)
            _widen(op.body, wide)
        elif op.kind == "dot_general" and not _is_precise(op):
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
