"""How long a step takes, and why: the parts of a schedule."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .._base import public, show_seconds, text_table
from .._chips import Chips
from .._hlo import Module, cause_of
from .calibration import Calibration
from .cycles import TpuPricer, torus_of
from .links import Link, gpu_seconds, slices_seconds
from .pricing import HOT, SPREAD, GpuPricer, GpuRates, Price, gpu_rates
from .schedule import COMPUTE, Schedule, Slice

# A step is launched by the host; what the device waits for in between.
PARTS = ("compute", "memory", "communication", "launch", "unknown")


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """A part of a step's time.

    Attributes:
        name: what it is: a module, a line, or an instruction.
        seconds: its time on the compute stream, and communication that is waited for (modelled).
        flops: its floating-point operations.
        bytes: bytes of main memory that it reads and writes; of collectives, those of the larger of
            operand and result on one device.
    """

    name: str
    seconds: float
    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Communication:
    """The communication over one set of mesh axes.

    Attributes:
        axes: the mesh axes.
        link: what it runs over: `nvlink`, `network`, `ici` or, between slices, `dcn`.
        seconds: its time on the link (modelled).
        exposed: the part of it that the compute stream waits for.
    """

    axes: tuple[str, ...]
    link: str
    seconds: float
    exposed: float

    @property
    def overlapped(self) -> float:
        """The part that is hidden behind other work."""
        return max(0.0, self.seconds - self.exposed)


def mfu_of(model_flops: int, seconds: float, peak_flops: float) -> float:
    """Returns the share of a device's peak that operations of the model use."""
    return model_flops / (seconds * peak_flops) if seconds else 0.0


def rate_of(tokens: int | None, seconds: float) -> float | None:
    """Returns tokens per second; None for a step without tokens."""
    return tokens / seconds if tokens and seconds else None


def largest(seconds: Mapping[str, float]) -> str:
    """Returns the part with the most seconds."""
    return max(seconds, key=lambda name: seconds[name]) if seconds else "unknown"


def is_recomputed(name: str) -> bool:
    """Returns whether the operation of this name repeats one of the forward pass."""
    return "rematted_computation" in name


