"""The large buffers of a compiled program: what is alive at its memory peak, and why.

If the compiler reports its buffers, they are used as they are. Otherwise the buffers alive at the
peak are derived from the order in which the program runs, and labelled as modelled.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from .._base import show_bytes
from .._hlo import Instruction, Module, Source, cause_of, parse_shapes, source_of


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """One temporary, or several alike.

    Attributes:
        shape: the shape of the array on one device, such as `bf16[4,2048,8192]`.
        bytes: the size of one of them.
        count: how many like it are alive at the same time.
        source: what created it.
        label: how its lifetime is known: `compiled` or `modelled`.
    """

    shape: str
    bytes: int
    count: int
    source: Source
    label: str = "modelled"

    @property
    def total_bytes(self) -> int:
        """The bytes of all of them."""
        return self.bytes * self.count

    def __str__(self) -> str:
        """Returns its shape, bytes and cause on one line."""
        times = f" ×{self.count}" if self.count > 1 else ""
        return f"{self.shape}{times} ({show_bytes(self.total_bytes)}) from {self.source}"


# Opcodes that allocate no array of their own.
_VIEWS = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "while", "optimization-barrier",
    "after-all", "partition-id", "replica-id", "copy-done", "call", "conditional",
}  # fmt: skip
_Alive = tuple[int, tuple[tuple[str, str], ...]]


OTHER = "other"


def largest_buffers(
    module: Module,
    paths: Collection[str],
    alive: Sequence[tuple[str, str, int]] | None,
    total: int | None,
    most: int = 10,
) -> list[Buffer]:
    """Returns the temporaries alive at the peak, largest first.

    Args:
        module: the program.
        paths: the paths of the model's modules.
        alive: what the compiler reports as alive, by name, type and bytes; None to model it.
        total: the bytes of all temporaries: the rows never add up to more, and the last row is the
            rest: small ones, padding, and on a TPU its code and on-chip memory.
        most: how many rows to return before that last row.
    """
    counted: Counter[tuple[str, int, Source]] = Counter()
    label = "compiled" if alive is not None else "modelled"
    for shape, size, source in (
        _modelled(module, paths) if alive is None else _compiled(module, paths, alive)
    ):
        counted[(shape, size, source)] += 1
    rows = [Buffer(shape, size, n, source, label) for (shape, size, source), n in counted.items()]
    rows.sort(key=lambda row: -row.total_bytes)
    if total is None:
        return rows[:most]
    kept: list[Buffer] = []
    left = total
    for row in rows[:most]:
        # The model may exceed the compiler's total, since the compiler reuses memory.
        count = min(row.count, left // row.bytes) if row.bytes else 0
        if count:
            kept.append(dataclasses.replace(row, count=count))
            left -= row.bytes * count
    if left and kept:
        kept.append(Buffer(OTHER, left, 1, Source("", "", "", False), label))
    return kept


def _compiled(
    module: Module, paths: Collection[str], alive: Sequence[tuple[str, str, int]]
) -> Iterator[tuple[str, int, Source]]:
    homes = {i.name: (c, i) for c, found in module.computations.items() for i in found}
    for value, kind, size in alive:
        name, _, index = value.removesuffix("}").partition("{")
        shapes = parse_shapes(kind)
        # A tuple's own buffer holds pointers to its elements.
        shape = "tuple" if kind.startswith("(") else str(shapes[0]) if shapes else kind
        home = homes.get(name)
        if home is None:
            yield shape, size, Source(name, "", "", False)
            continue
        writer = _written(module, *home, int(index.split(",")[0] or 0) if index else 0)
        yield shape, size, _cause(module, writer[0], writer[1], paths)


def _written(
    module: Module, computation: str, instruction: Instruction, index: int
) -> tuple[str, Instruction]:
    """Returns the instruction that writes a value carried by a loop, or the one that creates it."""
    loop = instruction
    if instruction.opcode == "parameter":
        caller = module.callers.get(computation)
        loop = caller[1] if caller is not None else instruction
    for body in loop.called if loop.opcode == "while" else ():
        inside = module.computations.get(body, [])
        if inside and inside[-1].opcode == "tuple" and index < len(inside[-1].operands):
            found = module.by_name[body].get(inside[-1].operands[index])
            if found is not None and found.op_name:
                return body, found
    return computation, instruction


def _modelled(module: Module, paths: Collection[str]) -> Iterator[tuple[str, int, Source]]:
    _, alive = _peak(module, module.entry, {})
    root = module.computations[module.entry][-1]
    results = set(root.operands) if root.opcode == "tuple" else {root.name}
    for computation, name in alive:
        if computation == module.entry and name in results:
            continue  # it is the result, not a temporary
        instruction = module.by_name[computation][name]
        shape = max(instruction.shapes, key=lambda s: s.nbytes)
        yield str(shape), shape.nbytes, _cause(module, computation, instruction, paths)


def _cause(
    module: Module, computation: str, instruction: Instruction, paths: Collection[str]
) -> Source:
    # A buffer that a loop fills is allocated before it: its cause is what fills it.
    filled = _loop_writer(module, computation, instruction.name)
    if filled is not None and not source_of(module, instruction, paths).place:
        return cause_of(module, *filled, paths)
    return cause_of(module, computation, instruction, paths)


def _loop_writer(module: Module, computation: str, name: str) -> tuple[str, Instruction] | None:
    """Returns what a loop's body writes into a buffer allocated before the loop."""
    own = module.by_name[computation]
    for instruction in own.values():
        if instruction.opcode != "tuple" or name not in instruction.operands:
            continue
        index = instruction.operands.index(name)
        for loop in own.values():
            if loop.opcode != "while" or loop.operands[:1] != (instruction.name,):
                continue
            for body in loop.called:
                inside = module.computations.get(body, [])
                if not inside or inside[-1].opcode != "tuple":
                    continue
                written = inside[-1].operands[index : index + 1]
                found = module.by_name[body].get(written[0]) if written else None
                if found is not None and found.op_name:
                    return body, found
    return None


