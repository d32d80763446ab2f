"""What a search found: candidates with what they take, ranked, and why one beats another."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from .._base import public, show_bytes, show_seconds
from .._compile import Compiled
from .._estimate import Estimate
from .._layout import Layout
from .._nnx import Recipe
from .remembered import Proof
from .space import Choice

if TYPE_CHECKING:
    from .._report import Report


@public
@dataclasses.dataclass(frozen=True)
class Candidate:
    """One layout that a search looked at, with what a step would take.

    Attributes:
        choice: chips, mesh, strategy, and how the step is computed.
        estimate: from the partitioned program (modelled).
        proof: what the chips' own compiler said; None if it was not asked.
        price: dollars for an hour of one chip; None if it was not given.
    """

    choice: Choice
    estimate: Estimate
    maker: Maker = dataclasses.field(repr=False, compare=False)
    proof: Proof | None = None
    price: float | None = None

    @functools.cached_property
    def recipe(self) -> Recipe:
        """What `sw.compile`, `sw.train_step` and `sw.fit` take, with its remat and accumulation."""
        return self.maker.recipe(self.choice)

    @functools.cached_property
    def layout(self) -> Layout:
        """Its layout."""
        return self.maker.layout(self.choice)

    @functools.cached_property
    def compiled(self) -> Compiled | None:
        """What the compiler made, out of its cache; None if it was not compiled."""
        return self.maker.compiled(self.recipe, self.layout) if self.proof is not None else None

    @property
    def chips(self) -> str:
        """The chips."""
        return self.choice.chips

    @property
    def mesh(self) -> str:
        """The mesh, as `sw.mesh` takes it."""
        return self.choice.mesh

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        return self.choice.strategy

    @property
    def remat(self) -> str | None:
        """The remat policy of the model's blocks; None for none, "" for the recipe's own."""
        return self.choice.remat

    @property
    def accumulate(self) -> int:
        """In how many microbatches the batch is processed."""
        return self.choice.accumulate

    @property
    def loss_chunks(self) -> int:
        """In how many chunks the loss is computed with the head."""
        return self.choice.loss_chunks

    @property
    def offload(self) -> str:
        """What is kept in the memory of the hosts between steps; "" for nothing."""
        return self.choice.offload

    @property
    def microbatches(self) -> int | None:
        """Into how many parts a pipeline splits the batch; None for the model's own number."""
        return self.choice.microbatches

    @property
    def samples(self) -> int:
        """The samples of the global batch."""
        return self.choice.samples

    @property
    def seconds(self) -> float:
        """One step (modelled): of the compiled program, if there is one."""
        return self._figures.seconds

    @property
    def sample_seconds(self) -> float:
        """The seconds of a step for each sample: what candidates are ranked by."""
        return self.seconds / self.samples

    @property
    def peak_bytes(self) -> int:
        """The memory of one device at its peak: compiled, or modelled."""
        return self._figures.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether that is within a device's memory; of an estimate, its upper bound may not be."""
        return self._figures.fits is not False

    @property
    def sure(self) -> bool:
        """Whether that is certain: compiled, or no estimate whose upper bound does not fit."""
        return self._figures.fits is not None

    @property
    def mfu(self) -> float:
        """The share of the chips' peak that the model's own operations use."""
        return self._figures.mfu or 0.0

    @property
    def bound(self) -> str:
        """The largest part of the step."""
        return self._figures.bound

    @property
    def parts(self) -> Mapping[str, float]:
        """How the seconds divide."""
        return self._figures.parts

    @property
    def _figures(self) -> Estimate | Proof:
        return self.estimate if self.proof is None else self.proof

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return self.choice.devices

    @property
    def cost(self) -> float | None:
        """Dollars for one step; None without a price."""
        if self.price is None:
            return None
        from .._chips import parse_chips

        chips = self.devices // parse_chips(self.chips).chip.devices_per_chip
        return self.price * chips * self.seconds / 3600

    @property
    def label(self) -> str:
        """`compiled` or `modelled`: where the figures come from."""
        return "compiled" if self.proof is not None else "modelled"

    @property
    def layout_options(self) -> str:
        """The options of the command line that ask for its layout."""
        return f"--mesh {self.mesh} --strategy {self.strategy}"

    @property
    def step_options(self) -> str:
        """The options that ask for the same step, each after a space; may be empty."""
        text = f" --remat {self.remat or 'none'}" if self.remat != "" else ""
        for name, value in (
            ("accumulate", self.accumulate if self.accumulate > 1 else None),
            ("loss-chunks", self.loss_chunks if self.loss_chunks > 1 else None),
            ("offload", self.offload or None),
            ("microbatches", self.microbatches),
        ):
            text += f" --{name} {value}" if value is not None else ""
        return text

    @property
    def step(self) -> dict[str, Any]:
        """What belongs to the step and not to the layout, as a lockfile has it."""
        found = {
            "accumulate": self.accumulate,
            "loss_chunks": self.loss_chunks,
            "offload": self.offload,
            "microbatches": self.microbatches,
        }
        return found if self.remat == "" else {"remat": self.remat, **found}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the layout as a lockfile, with what belongs to the step under the key `step`.

        `shardwise train --layout` applies both; `sw.load_layout` reads the layout.
        """
        self.layout.save(path, step=self.step)

    @property
    def command(self) -> str:
        """The options of the command line that ask for this candidate."""
        return f"--on {self.chips} {self.layout_options}{self.step_options}"

    def __str__(self) -> str:
        """Returns one line."""
        fits = ("fits" if self.sure else "may fit") if self.fits else "does not fit"
        return (
            f"{self.mesh} {self.strategy} on {self.chips}: {show_seconds(self.seconds)} per step, "
            f"{show_bytes(self.peak_bytes)} ({self.label}), {fits}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain data that `--format json` prints."""
        return {
            "chips": self.chips,
            "mesh": self.choice.sizes,
            "strategy": self.strategy,
            "remat": self.remat,
            "accumulate": self.accumulate,
            "loss_chunks": self.loss_chunks,
            "offload": self.offload,
            "microbatches": self.microbatches,
            "samples": self.samples,
            "seconds": self.seconds,
            "low": self.estimate.low,
            "high": self.estimate.high,
            "estimated_seconds": self.estimate.seconds,
            "peak_bytes": self.peak_bytes,
            "estimated_peak_bytes": self.estimate.peak_bytes,
            "capacity_bytes": self.estimate.capacity,
            "fits": self.fits,
            "mfu": self.mfu,
            "bound": self.bound,
            "cost": self.cost,
            "label": self.label,
            "command": self.command,
        }