@public
@dataclasses.dataclass(frozen=True)
class StepTime:
    """How long one step takes (modelled). The `time` of `sw.compile`'s result.

    Attributes:
        seconds: one step.
        low: seconds that it takes at least, if the models err as far as they were seen to.
        high: seconds that it takes at most.
        parts: how the seconds divide: `compute`, `memory`, `communication` (exposed), `launch`,
            `unknown`.
        communication: by mesh axes and link, exposed and overlapped.
        gains: seconds that the step would gain if a part were free.
        tokens: tokens in a global batch; None if the batch has none.
        model_flops: floating-point operations of one device, without recomputation.
        peak_flops: the device's peak per second, in bfloat16.
        modules: by module of the model, longest first.
        lines: by line of the user's code, longest first.
        instructions: by instruction of the program, longest first.
        unpriced: kernels that no model knows, by name, with how many times a step runs each; the
            bounds are widened for them.
        rates: where the speeds come from.
    """

    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    communication: tuple[Communication, ...]
    gains: dict[str, float]
    tokens: int | None
    model_flops: int
    peak_flops: float
    modules: tuple[Share, ...] = ()
    lines: tuple[Share, ...] = ()
    instructions: tuple[Share, ...] = ()
    unpriced: dict[str, int] = dataclasses.field(default_factory=dict)
    rates: str = ""

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
        """The part that the step would gain most from, if it were free."""
        return largest(self.gains)

    @property
    def verdict(self) -> str:
        """How long a step takes, in one sentence."""
        text = (
            f"{show_seconds(self.seconds)} per step "
            f"({show_seconds(self.low)} to {show_seconds(self.high)}, modelled)"
        )
        if self.tokens_per_second is not None:
            text += f", {self.tokens_per_second:,.0f} tokens/s"
        return f"{text}, {self.mfu:.0%} MFU, bound by {self.bound}"

    def __str__(self) -> str:
        """Returns the verdict, the parts, communication by axis, and the longest lines."""
        gains = self.gains
        rows = [
            (
                name,
                show_seconds(seconds),
                f"{seconds / self.seconds:.0%}" if self.seconds else "",
                show_seconds(gains[name]) if name in gains else "",
            )
            for name, seconds in self.parts.items()
            if seconds
        ]
        head = ("time of a step (modelled)", "seconds", "", "gained if free")
        blocks = [self.verdict, text_table(head, rows, right=(1, 2, 3))]
        if self.communication:
            rows = [
                (
                    ",".join(row.axes) or "no axis",
                    row.link,
                    show_seconds(row.seconds),
                    show_seconds(row.exposed),
                    show_seconds(row.overlapped),
                )
                for row in self.communication
            ]
            head = ("communication over", "link", "seconds", "exposed", "overlapped")
            blocks.append(text_table(head, rows, right=(2, 3, 4)))
        for title, shares in (("module", self.modules), ("line", self.lines)):
            rows = [
                (
                    share.name,
                    show_seconds(share.seconds),
                    f"{share.seconds / self.seconds:.0%}" if self.seconds else "",
                )
                for share in shares[:8]
            ]
            if rows:
                blocks.append(text_table((title, "seconds", ""), rows, right=(1, 2)))
        if self.unpriced:
            names = ", ".join(f"{n} ×{k}" if k > 1 else n for n, k in self.unpriced.items())
            blocks.append(f"priced by the memory they move alone: {names}")
        blocks.append(f"rates: {self.rates}")
        return "\n\n".join(blocks)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain data that `shardwise compile --format json` prints."""
        return {
            **{
                name: getattr(self, name)
                for name in (
                    "seconds", "low", "high", "parts", "gains", "bound", "tokens",
                    "tokens_per_second", "model_flops", "peak_flops", "mfu", "unpriced", "rates",
                )
            },
            "communication": [
                {**dataclasses.asdict(row), "axes": list(row.axes), "overlapped": row.overlapped}
                for row in self.communication
            ],
            **{
                name: [dataclasses.asdict(share) for share in getattr(self, name)[:100]]
                for name in ("modules", "lines", "instructions")
            },
        }  # fmt: skip

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> StepTime:
        """Returns the time that `to_dict` wrote."""
        names = {field.name for field in dataclasses.fields(cls)}
        given = {name: value for name, value in found.items() if name in names}
        given["communication"] = tuple(
            Communication(tuple(row["axes"]), row["link"], row["seconds"], row["exposed"])
            for row in found["communication"]
        )
        for name in ("modules", "lines", "instructions"):
            given[name] = tuple(Share(**row) for row in found[name])
        return cls(**given)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The chips that a program is priced on, and where its devices lie.

    Attributes:
        chips: the chips.
        mesh: the sizes of the mesh's axes by name.
        calibration: what was measured on devices of this kind, in place of the shipped rates.
    """

    chips: Chips
    mesh: Mapping[str, int]
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        """Rejects a calibration of other chips."""
        found = self.calibration
        if found is not None and found.chip != self.chips.chip.name:
            raise ValueError(
                f"the calibration is of {found.chip} ({found.device}), but the chips are "
                f"{self.chips}: measure one of those, or leave the calibration out"
            )

    @functools.cached_property
    def gpu(self) -> GpuRates | None:
        """The speeds of the GPUs; None for TPUs."""
        if self.chips.platform != "gpu":
            return None
        if self.calibration is not None:
            return self.calibration.rates
        return gpu_rates(self.chips.chip.name)

    @property
    def source(self) -> str:
        """Where the speeds come from."""
        if self.gpu is not None:
            return f"{self.gpu.label}, {self.gpu.source}"
        return f"the compiler's cycle estimates for {self.chips.chip.kind}; links by datasheet"

    @property
    def peak_flops(self) -> float:
        """Floating-point operations per second of one device, in bfloat16."""
        return self.chips.chip.bf16_flops_per_second / self.chips.chip.devices_per_chip

    def pricer(self, module: Module) -> GpuPricer | TpuPricer:
        """Returns what prices the instructions of a program on these chips."""
        if self.gpu is not None:
            return GpuPricer(module, self.gpu)
        return TpuPricer(module, self.chips)

    def link(self, kind: str, size: float, groups: Sequence[Sequence[int]]) -> Link:
        """Returns how long a collective takes, and what it runs over."""
        if self.gpu is not None:
            found = gpu_seconds(self.chips, kind, size, groups)
            known = (
                self.calibration.collective(kind, len(groups[0]), size)
                if self.calibration
                else None
            )
            if known is not None and found.name == "nvlink":
                return Link(found.name, known)
            return found
        return slices_seconds(self.chips, self._torus, kind, size, groups)

    def extents(self, group: Sequence[int]) -> tuple[int, ...]:
        """Returns how many places a group of TPUs of one slice spans along each dim of its torus."""
        local = self.chips.device_count // self.chips.slices
        inside = [device % local for device in group]
        return tuple(extent for extent, _ in self._torus.spans(inside))

    def schedule(self, module: Module, scale: Any = None) -> Schedule:
        """Returns one step of a program on these chips."""
        return Schedule(
            module,
            self.pricer(module),
            self.link,
            self.mesh,
            iteration=self.gpu.iteration if self.gpu is not None else 0.0,
            scale=scale or (lambda price: 1.0),
        )

    def spent(self, module: Module) -> dict[str, float]:
        """Returns the seconds that a step takes for each instruction of a program, by name.

        They add up to the step, but for the launch of each iteration of a loop.
        """
        found: dict[str, float] = defaultdict(float)
        for s in self.throttled(module).slices:
            found[_standing(module, s)] += (
                s.seconds if s.stream == COMPUTE else s.exposed
            ) * s.times
        return dict(found)

    def at_least(self, seconds: float) -> float:
        """Returns the seconds of a step, or what it takes to launch one."""
        return max(seconds, self.gpu.dispatch) if self.gpu is not None else seconds

    def throttled(self, module: Module) -> Schedule:
        """Returns one step of a program on these chips, within their power limits."""
        slower = _throttled(self, self.schedule(module))
        return self.schedule(module, lambda p: slower if p.kind in HOT else 1.0)

    @functools.cached_property
    def _torus(self) -> Any:
        return torus_of(self.chips, self.mesh)


