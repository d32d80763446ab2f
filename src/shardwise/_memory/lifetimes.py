"""When each temporary of a program is alive: as the compiler says, or as its order implies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from .._hlo import Instruction, Module, Shape, parse_shapes

# Opcodes that allocate no array of their own.
_VIEWS = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "while", "optimization-barrier",
    "after-all", "partition-id", "replica-id", "copy-done", "call", "conditional",
}  # fmt: skip
# What runs where it is called, before the instruction that calls it ends.
_CALLS = ("while", "call", "conditional", "async-start", "call-start")


# What may write where it reads.
_ELEMENTWISE = ("fusion", "add", "multiply", "subtract", "convert", "copy", "select", "all-reduce")


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """One array in a device's main memory.

    Attributes:
        name: the instruction that it is a result of.
        index: which of its results, or None for its only one.
        shape: its shape on one device, `tuple` for pointers to others.
        bytes: its size.
        start: the first place of the sequence at which it is alive.
        end: the last one.
        allocation: the memory that it is in.
        offset: where it begins there.
    """

    name: str
    index: int | None
    shape: str
    bytes: int
    start: int
    end: int
    allocation: int
    offset: int


@dataclasses.dataclass(frozen=True)
class Lifetimes:
    """All temporaries of a program.

    Attributes:
        sequence: the names of instructions in the order in which they run, with what a loop runs in
            one iteration before the loop itself.
        values: the temporaries.
        label: `compiled` or `modelled`.
    """

    sequence: tuple[str, ...]
    values: tuple[Value, ...]
    label: str

    @functools.cached_property
    def begun(self) -> list[tuple[int, int]]:
        """The bytes at each place where a value begins, largest first, without regard to overlaps."""
        changes: list[tuple[int, int, int]] = []
        for value in self.values:
            changes += [(value.start, 0, value.bytes), (value.end, 1, -value.bytes)]
        now, found = 0, {}
        for place, _, change in sorted(changes):
            now += change
            if change > 0:
                found[place] = now
        return sorted(((now, place) for place, now in found.items()), reverse=True)

    def alive(self, place: int) -> list[Value]:
        """Returns the values alive at a place; of those that share bytes, the largest."""
        first, last = self._spans
        there = [self.values[i] for i in np.flatnonzero((first <= place) & (place <= last))]
        kept: list[Value] = []
        ends: dict[int, int] = {}
        for value in sorted(there, key=lambda v: (v.allocation, v.offset, -v.bytes)):
            if value.offset >= ends.get(value.allocation, 0):
                kept.append(value)
                ends[value.allocation] = value.offset + value.bytes
        return kept

    @functools.cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        return (
            np.array([value.start for value in self.values], int),
            np.array([value.end for value in self.values], int),
        )

    def peak(self) -> tuple[int, int]:
        """Returns the most bytes alive at one place, and the place."""
        best = (0, 0)
        for most, place in self.begun:
            if most <= best[0]:
                break  # leaving out overlaps can only lower it
            total = sum(value.bytes for value in self.alive(place))
            best = max(best, (total, place), key=lambda found: found[0])
        return best

    def homes(self, module: Module) -> dict[str, tuple[str, Instruction]]:
        """Returns where each name of the sequence stands in the text of the program.

        What an asynchronous instruction wraps is not in the text: it stands before it.
        """
        known = {i.name: (c, i) for c, found in module.computations.items() for i in found}
        last: tuple[str, Instruction] | None = None
        for name in reversed(self.sequence):
            last = known.get(name, last)
            if last is not None and name not in known and last[1].opcode.endswith("-start"):
                known[name] = last
        return known


def compiled_lifetimes(found: Mapping[str, Any]) -> Lifetimes:
    """Returns the lifetimes that a compiler dumped."""
    values = []
    for text, kind, size, start, end, allocation, offset in found["values"]:
        name, _, index = text.removesuffix("}").partition("{")
        shapes = parse_shapes(kind)
        # A tuple's own buffer holds pointers to its elements.
        shape = "tuple" if kind.startswith("(") else str(shapes[0]) if shapes else kind
        number = int(index.split(",")[0]) if index else None
        values.append(Value(name, number, shape, size, start, end, allocation, offset))
    return Lifetimes(tuple(found["sequence"].split("\n")), tuple(values), "compiled")


def modelled_lifetimes(module: Module) -> Lifetimes:
    """Returns lifetimes by the order of a program: an array lives until its last reader has run."""
    sequence: list[str] = []
    values: list[Value] = []
    _run(module, module.entry, sequence, values, set())
    return Lifetimes(tuple(sequence), tuple(values), "modelled")


def _run(
    module: Module, computation: str, sequence: list[str], values: list[Value], carried: set[str]
) -> None:
    found = module.computations.get(computation, [])
    own = module.by_name.get(computation, {})
    elsewhere = set(carried)
    # Results of the program have memory of their own.
    if found and computation == module.entry:
        root = found[-1]
        elsewhere.update(root.operands if root.opcode == "tuple" else (root.name,))
    arrays = {i.name: [] if i.name in elsewhere else _allocated(module, i) for i in found}
    placed = {i.name for i in found if i.name in elsewhere and _allocated(module, i)}
    owners = _owners(found, own, arrays, placed)
    first, last = {}, {}
    for i in found:
        if i.opcode in _CALLS:
            for inner in i.called:
                # What a loop's body leaves is in the memory of what it began with.
                ends = module.computations.get(inner, [])
                kept = set(ends[-1].operands) if i.opcode == "while" and ends else set()
                _run(module, inner, sequence, values, kept)
        first[i.name] = len(sequence)
        sequence.append(i.name)
        for name in i.operands:
            for owner in owners.get(name, ()):
                last[owner] = first[i.name]
    if found:
        for owner in owners.get(found[-1].name, ()):
            last[owner] = first[found[-1].name]
    # What reads an array last may write its result there, if it is as large.
    freed: dict[int, list[Value]] = {}
    for i in found:
        at = first[i.name]
        for number, shape in arrays[i.name]:
            index = number if len(i.shapes) > 1 else None
            reused = [v for v in freed.get(at, ()) if v.bytes == shape.nbytes]
            if reused and i.opcode in _ELEMENTWISE:
                freed[at].remove(reused[0])
            allocation = (
                reused[0].allocation if reused and i.opcode in _ELEMENTWISE else len(values)
            )
            span = (at, last.get(i.name, at))
            made = Value(i.name, index, str(shape), shape.nbytes, *span, allocation, 0)
            values.append(made)
            freed.setdefault(made.end, []).append(made)


def _allocated(module: Module, instruction: Instruction) -> list[tuple[int, Shape]]:
    """Returns the arrays that an instruction allocates, each with its number among the results."""
    opcode = instruction.opcode
    if opcode in _VIEWS or opcode.endswith("-done") or opcode == "constant":
        return []
    if _in_place(module, instruction):
        return []
    numbered = list(enumerate(instruction.shapes))
    count = len(instruction.operands)
    if opcode in ("all-gather-start", "collective-permute-start"):
        numbered = numbered[count : 2 * count]  # after the operands themselves
    elif opcode in ("copy-start", "slice-start"):
        numbered = numbered[:1]
    elif opcode in ("async-start", "call-start"):
        numbered = numbered[-1:]
    return [(number, shape) for number, shape in numbered if shape.in_hbm and shape.nbytes]


def _in_place(module: Module, instruction: Instruction) -> bool:
    """Returns whether it writes into one of its operands: a slice update, alone or fused."""
    if instruction.opcode == "dynamic-update-slice":
        return True
    if instruction.opcode != "fusion" or not instruction.called:
        return False
    inside = module.computations.get(instruction.called[0], [])
    if not inside:
        return False
    own, root = module.by_name[instruction.called[0]], inside[-1]
    made = [own[n] for n in root.operands if n in own] if root.opcode == "tuple" else [root]
    through = [_behind(own, i) for i in made]
    return bool(through) and all(i.opcode == "dynamic-update-slice" for i in through)


def _behind(own: Mapping[str, Instruction], at: Instruction) -> Instruction:
    """Returns what a view shows."""
    while at.opcode == "bitcast" and at.operands and at.operands[0] in own:
        at = own[at.operands[0]]
    return at


def _owners(
    found: list[Instruction],
    own: dict[str, Instruction],
    arrays: Mapping[str, list[tuple[int, Shape]]],
    placed: Collection[str],
) -> dict[str, set[str]]:
    """Returns for each name the instructions whose buffers it refers to; those placed have their own."""
    owners: dict[str, set[str]] = {}
    for instruction in found:
        if arrays[instruction.name] or instruction.name in placed:
            owners[instruction.name] = {instruction.name} - set(placed)
            continue
        passed: set[str] = set()
        for name in instruction.operands:
            passed |= owners.get(name, set())
        if instruction.opcode == "get-tuple-element" and instruction.operands[0] in own:
            operand = own[instruction.operands[0]]
            index = int(instruction.rest.partition("index=")[2].split(",")[0] or 0)
            if operand.opcode == "tuple" and index < len(operand.operands):
                passed = owners.get(operand.operands[index], set())
        owners[instruction.name] = passed
    return owners
