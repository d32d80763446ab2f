"""What a compiler reports about a step: memory, a verdict, collectives with their causes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._base import public, show_bytes, show_devices, show_flops, text_table, write_atomically
from .._check import Findings
from .._hlo import Collective, by_axis, parse_hlo
from .._layout import Layout
from .._memory import Buffer, LiveMemory
from .._time import Machine, StepTime, Timeline, timeline_of

if TYPE_CHECKING:
    from .._report import Report

FORMAT = 2
# JAX's default for XLA_PYTHON_CLIENT_MEM_FRACTION.
_GPU_SHARE = 0.75


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One part of a device's memory.

    Attributes:
        name: what it is.
        bytes: its size.
        label: how the size is known: `exact` or `compiled`.
    """

    name: str
    bytes: int
    label: str


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one device, in bytes.

    Attributes:
        arguments: the arguments of the step (compiled).
        outputs: its outputs (compiled).
        temporaries: its temporaries, and on a TPU its code (compiled).
        aliased: outputs that reuse the memory of arguments (compiled).
        peak: arguments + outputs - aliased + temporaries (compiled).
        capacity: what a program can use on one device, or None if unknown.
        parameters: the model's share of the arguments (exact).
        optimizer: the share of the optimizer state, including a moving average (exact).
        batch: the batch's share (exact).
        host_state: state of the device that is in the memory of its host, not in that of the device
            (exact).
        host_temporaries: temporaries there, such as offloaded activations (compiled).
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    peak: int
    capacity: int | None
    parameters: int
    optimizer: int
    batch: int
    host_state: int = 0
    host_temporaries: int = 0

    @property
    def parts(self) -> tuple[Part, ...]:
        """The peak, in parts."""
        known = [
            Part("parameters", self.parameters, "exact"),
            Part("optimizer", self.optimizer, "exact"),
            Part("batch", self.batch, "exact"),
            Part("temporaries", self.temporaries, "compiled"),
        ]
        # Outputs that do not reuse an argument's memory, and the padding of small arrays on a TPU.
        rest = self.peak - sum(part.bytes for part in known)
        known.append(Part("outputs and padding", max(0, rest), "compiled"))
        return tuple(part for part in known if part.bytes)