def _standing(module: Module, s: Slice) -> str:
    """Returns the name of an instruction; of a collective in a fusion, that of the fusion."""
    caller = module.callers.get(s.computation)
    return caller[1].name if caller and caller[1].opcode == "fusion" else s.instruction.name


def _throttled(machine: Machine, first: Schedule) -> float:
    """Returns the factor by which what draws most power slows down in a step that does little else."""
    if machine.gpu is None or not first.seconds:
        return 1.0
    total = sum(s.seconds * s.times for s in first.slices if s.stream == COMPUTE)
    hot = sum(HOT.get(s.price.kind, 0.0) * s.seconds * s.times for s in first.slices)
    return machine.gpu.slowdown(hot / total if total else 0.0)


def time_of(
    module: Module, machine: Machine, paths: Collection[str], tokens: int | None
) -> StepTime:
    """Returns how long one step of a program takes on some chips."""
    slower = _throttled(machine, machine.schedule(module))

    def scaled(price: Price) -> float:
        return slower if price.kind in HOT else 1.0

    schedule = machine.schedule(module, scaled)
    seconds = machine.at_least(schedule.seconds)
    parts = _parts(schedule, seconds)
    gains = {}
    for name in ("compute", "memory", "communication"):
        if parts.get(name, 0.0) or name == "communication" and schedule.links:
            free = machine.schedule(
                module, lambda price, name=name: 0.0 if price.bound == name else scaled(price)
            )
            gains[name] = max(0.0, schedule.seconds - free.seconds)
    low, high = _bounds(schedule, seconds)
    unpriced: Counter[str] = Counter()
    for s in schedule.slices:
        if not s.price.known:
            unpriced[_called(s)] += s.times
    shares = _shares(module, schedule, paths)
    return StepTime(
        seconds=seconds,
        low=low,
        high=high,
        parts=parts,
        communication=_communication(schedule),
        gains=gains,
        tokens=tokens,
        model_flops=sum(
            s.price.flops * s.times
            for s in schedule.slices
            if not is_recomputed(s.instruction.op_name)
        ),
        peak_flops=machine.peak_flops,
        modules=shares["modules"],
        lines=shares["lines"],
        instructions=shares["instructions"],
        unpriced=dict(unpriced),
        rates=machine.source,
    )


