"""Parses the text of an optimised HLO module: computations, instructions, and their sources."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_BITS = {
    "pred": 8,
    "s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4,
    "s8": 8, "u8": 8, "f8e4m3fn": 8, "f8e5m2": 8, "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8,
    "f8e5m2fnuz": 8, "f8e3m4": 8, "f8e4m3": 8, "f8e8m0fnu": 8,
    "s16": 16, "u16": 16, "f16": 16, "bf16": 16,
    "s32": 32, "u32": 32, "f32": 32,
    "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One array: its dtype, and its sizes on one device."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements, without padding."""
        return -(-self.size * _BITS.get(self.dtype, 0) // 8)

    @property
    def in_hbm(self) -> bool:
        """Whether it is in the device's main memory, rather than in on-chip memory."""
        return not re.search(r"S\([1-9]\d*\)", self.layout)

    def __str__(self) -> str:
        """Returns it as HLO writes it."""
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its results, its operands, and everything else as text."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    arguments: str
    rest: str

    @property
    def op_name(self) -> str:
        """JAX's name of the operation: `jit(step)/transpose(jvp(blocks.0))/dot_general`."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return found[1].replace('\\"', '"').replace("\\'", "'") if found else ""

    @property
    def has_line(self) -> bool:
        """Whether it says which line of Python it comes from."""
        return "stack_frame_id=" in self.rest or "source_line=" in self.rest

    @property
    def called(self) -> tuple[str, ...]:
        """The computations it calls, except those that only reduce two numbers."""
        found = re.findall(
            r"(?:calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)", self.rest
        )
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        found += re.findall(r"%?([\w.\-]+)", branches[1]) if branches else []
        if self.opcode in ("call", "call-start"):
            found += re.findall(r"to_apply=%?([\w.\-]+)", self.rest)
        return tuple(found)

    def attribute(self, name: str) -> str:
        """Returns an attribute's text, such as `{0,1}` or `[2,4]<=[8]`, or an empty string."""
        found = re.search(rf"[ ,]{name}=", self.rest)
        if found is None:
            return ""
        start = found.end()
        depth, end = 0, start
        while end < len(self.rest):
            char = self.rest[end]
            depth += (char in "{[(") - (char in "}])")
            if depth < 0 or (depth == 0 and char == "," and self.rest[end : end + 2] == ", "):
                break
            end += 1
        return self.rest[start:end]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
        entry: the name of the computation that it begins with.
        computations: the instructions of each computation, in the order in which they run.
        frames: for each stack frame id its `(file, line, function, parent id)`.
        partitions: how many devices it is divided over; of several TPU slices, those of one.
    """

    entry: str
    computations: dict[str, list[Instruction]]
    frames: dict[int, tuple[str, int, str, int]]
    partitions: int = 1

    @functools.cached_property
    def has_lines(self) -> bool:
        """Whether any instruction says which line it comes from."""
        return any(i.has_line for found in self.computations.values() for i in found)

    @functools.cached_property
    def by_name(self) -> dict[str, dict[str, Instruction]]:
        """The instructions of each computation by name."""
        return {c: {i.name: i for i in found} for c, found in self.computations.items()}

    @functools.cached_property
    def readers(self) -> dict[str, dict[str, list[Instruction]]]:
        """The instructions of each computation that read a value, by its name."""
        found: dict[str, dict[str, list[Instruction]]] = {}
        for computation, instructions in self.computations.items():
            own = found.setdefault(computation, {})
            for instruction in instructions:
                for name in dict.fromkeys(instruction.operands):
                    own.setdefault(name, []).append(instruction)
        return found

    @functools.cached_property
    def callers(self) -> dict[str, tuple[str, Instruction]]:
        """For each computation, one computation that calls it, and the calling instruction."""
        return {
            called: (computation, instruction)
            for computation, found in self.computations.items()
            for instruction in found
            for called in instruction.called
        }

    def stack(self, instruction: Instruction) -> list[tuple[str, int, str]]:
        """Returns `(file, line, function)` of each Python frame that led to it, innermost first."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.rest)
        frame_id = int(found[1]) if found else 0
        stack = []
        while frame_id in self.frames and len(stack) < 200:
            file, line, function, parent = self.frames[frame_id]
            stack.append((file, line, function))
            frame_id = parent
        if not stack:
            file = re.search(r'source_file="([^"]*)"', instruction.rest)
            line = re.search(r"source_line=(\d+)", instruction.rest)
            if file and line:
                stack.append((file[1], int(line[1]), ""))
        return stack

    def runs(self) -> Iterator[tuple[str, int, bool]]:
        """Yields each computation that the program runs, how many times, and whether in a fusion.

        A computation that is run from several places comes once for each. The trips of a loop
        are multiplied; where they are not known, its body counts once.
        """
        todo = [(self.entry, 1, False)]
        while todo:
            name, times, fused = todo.pop()
            yield name, times, fused
            for instruction in self.computations.get(name, ()):
                opcode = instruction.opcode
                # The end of an asynchronous pair names the computation again.
                if opcode.endswith("-done") or opcode == "async-update":
                    continue
                more = times
                if opcode == "while":
                    more = times * (self.trips(name, instruction) or 1)
                inside = fused or opcode in ("fusion", "fusion-start")
                for called in instruction.called:
                    todo.append((called, more, inside))

    def trips(self, computation: str, loop: Instruction) -> int | None:
        """Returns how many times a loop runs its body, or None if the program does not say."""
        known = re.search(r'known_trip_count"?:\s*\{\s*"?n"?:\s*"?(\d+)', loop.rest)
        if known:
            return int(known[1])
        condition = re.search(r"condition=%?([\w.\-]+)", loop.rest)
        if condition is None:
            return None
        # The bound that a counter starting at 0 is compared with, here or in a fusion.
        bounds = []
        todo = [condition[1]]
        while todo:
            for instruction in self.computations.get(todo.pop(), ()):
                todo += instruction.called
                if instruction.opcode == "constant" and instruction.shapes[0].dtype in (
                    "s32", "u32", "s64", "u64",
                ):  # fmt: skip
                    bounds.append(int(instruction.arguments))
        if not bounds or max(bounds) <= 0:
            return None
        return -(-max(bounds) // self._stride(condition[1], loop))

    def _stride(self, condition: str, loop: Instruction) -> int:
        """Returns what an iteration adds to a loop's counter: more than 1 if it is unrolled."""
        body = re.search(r"body=%?([\w.\-]+)", loop.rest)
        found = self.computations.get(body[1] if body else "", [])
        if not found or found[-1].opcode != "tuple":
            return 1
        own = self.by_name[body[1] if body else ""]
        for counter in self.computations.get(condition, ()):
            place = counter.attribute("index")
            if counter.opcode != "get-tuple-element" or not place.isdecimal():
                continue
            added, at = 0, own.get(found[-1].operands[int(place)])
            # A TPU's compiler may copy the counter to the memory of its scalar cores first.
            while at is not None and at.opcode in ("add", "copy"):
                if at.opcode == "copy":
                    at = own.get(at.operands[0])
                    continue
                parts = [own[name] for name in at.operands if name in own]
                steps = [int(i.arguments) for i in parts if i.opcode == "constant"]
                others = [i for i in parts if i.opcode != "constant"]
                if len(steps) != 1 or len(others) != 1:
                    break
                added, at = added + steps[0], others[0]
            if at is not None and at.opcode == "get-tuple-element" and added > 0:
                if at.attribute("index") == place:
                    return added
        return 1


def parse_hlo(text: str) -> Module:
    """Returns the module that an optimised HLO text describes."""
    tables: dict[str, dict[int, str]] = {}
    computations: dict[str, list[Instruction]] = {}
    entry, table = "", ""
    current: list[Instruction] | None = None
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if current is not None:
            # An attribute may span several lines, such as a kernel's description.
            last = number + 1 == len(lines) or not lines[number + 1]
            if line.startswith("}") and last:
                current = None
            elif (made := _instruction(line)) is not None:
                current.append(made)
            elif current:
                whole = current[-1]
                current[-1] = dataclasses.replace(whole, rest=f"{whole.rest}\n{line}")
        elif line.rstrip().endswith("{") and not line.startswith("HloModule"):
            header = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
            if header:
                current = computations.setdefault(header[2], [])
                entry = header[2] if header[1] else entry
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = line
        elif table and (row := re.match(r"(\d+) (.*)", line)):
            tables.setdefault(table, {})[int(row[1])] = row[2]
    if not entry:
        raise ValueError("the compiler's output has no entry computation")
    computations = {name: list(_with_elements(found)) for name, found in computations.items()}
    divided = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    return Module(entry, computations, _frames(tables), int(divided[1]) if divided else 1)


def _with_elements(found: list[Instruction]) -> Iterator[Instruction]:
    """Yields instructions, and after each tuple those of its elements that are read as `%name#1`.

    The program that the TPU compiler dumps is written so.
    """
    elements: dict[str, set[int]] = {}
    for instruction in found:
        for operand in instruction.operands:
            name, _, number = operand.partition("#")
            if number:
                elements.setdefault(name, set()).add(int(number))
    for instruction in found:
        yield instruction
        for number in sorted(elements.get(instruction.name, ())):
            name = instruction.name
            yield Instruction(
                name=f"{name}#{number}",
                opcode="get-tuple-element",
                shapes=instruction.shapes[number : number + 1],
                operands=(name,),
                arguments=f"%{name}",
                rest=f", index={number}",
            )


def _frames(tables: dict[str, dict[int, str]]) -> dict[int, tuple[str, int, str, int]]:
    files = {i: text.strip('"') for i, text in tables.get("FileNames", {}).items()}
    functions = {i: text.strip('"') for i, text in tables.get("FunctionNames", {}).items()}

    def numbers(text: str) -> dict[str, int]:
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}

    places = {i: numbers(text) for i, text in tables.get("FileLocations", {}).items()}
    frames = {}
    for i, text in tables.get("StackFrames", {}).items():
        row = numbers(text)
        place = places.get(row.get("file_location_id", 0), {})
        file = files.get(place.get("file_name_id", 0), "")
        function = functions.get(place.get("function_name_id", 0), "")
        # The table counts parents from 1, where 1 means none.
        frames[i] = (file, place.get("line", 0), function, row.get("parent_frame_id", 1) - 1)
    return frames


_HEAD = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](\{[^}]*\})?")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")


def _instruction(line: str) -> Instruction | None:
    head = _HEAD.match(line)
    if head is None:
        return None
    start = head.end()
    end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return None
    close = _closing(line, opcode.end() - 1)
    arguments = line[opcode.end() : close - 1]
    return Instruction(
        name=head[1],
        opcode=opcode[1],
        shapes=tuple(parse_shapes(line[start:end])),
        operands=tuple(re.findall(r"%([\w.\-]+(?:#\d+)?)", arguments)),
        arguments=arguments,
        rest=line[close:],
    )


def parse_shapes(text: str) -> list[Shape]:
    """Returns every array in the text of a type, including those in tuples."""
    return [
        Shape(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), layout or "")
        for dtype, dims, layout in _ARRAY.findall(text)
        if dtype in _BITS
    ]


def _closing(text: str, start: int) -> int:
    """Returns the index after the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        char = text[place]
        if char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if depth == 0:
                return place + 1
    return len(text)
