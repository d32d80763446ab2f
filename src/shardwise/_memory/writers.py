"""What writes a value: of what a loop carries, the instruction in its body."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .._hlo import Instruction, Module, Source, cause_of, source_of
from .lifetimes import Value

Homes = Mapping[str, tuple[str, Instruction]]


def source_of_value(module: Module, homes: Homes, value: Value, paths: Collection[str]) -> Source:
    """Returns where a value comes from."""
    if value.name not in homes:
        return Source(value.name, "", "", False)
    return cause_of(module, *writer(module, homes, value), paths)


def writer(module: Module, homes: Homes, value: Value) -> tuple[str, Instruction]:
    """Returns the instruction that fills a value, and its computation.

    What a loop carries is filled in its body, and so is what is allocated before it, or left by it.
    """
    computation, instruction = homes[value.name]
    loop = computation, instruction
    if instruction.opcode == "parameter":
        loop = module.callers.get(computation, loop)
    if loop[1].opcode == "while":
        index = value.index or 0
        return _left(module, loop[1], index) or _begun(module, *loop, index) or loop
    if not source_of(module, instruction, ()).place:
        for reader in module.readers[computation].get(instruction.name, ()):
            if reader.opcode == "tuple":
                index = reader.operands.index(instruction.name)
                for loop in module.readers[computation].get(reader.name, ()):
                    found = _left(module, loop, index)
                    if found is not None:
                        return found
    return computation, instruction


def _begun(
    module: Module, computation: str, loop: Instruction, index: int
) -> tuple[str, Instruction] | None:
    """Returns what makes a value that a loop only reads."""
    own = module.by_name[computation]
    given = own.get(loop.operands[0]) if loop.operands else None
    if given is None or given.opcode != "tuple" or index >= len(given.operands):
        return None
    found = own.get(given.operands[index])
    return None if found is None else (computation, found)


def _left(module: Module, loop: Instruction, index: int) -> tuple[str, Instruction] | None:
    """Returns what a loop's body leaves as one of its results, if it does not just pass it on."""
    for body in loop.called if loop.opcode == "while" else ():
        inside = module.computations.get(body, [])
        if inside and inside[-1].opcode == "tuple" and index < len(inside[-1].operands):
            own = module.by_name[body]
            found = own.get(inside[-1].operands[index])
            if found is not None and found.opcode == "get-tuple-element":
                found = own.get(found.operands[0])  # one of several results
            if found is not None and found.opcode != "parameter":
                return body, found
    return None
