"""The collectives that a GPU's compiler combines into one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from .fused import Block, neighbours, size_of

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
    waits = _waits(block, {number for numbers in alike.values() for number in numbers})
    found: list[list[int]] = []
    for numbers in alike.values():
        free = members = 0
        for number in numbers:
            op = block.kernels[number].op
            size = sum(block.shapes[v].nbytes for v in op.results)
            waited = any(waits[n] >> number & 1 for n in found[-1]) if members else False
            if size > free or waits[number] & members or waited:
                found.append([])
                free, members = _MOST, 0
            found[-1].append(number)
            free -= size
            members |= 1 << number
    return found


def _waits(block: Block, wanted: Collection[int]) -> list[int]:
    """Returns for each kernel those of the wanted ones that it waits for, as the bits of a number."""
    found = [0] * len(block.kernels)
    for number, near in enumerate(neighbours(block.kernels)[0]):
        for other in near:
            if other < number:
                found[number] |= found[other] | (1 << other if other in wanted else 0)
    return found


def merged(block: Block) -> list[list[int]]:
    """Returns the numbers of products that are computed as one: two alike with an operand in common.

    As of queries and keys, and their gradients.
    """
    kernels, shapes = block.kernels, block.shapes
    before, _ = neighbours(kernels)
    alike: dict[Any, list[int]] = {}
    for number, kernel in enumerate(kernels):
        op = kernel.op
        if op.kind == "dot_general":
            for side, operand in enumerate(op.operands[:2]):
                # A transposed operand is read in its own order, with other dims.
                other, made = shapes[block.root(op.operands[1 - side])], shapes[op.results[0]]
                alike.setdefault((side, block.root(operand), other, made), []).append(number)
    found: list[list[int]] = []
    for numbers in alike.values():
        if len(numbers) > 1 and not {n for pair in found for n in pair} & set(numbers[:2]):
            one, other = numbers[:2]
            sizes = [shapes[v].nbytes for v in kernels[one].op.operands[:2]]
            if max(sizes) <= _MERGED and one not in before[other]:
                found.append([one, other])
    return found