@public
@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step, compiled by the chips' own compiler. Returned by `sw.compile`.

    Attributes:
        chips: the chips, such as `v5p:4x8x8`, or JAX's name for the devices present.
        platform: their platform: `tpu`, `gpu` or `cpu`.
        mesh: the sizes of the mesh's axes by name.
        memory: the memory of one device; None if the compiler failed without reporting it.
        refused: why the compiler rejected the program, in its own words, or empty.
        stand_in: whether collectives, buffers, flops and traffic are those of the same step compiled
            for CPU devices, because the chips' compiler left no program behind.
        collectives: each with its axes, bytes, times and cause (compiled; bytes modelled).
        buffers: the largest temporaries alive at the peak, with everything else in the last row;
            labelled `compiled` or `modelled`.
        flops: floating-point operations of one device in a step (compiled); None without a
            program.
        bytes_accessed: memory traffic of one device in a step (compiled); None without a program.
        findings: what only a compilation can show: SW301 to SW304.
        time: how long a step takes (modelled); None for chips without rates, or without a program.
        live: what is alive when in a step, by owner (lifetimes compiled, seconds modelled); None
            without a program.
        workspace_bound: how much more memory the workspaces of convolutions may take on the device,
            where their library chooses them (modelled).
        not_counted: the kernels whose flops are unknown and therefore not in `flops`, by name,
            with how many times a step runs each.
        noise: what the compiler printed.
        seconds: how long the compiler took.
        cached: whether the result came from the cache.
        hlo: the optimised program; not saved.
        layout: the layout that was compiled; not saved.
    """

    chips: str
    platform: str
    mesh: dict[str, int]
    memory: Memory | None
    refused: str
    collectives: tuple[Collective, ...]
    buffers: tuple[Buffer, ...]
    flops: int | None
    bytes_accessed: int | None
    findings: Findings
    stand_in: bool = False
    time: StepTime | None = None
    live: LiveMemory | None = None
    workspace_bound: int = 0
    not_counted: dict[str, int] = dataclasses.field(default_factory=dict)
    noise: str = dataclasses.field(default="", repr=False)
    seconds: float = 0.0
    cached: bool = False
    hlo: str = dataclasses.field(default="", repr=False)
    layout: Layout | None = dataclasses.field(default=None, repr=False, compare=False)
    machine: Machine | None = dataclasses.field(default=None, repr=False, compare=False)
    paths: tuple[str, ...] = dataclasses.field(default=(), repr=False, compare=False)

    def timeline(self) -> Timeline:
        """Returns when each instruction of the step runs (modelled), to open in Perfetto.

        Raises:
            ValueError: there is no program, or there are no rates for its chips.

        Example:
            >>> import jax, optax, shardwise as sw
            >>> from flax import nnx
            >>> make = lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0))
            >>> layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), "dp")
            >>> compiled = sw.compile(make, layout, inputs=jax.ShapeDtypeStruct((8, 64), "float32"))
            >>> compiled.timeline()
            Traceback (most recent call last):
            ...
            ValueError: there is no timeline for cpu: step times are modelled for GPUs and TPUs
        """
        if self.machine is None or not self.hlo:
            why = (
                "a saved compilation does not keep its program"
                if self.time is not None
                else "step times are modelled for GPUs and TPUs"
            )
            raise ValueError(f"there is no timeline for {self.chips}: {why}")
        module = parse_hlo(self.hlo)
        title = f"one step on one of {math.prod(self.mesh.values())} devices of {self.chips}"
        return timeline_of(module, self.machine.throttled(module), self.paths, title)

    @property
    def has_program(self) -> bool:
        """Whether there is a program; without one, an empty `collectives` means nothing."""
        return self.flops is not None

    @property
    def fits(self) -> bool | None:
        """Whether it fits into a device's memory; None if its capacity is unknown."""
        if self.refused:
            return False
        if self.memory is None or self.memory.capacity is None:
            return None
        # The TPU compiler rejects what does not fit, and only it knows what it can pack.
        return self.platform == "tpu" or self.memory.peak <= self.memory.capacity

    @property
    def spare_bytes(self) -> int | None:
        """How much of a device's memory is left; negative if it does not fit."""
        if self.memory is None or self.memory.capacity is None:
            return None
        return self.memory.capacity - self.memory.peak

    @property
    def by_axis(self) -> dict[str, dict[str, tuple[int, int]]]:
        """The count and the bytes of each kind of collective in a step, by axis."""
        return by_axis(self.collectives)

    @property
    def verdict(self) -> str:
        """Whether it fits, in one sentence."""
        where = f"{show_devices(math.prod(self.mesh.values()))} of {self.chips}"
        if self.memory is None and self.refused:
            return f"does not fit on {where}: {_one_line(self.refused)}"
        if self.memory is None:
            return f"needs unknown memory on {where}: the compiler does not report it"
        peak = show_bytes(self.memory.peak)
        if self.memory.capacity is None:
            return f"needs {peak} on {where} (compiled)"
        capacity = show_bytes(self.memory.capacity)
        spare = self.spare_bytes or 0
        if not self.fits:
            over = f", {show_bytes(-spare)} too much" if spare < 0 else ""
            return f"does not fit: needs {peak} of {capacity}{over}, on {where} (compiled)"
        left = f"{show_bytes(spare)} to spare" if spare >= 0 else "packed by the compiler"
        text = f"fits: needs {peak} of {capacity}, {left}, on {where} (compiled)"
        if (
            self.platform in ("gpu", "cuda")
            and self.memory.peak > _GPU_SHARE * self.memory.capacity
        ):
            share = min(0.98, self.memory.peak / self.memory.capacity + 0.02)
            text += (
                f"\nby default JAX uses {_GPU_SHARE:.0%} of a GPU's memory: set "
                f"XLA_PYTHON_CLIENT_MEM_FRACTION={share:.2f} or more"
            )
        return text

    def __str__(self) -> str:
        """Returns the verdict, memory, collectives by axis with their causes, and findings."""
        return f"{self.verdict}\n\n{self.details}"

    @property
    def note(self) -> str:
        """Which program causes and collectives come from, if not the one of the chips."""
        if not self.stand_in:
            return ""
        return (
            "The compiler left no program behind: collectives and temporaries below are not of the "
            "chips, but of the\nsame step compiled for as many CPU devices, which is partitioned in "
            "the same way but widens bfloat16\nand uses plain attention."
        )

    @property
    def details(self) -> str:
        """The text below the verdict: memory, collectives by axis, and findings."""
        parts = []
        if self.note:
            parts.append(self.note)
        if self.memory is not None:
            parts.append(_show_memory(self.memory, self.buffers, self.stand_in))
        if self.workspace_bound:
            parts.append(
                f"convolutions choose their workspace on the device: up to "
                f"{show_bytes(self.workspace_bound)} more at the peak (modelled)"
            )
        if self.collectives:
            parts.append(_show_collectives(self))
        elif self.has_program:
            parts.append("no collectives")
        else:
            parts.append("collectives, flops and memory traffic unknown: there is no program")
        if self.flops is not None and self.bytes_accessed is not None:
            text = (
                f"{show_flops(self.flops)} and {show_bytes(self.bytes_accessed)} of memory traffic "
                f"on each device in a step (compiled)"
            )
            if self.not_counted:
                text += f"\nflops not counted: {show_not_counted(self.not_counted)}"
            parts.append(text)
        if self.time is not None:
            parts.append(str(self.time))
        parts.append(str(self.findings) if self.findings else self.findings.summary)
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain data that `shardwise compile --format json` prints."""
        return {
            "format": FORMAT,
            "chips": self.chips,
            "platform": self.platform,
            "mesh": self.mesh,
            "fits": self.fits,
            "spare_bytes": self.spare_bytes,
            "verdict": self.verdict,
            "refused": self.refused,
            "stand_in": self.stand_in,
            "memory": dataclasses.asdict(self.memory) if self.memory else None,
            "buffers": [dataclasses.asdict(row) for row in self.buffers],
            "collectives": [
                {**dataclasses.asdict(row), "total_bytes": row.total_bytes, "crosses": row.crosses}
                for row in self.collectives
            ]
            if self.has_program
            else None,
            "by_axis": {
                axis: {kind: {"count": n, "bytes": b} for kind, (n, b) in kinds.items()}
                for axis, kinds in self.by_axis.items()
            }
            if self.has_program
            else None,
            "flops": self.flops,
            "not_counted": self.not_counted,
            "bytes_accessed": self.bytes_accessed,
            "workspace_bound": self.workspace_bound,
            "time": self.time.to_dict() if self.time is not None else None,
            "live": self.live.to_dict() if self.live is not None else None,
            "findings": [finding.to_dict() for finding in self.findings],
            "seconds": self.seconds,
            "cached": self.cached,
        }

    def report(self, *, against: Compiled | Layout | None = None) -> Report:
        """Returns one HTML page: the verdict, memory, time, the model, the mesh, and collectives.

        Args:
            against: another compilation, or a layout, to draw next to it.

        Example:
            >>> import jax, shardwise as sw
            >>> from flax import nnx
            >>> make = lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0))
            >>> layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), "dp")
            >>> compiled = sw.compile(make, layout, inputs=jax.ShapeDtypeStruct((8, 16), "float32"))
            >>> compiled.report().title
            'data=8 on cpu'
        """
        from .._report import report_of

        return report_of(self, against)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file for `sw.load_compiled`, to compare with later compilations."""
        write_atomically(path, json.dumps(self.to_dict(), indent=1) + "\n")


