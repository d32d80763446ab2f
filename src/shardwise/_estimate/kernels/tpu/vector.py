"""Which arrays a TPU's compiler keeps beside its cores, so that they are not in main memory at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING

from ...._hlo import Access
from ..graph import COLLECTIVES, Kernel

if TYPE_CHECKING:
    from ..fused import Block

# Bytes of that memory by chip. On v4 and v5p, arrays of the sizes that were looked at are not there.
VECTOR = {"v5e": 128 * 2**20, "v6e": 128 * 2**20, "tpu7x": 64 * 2**20}
# How many kernels later the last one that reads an array may run.
_SOON = 6
# An array takes at most the first share of that memory, and all of them the second.
_ONE, _ALL = 0.5, 0.7
# What still passes through main memory, as when an array is brought there in parts.
LEFT = 0.1


def nearby(block: Block, chip: str) -> set[int]:
    """Returns the arrays that are read soon after they are made, and small enough."""
    memory = VECTOR.get(chip)
    if memory is None:
        return set()
    last = {
        block.root(value): number
        for number, kernel in enumerate(block.kernels)
        for value in kernel.reads
    }
    found: set[int] = set()
    alive: list[tuple[int, int]] = []
    for number, kernel in enumerate(block.kernels):
        alive = [(end, size) for end, size in alive if end >= number]
        if kernel.op.kind in COLLECTIVES or kernel.op.kind == "while":
            continue
        for value, size in kernel.writes.items():
            end = last.get(value, -1)
            if (
                block.root(value) != value
                or value in block.outputs
                or not 0 <= end - number <= _SOON
            ):
                continue
            if size <= _ONE * memory and size + sum(n for _, n in alive) <= _ALL * memory:
                found.add(value)
                alive.append((end, size))
    return found


def outside(kernel: Kernel, moved: Access, near: Collection[int]) -> Access:
    """Returns what a kernel moves through main memory."""
    read, written = (
        sum(size for value, size in sizes.items() if value in near)
        for sizes in (kernel.reads, kernel.writes)
    )
    return dataclasses.replace(
        moved,
        read=moved.read - int((1 - LEFT) * min(read, moved.read)),
        written=moved.written - int((1 - LEFT) * min(written, moved.written)),
    )
