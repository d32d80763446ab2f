"""Kernels that a compiler fuses though each writes a value of its own."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..program import Op, dims_of
from .graph import Kernel, join, levels_of, makers_of, waits_for

if TYPE_CHECKING:
    from .fused import Block

# A row of a normalisation that one kernel still holds.
_ROW = 16384
# A gather that takes less than this part of an array is computed with what else reads it.
_FEW = 64


class Merger:
    """Merges the kernels of a block."""

    def __init__(self, block: Block):
        """Takes the block, for its shapes and the orders of its dims."""
        self.block = block

    def merged(self, kernels: list[Kernel]) -> list[Kernel]:
        """Returns the kernels with those in one that a compiler fuses though each writes a value."""
        for _ in range(4):
            before = len(kernels)
            kernels = self._siblings(self._rows(kernels))
            if len(kernels) == before:
                break
        if not self.block.gpu:
            return kernels
        return self._updated(self._added(self._picked(self._columns(kernels))))

    def _updated(self, kernels: list[Kernel]) -> list[Kernel]:
        """Merges casts of parameters with their updates, if these do not depend on what is cast.

        As of filters that the gradient of a convolution reads in reverse, which are not cast, then,
        before the sum of their own gradient has come.
        """
        owner = makers_of(kernels)
        given: dict[int, list[Kernel]] = defaultdict(list)
        for kernel in kernels:
            for value in kernel.reads if not kernel.heavy else ():
                if value not in owner:
                    given[value].append(kernel)
        gone: set[Kernel] = set()
        for kernel in kernels:
            if kernel.heavy or not kernel.size or len(kernel.reads) != 1:
                continue
            (value,) = kernel.reads
            cast = owner.get(value)
            if cast is not None and not cast.heavy and len(cast.reads) == 1:
                (value,) = cast.reads
            for other in given[value]:
                alike = other is not kernel and other is not cast and other.size == kernel.size
                if alike and other not in gone and not waits_for(other.reads, kernel, owner):
                    kernel.reads = {value: other.reads[value]}
                    join(other, kernel, set(), keep=True)
                    owner |= dict.fromkeys(kernel.writes, other)
                    gone.add(kernel)
                    break
        return [kernel for kernel in kernels if kernel not in gone]

    def _added(self, kernels: list[Kernel]) -> list[Kernel]:
        """Merges scatters with what makes the updates that they alone read."""
        owner = makers_of(kernels)
        users = Counter(value for kernel in kernels for value in kernel.reads)
        gone: set[Kernel] = set()
        for kernel in kernels:
            if kernel.op.kind != "scatter":
                continue
            todo = list(kernel.reads)
            while todo:
                value = todo.pop()
                made = owner.get(value)
                if made is None or users[value] != 1 or len(made.writes) != 1:
                    continue
                light = not made.heavy or made.op.kind == "gather"
                if light and self.block.root(value) not in self.block.outputs:
                    del kernel.reads[value]
                    todo += made.reads
                    kernel.reads = made.reads | kernel.reads
                    kernel.ops = [*made.ops, *kernel.ops]
                    gone.add(made)
        return [kernel for kernel in kernels if kernel not in gone]

    def _picked(self, kernels: list[Kernel]) -> list[Kernel]:
        """Merges gathers of few elements with what reads the array too."""
        owner = makers_of(kernels)
        gone: set[Kernel] = set()
        for kernel in kernels:
            if kernel.op.kind != "gather":
                continue
            source, few = (
                self.block.root(kernel.op.operands[0]),
                kernel.writes[kernel.op.results[0]],
            )
            if source in owner and _FEW * few <= self.block.nbytes(source):
                near = (k for k in kernels if not k.heavy and source in k.reads)
                if _join_first(kernel, near, owner):
                    gone.add(kernel)
        return [kernel for kernel in kernels if kernel not in gone]

    def _columns(self, kernels: list[Kernel]) -> list[Kernel]:
        """Merges sums over columns with what writes an array of the same elements."""
        owner = makers_of(kernels)
        gone: set[Kernel] = set()
        for kernel in kernels:
            if kernel.op.kind != "reduce" or not kernel.size or self._by_row(kernel.op):
                continue
            near = (
                other
                for other in kernels
                if not other.heavy and other.size == kernel.size and other.op.kind != "reduce"
                if 0 < sum(kernel.reads.values()) <= 2 * _shared(kernel, other)
            )
            if _join_first(kernel, near, owner):
                gone.add(kernel)
        return [kernel for kernel in kernels if kernel not in gone]

    def _rows(self, kernels: list[Kernel]) -> list[Kernel]:
        """Merges kernels with those that read their results next, over the same elements.

        A reduction of rows, with the kernel that reads the rows again (as in a softmax); and what
        writes an array, with a reduction of it.
        """
        readers: dict[int, list[Kernel]] = defaultdict(list)
        owner = makers_of(kernels)
        for kernel in kernels:
            for value in kernel.reads:
                readers[value].append(kernel)
        gone: set[Kernel] = set()
        for kernel in kernels:
            if kernel.heavy or not kernel.size:
                continue
            made = set(kernel.writes)
            found = dict.fromkeys(k for value in made for k in readers[value])
            users = [k for k in found if k is not kernel and k not in gone]
            alike = [k for k in users if not k.heavy and k.size == kernel.size]
            reduces = kernel.op.kind == "reduce"
            if reduces:
                if not self._by_row(kernel.op):
                    continue
                if len(users) > 1:
                    alike = [k for k in alike if k.op.kind == "reduce" and self._by_row(k.op)]
            else:
                alike = [k for k in alike if k.op.kind == "reduce"]
            for other in alike:
                rest = {v: n for v, n in other.reads.items() if v not in made}
                largest = max(kernel.reads.values(), default=0)
                new = any(8 * n > largest and v not in kernel.reads for v, n in rest.items())
                if (reduces and new) or waits_for(rest, kernel, owner):
                    continue
                join(other, kernel, made, keep=len(users) > 1 or not reduces)
                gone.add(kernel)
                owner |= dict.fromkeys(kernel.writes, other)
                for value in kernel.reads:
                    others = [k for k in readers[value] if k is not kernel and k is not other]
                    readers[value] = [*others, other]
                break
        return [k for k in kernels if k not in gone]

    def _by_row(self, op: Op) -> bool:
        """Returns whether a reduction sums the fastest dims, few enough for one kernel to hold."""
        dims, source = dims_of(op, "dimensions"), op.operands[0]
        order = self.block.orders.of(source)
        row = math.prod(self.block.shapes[source].dims[d] for d in dims)
        return bool(dims) and set(order[len(order) - len(dims) :]) == set(dims) and row <= _ROW

    def _siblings(self, kernels: list[Kernel]) -> list[Kernel]:
        """Merges kernels that read the same arrays in the same shape, none waiting for another."""
        level = levels_of(kernels)
        places: dict[tuple[int, int], list[Kernel]] = defaultdict(list)
        kept = []
        # On TPUs also both moments of an update, which share a gradient of half their width.
        part = 2 if self.block.gpu else 3
        for kernel, at in zip(kernels, level, strict=True):
            if kernel.heavy or not kernel.size:
                kept.append(kernel)
                continue
            for other in places[at, kernel.size]:
                if self.block.gpu and self._sums_alike(kernel, other) is False:
                    continue  # rows are summed in one kernel, columns in another
                shared = _shared(kernel, other)
                if part * shared >= sum(kernel.reads.values()) and shared:
                    join(other, kernel, set(), keep=True)
                    break
            else:
                places[at, kernel.size].append(kernel)
                kept.append(kernel)
        return kept

    def _sums_alike(self, kernel: Kernel, other: Kernel) -> bool | None:
        """Returns whether two sums are both of rows or both of columns; None if one is no sum."""
        if kernel.op.kind != "reduce" or other.op.kind != "reduce":
            return None
        return self._by_row(kernel.op) == self._by_row(other.op)


def _join_first(kernel: Kernel, others: Iterable[Kernel], owner: dict[int, Kernel]) -> bool:
    """Joins a kernel to the first other one if neither waits for the other; returns whether it did."""
    for other in others:
        if not waits_for(other.reads, kernel, owner) and not waits_for(kernel.reads, other, owner):
            join(other, kernel, set(), keep=True)
            owner.update(dict.fromkeys(kernel.writes, other))
            return True
    return False


def _shared(kernel: Kernel, other: Kernel) -> int:
    """Returns the bytes that a kernel reads and another one too."""
    return sum(size for value, size in kernel.reads.items() if value in other.reads)
