"""A kernel, collective or loop of a step, and which kernels wait for which."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..._hlo import Access, Shape
from ..program import Op

if TYPE_CHECKING:
    from .tpu import Cut

COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"}


@dataclasses.dataclass(slots=True, eq=False)
class Kernel:
    """One kernel, collective or loop.

    Attributes:
        ops: its operations.
        heavy: whether it is a single operation that is never fused.
        reads: the values that it reads, each with the bytes of it that are read.
        writes: the values that it writes, each with its bytes.
        operations: its scalar operations.
        size: the elements that it iterates over.
        level: how late it can run.
        windowed: in how many parts it is computed while shards travel; 0 if it is not.
        permutes: how many permutes of a shard stand for a collective that is windowed.
        summed: whether these parts are added up.
        partners: the windowed collectives of a product.
        cut: the activations that a convolution in parts has in pieces.
        repeats: how often a gather runs, for uses that are far from each other.
        absorbed: whether a product next to it does most of its work (on a TPU).
    """

    ops: list[Op]
    heavy: bool
    reads: dict[int, int] = dataclasses.field(default_factory=dict)
    writes: dict[int, int] = dataclasses.field(default_factory=dict)
    operations: int = 0
    size: int = 0
    level: int = 0
    windowed: int = 0
    permutes: int = 0
    repeats: int = 1
    summed: bool = False
    absorbed: bool = False
    partners: list[Kernel] = dataclasses.field(default_factory=list)
    cut: Cut | None = None

    @property
    def op(self) -> Op:
        """Its last operation."""
        return self.ops[-1]

    @property
    def access(self) -> Access:
        """What it moves through memory."""
        return Access(sum(self.reads.values()), sum(self.writes.values()), self.operations)


def makers_of(kernels: Sequence[Kernel]) -> dict[int, Kernel]:
    """Returns what makes each value in memory."""
    owner = {value: kernel for kernel in kernels if kernel.heavy for value in kernel.op.results}
    return owner | {value: kernel for kernel in kernels for value in kernel.writes}


def waits_for(values: Iterable[int], kernel: Kernel, owner: Mapping[int, Kernel]) -> bool:
    """Returns whether some values are made of what a kernel makes, through any others."""
    todo = [owner[value] for value in values if value in owner]
    seen = set(todo)
    while todo:
        each = todo.pop()
        if each is kernel:
            return True
        near = {owner[value] for value in each.reads if value in owner} - seen
        seen |= near
        todo += near
    return False


def join(into: Kernel, kernel: Kernel, made: set[int], *, keep: bool) -> None:
    for value in made:
        into.reads.pop(value, None)
    for value, size in kernel.reads.items():
        into.reads[value] = max(into.reads.get(value, 0), size)
    into.operations += kernel.operations
    into.ops = [*kernel.ops, *into.ops]
    if keep:
        into.writes |= kernel.writes
    elif not into.writes.keys() & kernel.writes.keys():
        into.writes |= {value: 0 for value in kernel.writes}


def neighbours(kernels: Sequence[Kernel]) -> tuple[list[set[int]], list[set[int]]]:
    """Returns for each kernel the numbers of those that it waits for, and of those that wait for it."""
    owner = {value: i for i, k in enumerate(kernels) for op in k.ops for value in op.results}
    owner |= {value: i for i, k in enumerate(kernels) for value in k.writes}
    before: list[set[int]] = [set() for _ in kernels]
    after: list[set[int]] = [set() for _ in kernels]
    for i, kernel in enumerate(kernels):
        for value in kernel.reads:
            j = owner.get(value)
            if j is not None and j != i:
                before[i].add(j)
                after[j].add(i)
    return before, after


def levels_of(kernels: list[Kernel]) -> list[int]:
    """Returns for each kernel the length of the longest chain that it waits for."""
    before, after = neighbours(kernels)
    waiting = [len(b) for b in before]
    ready = [i for i, n in enumerate(waiting) if not n]
    level = [0] * len(kernels)
    while ready:
        i = ready.pop()
        for j in after[i]:
            level[j] = max(level[j], level[i] + 1)
            waiting[j] -= 1
            if not waiting[j]:
                ready.append(j)
    return level


def captured(loop: Op) -> set[int]:
    """Returns the values that a loop's body reads from outside, other than its arguments."""
    inside = set(loop.inside)
    used: set[int] = set()
    for op in loop.body:
        used |= set(op.operands)
        inside |= set(op.results)
        if op.kind == "while":
            used |= captured(op)
    return used - inside


def size_of(shapes: dict[int, Shape], op: Op) -> int:
    """Returns the bytes of the larger of what a collective takes and gives."""
    taken = sum(shapes[v].nbytes for v in op.operands)
    return max(taken, sum(shapes[v].nbytes for v in op.results))
