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
    if instruction.opcode == "parameter":
        caller = module.callers.get(computation)
        loop = caller[1] if caller is not None else instruction
        return _left(module, loop, value.index or 0) or (computation, instruction)
    if instruction.opcode == "while":
        return _left(module, instruction, value.index or 0) or (computation, instruction)
    if not source_of(module, instruction, ()).place:
        for reader in module.readers[computation].get(instruction.name, ()):
            if reader.opcode == "tuple":
                index = reader.operands.index(instruction.name)
                for loop in module.readers[computation].get(reader.name, ()):
                    found = _left(module, loop, index)
                    if found is not None:
                        return found
    return computation, instruction


def _left(module: Module, loop: Instruction, index: int) -> tuple[str, Instruction] | None:
    """Returns what a loop's body leaves as one of its results, if it does not just pass it on."""
    for body in loop.called if loop.opcode == "while" else ():
        inside = module.computations.get(body, [])
        if inside and inside[-1].opcode == "tuple" and index < len(inside[-1].operands):
            found = module.by_name[body].get(inside[-1].operands[index])
            if found is not None and found.opcode != "get-tuple-element":
                return body, found
    return None
