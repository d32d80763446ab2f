"""What one instruction costs."""

from __future__ import annotations

import dataclasses

# How far off each kind of kernel may be, as a share of its time: what was seen on an H200.
SPREAD = {
    "product": 0.06,
    "wide product": 0.1,  # of float32 and wider
    "attention": 0.12,
    "convolution": 0.12,
    "memory": 0.1,
    "scalar": 0.15,
    "launch": 0.25,
    "collective": 0.2,
    "cycles": 0.1,
    "unknown": 1.0,
}

# What draws so much power that a GPU lowers its clock: the shares that count, by kind.
HOT = {"product": 1.0, "attention": 0.5}


@dataclasses.dataclass(frozen=True, slots=True)
class Price:
    """What one run of an instruction costs.

    Attributes:
        seconds: how long it takes alone.
        kind: what sets its time: a key of `SPREAD`.
        bytes: bytes of main memory that it reads and writes; of a collective, those of the larger of
            its operand and its result on one device.
        flops: its floating-point operations.
        known: whether there is a model for it; if not, `seconds` is a lower bound.
        gap: seconds that the device then waits for the next launch.
    """

    seconds: float
    kind: str
    bytes: int = 0
    flops: int = 0
    known: bool = True
    gap: float = 0.0

    @property
    def bound(self) -> str:
        """What it waits for: `compute`, `memory`, `launch` or `communication`."""
        return {
            "product": "compute",
            "wide product": "compute",
            "attention": "compute",
            "convolution": "compute",
            "scalar": "compute",
            "cycles": "compute",
            "memory": "memory",
            "launch": "launch",
            "collective": "communication",
        }.get(self.kind, "unknown")


FREE = Price(0.0, "launch")
