"""The collectives that a GPU's compiler combines into one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from .fused import Block
from .graph import Kernel, neighbours, size_of

# In bytes on each device.
_MOST = 30 * 2**20 + 7
# Sums that are smaller are combined though something waits for them.
_SMALL = 2**16
# Products of larger operands are not merged.
_MERGED = 2**30
_KINDS = ("all-gather", "all-reduce", "reduce-scatter")


def combined(block: Block, from_start: Collection[int], needed: Collection[int]) -> list[list[int]]:
    """Returns the numbers of the collectives that are combined, in lists.

    These are gathers that are needed at once, and reductions of one dtype of which nothing but
    results of the block is made: as many as make so many bytes, if none waits for another.

    Args:
        block: the kernels.
        from_start: the numbers of those that wait for nothing but what is there when it begins.
        needed: the values that something else is made of than results of the block.
    """
    alike: dict[Any, list[int]] = {}
    places = block.post_order()
    for number in sorted(range(len(places)), key=places.__getitem__):
        kernel = block.kernels[number]
        op = kernel.op
        if not kernel.heavy or op.kind not in _KINDS:
            continue
        if op.kind == "all-gather":
            if number in from_start:
                alike.setdefault((op.kind, op.axes), []).append(number)
        elif not any(v in needed for v in op.results) or size_of(block.shapes, op) < _SMALL:
            dtype = block.shapes[op.results[0]].dtype
            alike.setdefault((op.kind, op.axes, dtype), []).append(number)
    found = _Joined(block.kernels)
    for numbers in alike.values():
        free = 0
        for number in numbers:
            op = block.kernels[number].op
            size = sum(block.shapes[v].nbytes for v in op.results)
            if size > free or not found.join(number):
                found.begin(number)
                free = _MOST
            free -= size
    return found.groups


class _Joined:
    """Kernels in groups that run as one, such that no two groups wait for each other."""

    def __init__(self, kernels: Sequence[Kernel], groups: Sequence[list[int]] = ()):
        """Takes the kernels, and groups of them that are there already."""
        self.groups: list[list[int]] = []
        self.before, self.after = neighbours(kernels)
        self.members: dict[int, list[int]] = {n: group for group in groups for n in group}

    def begin(self, number: int) -> None:
        """Begins a group."""
        self.groups.append([number])
        self.members[number] = self.groups[-1]

    def join(self, number: int) -> bool:
        """Adds a kernel to the last group, unless one of them waits for the other."""
        group = self.groups[-1]
        if self._reached(group, {number}) or self._reached([number], set(group)):
            return False
        group.append(number)
        self.members[number] = group
        return True

    def _reached(self, start: Sequence[int], wanted: set[int]) -> bool:
        """Returns whether something that is wanted waits for the start."""
        todo, seen = list(start), set(start)
        while todo:
            near = self.after[todo.pop()]
            if near & wanted:
                return True
            for other in near - seen:
                group = self.members.get(other, (other,))
                seen.update(group)
                todo += group
        return False


def paired(block: Block, groups: Sequence[list[int]]) -> list[list[int]]:
    """Returns the numbers of products that are computed as one: two alike with an operand in common.

    As of queries and keys, and their gradients. `groups` are those of other kernels.
    """
    kernels, shapes = block.kernels, block.shapes
    alike: dict[Any, list[int]] = {}
    for number, kernel in enumerate(kernels):
        op = kernel.op
        if op.kind == "dot_general":
            for side, operand in enumerate(op.operands[:2]):
                # A transposed operand is read in its own order, with other dims.
                other, made = shapes[block.root(op.operands[1 - side])], shapes[op.results[0]]
                alike.setdefault((side, block.root(operand), other, made), []).append(number)
    found = _Joined(kernels, groups)
    for numbers in alike.values():
        one, *others = [number for number in numbers if number not in found.members] or [-1]
        if others and max(shapes[v].nbytes for v in kernels[one].op.operands[:2]) <= _MERGED:
            found.begin(one)
            found.join(others[0])
    return [group for group in found.groups if len(group) > 1]
