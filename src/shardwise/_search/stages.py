"""The stages of a search: what may fit, what is fast, what the compiler says."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy
from flax import nnx

from .._base import either, option, show_bytes, show_seconds
from .._check import LayoutError
from .._chips import parse_chips
from .._compile import compile as compile_step
from .._estimate import Partitioned, partition_step
from .._layout import Layout, layout
from .._mesh import mesh as make_mesh
from .._nnx import Recipe, abstract_model
from ..models import Decoder
from .found import Candidate, rank
from .space import (
    Choice,
    accumulations,
    axes_of,
    blocks_of,
    given_axes,
    meshes,
    orders,
    remats_of,
    samples_of,
    with_choice,
)
from .topologies import after

# Up to this many meshes are all priced; of more, the neighbours of the best.
_ALL = 24
_KEPT = 4
# Of what a device can use, what an estimate may be over: the compiler decides.
_NEAR = 1.1


class Searcher:
    """Ranks the layouts of one recipe."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        mesh: str | Mapping[str, int] | None,
        strategy: str | None,
        axes: Mapping[str, int] | None,
        remat: str | None,
        accumulate: int | None,
        prices: Mapping[str, float],
        calibration: str | os.PathLike[str] | None,
        deadline: float | None,
        progress: Callable[[str], None],
    ):
        """Takes the recipe, the fixed parts, and the limits; see `sw.search`."""
        self.recipe, self.strategy, self.prices = recipe, strategy, prices
        self.fixed = given_axes(mesh) if mesh is not None else None
        self.axes = dict(axes or {})
        self.calibration, self.deadline, self.progress = calibration, deadline, progress
        for name in self.axes:
            if name not in ("data", "fsdp", "model"):
                raise ValueError(
                    f"{either('axes= has', '--axis has')} {name!r}: a search has the axes data, "
                    f"fsdp and model"
                )
        if accumulate is not None and accumulate < 1:
            raise ValueError(f"accumulate={accumulate} is not a number of microbatches")
        self.accumulate = accumulate
        self.samples = samples_of(recipe)
        abstract = abstract_model(recipe.model)
        self.model = nnx.merge(abstract.graphdef, abstract.state)
        self.state = abstract.state
        self.pattern = "" if isinstance(self.model, Decoder) else blocks_of(self.model)
        self.remats, why = remats_of(recipe, self.model)
        self.notes: list[str] = []
        if remat != "free":
            if self.remats == [""]:
                raise ValueError(f"{option('remat', remat or 'none')} has nothing to act on: {why}")
            self.remats = [remat]
        elif why:
            self.note(f"remat was not searched: {why}")
        self.known: dict[Choice, Candidate | None] = {}
        self.steps: dict[Any, Partitioned] = {}
        self.layouts: dict[Any, Layout | None] = {}
        self.remedies: list[Candidate] = []
        self.tensor: bool | None = None
        self.leader: Candidate | None = None
        self.priced = 0

    def note(self, text: str) -> None:
        """Keeps a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def ranked(self) -> list[Candidate]:
        """Returns what was priced, best first."""
        return rank([c for c in self.known.values() if c is not None])

    def may_fit(self, chips: str) -> bool:
        """Returns whether the state alone, split over all devices, is within their memory."""
        found = parse_chips(chips)
        return self.model_bytes() / found.device_count <= found.chip.capacity_bytes

    def model_bytes(self) -> int:
        """Returns the bytes of the parameters."""
        leaves = jax.tree.leaves(self.state)
        return sum(math.prod(leaf.shape) * _width(leaf.dtype) for leaf in leaves)

    def rank(self, chips: str) -> None:
        """Prices layouts on these chips."""
        places = self._places(chips)
        if not places:
            return
        seen: dict[tuple[int, int, int], Candidate] = {}
        wanted = list(places) if len(places) <= _ALL else _corners(places)
        while wanted:
            for place in wanted:
                found = self._try(self._choice(chips, place, self.remats[-1], self._first()))
                if found is not None:
                    seen[place] = found
            best = sorted(seen, key=lambda place: _order(seen[place]))[:2]
            near = {n for place in best for n in _neighbours(place) if n in places}
            wanted = sorted(n for n in near if n not in seen and self._new(chips, n))
        self._refine(chips, seen)

    def _new(self, chips: str, place: tuple[int, int, int]) -> bool:
        return self._choice(chips, place, self.remats[-1], self._first()) not in self.known

    def _first(self) -> int:
        return self.accumulate or self.recipe.accumulate

    def _places(self, chips: str) -> list[tuple[int, int, int]]:
        devices = parse_chips(chips).device_count
        if self.fixed is not None:
            unknown = [name for name in self.fixed if name not in ("data", "fsdp", "model")]
            if unknown:
                raise ValueError(
                    f"{either('mesh=', '--mesh')} has the axis {unknown[0]!r}: a search has data, "
                    f"fsdp and model"
                )
            place = tuple(self.fixed.get(name, 1) for name in ("data", "fsdp", "model"))
            if math.prod(place) != devices:
                raise ValueError(
                    f"{either('mesh=', '--mesh')} has {math.prod(place)} devices, but {chips} has "
                    f"{devices}"
                )
            data, fsdp, model = place
            named = self.strategy or ""
            if "fsdp" in named and fsdp == 1:
                data, fsdp = 1, data  # as a strategy takes it: FSDP over the data axis
            return [(data, fsdp, model)]
        tensor = self.strategy is None or "tensor" in self.strategy
        found = list(meshes(devices, self.samples, tensor=tensor and self._can_split(devices)))
        for name, size in self.axes.items():
            place = ("data", "fsdp", "model").index(name)
            found = [each for each in found if each[place] == size]
        if self.strategy is not None:
            parts = {part.strip() for part in self.strategy.split("+")}
            found = [
                (data, fsdp, model)
                for data, fsdp, model in found
                if (fsdp > 1) == ("fsdp" in parts) and (model > 1) == ("tensor" in parts)
            ] or ([(devices, 1, 1)] if devices == 1 else [])
        if not found:
            self.note(
                f"nothing to try on {chips}: no mesh of {devices} devices divides a batch of "
                f"{self.samples} samples and has the parts that are fixed"
            )
        return found

    def _can_split(self, devices: int) -> bool:
        """Returns whether tensor parallelism splits anything of this model."""
        if self.tensor is None and devices > 1:
            made = self._layout("h100:1x2", (("model", 2),), "tensor", self.recipe)
            split = made is not None and any(
                leaf.resident_bytes < leaf.bytes for leaf in made.leaves
            )
            self.tensor = split
            if not split:
                self.note("tensor parallelism was not tried: the model has no pairs to split")
        return bool(self.tensor)

    def _choice(
        self, chips: str, place: tuple[int, int, int], remat: str | None, accumulate: int
    ) -> Choice:
        axes, strategy = axes_of(*place)
        return Choice(chips, axes, strategy, remat, accumulate)

    def _layout(self, chips: str, axes: Any, strategy: str, recipe: Recipe) -> Layout | None:
        key = (chips, axes, strategy)
        if key not in self.layouts:
            text = ",".join(f"{name}={size}" for name, size in axes)
            try:
                self.layouts[key] = layout(recipe, make_mesh(text, on=chips), strategy)
            except ValueError as error:
                self.note(f"{text} {strategy} cannot be laid out: {str(error).splitlines()[0]}")
                self.layouts[key] = None
        return self.layouts[key]

    def _try(self, choice: Choice) -> Candidate | None:
        """Prices one choice; None if it cannot be laid out."""
        if choice not in self.known:
            self._check_time()
            found = self.known[choice] = self._priced(choice)
            if found is not None:
                self._tell_best(found)
        return self.known[choice]

    def _check_time(self) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise TimeoutError

    def _priced(self, choice: Choice) -> Candidate | None:
        if self.samples % (choice.data_ways * choice.accumulate):
            return None
        recipe = with_choice(self.recipe, choice, self.pattern)
        made = self._layout(choice.chips, choice.axes, choice.strategy, recipe)
        if made is None:
            return None
        if "model" in choice.sizes and not any("model" in str(leaf.spec) for leaf in made.leaves):
            self.note(
                f"{choice.mesh} was dropped: no pair of dims is divisible by {choice.sizes['model']}"
            )
            return None
        key = (
            choice.chips,
            frozenset(choice.axes),
            choice.strategy,
            choice.remat,
            choice.accumulate,
        )
        try:
            if key not in self.steps:
                self.steps[key] = partition_step(recipe, made, calibration=self.calibration)
            estimate = self.steps[key].on(made.mesh)
        except (LayoutError, ValueError) as error:
            self.note(f"{choice.mesh} {choice.strategy} was dropped: {str(error).splitlines()[0]}")
            return None
        chip = parse_chips(choice.chips).chip.name
        return Candidate(choice, estimate, recipe, made, price=self.prices.get(chip))

    def _tell_best(self, found: Candidate) -> None:
        """Says which candidate is the best so far."""
        self.priced += 1
        if self.leader is None or rank([self.leader, found])[0] is found:
            self.leader = found
        self.progress(f"best of {self.priced}: {self.leader}")

    def _refine(self, chips: str, seen: Mapping[tuple[int, int, int], Candidate]) -> None:
        """Tries remat policies, accumulation and orders of the axes on the best meshes."""
        best = sorted(seen, key=lambda place: _order(seen[place]))[:_KEPT]
        small = sorted(seen, key=lambda place: seen[place].peak_bytes)[:1]
        for place in dict.fromkeys([*best, *small]):
            for remat in self.remats:
                self._fit(self._choice(chips, place, remat, self._first()))
        for each in [c for c in self.ranked() if c.chips == chips and c.fits][:3]:
            for axes in orders(each.choice.axes):
                choice = dataclasses.replace(each.choice, axes=axes)
                again = self._try(choice)
                if again is not None and again is not each and again.seconds > 0.995 * each.seconds:
                    self.known[choice] = None  # the same layout in another order, no faster

    def _fit(self, choice: Choice) -> None:
        """Prices a choice, and the least accumulation with which it would fit."""
        found = self._try(choice)
        if found is None or found.fits or self.accumulate is not None:
            return
        free = found.estimate.capacity - found.estimate.state_bytes
        if free <= 0:
            return
        parts = found.choice.accumulate * (found.peak_bytes - found.estimate.state_bytes) / free
        for number in accumulations(self.samples, choice.data_ways):
            if number >= parts and number > choice.accumulate:
                again = self._try(dataclasses.replace(choice, accumulate=number))
                if again is not None and again.fits:
                    return

    def prove(self, count: int) -> None:
        """Compiles the best, until this many of them fit, and says where the ranking changed."""
        proved = 0
        for _ in range(3 * count):
            open_ones = [c for c in self._promising() if c.compiled is None]
            if proved >= count or not open_ones:
                break
            self._check_time()
            candidate = open_ones[0]
            self.progress(f"compiling {candidate.mesh} {candidate.strategy} for {candidate.chips}")
            compiled = self._compiled(candidate)
            if compiled is None:
                break
            proved += compiled.fits
            self._compare(candidate, compiled)

    def _promising(self) -> list[Candidate]:
        """Returns what fits or nearly fits, by the estimate's own order."""
        near = [
            c
            for c in self.ranked()
            if c.compiled is not None or c.estimate.peak_bytes <= _NEAR * c.estimate.capacity
        ]
        return sorted(near, key=lambda c: (not c.estimate.fits, c.estimate.seconds))

    def _compiled(self, candidate: Candidate) -> Candidate | None:
        try:
            found = compile_step(
                candidate.recipe, candidate.layout, calibration=self.calibration, show=False
            )
        except ValueError as error:
            # The compiler is not installed, or has no such topology: the ranking stands.
            self.note(f"nothing was compiled: {str(error).splitlines()[0]}")
            return None
        made = dataclasses.replace(candidate, compiled=found)
        self.known[candidate.choice] = made
        return made

    def _compare(self, before: Candidate, after_: Candidate) -> None:
        name = f"{before.mesh} {before.strategy}"
        if before.estimate.fits and not after_.fits:
            self.note(
                f"{name} does not fit: the compiler needs {show_bytes(after_.peak_bytes)}, "
                f"{show_bytes(before.peak_bytes)} were estimated"
            )
        off = after_.seconds / before.seconds - 1
        if abs(off) > 0.1:
            self.note(
                f"{name} takes {show_seconds(after_.seconds)} by its compiled program, "
                f"{off:+.0%} from the estimate"
            )

    def remedy(self, names: Iterable[str], *, prove: bool) -> None:
        """Looks for the least that would fit: more chips, with remat and accumulation."""
        for name in names:
            if ":" not in name:
                continue
            for chips in after(name)[:4]:
                if any(c.chips == chips and c.fits for c in self.remedies):
                    break  # found for smaller ones of this chip
                devices = parse_chips(chips).device_count
                if self.samples % devices and not self._can_split(devices):
                    break
                mine = dict(self.known)
                self.rank(chips)
                fitting = [c for c in self.ranked() if c.chips == chips and c.fits]
                self.known = mine
                if fitting:
                    found = fitting[0]
                    if prove:
                        self.known[found.choice] = found
                        found = self._compiled(found) or found
                        self.known = mine
                    self.remedies.append(found)
                    if found.fits:
                        break


def _width(dtype: Any) -> int:
    """Returns the bytes of one element; a random key counts as two words."""
    key = jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
    return 8 if key else jax.numpy.dtype(dtype).itemsize


def _order(candidate: Candidate) -> tuple[bool, float]:
    """Returns how good a candidate is, if one that nearly fits can still be made to."""
    return candidate.estimate.state_bytes > candidate.estimate.capacity, candidate.seconds


def _corners(places: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Returns for each size of the tensor axis the pure forms of the others."""
    found = []
    for model in sorted({model for _, _, model in places}):
        of = sorted(place for place in places if place[2] == model)
        found += [of[0], of[len(of) // 2]]
    return list(dict.fromkeys(found))


def _neighbours(place: tuple[int, int, int]) -> Iterable[tuple[int, int, int]]:
    """Yields the places that differ by a factor of 2 between two of the axes."""
    for less in range(3):
        for more in range(3):
            if less != more and place[less] % 2 == 0:
                sizes = list(place)
                sizes[less] //= 2
                sizes[more] *= 2
                yield tuple(sizes)  # pyright: ignore[reportReturnType] - three of them
