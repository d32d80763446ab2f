"""Which values of a partitioned step are in the memory of the hosts, and not on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from .partition import Op, Program

_MOVES = "annotate_device_placement"
# What they make is where their first operand is.
_STAYS = {"dynamic_update_slice", "dynamic_slice", "slice", "reshape", "transpose", "copy"}
_STAYS |= {"optimization_barrier", "sharding_constraint"}


def placed(program: Program) -> Program:
    """Returns the program with moves between memories as copies, and the values on the host."""
    moves = [
        op for op in _all(program.ops) if op.attributes.get("call_target_name") == f'"{_MOVES}"'
    ]
    if not moves and not program.host:
        return program
    host = set(program.host)
    for op in moves:
        if "pinned_host" in op.attributes.get("mhlo.frontend_attributes", ""):
            host |= set(op.results)
        else:
            host |= set(op.operands)
    gone = {id(op) for op in moves}
    pairs = list(_alike(program.ops, gone))
    before = -1
    while len(host) != before:
        before = len(host)
        for one, other in pairs:
            if one in host or other in host:
                host |= {one, other}
    ops = _copied(program.ops, gone)
    return dataclasses.replace(program, ops=ops, host=frozenset(host))


def _all(ops: Sequence[Op]) -> Iterator[Op]:
    for op in ops:
        yield op
        yield from _all(op.body)


def _alike(ops: Sequence[Op], moves: set[int]) -> Iterator[tuple[int, int]]:
    """Yields pairs of values that are in the same memory."""
    for op in _all(ops):
        if op.kind == "while":
            for four in zip(op.operands, op.inside, op.after, op.results, strict=True):
                yield from zip(four, four[1:], strict=False)
        elif op.kind in _STAYS and id(op) not in moves:
            yield op.operands[0], op.results[0]
            if op.kind == "dynamic_update_slice":
                yield op.operands[0], op.operands[1]


def _copied(ops: Sequence[Op], moves: set[int]) -> list[Op]:
    kept = []
    for op in ops:
        if id(op) in moves:
            # To the host, it is read where it is; to the device, it is written there.
            away = "pinned_host" in op.attributes.get("mhlo.frontend_attributes", "")
            op = dataclasses.replace(op, kind="copy" if away else "convert", attributes={})
        elif op.kind == "while":
            op = dataclasses.replace(op, body=_copied(op.body, moves))
        kept.append(op)
    return kept