def show_not_counted(kernels: Mapping[str, int]) -> str:
    """Returns the kernels that `flops` leaves out, each with how many times it runs."""
    return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in kernels.items())


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _show_memory(memory: Memory, buffers: Sequence[Buffer], stand_in: bool) -> str:
    rows = [
        ("parameters", show_bytes(memory.parameters), "exact"),
        ("optimizer", show_bytes(memory.optimizer), "exact"),
        ("batch", show_bytes(memory.batch), "exact"),
        ("arguments", show_bytes(memory.arguments), "compiled"),
        ("other outputs", show_bytes(memory.outputs - memory.aliased), "compiled"),
        ("temporaries", show_bytes(memory.temporaries), "compiled"),
        ("peak", show_bytes(memory.peak), "compiled"),
    ]
    if memory.host_state:
        rows.append(("state in host memory", show_bytes(memory.host_state), "exact"))
    if memory.host_temporaries:
        rows.append(("temporaries in host memory", show_bytes(memory.host_temporaries), "compiled"))
    text = text_table(("memory of one device", "bytes", ""), rows, right=(1,))
    if buffers:
        found = [
            (
                buffer.shape,
                f"×{buffer.count}" if buffer.count > 1 else "",
                show_bytes(buffer.total_bytes),
                buffer.source.place,
                buffer.source.module,
                buffer.source.op,
            )
            for buffer in buffers
        ]
        label = "of CPU devices, not of the chips" if stand_in else buffers[0].label
        head = (
            f"largest temporaries at the peak ({label})",
            "",
            "bytes",
            "line",
            "module",
            "op",
        )
        text += "\n\n" + text_table(head, found, right=(2,))
    return text


