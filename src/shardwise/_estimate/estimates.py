"""What a step would take: its time and the memory that it needs, modelled."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .._base import public, show_bytes, show_seconds
from .._time import SPREAD, Machine, largest, mfu_of, rate_of
from .estimator import Estimator
from .program import Program

# What temporary arrays take, of those that are alive at once: what is lost between them, and copies.
_TPU_TEMPORARY, _GPU_TEMPORARY = 1.09, 1.02
# A TPU's program is in its memory: bytes of each kernel (140 to 170 kB in compiled steps).
_CODE = 150_000


@public
@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a step would take, without compiling it. Returned by `sw.estimate` (modelled).

    Attributes:
        chips: the chips.
        mesh: the sizes of the mesh's axes by name.
        seconds: one step.
        low: seconds that it takes at least, if the models err as far as they were seen to.
        high: seconds that it takes at most.
        parts: how the seconds divide: `compute`, `memory`, `communication` (exposed), `launch`,
            `unknown`.
        peak_bytes: the memory of one device at its peak.
        peak_bound: the peak if nothing that a compiler may free early is freed.
        capacity: what a program can use on one device.
        state_bytes: the share of the arguments: parameters, optimizer state, batch (exact); what is
            offloaded does not count.
        by_axis: by axes and kind, how many collectives a step runs and the bytes that each device
            sends in the ring model.
        lines: by line of the user's code, the seconds of collectives, longest first.
        flops: floating-point operations of one device in a step.
        model_flops: those without recomputation.
        tokens: tokens in a global batch; None if the batch has none.
        peak_flops: the device's peak per second, in bfloat16.
        unpriced: custom calls that no model knows, by name, with how many times a step runs each:
            `seconds` has the memory that they move and nothing of what they compute, and `high`
            ten times as much.
    """

    chips: str
    mesh: dict[str, int]
    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    peak_bytes: int
    peak_bound: int
    capacity: int
    state_bytes: int
    by_axis: dict[str, dict[str, tuple[int, int]]]
    lines: dict[str, float]
    flops: int
    model_flops: int
    tokens: int | None
    peak_flops: float
    unpriced: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def fits(self) -> bool | None:
        """Whether a device's memory holds it; None if only compiling can tell.

        True if the upper bound of the peak fits, False if the modelled peak itself does not. In
        between it fits by the estimate, and nobody knows yet whether it does.
        """
        if self.peak_bytes > self.capacity:
            return False
        return True if self.peak_bound <= self.capacity else None

    @property
    def mfu(self) -> float:
        """The share of the peak that the model's own operations use, without recomputation."""
        return mfu_of(self.model_flops, self.seconds, self.peak_flops)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the global batch per second."""
        return rate_of(self.tokens, self.seconds)

    @property
    def bound(self) -> str:
        """The largest part of the step; what each would gain if free, only a compiled step knows."""
        return largest(self.parts)

    @property
    def verdict(self) -> str:
        """Memory and time, in two lines, and what is not priced."""
        fits = {True: "fits", False: "does not fit", None: "may fit"}[self.fits]
        # Near its limit, the compiler computes some values again and orders others anew.
        near = self.fits is not True and self.peak_bytes < 2 * self.capacity
        unsure = "; compile to be sure" if near else ""
        text = (
            f"{fits}: needs about {show_bytes(self.peak_bytes)} of {show_bytes(self.capacity)} "
            f"(modelled; at most {show_bytes(self.peak_bound)}{unsure}), on {self.chips}\n"
            f"{show_seconds(self.seconds)} per step "
            f"({show_seconds(self.low)} to {show_seconds(self.high)}, modelled)"
        )
        if self.tokens_per_second is not None:
            text += f", {self.tokens_per_second:,.0f} tokens/s"
        text += f", mostly {self.bound}"
        if self.unpriced:
            names = ", ".join(f"{n} ×{k}" if k > 1 else n for n, k in self.unpriced.items())
            text += f"\nnot priced, only the memory that they move: {names}"
        return text

    def __str__(self) -> str:
        """Returns the verdict and the collectives by axis."""
        lines = [self.verdict]
        for axes, kinds in self.by_axis.items():
            counts = ", ".join(f"{count} {kind}" for kind, (count, _) in kinds.items())
            sent = sum(sent for _, sent in kinds.values())
            lines.append(
                f"over {axes}: {counts}; {show_bytes(sent)} sent by each device (modelled)"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain data that `--format json` prints."""
        found = dataclasses.asdict(self)
        found["by_axis"] = {
            axis: {kind: {"count": n, "bytes": b} for kind, (n, b) in kinds.items()}
            for axis, kinds in self.by_axis.items()
        }
        names = ("fits", "tokens_per_second", "mfu", "bound")
        return {**found, **{name: getattr(self, name) for name in names}}


def estimate_of(program: Program, machine: Machine, tokens: int | None) -> Estimate:
    """Returns what a partitioned step takes on some chips."""
    run = Estimator(program, machine).run()
    known = {kind: t for kind, t in run.kinds.items() if kind != "unknown"}
    off = math.sqrt(sum((1.5 * SPREAD[kind] * t) ** 2 for kind, t in known.items()))
    off = max(off, 0.08 * run.seconds)
    seconds = machine.at_least(run.seconds)
    temporary, code = _GPU_TEMPORARY, 0
    if machine.gpu is None:
        temporary, code = _TPU_TEMPORARY, _CODE * run.kernels
    state = sum(program.shapes[v].nbytes for v in program.arguments if v not in program.host)
    # State that is offloaded comes to the device in parts for its update (half of it, in Llama 3
    # 70B on 32 v6e chips).
    away = sum(program.shapes[v].nbytes for v in program.arguments if v in program.host) // 2
    table: dict[str, dict[str, tuple[int, int]]] = {}
    for (axes, kind), (count, sent) in run.traffic.items():
        table.setdefault(axes, {})[kind] = (count, sent)
    return Estimate(
        chips=str(machine.chips),
        mesh=dict(machine.mesh),
        seconds=seconds,
        low=max(0.0, seconds - off),
        high=seconds + off + 10 * run.kinds.get("unknown", 0.0),
        parts={name: value for name, value in run.parts.items() if value > 0},
        peak_bytes=state + away + int(temporary * run.peak) + code,
        peak_bound=state + 2 * away + int(temporary * run.bound) + code,
        capacity=machine.chips.chip.capacity_bytes,
        state_bytes=state,
        by_axis=table,
        lines=dict(sorted(run.lines.items(), key=lambda item: -item[1])),
        flops=run.flops,
        model_flops=run.flops - run.recomputed,
        tokens=tokens,
        peak_flops=machine.peak_flops,
        unpriced=dict(run.unpriced),
    )
