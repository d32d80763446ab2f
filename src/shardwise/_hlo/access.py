"""The memory that an instruction really reads and writes: slices of an array are not the array."""

from __future__ import annotations

import dataclasses
import re

from .program import Instruction, Module, Shape

# These move nothing by themselves: names for memory, control flow, and what the compiler knows.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "call-start", "call-update", "after-all", "partition-id", "replica-id", "optimization-barrier", "async-done",
    "async-update", "domain", "add-dependency",
}  # fmt: skip
_SLICES = {"slice", "dynamic-slice", "gather"}
# How many instructions of a GPU one element takes; everything else that computes takes one.
_WEIGHTS = {
    "exponential": 8, "exponential-minus-one": 14, "log": 14, "log-plus-one": 18, "tanh": 14,
    "logistic": 12, "erf": 24, "power": 30, "rsqrt": 6, "sqrt": 8, "cbrt": 20, "divide": 8,
    "sine": 20, "cosine": 20, "tan": 30, "atan2": 30, "remainder": 12, "round-nearest-even": 2,
}  # fmt: skip
_STILL = FREE | {"broadcast", "iota", "reshape", "copy", "slice", "concatenate", "pad", "transpose"}


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """What one run of an instruction moves and computes outside matrix products.

    Attributes:
        read: bytes read from main memory.
        written: bytes written to it.
        operations: scalar operations of its elements.
    """

    read: int
    written: int
    operations: int = 0

    @property
    def total(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


def access_of(module: Module, computation: str, instruction: Instruction) -> Access:
    """Returns what one run of an instruction moves; what its loops or calls run is not included."""
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith("-done"):
        return Access(0, 0)
    own = module.by_name[computation]
    given = [own[name].shapes for name in instruction.operands if name in own]
    written = sum(s.nbytes for s in instruction.shapes if s.in_hbm)
    if opcode in ("fusion", "fusion-start") and instruction.called:
        return _fusion(module, instruction, given)
    if opcode == "async-start" and instruction.called:
        inner = module.computations.get(instruction.called[0], [])
        parts = [access_of(module, instruction.called[0], i) for i in inner]
        return Access(sum(p.read for p in parts), sum(p.written for p in parts))
    if opcode == "custom-call":
        # The last result of a library call is its workspace.
        results = instruction.shapes
        if len(results) > 1 and results[-1].dtype in ("s8", "u8"):
            written = sum(s.nbytes for s in results[:-1])
        return Access(sum(s.nbytes for shapes in given for s in shapes), written)
    if opcode in ("dynamic-slice", "slice", "gather"):
        index = sum(s.nbytes for shapes in given[1:] for s in shapes)
        return Access(written + index, written)
    if opcode == "dynamic-update-slice" and len(given) > 1:
        update = sum(s.nbytes for s in given[1])
        return Access(update, update)
    if opcode == "scatter" and len(given) >= 3:
        arrays = len(instruction.shapes)
        updates = sum(s.nbytes for shapes in given[-arrays:] for s in shapes)
        index = sum(s.nbytes for s in given[arrays])
        return Access(2 * updates + index, updates)
    if opcode in ("iota", "broadcast") and written:
        return Access(sum(s.nbytes for shapes in given for s in shapes), written)
    if opcode in ("copy-start", "send", "recv"):
        read = sum(s.nbytes for shapes in given[:1] for s in shapes)
        return Access(read, read)
    read = sum(s.nbytes for shapes in given for s in shapes if s.in_hbm)
    return Access(read, written, _work(instruction, instruction.shapes[:1]))


def _fusion(module: Module, fusion: Instruction, given: list[tuple[Shape, ...]]) -> Access:
    inside = module.computations.get(fusion.called[0], [])
    if not inside:
        return Access(0, 0)
    own = {i.name: i for i in inside}
    demand: dict[str, float] = dict.fromkeys(own, 0.0)
    sliced: dict[str, float] = dict.fromkeys(own, 0.0)
    root = inside[-1]
    written = 0
    outputs = [own[n] for n in root.operands if n in own] if root.opcode == "tuple" else [root]
    updates = {}
    for output in outputs:
        update = _in_place(own, output)
        if update is not None:
            updates[update.name] = True
            place = 1 if update.opcode == "dynamic-update-slice" else 2
            written += _bytes_of(own, update.operands[place])
        else:
            written += sum(s.nbytes for s in output.shapes if s.in_hbm)
        demand[output.name] = float(_size(output))
    operations = 0.0
    for instruction in reversed(inside):
        wanted = min(demand[instruction.name] + sliced[instruction.name], _size(instruction))
        if not wanted or instruction.opcode in ("parameter", "constant"):
            continue
        share = wanted / max(1, _size(instruction))
        operations += share * _work(instruction, _sizes(instruction, own))
        for place, name in enumerate(instruction.operands):
            if name not in own:
                continue
            whole = _size(own[name])
            if instruction.opcode in _SLICES and place == 0:
                sliced[name] = min(sliced[name] + wanted, whole)
            elif instruction.opcode in ("dynamic-update-slice", "scatter") and place == 0:
                kept = 0.0 if instruction.name in updates else wanted
                demand[name] = max(demand[name], kept)
            elif instruction.opcode in ("dot", "reduce-window"):
                demand[name] = float(whole)
            elif instruction.opcode in ("broadcast", "concatenate", "pad"):
                demand[name] = max(demand[name], min(wanted, whole))
            else:
                demand[name] = max(demand[name], min(share, 1.0) * whole)
    read = 0
    for instruction in inside:
        if instruction.opcode != "parameter":
            continue
        number = int(instruction.arguments)
        shapes = given[number] if number < len(given) else instruction.shapes
        wanted = min(demand[instruction.name] + sliced[instruction.name], _size(instruction))
        full = sum(s.nbytes for s in shapes if s.in_hbm)
        read += int(full * wanted / max(1, _size(instruction)))
    return Access(read, written, int(operations))


def _in_place(own: dict[str, Instruction], output: Instruction) -> Instruction | None:
    """Returns the update that an output writes in place, if it only changes a part of a parameter."""
    found: Instruction | None = output
    while found is not None and found.opcode in ("bitcast", "convert", "copy", "reshape"):
        found = own.get(found.operands[0]) if found.operands else None
    if found is None or found.opcode not in ("dynamic-update-slice", "scatter"):
        return None
    if len(found.shapes) > 1 or len(found.operands) != (
        3 if found.opcode == "scatter" else len(found.operands)
    ):
        return None
    into = own.get(found.operands[0])
    while into is not None and into.opcode in ("bitcast", "convert", "copy", "reshape"):
        into = own.get(into.operands[0]) if into.operands else None
    return found if into is not None and into.opcode == "parameter" else None


def _bytes_of(own: dict[str, Instruction], name: str) -> int:
    return sum(s.nbytes for s in own[name].shapes) if name in own else 0


def _size(instruction: Instruction) -> int:
    return sum(s.size for s in instruction.shapes)


def _sizes(instruction: Instruction, own: dict[str, Instruction]) -> tuple[Shape, ...]:
    if instruction.opcode in ("reduce", "reduce-window") and instruction.operands:
        first = own.get(instruction.operands[0])
        return first.shapes[:1] if first else instruction.shapes[:1]
    return instruction.shapes[:1]


def _work(instruction: Instruction, shapes: tuple[Shape, ...]) -> int:
    if instruction.opcode in _STILL or not shapes:
        return 0
    wide = 2 if shapes[0].dtype in ("s64", "u64", "f64") else 1
    return _WEIGHTS.get(instruction.opcode, 1) * wide * shapes[0].size


def target_of(instruction: Instruction) -> str:
    """Returns the name of the library call of a custom call, or an empty string."""
    found = re.search(r'custom_call_target="((?:[^"\\]|\\.)*)"', instruction.rest)
    return found[1] if found else ""