def _called(s: Slice) -> str:
    return s.instruction.op_name.rpartition("/")[2] or s.instruction.name


def _parts(schedule: Schedule, seconds: float) -> dict[str, float]:
    found: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for s in schedule.slices:
        if s.stream == COMPUTE:
            found[s.price.bound] += s.seconds * s.times
        else:
            found[s.price.bound] += s.exposed * s.times
    # The rest: iterations of loops, waits for the last transfer, and the launch of the step.
    found["launch"] += max(0.0, seconds - sum(found.values()))
    return {name: value for name, value in found.items() if value > 1e-9 * seconds}


def _communication(schedule: Schedule) -> tuple[Communication, ...]:
    found: dict[tuple[tuple[str, ...], str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for s in schedule.slices:
        if s.price.bound == "communication":
            row = found[s.axes, s.stream]
            row[0] += s.seconds * s.times
            row[1] += s.exposed * s.times
    rows = [Communication(axes, link, *row) for (axes, link), row in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _bounds(schedule: Schedule, seconds: float) -> tuple[float, float]:
    """Returns the bounds: each kind of work errs by itself, as far as it was seen to."""
    by_kind: dict[str, float] = defaultdict(float)
    for s in schedule.slices:
        spent = s.seconds if s.stream == COMPUTE else s.exposed
        by_kind[s.price.kind] += spent * s.times
    off = math.sqrt(
        sum((SPREAD[kind] * t) ** 2 for kind, t in by_kind.items() if kind != "unknown")
    )
    off = max(off, 0.04 * seconds)
    # A kernel that no model knows takes at least what its memory takes.
    return max(0.0, seconds - off), seconds + off + 10 * by_kind["unknown"]


def _shares(
    module: Module, schedule: Schedule, paths: Collection[str]
) -> dict[str, tuple[Share, ...]]:
    tables: dict[str, dict[str, list[float]]] = {
        name: defaultdict(lambda: [0.0, 0, 0]) for name in ("modules", "lines", "instructions")
    }
    known: dict[tuple[str, str], tuple[str, str, str]] = {}
    for s in schedule.slices:
        key = (s.computation, s.instruction.name)
        if key not in known:
            source = cause_of(module, s.computation, s.instruction, paths)
            known[key] = (source.module or source.op, source.place, s.instruction.name)
        spent = (s.seconds if s.stream == COMPUTE else s.exposed) * s.times
        for name, label in zip(tables, known[key], strict=True):
            if label:
                row = tables[name][label]
                row[0] += spent
                row[1] += s.price.flops * s.times
                row[2] += s.price.bytes * s.times
    return {
        name: tuple(
            sorted(
                (Share(label, row[0], int(row[1]), int(row[2])) for label, row in table.items()),
                key=lambda share: -share.seconds,
            )
        )
        for name, table in tables.items()
    }
