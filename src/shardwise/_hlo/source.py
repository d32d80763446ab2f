"""Where an instruction of a compiled program comes from: a module, a leaf, a line of user code."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator

from .._base import is_ours, is_users, show_line
from .neighbours import nearest
from .program import Instruction, Module

# Where the step begins.
EDGES = ("Blueprint.step", "Blueprint.evaluate", "Forward.__call__")
# JAX operations that only move values.
_MOVERS = {
    "squeeze", "dynamic_slice", "dynamic_update_slice", "slice", "reshape", "transpose", "while",
    "broadcast_in_dim", "convert_element_type", "concatenate", "copy", "pad", "scan",
}  # fmt: skip
# How transforms and control flow wrap a scope.
_WRAPPED = re.compile(r"^(?:jit|jvp|transpose|vmap|pmap|checkpoint|remat\d*|custom_\w+)\((.*)\)$")


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where an instruction comes from.

    Attributes:
        op: the JAX operation, such as `dot_general`.
        module: the path of the module being called, or empty.
        place: the user's line, such as `file.py:12`, or empty.
        backward: whether it belongs to the backward pass.
        leaf: the leaf of the state it was made from, if only one, such as `embed` or
            `optimizer.0.mu.embed`; otherwise empty.
    """

    op: str
    module: str
    place: str
    backward: bool
    leaf: str = ""

    def __str__(self) -> str:
        """Returns the known places, those closest to the user first."""
        known = [self.place, self.module, self.leaf]
        return " ".join(x for x in known if x) or self.op or "?"


def source_of(module: Module, instruction: Instruction, paths: Collection[str]) -> Source:
    """Returns where an instruction comes from.

    Args:
        module: the program.
        instruction: an instruction of it.
        paths: the paths of the model's modules.
    """
    op_name = instruction.op_name
    scopes = [_unwrapped(part) for part in _split(op_name)]
    found = ""
    for scope in scopes:
        for candidate in (f"{found}.{scope}" if found else scope, scope):
            if candidate in paths:
                found = candidate
                break
    return Source(
        op=scopes[-1] if scopes else instruction.opcode,
        module=found,
        place=user_place(module.stack(instruction)),
        backward="transpose(" in op_name,
    )


def cause_of(
    module: Module, computation: str, instruction: Instruction, paths: Collection[str]
) -> Source:
    """Returns where an instruction comes from, by what is around it if it does not say so itself.

    Compilers drop lines: a gathered parameter has the parameter's name alone, and what was merged
    from several instructions has none. The line is then that of what makes the value, or else of what
    reads it. What has frames, but none of user code, such as an optimizer's update, has no line.
    """
    said = named(module, computation, instruction)
    own = source_of(module, said, paths)
    # How a scan slices and stacks, at the scan's line, is less than what is in its body.
    vague = not own.module and own.op in _MOVERS
    if not vague and (own.place or (module.stack(said) and not _is_leaf(own))):
        return own
    near = _nearest_place(module, computation, instruction, paths)
    if near is None or (own.place and not near.module):
        return own
    return Source(
        op=own.op if said.op_name and not _is_leaf(own) else near.op,
        module=own.module or near.module,
        place=near.place,
        backward=own.backward or near.backward,
        leaf=own.leaf,
    )


def _nearest_place(
    module: Module, computation: str, instruction: Instruction, paths: Collection[str]
) -> Source | None:
    first = None
    if not module.has_lines:
        return None
    for _, found in _around(module, computation, instruction):
        if not found.has_line:  # most of what is looked at: reading its name takes longer
            continue
        near = source_of(module, found, paths)
        if not near.place:
            continue
        if near.module or near.op not in _MOVERS:
            return near
        first = first or near
    return first


def _is_leaf(source: Source) -> bool:
    """Returns whether all that is known of an instruction is the argument that it is made from."""
    return bool(_leaf_name(source.op))


def _around(
    module: Module, computation: str, instruction: Instruction
) -> Iterator[tuple[str, Instruction]]:
    """Yields what is inside of an instruction, what leads to it, and what becomes of it."""
    yield from _inside(module, computation, instruction)
    for up in (True, False):
        for place, found in nearest(module, computation, instruction, up=up):
            yield place, found
            yield from _inside(module, place, found)


def _inside(
    module: Module, computation: str, instruction: Instruction
) -> Iterator[tuple[str, Instruction]]:
    """Yields the instructions of a fusion or an asynchronous computation, the last one first."""
    if instruction.opcode in ("fusion", "fusion-start", "async-start", "call-start"):
        for inner in instruction.called:
            for found in reversed(module.computations.get(inner, ())):
                yield inner, found


def named(module: Module, computation: str, instruction: Instruction) -> Instruction:
    """Returns the instruction that says where one comes from: itself, or the nearest that does.

    What the compiler makes itself has no name: a fusion is named by what it computes, a product that
    it merged from several by what reads the result, anything else by what makes its operand.
    """
    own = module.by_name[computation]
    found = instruction
    for _ in range(4):
        if found.op_name:
            return found
        inside = _last_named(module, found)
        if inside is not None:
            return inside
        if found.opcode == "custom-call" and "matmul" in found.rest:
            return _reader(module, computation, found) or instruction
        following = next((own[name] for name in found.operands if name in own), None)
        if following is None or following.opcode in ("parameter", "constant", "while"):
            break
        found = following
    return instruction