def rank(candidates: list[Candidate]) -> list[Candidate]:
    """Returns the candidates, those that fit first, fastest first."""
    return sorted(
        candidates,
        key=lambda c: (not c.fits, c.sample_seconds, c.peak_bytes, c.choice.chips, c.choice.key),
    )


class Maker(Protocol):
    """Makes what a candidate stands for, when it is asked for.

    Attributes:
        given: the recipe that is searched.
        names: the axis that is taken for each annotated name that is no axis; None for none.
    """

    given: Recipe
    names: Mapping[str, str | None]

    def recipe(self, choice: Choice) -> Recipe:
        """Returns the recipe of a choice."""
        ...

    def layout(self, choice: Choice) -> Layout:
        """Returns the layout of a choice."""
        ...

    def compiled(self, recipe: Recipe, layout: Layout) -> Compiled:
        """Returns a step that was compiled before."""
        ...


@public
@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found. Returned by `sw.search`.

    Attributes:
        candidates: those that were priced, those that fit first, fastest first.
        remedies: where nothing fits: what would, with more chips, remat or accumulation.
        notes: what was not tried and why, and where the compiler changed the ranking.
        stopped: why the search ended early; empty if it did not.
        seconds: how long the search took (measured).
    """

    candidates: tuple[Candidate, ...]
    remedies: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()
    stopped: str = ""
    seconds: float = 0.0

    @property
    def best(self) -> Candidate:
        """The fastest candidate that fits.

        Raises:
            ValueError: nothing fits.
        """
        fitting = [c for c in self.candidates if c.fits]
        if not fitting:
            raise ValueError(self._nothing())
        return min(fitting, key=lambda c: (c.proof is None, c.sample_seconds))

    @property
    def smallest(self) -> Candidate:
        """The candidate with the lowest peak memory."""
        return min(self.candidates, key=lambda c: (not c.fits, c.peak_bytes))

    @property
    def cheapest(self) -> Candidate | None:
        """The candidate that fits at the lowest cost of a step; None without prices."""
        priced = [c for c in self.candidates if c.fits and c.cost is not None]
        return min(priced, key=lambda c: ((c.cost or 0.0) / c.samples, c.seconds), default=None)

    @property
    def front(self) -> tuple[Candidate, ...]:
        """The candidates that fit and that no other one beats in both time and memory."""
        kept: list[Candidate] = []
        fitting = [c for c in self.candidates if c.fits]
        for each in sorted(fitting, key=lambda c: (c.sample_seconds, c.peak_bytes)):
            if not kept or each.peak_bytes < kept[-1].peak_bytes:
                kept.append(each)
        return tuple(kept)

    def explain(self, one: Candidate, other: Candidate) -> str:
        """Returns why one candidate is faster or smaller than another, in bytes and milliseconds."""
        lines = [f"A  {one}", f"B  {other}", ""]
        if one.samples != other.samples:
            lines.append(f"  samples in a step: {one.samples} in A, {other.samples} in B")
        gap = one.seconds - other.seconds
        faster, slower = ("A", "B") if gap <= 0 else ("B", "A")
        lines.append(f"{faster} is {show_seconds(abs(gap))} faster than {slower} ({one.label}):")
        for part in sorted({*one.estimate.parts, *other.estimate.parts}):
            a, b = (c.estimate.parts.get(part, 0.0) for c in (one, other))
            if max(a, b) > 0.002 * max(one.seconds, other.seconds):
                lines.append(f"  {part}: {show_seconds(a)} in A, {show_seconds(b)} in B (modelled)")
        axes = sorted({*one.estimate.by_axis, *other.estimate.by_axis})
        for axis in axes:
            sent = [
                sum(n for _, n in c.estimate.by_axis.get(axis, {}).values()) for c in (one, other)
            ]
            lines.append(
                f"  sent over {axis} by each device: {show_bytes(sent[0])} in A, "
                f"{show_bytes(sent[1])} in B (modelled)"
            )
        for name, figures in (
            ("parameters, optimizer and batch", [c.estimate.state_bytes for c in (one, other)]),
            ("peak memory", [c.peak_bytes for c in (one, other)]),
        ):
            lines.append(f"  {name}: {show_bytes(figures[0])} in A, {show_bytes(figures[1])} in B")
        return "\n".join(lines)

    def __str__(self) -> str:
        """Returns the table of candidates, and what was noticed."""
        if not self.candidates:
            stopped = f"; stopped early: {self.stopped}" if self.stopped else ""
            return self._nothing() + stopped
        lines = [_table(list(self.candidates[:12]))]
        if len(self.candidates) > 12:
            lines.append(f"and {len(self.candidates) - 12} more")
        if not any(c.fits for c in self.candidates):
            lines += ["", self._nothing()]
        if self.remedies:
            lines += ["", _table(list(self.remedies), chips=True)]
        lines += [f"note: {note}" for note in self.notes]
        if self.stopped:
            lines.append(f"stopped early: {self.stopped}")
        return "\n".join(lines)

    def _nothing(self) -> str:
        if not self.candidates:
            return "nothing was priced: " + ("; ".join(self.notes) or "the space is empty")
        least = min(self.candidates, key=lambda c: c.peak_bytes)
        text = (
            f"nothing fits on {least.chips}: the smallest, {least.mesh} {least.strategy}, needs "
            f"{show_bytes(least.peak_bytes)} of {show_bytes(least.estimate.capacity)} ({least.label})"
        )
        return text + ("; what would fit:" if self.remedies else "")

    def report(self) -> Report:
        """Returns one HTML page: time against memory, the table, and why one beats another."""
        from .._report import report_of_search

        return report_of_search(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain data that `--format json` prints."""
        fitting = any(c.fits for c in self.candidates)
        place = {id(c): i for i, c in enumerate(self.candidates)}
        cheapest = self.cheapest
        return {
            "candidates": [c.to_dict() for c in self.candidates],
            "best": place[id(self.best)] if fitting else None,
            "smallest": place[id(self.smallest)] if self.candidates else None,
            "cheapest": place[id(cheapest)] if cheapest is not None else None,
            "front": [place[id(c)] for c in self.front],
            "remedies": [c.to_dict() for c in self.remedies],
            "notes": list(self.notes),
            "stopped": self.stopped,
            "seconds": self.seconds,
        }


