"""What is known about a layout before anything runs: findings, memory, and whether it fits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from .._base import show_bytes, show_devices
from .._check import Findings, check
from .._layout import Layout
from .._mesh import chips_of
from .._nnx import Recipe
from .._step import make_blueprint
from .job import shard_bytes
from .result import Compiled, Part


@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout, with its compilation if there is one.

    Attributes:
        layout: the layout; None for a compilation read from a file.
        compiled: its compilation, or None.
        optimizer_bytes: bytes of optimizer state on one device (exact); None if unknown.
        batch_bytes: bytes of the batch on one device (exact); None if unknown.
        host_bytes: bytes of a device's state that are in the memory of its host (exact).
        problem: why the recipe's step cannot run on this layout though the layout has no errors,
            such as a batch that the mesh does not divide; or nothing.
        allow: findings that are intentional, as in `sw.check`.
    """

    layout: Layout | None
    compiled: Compiled | None = None
    optimizer_bytes: int | None = None
    batch_bytes: int | None = None
    problem: str = ""
    host_bytes: int = 0
    allow: Mapping[str, str | Sequence[str]] | None = None

    @functools.cached_property
    def findings(self) -> Findings:
        """The findings of the layout itself."""
        return check(self.layout, allow=self.allow) if self.layout is not None else Findings(())

    @functools.cached_property
    def all_findings(self) -> Findings:
        """The findings of the layout and of its compilation."""
        more = self.compiled.findings if self.compiled is not None else ()
        return Findings((*self.findings, *more), self.findings.allowed)

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the mesh's axes by name."""
        if self.layout is not None:
            return dict(self.layout.mesh.shape)
        assert self.compiled is not None, "a plan has a layout or a compilation"
        return self.compiled.mesh

    @property
    def chips(self) -> str:
        """The chips or devices, or an empty string if there are none."""
        if self.compiled is not None:
            return self.compiled.chips
        chips = self._chips()
        return str(chips) if chips is not None else ""

    @property
    def capacity(self) -> int | None:
        """The memory of a device in bytes, or None if unknown."""
        if self.compiled is not None:
            return self.compiled.memory.capacity if self.compiled.memory is not None else None
        chips = self._chips()
        return chips.chip.capacity_bytes if chips is not None else None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The memory of one device, in parts; without a compilation, only what shapes determine."""
        if self.compiled is not None:
            return self.compiled.memory.parts if self.compiled.memory is not None else ()
        assert self.layout is not None
        parts = [
            ("parameters", self.layout.bytes_per_device),
            ("optimizer", self.optimizer_bytes or 0),
            ("batch", self.batch_bytes or 0),
        ]
        return tuple(Part(name, size, "exact") for name, size in parts if size)

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None if only compiling can tell."""
        if self.compiled is not None:
            return self.compiled.fits
        over = self.capacity is not None and self._resident_bytes > self.capacity
        return False if over else None

    @property
    def usable(self) -> bool:
        """Whether it has no errors, the step can run, and it may fit."""
        return not self.findings.errors and not self.problem and self.fits is not False

    @property
    def verdict(self) -> str:
        """Whether it fits, or what it needs, in one sentence."""
        if self.compiled is not None:
            return self.compiled.verdict
        layout, findings = self.layout, self.findings
        assert layout is not None
        if findings.errors:
            return f"cannot run: {findings.summary}"
        if self.problem:
            return f"cannot run: {self.problem}"
        where = show_devices(layout.mesh.size)
        resident = f"{where} holds {show_bytes(layout.bytes_per_device)} of {show_bytes(layout.total_bytes)} (exact)"
        if layout.mesh.size > 1 and layout.bytes_per_device == layout.total_bytes:
            resident += ": no leaf is split"
        if self._resident_bytes > layout.bytes_per_device:
            resident += f", with optimizer and batch {show_bytes(self._resident_bytes)}"
        if self.host_bytes:
            resident += f" and {show_bytes(self.host_bytes)} in host memory"
        chips = self._chips()
        if chips is None:
            return f"{findings.summary}: {resident}"
        has = f"{chips.chip.name} has {show_bytes(chips.chip.capacity_bytes)}"
        if self.fits is False:
            over = show_bytes(self._resident_bytes - chips.chip.capacity_bytes)
            return f"does not fit: {resident}; {has}, {over} too much"
        return f"{findings.summary}: {resident}; {has}"

    @property
    def _resident_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def _chips(self) -> Any:
        return chips_of(self.layout.mesh) if self.layout is not None else None


def plan_of(found: Any, layout: Layout) -> Plan:
    """Returns the plan of a layout; for a recipe, with the bytes of its optimizer state and batch."""
    bare = Plan(layout)
    if not isinstance(found, Recipe) or bare.findings.errors:
        return bare
    optimizer = None
    try:
        step = make_blueprint(found, layout)
        optimizer = shard_bytes((step.abstract.optimizer, step.abstract.ema))
        host = shard_bytes(step.abstract, host=True)
        return Plan(layout, None, optimizer, shard_bytes(step.batch), host_bytes=host)
    except ValueError as error:
        # The layout can be shown all the same; what a run would raise is its verdict.
        return Plan(layout, None, optimizer, problem=" ".join(str(error).split()))
