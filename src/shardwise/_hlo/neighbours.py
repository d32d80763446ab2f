"""The values that an instruction reads and those that read it, through loops, tuples and fusions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .program import Instruction, Module

Place = tuple[str, Instruction]
# A computation, an instruction of it, and which element of its tuple is meant.
_Element = tuple[str, Instruction, int | None]
# How many instructions a search looks at: what is further away has little to do with it.
MOST = 48


def nearest(
    module: Module, computation: str, instruction: Instruction, *, up: bool
) -> Iterator[Place]:
    """Yields what leads to a value (`up`) or what becomes of it, nearest first, without itself."""
    step = _sources if up else _readers
    seen: set[tuple[str, str, int | None]] = {(computation, instruction.name, None)}
    todo: list[_Element] = [(computation, instruction, None)]
    for _ in range(MOST):
        if not todo:
            return
        place, at, index = todo.pop(0)
        if at is not instruction:
            yield place, at
        for found in step(module, place, at, index):
            key = (found[0], found[1].name, found[2])
            if key not in seen:
                seen.add(key)
                todo.append(found)


def _sources(
    module: Module, computation: str, at: Instruction, index: int | None
) -> Iterator[_Element]:
    own = module.by_name[computation]
    if index is None and at.opcode in ("tuple", "while"):
        return  # which of its values is meant is not known
    if at.opcode == "parameter":
        yield from _given(module, computation, at, index)
        return
    if at.opcode == "get-tuple-element":
        index = _index(at)
    elif at.opcode == "tuple" and index is not None:
        if index < len(at.operands) and at.operands[index] in own:
            yield computation, own[at.operands[index]], None
        return
    elif at.opcode == "while":
        # What its last iteration left there, then what it began with.
        inside = module.computations.get(_body(at), [])
        if inside:
            yield _body(at), inside[-1], index
    elif not at.opcode.endswith("-done"):
        index = None
    given = [own[name] for name in at.operands if name in own]
    # A scalar, such as where a slice begins, says nothing of what is in it.
    large = [i for i in given if max((s.size for s in i.shapes), default=0) > 1]
    for operand in large or given:
        yield computation, operand, index


def _given(
    module: Module, computation: str, at: Instruction, index: int | None
) -> Iterator[_Element]:
    """Yields what a computation is called with."""
    if computation not in module.callers:
        return
    if index is None and len(at.shapes) > 1:
        return
    outer, caller = module.callers[computation]
    given = module.by_name[outer]
    number = 0 if caller.opcode == "while" else int(at.arguments)
    if number < len(caller.operands) and caller.operands[number] in given:
        yield outer, given[caller.operands[number]], index


def _readers(
    module: Module, computation: str, at: Instruction, index: int | None
) -> Iterator[_Element]:
    if index is None and at.opcode in ("tuple", "while", "parameter") and len(at.shapes) > 1:
        return
    for reader in module.readers[computation].get(at.name, ()):
        if reader.opcode == "tuple":
            yield computation, reader, reader.operands.index(at.name)
        elif reader.opcode == "while" and (body := _body(reader)) in module.computations:
            for inner in module.computations[body]:
                if inner.opcode == "parameter":
                    yield body, inner, index
        elif reader.opcode == "get-tuple-element" and index is not None:
            if _index(reader) == index:
                yield computation, reader, None
        else:
            yield computation, reader, index if reader.opcode.endswith("-done") else None
    found = module.computations[computation]
    if at is found[-1] and computation in module.callers:
        outer, caller = module.callers[computation]
        if caller.opcode == "while":
            yield outer, caller, index


def _index(at: Instruction) -> int | None:
    found = at.attribute("index")
    return int(found) if found.isdecimal() else None


def _body(loop: Instruction) -> str:
    found = re.search(r"body=%?([\w.\-]+)", loop.rest)
    return found[1] if found else ""
