"""What arrays of attention heads take in a TPU's memory, where each row fills whole registers.

Attention kernels read and write rows of one head, so that the compiler cannot choose another order of
dims for what comes before and after them. Two halves of a head that are rotated are arrays of
their own, which are written and read again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ...._hlo import Access, Shape
from ..graph import Kernel
from .filters import LANES


def filled(dims: Sequence[int]) -> float:
    """Returns how much larger an array is whose rows fill whole registers, in the best order."""
    return min((-(-n // LANES) * LANES / n for n in dims if n > 1), default=1.0)


def heads_of(kernels: Sequence[Kernel], shapes: Mapping[int, Shape]) -> set[int]:
    """Returns the sizes of the heads that attention kernels read and write, up to a register's."""
    found = set()
    for kernel in kernels:
        if kernel.op.kind == "custom_call":
            each = [shapes[value].dims for value in (*kernel.reads, *kernel.writes)]
            found |= {dims[-1] for dims in each if len(dims) >= 4 and 1 < dims[-1] <= LANES}
    return found


def padded(kernel: Kernel, shapes: Mapping[int, Shape], heads: Collection[int]) -> Access:
    """Returns what a kernel moves through memory, with rows of heads that fill registers."""
    if not heads:
        return kernel.access
    # The halves are as precise as what is made of them.
    made = min((shapes[v].nbytes // max(1, shapes[v].size) for v in kernel.writes), default=0)
    halves = 0
    for op in kernel.ops:
        if op.kind != "concatenate" or _row(shapes[op.results[0]]) not in heads:
            continue
        for value in op.operands:
            if _row(shapes[value]) < _row(shapes[op.results[0]]):
                halves += shapes[value].size * made * LANES // _row(shapes[value])
    access = kernel.access
    read, written = (
        sum(
            size * LANES // _row(shapes[value]) if _row(shapes[value]) in heads else size
            for value, size in sizes.items()
        )
        for sizes in (kernel.reads, kernel.writes)
    )
    return Access(read + halves, written + halves, access.operations)


def _row(shape: Shape) -> int:
    """Returns the size of the last dim; that of a register for arrays of one or two dims."""
    return shape.dims[-1] if len(shape.dims) >= 3 and shape.dims[-1] else LANES