def _peak(module: Module, computation: str, known: dict[str, _Alive]) -> _Alive:
    """Returns the largest sum of buffers alive at one time, and which they are."""
    if computation in known:
        return known[computation]
    known[computation] = (0, ())
    found = module.computations.get(computation, [])
    own = module.by_name.get(computation, {})
    allocated = {i.name: _allocated_bytes(module, i) for i in found}
    below = _owners(found, own, allocated)
    last = {}
    for place, instruction in enumerate(found):
        for name in instruction.operands:
            for owner in below.get(name, ()):
                last[owner] = place
    if found:
        for owner in below.get(found[-1].name, ()):
            last[owner] = len(found)
    ends: dict[int, list[str]] = {}
    for name, place in last.items():
        ends.setdefault(place, []).append(name)
    alive: dict[str, int] = {}
    now, best = 0, (0, ())
    for place, instruction in enumerate(found):
        if allocated[instruction.name]:
            alive[instruction.name] = allocated[instruction.name]
            now += allocated[instruction.name]
        inner: _Alive = (0, ())
        if instruction.opcode in ("while", "call", "conditional"):
            bodies = [_peak(module, name, known) for name in instruction.called]
            inner = max(bodies, key=lambda b: b[0], default=inner)
        if now + inner[0] > best[0]:
            best = (now + inner[0], (*((computation, n) for n in alive), *inner[1]))
        for name in ends.get(place, ()):
            now -= alive.pop(name, 0)
    known[computation] = best
    return best


def _allocated_bytes(module: Module, instruction: Instruction) -> int:
    if instruction.opcode in _VIEWS or instruction.opcode.endswith("-done"):
        return 0
    if instruction.opcode == "constant" or _in_place(module, instruction):
        return 0
    return sum(shape.nbytes for shape in instruction.shapes if shape.in_hbm)


def _in_place(module: Module, instruction: Instruction) -> bool:
    """Returns whether it writes into one of its operands: a slice update, alone or fused."""
    if instruction.opcode == "dynamic-update-slice":
        return True
    if instruction.opcode != "fusion" or not instruction.called:
        return False
    inside = module.computations.get(instruction.called[0], [])
    return bool(inside) and inside[-1].opcode == "dynamic-update-slice"


def _owners(
    found: list[Instruction], own: dict[str, Instruction], allocated: dict[str, int]
) -> dict[str, set[str]]:
    """Returns for each name the instructions whose buffers it refers to."""
    owners: dict[str, set[str]] = {}
    for instruction in found:
        if allocated[instruction.name]:
            owners[instruction.name] = {instruction.name}
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


def workspace_bound(module: Module) -> int:
    """Returns how much more memory the workspaces of convolutions may take on a real GPU.

    The library chooses its algorithms, and with them its workspaces, by timing them on the device.
    Workspaces of up to the arrays that a convolution reads and writes, twice, were seen there; the
    program without a device has those of the default algorithms.
    """
    most = 0
    for computation, found in module.computations.items():
        for i in found:
            if i.opcode == "custom-call" and '"__cudnn$conv' in i.rest:
                own = module.by_name[computation]
                arrays = [s.nbytes for n in i.operands if n in own for s in own[n].shapes]
                arrays += [s.nbytes for s in i.shapes[:1]]
                had = sum(s.nbytes for s in i.shapes[1:])
                most = max(most, 2 * sum(arrays) - had)
    return most
