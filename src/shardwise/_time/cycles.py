"""Prices instructions of a program compiled for TPUs, by the compiler's own estimate of cycles."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from .._chips import Chips
from .._hlo import Access, Instruction, Module, Shape, access_of, flops_of, target_of
from .links import Torus
from .pricing import FREE, Price

# Cycles per second. Where the rate of a large product was measured (v6e 827, tpu7x 956 TFLOP/s), that
# rate divided by the flops per cycle that the compiler estimates for it. Elsewhere the chip's own
# clock, its peak divided by the multiply-adds of its arrays: the compiler's estimate for a large
# product is then 90% to 92% of the peak, as measured on v6e. (With XLA's own peak in its place,
# products on v5e ran at 205 of at most 197 TFLOP/s.)
CLOCKS = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 2.24e9, "tpu7x": 2.26e9}
# The flops per cycle that the compiler estimates for a large bfloat16 product.
PER_CYCLE = {"v4": 243e3, "v5e": 115e3, "v5p": 236e3, "v6e": 369e3, "tpu7x": 422e3}
# What attention kernels reach of a device's peak.
_ATTENTION = 0.5
_MEMORY_SHARE = 0.85
_START = 1e-6
# Of the bandwidth above, what the compiler's cycles for fusions without a product amount to
# (on v5p 1.0 to 1.7 TB/s).
_STREAMED = 0.5
# The same for what products of so few rows or columns read, and for what they write (1.4 and 0.6 TB/s).
_FEW, _READ, _WRITTEN = 512, 0.6, 0.27
# These only write: the compiler's estimate, 4 to 8 times what memory takes, is of no real kernel.
_FILLS = ("broadcast", "iota", "pad")
# The compiler writes the largest integer where it has none, as for sparse cores.
_NO_ESTIMATE = 2**62


class TpuPricer:
    """Prices each instruction of a module on one kind of TPU."""

    def __init__(self, module: Module, chips: Chips):
        """Takes the program and the chips."""
        self.module, self.chips = module, chips
        self.clock = CLOCKS[chips.chip.name]
        each = chips.chip.devices_per_chip
        self.peak = chips.chip.bf16_flops_per_second / each
        self.bandwidth = chips.chip.hbm_bytes_per_second / each * _MEMORY_SHARE

    def price(self, computation: str, instruction: Instruction) -> Price:
        """Returns what one run of an instruction costs, without what it calls in loops."""
        opcode = instruction.opcode
        if opcode in ("while", "conditional", "call"):
            return FREE
        access = access_of(self.module, computation, instruction)
        cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.rest)
        if opcode == "custom-call":
            flops = flops_of(self.module, computation, instruction)
            if flops:
                seconds = max(flops / (_ATTENTION * self.peak), access.total / self.bandwidth)
                return Price(_START + seconds, "attention", access.total, flops)
            if flops is None and "tpu_custom_call" in target_of(instruction):
                seconds = _START + access.total / self.bandwidth
                return Price(seconds, "unknown", access.total, 0, known=False)
            return FREE
        if cycles is not None and int(cycles[1]) < _NO_ESTIMATE:
            flops = self._flops(computation, instruction)
            seconds = int(cycles[1]) / self.clock
            streamed = access.total / self.bandwidth
            if opcode in _FILLS:
                seconds = min(seconds, _START + streamed)
            memory = streamed > 0.6 * seconds and flops < 0.3 * seconds * self.peak
            return Price(seconds, "memory" if memory else "cycles", access.total, flops)
        if opcode in ("copy-start", "copy-done", "slice-start") or not access.total:
            # Moves between memories, which the compiler hides behind other work.
            return FREE
        return Price(access.total / self.bandwidth, "memory", access.total)

    def streamed(self, access: Access, penalty: float) -> Price:
        """Returns the price of a fusion that streams through memory.

        Slower than memory allows, as the compiler estimates them: see `_STREAMED`.
        """
        moved = penalty * access.total / (_STREAMED * self.bandwidth)
        return Price(_START + moved, "memory", access.total)

    def dot(self, shapes: list[Shape], numbers: list[list[int]], flops: int, moved: int) -> Price:
        """Returns the price of a product: contracted dims of both operands, batch dims of the first."""
        left, right = shapes[:2]
        contracted = math.prod(left.dims[d] for d in numbers[0])
        batch = math.prod(left.dims[d] for d in numbers[2])
        tile = 256 if self.chips.chip.name in ("v6e", "tpu7x") else 128
        filled = 1.0
        for size in (
            contracted,
            left.size // max(1, contracted * batch),
            right.size // max(1, contracted * batch),
        ):
            filled *= size / (-(-size // tile) * tile) if size > 8 else size / 8
        # Lanes that a short fastest dim leaves empty, such as heads of 64.
        filled *= min(1.0, max(1, min(left.dims[-1], right.dims[-1])) / 128)
        wide = 3.0 if left.nbytes > 2 * left.size else 1.0
        seconds = wide * flops / (0.9 * self.clock * PER_CYCLE[self.chips.chip.name] * filled)
        streamed = moved / self.bandwidth
        sides = [shape.size // max(1, contracted * batch) for shape in (left, right)]
        if batch == 1 and min(contracted, *sides) <= _FEW:
            # It takes what it takes to read and write them, as for the keys of a single head.
            written = min(moved, math.prod(sides) * left.nbytes // max(1, left.size))
            streamed = ((moved - written) / _READ + written / _WRITTEN) / self.bandwidth
        kind = "memory" if streamed > seconds else "cycles"
        return Price(_START + max(seconds, streamed), kind, moved, flops)

    def estimates(self, fusion: Instruction) -> bool:
        """Returns whether a fusion with a collective in it computes something too."""
        return '"estimated_cycles":"' in fusion.rest

    def _flops(self, computation: str, instruction: Instruction) -> int:
        own = flops_of(self.module, computation, instruction) or 0
        if instruction.opcode == "fusion" and instruction.called:
            inner = instruction.called[0]
            for i in self.module.computations.get(inner, ()):
                own += flops_of(self.module, inner, i) or 0
        return own


@dataclasses.dataclass(frozen=True, eq=False)
class _Device:
    """What JAX asks a TPU when it arranges a mesh."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"
    process_index: int = 0
    slice_index: int = 0


def torus_of(chips: Chips, mesh: Mapping[str, int]) -> Torus:
    """Returns where each device of a mesh lies, as JAX arranges a mesh on these chips.

    Of several slices, one: all are alike.
    """
    from jax.experimental import mesh_utils

    sizes = (*chips.topology, 1)[:3]
    if len(chips.topology) == 3:
        # Cubes of 4 x 4 x 4 chips are joined by optical switches into rings.
        whole = all(size % 4 == 0 for size in sizes)
        wraps = tuple(whole for _ in sizes)
    else:
        wraps = tuple(size >= 16 for size in sizes)
    places = [place[::-1] for place in np.ndindex(*reversed(sizes))]
    devices = [
        _Device(number, tuple(int(x) for x in place), core, chips.chip.kind)
        for number, (place, core) in enumerate(
            (place, core) for place in places for core in range(chips.chip.devices_per_chip)
        )
    ]
    given = cast(list[Any], devices)
    across = chips.slices_by_axis(tuple(mesh.values()))
    shape = tuple(size // n for size, n in zip(mesh.values(), across, strict=True))
    try:
        made = mesh_utils.create_device_mesh(shape, given)
    except NotImplementedError:  # the axes do not match the torus
        made = mesh_utils.create_device_mesh(shape, given, allow_split_physical_axes=True)
    return Torus(tuple(device.coords for device in made.flat), sizes, wraps)