def _label(candidate: Candidate) -> str:
    if candidate.sure and candidate.fits:
        return candidate.label
    return f"{candidate.label}, {'may fit' if candidate.fits else 'does not fit'}"


def _table(candidates: list[Candidate], *, chips: bool = False) -> str:
    several = chips or len({c.chips for c in candidates}) > 1
    columns: list[tuple[str, Callable[[Candidate], str], bool]] = [
        ("mesh", lambda c: c.mesh, True),
        ("strategy", lambda c: c.strategy, True),
        ("remat", lambda c: _remat(c.remat), True),
        ("parts", lambda c: str(c.accumulate), True),
        ("chunks", lambda c: str(c.loss_chunks), any(c.loss_chunks > 1 for c in candidates)),
        ("offload", lambda c: c.offload or "none", any(c.offload for c in candidates)),
        ("stages' parts", lambda c: str(c.microbatches or ""), any(c.microbatches for c in candidates)),
        ("batch", lambda c: str(c.samples), len({c.samples for c in candidates}) > 1),
        ("step", lambda c: show_seconds(c.seconds), True),
        ("peak", lambda c: show_bytes(c.peak_bytes), True),
        ("of", lambda c: show_bytes(c.estimate.capacity), True),
        ("MFU", lambda c: f"{c.mfu:.0%}", True),
        ("bound by", lambda c: c.bound, True),
        ("", _label, True),
        ("$/step", _cost, any(c.cost is not None for c in candidates)),
        ("chips", lambda c: c.chips, several),
    ]  # fmt: skip
    shown = [(name, cell) for name, cell, wanted in columns if wanted]
    rows = [["", *(name for name, _ in shown)]]
    rows += [[str(i), *(cell(c) for _, cell in shown)] for i, c in enumerate(candidates, 1)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _cost(candidate: Candidate) -> str:
    return show_cost(candidate.cost) if candidate.cost is not None else ""


def show_cost(dollars: float) -> str:
    """Returns dollars with at least two digits that count."""
    return f"{dollars:.4f}" if dollars >= 0.001 or not dollars else f"{dollars:.2g}"


def _remat(policy: str | None) -> str:
    short = {"dots_with_no_batch_dims_saveable": "dots", "nothing_saveable": "all", "": "as given"}
    return "none" if policy is None else short.get(policy, policy)