def _crossing(compiled: Compiled, axes: str, total: int) -> str:
    """Returns how much of what is sent over some axes leaves a host or a slice, if there are several."""
    rows = [row for row in compiled.collectives if ",".join(row.axes) == axes]
    if not any(row.crosses for row in compiled.collectives) or not all(row.hosts for row in rows):
        return ""
    word = "slices" if compiled.platform == "tpu" else "hosts"
    crossing = [row for row in rows if row.crosses]
    if not crossing:
        return f", inside {word}"
    sent = sum(row.total_bytes for row in crossing)
    part = "" if sent == total else f"{show_bytes(sent)} of it "
    return f", {part}across {max(row.hosts for row in crossing)} {word}"


def _show_collectives(compiled: Compiled) -> str:
    blocks = []
    for axes, kinds in compiled.by_axis.items():
        total = sum(sent for _, sent in kinds.values())
        counts = ", ".join(f"{count} {kind}" for kind, (count, _) in kinds.items())
        sent_by_each = f"{show_bytes(total)} sent by each device (modelled)"
        sent_by_each += _crossing(compiled, axes, total)
        head = f"over {axes or 'no axis'}: {counts}; {sent_by_each}"
        rows = {}
        for row in compiled.collectives:
            if ",".join(row.axes) != axes:
                continue
            key = (row.kind, row.shape, str(row.source), row.source.backward)
            count, sent = rows.get(key, (0, 0))
            rows[key] = (count + row.times, sent + row.total_bytes)
        ordered = sorted(rows.items(), key=lambda item: -item[1][1])
        table = [
            (kind, shape, f"×{count}", show_bytes(sent), "backward" if backward else "", source)
            for (kind, shape, source, backward), (count, sent) in ordered[:12]
        ]
        if len(ordered) > 12:
            rest = sum(sent for _, (_, sent) in ordered[12:])
            table.append((f"and {len(ordered) - 12} more", "", "", show_bytes(rest), "", ""))
        lines = text_table(("",) * 6, table, right=(2, 3)).splitlines()
        blocks.append("\n".join([head, *(f"  {line}" for line in lines)]))
    return "\n\n".join(blocks)
