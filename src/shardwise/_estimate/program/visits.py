"""The order in which the compilers propagate shardings: operations where they are needed first.

Both compilers turn a step into HLO, which has no order, and back before they propagate shardings:
operations are in the order then in which one finds them from the results, operands in order. Where
two shardings are equally good, the one that is propagated first stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_PLACE = "shardwise.place"


def in_order_of_need(module: Any, ir: Any) -> None:
    """Puts operations in the order of the compilers; `in_own_order` undoes it.

    Not in a step with a `shard_map`, of which Shardy rejects some in this order.
    """
    if any(op.operation.name == "sdy.manual_computation" for op in _all(module.operation)):
        return
    integer = ir.IntegerType.get_signless(64, module.context)
    for block in _blocks(module.operation):
        ops = [op.operation for op in block.operations]
        if not ops or any(op.name == "func.func" for op in ops):
            continue
        for place, op in enumerate(ops):
            op.attributes[_PLACE] = ir.IntegerAttr.get(integer, place)
        for op in _needed(ops):
            op.move_before(ops[-1])


def in_own_order(module: Any, ir: Any) -> None:
    """Puts operations back where they were; new ones follow their operands."""
    for block in _blocks(module.operation):
        ops = [op.operation for op in block.operations]
        if not any(_PLACE in op.attributes for op in ops):
            continue
        known: dict[Any, int] = {}
        places = []
        for op in ops:
            if _PLACE in op.attributes:
                place = ir.IntegerAttr(op.attributes[_PLACE]).value
                del op.attributes[_PLACE]
            else:
                place = max((known.get(value, -1) for value in op.operands), default=-1)
            known.update((result, place) for result in op.results)
            places.append(place)
        for number in sorted(range(len(ops) - 1), key=places.__getitem__):
            ops[number].move_before(ops[-1])


def _needed(ops: list[Any]) -> Iterator[Any]:
    """Yields all operations of a block but the last, each after what it reads."""
    reads = {op: [value.owner for value in _read(op)] for op in ops}
    seen: set[Any] = set()
    unread = [op for op in ops[:-1] if not any(True for result in op.results for _ in result.uses)]
    for root in (*unread, ops[-1]):
        stack = [] if root in seen else [(root, iter(reads[root]))]
        seen.add(root)
        while stack:
            op, rest = stack[-1]
            following = next(
                (owner for owner in rest if owner in reads and owner not in seen), None
            )
            if following is not None:
                seen.add(following)
                stack.append((following, iter(reads[following])))
                continue
            stack.pop()
            if op != ops[-1]:
                yield op


def _read(op: Any) -> Iterator[Any]:
    yield from op.operands
    for block in _blocks(op):
        for inner in block.operations:
            yield from inner.operation.operands


def _all(operation: Any) -> Iterator[Any]:
    for block in _blocks(operation):
        yield from block.operations


def _blocks(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            yield block
            for op in block.operations:
                yield from _blocks(op.operation)
