"""The large buffers of a compiled program: what is alive at its memory peak, and why.

If the compiler reports its buffers, they are used as they are. Otherwise the buffers alive at the
peak are derived from the order in which the program runs, and labelled as modelled.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection

from .._base import show_bytes
from .._hlo import Module, Source
from .lifetimes import Lifetimes
from .writers import source_of_value


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


OTHER = "other"


def largest_buffers(
    module: Module,
    paths: Collection[str],
    lifetimes: Lifetimes,
    total: int | None,
    most: int = 10,
) -> list[Buffer]:
    """Returns the temporaries alive at the peak, largest first.

    Args:
        module: the program.
        paths: the paths of the model's modules.
        lifetimes: when each temporary is alive.
        total: the bytes of all temporaries: the rows never add up to more, and the last row is the
            rest: small ones, padding, and on a TPU its code and on-chip memory.
        most: how many rows to return before that last row.
    """
    counted: Counter[tuple[str, int, Source]] = Counter()
    homes = lifetimes.homes(module)
    for value in lifetimes.alive(lifetimes.peak()[1]):
        counted[value.shape, value.bytes, source_of_value(module, homes, value, paths)] += 1
    rows = [
        Buffer(shape, size, n, source, lifetimes.label)
        for (shape, size, source), n in counted.items()
    ]
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
        kept.append(Buffer(OTHER, left, 1, Source("", "", "", False), lifetimes.label))
    return kept


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
