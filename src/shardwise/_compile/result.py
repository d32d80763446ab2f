"""What a compiler said of a step: memory, a verdict, collectives with their causes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._base import public, show_bytes, show_devices, show_flops, text_table, write_atomically
from .._check import Findings
from .._layout import Layout
from .hlo import Buffer, Collective, by_axis

if TYPE_CHECKING:
    from .._report import Report

FORMAT = 2
# Unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
_GPU_SHARE = 0.75


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One part of a device's memory.

    Attributes:
        name: what it is.
        bytes: how large.
        label: how that is known: `exact` or `compiled`.
    """

    name: str
    bytes: int
    label: str


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device.

    Attributes:
        arguments: what the step is given (compiled).
        outputs: what it returns (compiled).
        temporaries: what it needs in between, and on a TPU its code (compiled).
        aliased: outputs that take the place of arguments (compiled).
        peak: arguments + outputs - aliased + temporaries (compiled).
        capacity: what a program can use of a device, or None where that is not known.
        parameters: the model's part of the arguments (exact).
        optimizer: the optimizer's, and a moving average's (exact).
        batch: the batch's (exact).
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

    @property
    def parts(self) -> tuple[Part, ...]:
        """The peak, in parts."""
        known = [
            Part("parameters", self.parameters, "exact"),
            Part("optimizer", self.optimizer, "exact"),
            Part("batch", self.batch, "exact"),
            Part("temporaries", self.temporaries, "compiled"),
        ]
        # Outputs that take no argument's place, and the padding of small arrays on a TPU.
        rest = self.peak - sum(part.bytes for part in known)
        known.append(Part("outputs and padding", max(0, rest), "compiled"))
        return tuple(part for part in known if part.bytes)