def _last_named(module: Module, fusion: Instruction) -> Instruction | None:
    """Returns the last instruction of a fusion that has a name."""
    if fusion.opcode != "fusion" or not fusion.called:
        return None
    inside = module.computations.get(fusion.called[0], [])
    return next((i for i in reversed(inside) if i.op_name and i.opcode != "parameter"), None)


def _reader(module: Module, computation: str, product: Instruction) -> Instruction | None:
    """Returns what reads a product first and has a name."""
    values = {product.name}
    for other in module.computations[computation]:
        if not values.intersection(other.operands):
            continue
        if other.opcode in ("get-tuple-element", "bitcast"):
            values.add(other.name)
        elif other.op_name:
            return other
        elif (inside := _last_named(module, other)) is not None:
            return inside
    return None


def user_place(stack: list[tuple[str, int, str]]) -> str:
    """Returns `file.py:12` for the innermost frame of user code, or an empty string."""
    for file, line, function in stack:
        if is_users(file):
            return show_line(file, line)
        if function in EDGES and is_ours(file):
            break  # frames further out only called `compile`
    return ""


def _split(op_name: str) -> Iterator[str]:
    """Yields the parts between slashes that are outside parentheses."""
    depth, start = 0, 0
    for place, char in enumerate(op_name):
        depth += (char == "(") - (char == ")")
        if char == "/" and depth == 0:
            yield op_name[start:place]
            start = place + 1
    if op_name[start:]:
        yield op_name[start:]


def _unwrapped(part: str) -> str:
    while wrapped := _WRAPPED.match(part):
        part = wrapped[1]
    return part


_PASSING = {
    "bitcast", "convert", "copy", "copy-start", "copy-done", "reshape", "transpose", "slice",
    "all-gather", "all-gather-start", "all-gather-done", "collective-permute",
    "collective-permute-start", "collective-permute-done", "dynamic-slice", "get-tuple-element",
    "optimization-barrier", "tuple", "async-start", "async-done", "all-to-all",
}  # fmt: skip


def leaf_of(module: Module, computation: str, instruction: Instruction) -> str:
    """Returns the leaf of the state if the instruction only moves, casts or gathers a single one."""
    return _leaf(module, computation, instruction, None, 0)


def _leaf(
    module: Module, computation: str, instruction: Instruction, index: int | None, depth: int
) -> str:
    if depth > 60:
        return ""
    own = module.by_name[computation]
    if instruction.opcode == "parameter":
        if computation == module.entry:
            return _leaf_name(instruction.op_name)
        called = module.callers.get(computation)
        if called is None:
            return ""
        outer, caller = called
        given = module.by_name[outer]
        if caller.opcode == "while":
            before = given.get(caller.operands[0])
            if before is None or index is None:
                return ""
            return _leaf(module, outer, before, index, depth + 1)
        number = int(instruction.arguments)
        if number >= len(caller.operands) or caller.operands[number] not in given:
            return ""
        return _leaf(module, outer, given[caller.operands[number]], index, depth + 1)
    if instruction.opcode == "while":
        before = own.get(instruction.operands[0])
        return _leaf(module, computation, before, index, depth + 1) if before else ""
    if instruction.opcode == "tuple" and index is not None:
        inner = own.get(instruction.operands[index]) if index < len(instruction.operands) else None
        return _leaf(module, computation, inner, None, depth + 1) if inner else ""
    if instruction.opcode == "get-tuple-element":
        place = re.search(r"index=(\d+)", instruction.rest)
        inner = own.get(instruction.operands[0])
        if inner is None or place is None:
            return ""
        return _leaf(module, computation, inner, int(place[1]), depth + 1)
    if instruction.opcode == "fusion":
        inside = module.computations.get(instruction.called[0], [])
        moves = all(i.opcode in _PASSING | {"parameter", "constant", "compare", "select"}
                    for i in inside)  # fmt: skip
        if not moves:
            return ""
    elif instruction.opcode not in _PASSING:
        return ""
    big = [own[name] for name in instruction.operands if name in own and own[name].shapes]
    big = [i for i in big if max((s.size for s in i.shapes), default=0) > 1 or len(big) == 1]
    if index is not None and index < len(big) and len(big) > 1:
        big = [big[index]]
    if len(big) != 1:
        return ""
    passed = index if instruction.opcode.endswith("-done") else None
    return _leaf(module, computation, big[0], passed, depth + 1)


def _leaf_name(op_name: str) -> str:
    """Returns `embed` for JAX's `state.model['embed']`."""
    found = re.fullmatch(r"state\.(\w+)\[['\"](.*)['\"]\]", op_name)
    if found:
        return found[2] if found[1] == "model" else f"{found[1]}.{found[2]}"
    return op_name if op_name.startswith(("state.", "batch")) else ""
