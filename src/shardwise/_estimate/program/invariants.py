"""What loops carry and never change, as the compilers propagate shardings of it.

Both compilers remove such values from loops before they propagate shardings: bodies read them from
outside. So how a weight is split is known in a body at once, before how activations are, which
loops carry from one round to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def read_outside(module: Any) -> None:
    """Has the bodies of loops read what they never change from outside; `read_inside` undoes it.

    Not what is computed from constants alone: Shardy makes copies of that for each that reads it.
    """
    fixed: set[Any] = set()
    for op in _all(module.operation):
        if not len(op.regions) and fixed.issuperset(op.operands):
            fixed.update(op.results)
    for _, arguments, last, operands in _loops(module.operation):
        read = set(fixed)
        for number, argument in enumerate(arguments):
            # What is carried twice is read once, so that this can be undone.
            if last.operands[number] == argument and operands[number] not in read:
                read.add(operands[number])
                argument.replace_all_uses_with(operands[number])
                last.operands[number] = argument


def read_inside(module: Any) -> None:
    """Has the bodies of loops read what they never change from what the loops carry."""
    for body, arguments, last, operands in _loops(module.operation):
        carried: dict[Any, Any] = {}
        for number, argument in enumerate(arguments):
            if last.operands[number] == argument:
                carried.setdefault(operands[number], argument)
        for op in _all(body):
            for number, value in enumerate(op.operands):
                if value in carried:
                    op.operands[number] = carried[value]


def _loops(operation: Any) -> Iterator[tuple[Any, list[Any], Any, list[Any]]]:
    """Yields loops, outer ones first: the body, its arguments and its last operation; the operands."""
    for op in _all(operation):
        if op.name == "stablehlo.while":
            body = op.regions[1]
            (block,) = body.blocks
            last = list(block.operations)[-1].operation
            yield body, list(block.arguments), last, list(op.operands)


def _all(owner: Any) -> Iterator[Any]:
    """Yields the operations inside of a region or of another operation."""
    for region in getattr(owner, "regions", [owner]):
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                yield from _all(op.operation)