@public
@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step as the chips' own compiler made it. Made by `sw.compile`.

    Attributes:
        chips: the devices: `v5p:4x8x8`, or what JAX calls those that are here.
        platform: what they are: `tpu`, `gpu` or `cpu`.
        mesh: the sizes of the mesh's axes by name.
        memory: the bytes of one device; None if the compiler gave up without saying.
        refused: why the compiler will not run it, in its own words, or nothing.
        collectives: each with its axes, bytes, times and cause (compiled; bytes modelled).
        buffers: the largest temporaries alive at the peak, and last what is in no other row; the
            label of each says whether it is the compiler's own account, or modelled.
        flops: that one device does in a step (compiled); None where there is no program.
        bytes_accessed: in its main memory in a step (compiled); None where there is no program.
        findings: what only a compilation can show: SW301 to SW304.
        not_counted: the kernels whose flops are not known, hence not in `flops`: their names,
            and how often a step runs each.
        noise: what the compiler printed.
        seconds: how long it took.
        cached: whether it had been compiled before.
        hlo: the optimised program; not saved.
        layout: what was compiled; not saved.
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
    not_counted: dict[str, int] = dataclasses.field(default_factory=dict)
    noise: str = dataclasses.field(default="", repr=False)
    seconds: float = 0.0
    cached: bool = False
    hlo: str = dataclasses.field(default="", repr=False)
    layout: Layout | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def has_program(self) -> bool:
        """Whether a program was seen; without one, an empty `collectives` says nothing."""
        return self.flops is not None

    @property
    def fits(self) -> bool | None:
        """Whether it fits into a device's memory; None where its size is not known."""
        if self.refused:
            return False
        if self.memory is None or self.memory.capacity is None:
            return None
        # The TPU's compiler would have refused it, and it alone knows what it can pack.
        return self.platform == "tpu" or self.memory.peak <= self.memory.capacity

    @property
    def spare_bytes(self) -> int | None:
        """How much of a device's memory is left; negative where it does not fit."""
        if self.memory is None or self.memory.capacity is None:
            return None
        return self.memory.capacity - self.memory.peak

    @property
    def by_axis(self) -> dict[str, dict[str, tuple[int, int]]]:
        """For each axis and each kind of collective its count and its bytes in a step."""
        return by_axis(self.collectives)

    @property
    def verdict(self) -> str:
        """Whether it fits, in one sentence."""
        where = f"{show_devices(math.prod(self.mesh.values()))} of {self.chips}"
        if self.memory is None and self.refused:
            return f"does not fit on {where}: {_one_line(self.refused)}"
        if self.memory is None:
            return f"of unknown size on {where}: the compiler does not say how much memory it needs"
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
                f"\nJAX takes {_GPU_SHARE:.0%} of a GPU's memory: set "
                f"XLA_PYTHON_CLIENT_MEM_FRACTION={share:.2f} or more"
            )
        return text

    def __str__(self) -> str:
        """Returns the verdict, memory, collectives by axis with their causes, and findings."""
        return f"{self.verdict}\n\n{self.details}"

    @property
    def note(self) -> str:
        """What causes and collectives are of, where they are not of the program itself."""
        if not (self.refused and self.hlo):
            return ""
        return (
            "The compiler gives no program that does not fit: causes and collectives below are of "
            "the same\nstep compiled for as many CPU devices, which is split alike but widens "
            "bfloat16 and has plain attention."
        )

    @property
    def details(self) -> str:
        """What stands under the verdict: memory, collectives by axis, and findings."""
        parts = []
        if self.note:
            parts.append(self.note)
        if self.memory is not None:
            parts.append(_show_memory(self.memory, self.buffers))
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
        parts.append(str(self.findings) if self.findings else self.findings.summary)
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain data, which `shardwise compile --format json` prints."""
        return {
            "format": FORMAT,
            "chips": self.chips,
            "platform": self.platform,
            "mesh": self.mesh,
            "fits": self.fits,
            "spare_bytes": self.spare_bytes,
            "verdict": self.verdict,
            "refused": self.refused,
            "memory": dataclasses.asdict(self.memory) if self.memory else None,
            "buffers": [dataclasses.asdict(row) for row in self.buffers],
            "collectives": [
                {**dataclasses.asdict(row), "total_bytes": row.total_bytes}
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
            "findings": [finding.to_dict() for finding in self.findings],
            "seconds": self.seconds,
            "cached": self.cached,
        }

    def report(self, *, against: Compiled | Layout | None = None) -> Report:
        """Returns one HTML page: the verdict, memory, the model, the mesh, and collectives.

        Args:
            against: another compilation, or a layout, to stand beside it.

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
        """Writes it to a file, which `sw.load_compiled` reads, to compare with later ones."""
        write_atomically(path, json.dumps(self.to_dict(), indent=1) + "\n")


def show_not_counted(kernels: Mapping[str, int]) -> str:
    """Returns the kernels that flops leave out, each with how often it runs."""
    return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in kernels.items())


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _show_memory(memory: Memory, buffers: Sequence[Buffer]) -> str:
    rows = [
        ("parameters", show_bytes(memory.parameters), "exact"),
        ("optimizer", show_bytes(memory.optimizer), "exact"),
        ("batch", show_bytes(memory.batch), "exact"),
        ("arguments", show_bytes(memory.arguments), "compiled"),
        ("outputs beyond them", show_bytes(memory.outputs - memory.aliased), "compiled"),
        ("temporaries", show_bytes(memory.temporaries), "compiled"),
        ("peak", show_bytes(memory.peak), "compiled"),
    ]
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
        head = (
            f"largest temporaries at the peak ({buffers[0].label})",
            "",
            "bytes",
            "line",
            "module",
            "op",
        )
        text += "\n\n" + text_table(head, found, right=(2,))
    return text


def _show_collectives(compiled: Compiled) -> str:
    blocks = []
    for axes, kinds in compiled.by_axis.items():
        total = sum(sent for _, sent in kinds.values())
        told = ", ".join(f"{count} {kind}" for kind, (count, _) in kinds.items())
        head = (
            f"over {axes or 'no axis'}: {told}; {show_bytes(total)} sent by each device (modelled)"
        )
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
