"""The stages of a search: what may fit, what is fast, what the compiler says."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .._base import count as counted
from .._base import option, show_bytes, show_seconds
from .._check import LayoutError
from .._chips import parse_chips
from .._compile import Compiled
from .._compile import compile as compile_step
from .._estimate import Partitioned, partition_step
from .._layout import PART_AXES, Layout, layout
from .._mesh import mesh as make_mesh
from .._nnx import Recipe
from .abilities import CHUNKS, Abilities
from .applied import samples_of, with_choice
from .found import Candidate, rank
from .remembered import Remembered, proof_of
from .space import (
    Choice,
    Fixed,
    Place,
    accumulations,
    beyond,
    corners,
    orders,
    places,
)
from .topologies import after

# Up to this many meshes are all priced; of more, the neighbours of the best.
_ALL = 24
_KEPT = 4
# Of what a device can use, what an estimate may be over: the compiler decides.
_NEAR = 1.1
# State over the data axes, between none of it split (dp) and all of it (fsdp).
_ZERO = tuple(name for name in ("zero1", "zero2") if name in PART_AXES)


class Maker:
    """Makes recipes and layouts of choices, each once."""

    def __init__(self, given: Recipe, calibration: str | os.PathLike[str] | None):
        """Takes the recipe that is searched."""
        self.given, self.calibration = given, calibration
        self.layouts: dict[Any, Layout] = {}

    def recipe(self, choice: Choice) -> Recipe:
        """Returns the recipe of a choice."""
        return with_choice(self.given, choice)

    def layout(self, choice: Choice) -> Layout:
        """Returns the layout of a choice.

        Raises:
            ValueError: the strategy cannot be applied.
        """
        key = (choice.chips, choice.axes, choice.strategy)
        if key not in self.layouts:
            mesh = make_mesh(choice.mesh, on=choice.chips)
            self.layouts[key] = layout(self.given, mesh, choice.strategy)
        return self.layouts[key]

    def compiled(self, recipe: Recipe, layout: Layout) -> Compiled:
        """Returns a step, compiled for the layout's chips; what was compiled before is cached."""
        return compile_step(recipe, layout, calibration=self.calibration, show=False)


class Searcher:
    """Ranks the layouts of one recipe."""

    def __init__(
        self,
        recipe: Recipe,
        fixed: Fixed,
        *,
        prices: Mapping[str, float],
        calibration: str | os.PathLike[str] | None,
        deadline: float | None,
        progress: Callable[[str], None],
        seen: Callable[[Candidate], None],
    ):
        """Takes the recipe, the fixed parts, and the limits; see `sw.search`."""
        self.recipe, self.fixed, self.prices = recipe, fixed, prices
        self.calibration, self.deadline, self.progress = calibration, deadline, progress
        self.seen = seen
        self.maker = Maker(recipe, calibration)
        self.can = Abilities(recipe)
        self.notes: list[str] = []
        self.remats, why = self.can.remats
        if fixed.remat != "free":
            if self.remats == [""]:
                raise ValueError(
                    f"{option('remat', fixed.remat or 'none')} has nothing to act on: {why}"
                )
            self.remats = [fixed.remat]
        elif why:
            self.note(f"remat was not searched: {why}")
        self.memory = Remembered(recipe, calibration)
        self.known: dict[Choice, Candidate | None] = {}
        self.steps: dict[str, Partitioned] = {}
        self.remedies: list[Candidate] = []
        self.leader: Candidate | None = None
        self.too_large: set[str] = set()
        # By chips, how many times an estimate's peak a compiled one was, where that did not fit.
        self.swollen: dict[str, float] = {}
        self.priced = 0

    def note(self, text: str) -> None:
        """Keeps a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def ranked(self) -> list[Candidate]:
        """Returns what was priced, best first."""
        return rank([c for c in self.known.values() if c is not None])

    def may_fit(self, chips: str) -> bool:
        """Returns whether the parameters alone, split over all devices, are within their memory."""
        found = parse_chips(chips)
        return self.can.model_bytes / found.device_count <= found.chip.capacity_bytes

    def samples(self, chips: str) -> int:
        """Returns the samples of a global batch; a multiple of the devices if they are left open."""
        devices, own = parse_chips(chips).device_count, samples_of(self.recipe)
        if isinstance(self.fixed.batch_per_device, int):
            return self.fixed.batch_per_device * devices
        return -(-own // devices) * devices if self.fixed.batch_per_device == "free" else own

    # Pricing.

    def rank(self, chips: str) -> None:
        """Prices layouts on these chips."""
        found = self._places(chips)
        plain = [place for place in found if place.is_plain]
        start = plain or found
        wanted = list(start) if len(start) <= _ALL else corners(start) or _spread(start)
        seen: dict[Place, Candidate] = {}
        tried: set[Place] = set()
        while wanted:
            tried |= set(wanted)
            for place in self._affordable(chips, wanted, seen):
                priced = self._try(self._choice(chips, place, self.remats[-1]))
                if priced is not None:
                    seen[place] = priced
            best = sorted(seen, key=lambda place: _order(seen[place]))[:2]
            near = {n for place in best for n in _near(place, found, plain)}
            near |= set(beyond(best[0], found)) if best and best[0].is_plain else set()
            wanted = sorted(n for n in near if n not in tried)
        self._refine(chips, seen)

    def _places(self, chips: str) -> list[Place]:
        devices, samples = parse_chips(chips).device_count, self.samples(chips)
        limits, missing = self.can.limits
        if self.fixed.mesh is not None:
            return [self.fixed.place(chips, devices)]
        found = self.fixed.kept(places(devices, samples, limits))
        if not found:
            self.note(
                f"nothing to try on {chips}: no mesh of {devices} devices divides a batch of "
                f"{samples} samples and has the parts that are fixed"
            )
        if missing and devices > 1:
            self.note(f"the model does not allow {missing}: not tried")
        return found

    def _affordable(
        self, chips: str, wanted: Sequence[Place], seen: Mapping[Place, Candidate]
    ) -> list[Place]:
        """Returns the places whose state alone is within a device's memory; all if none is."""
        capacity = parse_chips(chips).chip.capacity_bytes
        fitting = [place for place in wanted if self._state_bytes(chips, place) <= capacity]
        if not fitting and not any(c.estimate.state_bytes <= capacity for c in seen.values()):
            return list(wanted)
        self.too_large |= {f"{chips} {p.sizes}" for p in wanted if p not in fitting}
        return fitting

    def _state_bytes(self, chips: str, place: Place) -> int:
        """Returns the parameters and the optimizer's state on one device; 0 without a layout."""
        choice = self._choice(chips, place, self.remats[-1])
        size = self.memory.state_bytes(choice.key)
        if size is None:
            self._check_time()
            try:
                made = self.maker.layout(choice)
                moments = made.for_optimizer(self.recipe.optimizer, wrt=self.recipe.wrt)
                offloaded = "optimizer" in self.recipe.offloaded
                size = made.bytes_per_device + (0 if offloaded else moments.bytes_per_device)
            except ValueError:
                size = 0
            self.memory.keep(choice.key, size)
        return size

    def _choice(self, chips: str, place: Place, remat: str | None, **changes: Any) -> Choice:
        fixed = self.fixed
        return dataclasses.replace(
            Choice(
                chips,
                place.axes,
                fixed.strategy_of(place),
                remat,
                fixed.accumulate or self.recipe.accumulate,
                fixed.loss_chunks or self.recipe.loss_chunks,
                self.recipe.offload if fixed.offload is None else fixed.offload,
                samples=self.samples(chips),
            ),
            **changes,
        )

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
        if choice.samples % (choice.data_ways * choice.accumulate):
            return None
        estimate = self.memory.estimate(choice.key)
        if estimate is None:
            estimate = self._estimated(choice)
            self.memory.keep(choice.key, estimate)
        if isinstance(estimate, str):
            self.note(estimate)
            return None
        chip = parse_chips(choice.chips).chip.name
        return Candidate(choice, estimate, self.maker, price=self.prices.get(chip))

    def _estimated(self, choice: Choice) -> Any:
        """Returns an estimate, or why there is none."""
        name = f"{choice.mesh} {choice.strategy}"
        try:
            made = self.maker.layout(choice)
        except ValueError as error:
            return f"{name} cannot be laid out: {_first(error)}"
        if "model" in choice.sizes and not any("model" in str(leaf.spec) for leaf in made.leaves):
            size = choice.sizes["model"]
            return f"{choice.mesh} was dropped: no pair of dims is divisible by {size}"
        # The same axes in another order are the same partitioned program.
        key = dataclasses.replace(choice, axes=tuple(sorted(choice.axes))).key
        try:
            if key not in self.steps:
                recipe = self.maker.recipe(choice)
                self.steps[key] = partition_step(recipe, made, calibration=self.calibration)
            return self.steps[key].on(made.mesh)
        except (LayoutError, ValueError) as error:
            return f"{name} was dropped: {_first(error)}"

    def _tell_best(self, found: Candidate) -> None:
        """Says which candidate is the best so far."""
        self.priced += 1
        if self.leader is None or rank([self.leader, found])[0] is found:
            self.leader = found
        self.seen(found)
        self.progress(f"best of {self.priced}: {self.leader}")

    # What fits, and what is faster on the best meshes.

    def _refine(self, chips: str, seen: Mapping[Place, Candidate]) -> None:
        """Tries how the step is computed, and orders of the axes, on the best meshes."""
        best = sorted(seen, key=lambda place: _order(seen[place]))[:_KEPT]
        small = sorted(seen, key=lambda place: seen[place].peak_bytes)[:1]
        for place in dict.fromkeys([*best, *small]):
            thorough = place in (*best[:2], *small)
            for remat in self.remats:
                self._fit(self._choice(chips, place, remat), thorough=thorough)
        for place in best[:2]:
            self._split_state(chips, place)
        mine = [c for c in self.ranked() if c.chips == chips]
        if self.fixed.batch_per_device == "free":
            self._resize(mine[:3])
        for each in [c for c in mine if c.fits][:2]:
            self._save_more(each)
            self._repartition(each)
        for each in [c for c in self.ranked() if c.chips == chips and c.fits][:3]:
            for axes in orders(each.choice.axes):
                choice = dataclasses.replace(each.choice, axes=axes)
                again = self._try(choice)
                if again is not None and again is not each and again.seconds > 0.995 * each.seconds:
                    self.known[choice] = None  # the same layout in another order, no faster

    def _fit(self, choice: Choice, *, thorough: bool) -> None:
        """Prices a choice, and the least that would make it fit."""
        found = self._try(choice)
        if found is None or found.fits:
            return
        lean = found
        if thorough and self.fixed.loss_chunks is None and self.can.chunks:
            again = self._try(dataclasses.replace(choice, loss_chunks=CHUNKS))
            if again is not None and again.fits:
                return
            if again is not None and again.peak_bytes < 0.98 * found.peak_bytes:
                lean = again
        self._accumulate(lean)
        if thorough and choice.remat == self.remats[-1]:
            self._offload(lean)

    def _accumulate(self, found: Candidate) -> Candidate | None:
        """Returns a candidate with the least accumulation with which it would fit."""
        free = found.estimate.capacity - found.estimate.state_bytes
        if self.fixed.accumulate is not None or free <= 0:
            return None
        choice = found.choice
        parts = choice.accumulate * (found.peak_bytes - found.estimate.state_bytes) / free
        numbers = [n for n in accumulations(choice.samples, choice.data_ways) if n >= parts]
        for number in [n for n in numbers if n > choice.accumulate][:3]:
            again = self._try(dataclasses.replace(choice, accumulate=number))
            if again is not None and again.fits:
                return again
        return None

    def _offload(self, lean: Candidate) -> None:
        """Tries to keep activations, the optimizer's state, or both in the memory of the hosts."""
        tries: list[Candidate | None] = []
        if self.fixed.remat == "free" and lean.remat != "":
            for policy in self.can.offloaded:
                tries.append(self._try(dataclasses.replace(lean.choice, remat=policy)))
            if not self.can.offloaded:
                self.note("activations were not offloaded: the model gives none of them a name")
        if self.fixed.offload is None and not self.recipe.offload:
            away = dataclasses.replace(lean.choice, offload="optimizer")
            tries.append(self._try(away))
            if not any(c is not None and c.fits for c in tries):
                smallest = min((c for c in tries if c is not None), default=None, key=_peak)
                if smallest is not None:
                    both = dataclasses.replace(smallest.choice, offload="optimizer")
                    tries.append(self._try(both))
        if not any(c is not None and c.fits for c in tries):
            for each in sorted((c for c in tries if c is not None), key=_peak)[:1]:
                self._accumulate(each)

    def _save_more(self, found: Candidate) -> None:
        """Tries to save named activations where all are recomputed, and fewer policies fit."""
        if self.fixed.remat != "free" or found.remat != self.remats[-1] or found.remat == "":
            return
        for policy in self.can.saved:
            self._try(dataclasses.replace(found.choice, remat=policy))

    def _repartition(self, found: Candidate) -> None:
        """Tries other numbers of microbatches of a pipeline."""
        stages = found.choice.sizes.get("pipe", 1)
        if stages == 1 or not self.can.own_microbatches:
            return
        for factor in (1, 2, 8):
            self._try(dataclasses.replace(found.choice, microbatches=factor * stages))

    def _split_state(self, chips: str, place: Place) -> None:
        """Tries to split the optimizer's state and gradients alone, between dp and fsdp."""
        if self.fixed.strategy is not None or self.fixed.mesh is not None:
            return
        whole = place if place["fsdp"] == 1 else place.moved("fsdp", "data", place["fsdp"])
        if whole is None or whole["data"] == 1:
            return
        if any(whole[name] != size for name, size in self.fixed.axes.items()):
            return
        for name in _ZERO:
            strategy = whole.strategy.replace("dp", name, 1)
            self._try(self._choice(chips, whole, self.remats[-1], strategy=strategy))

    def _resize(self, candidates: Sequence[Candidate]) -> None:
        """Tries larger batches as long as they fit and gain; smaller ones until they fit."""
        for each in candidates:
            now, before = each, math.inf
            while now is not None and now.fits and now.sample_seconds < 0.995 * before:
                before = now.sample_seconds
                now = self._try(dataclasses.replace(now.choice, samples=2 * now.samples))
            now = each
            while now is not None and not now.fits and not now.samples % 2:
                now = self._try(dataclasses.replace(now.choice, samples=now.samples // 2))

    # Proof.

    def prove(self, count: int) -> None:
        """Compiles the best, until this many of them fit, and says where the ranking changed."""
        proved = 0
        for _ in range(3 * count):
            open_ones = [c for c in self._promising() if c.proof is None]
            if proved >= count or not open_ones:
                break
            self._check_time()
            proof = self._proved(open_ones[0])
            if proof is None:
                break
            proved += proof.fits
            self._compare(open_ones[0], proof)
            if not proof.fits:
                self._learn(open_ones[0], proof)

    def _learn(self, before: Candidate, after_: Candidate) -> None:
        """Keeps how far an estimate was off, and prices what takes less memory than this."""
        off = after_.peak_bytes / max(1, before.estimate.peak_bytes)
        self.swollen[before.chips] = max(off, self.swollen.get(before.chips, 1.0))
        lean = before
        if self.fixed.loss_chunks is None and before.loss_chunks == 1 and self.can.chunks:
            lean = self._try(dataclasses.replace(before.choice, loss_chunks=CHUNKS)) or before
        self._offload(lean)
        if self.fixed.accumulate is None:
            for number in accumulations(lean.samples, lean.choice.data_ways)[1:3]:
                self._try(dataclasses.replace(lean.choice, accumulate=number))

    def _expected(self, candidate: Candidate) -> float:
        """Returns the peak of a candidate, if its estimate is off as far as others were."""
        return candidate.estimate.peak_bytes * self.swollen.get(candidate.chips, 1.0)

    def _promising(self) -> list[Candidate]:
        """Returns what fits or nearly fits, by the estimate's own order."""
        near = [
            c
            for c in self.ranked()
            if c.proof is not None or c.estimate.peak_bytes <= _NEAR * c.estimate.capacity
        ]

        def order(c: Candidate) -> tuple[bool, float, str]:
            over = self._expected(c) > c.estimate.capacity
            return over, c.estimate.seconds / c.samples, c.choice.key

        return sorted(near, key=order)

    def _proved(self, candidate: Candidate) -> Candidate | None:
        """Returns a candidate with what the compiler says; None if there is no compiler."""
        proof = self.memory.proof(candidate.choice.key)
        if proof is None:
            self.progress(f"compiling {candidate.mesh} {candidate.strategy} for {candidate.chips}")
            try:
                compiled = self.maker.compiled(candidate.recipe, candidate.layout)
            except ValueError as error:
                # The compiler is not installed, or has no such topology: the ranking stands.
                self.note(f"nothing was compiled: {_first(error)}")
                return None
            proof = proof_of(compiled, candidate.estimate)
            self.memory.keep(candidate.choice.key, proof)
        made = dataclasses.replace(candidate, proof=proof)
        self.known[candidate.choice] = made
        self.seen(made)
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
        """Looks for the least that would fit: more chips, or a smaller batch on these."""
        for name in names:
            if ":" not in name:
                continue
            # A mesh that is fixed is one of these chips alone.
            for chips in after(name)[:4] if self.fixed.mesh is None else []:
                if self._remedied(chips, prove=prove):
                    break
            self._shrink(name, prove=prove)

    def _remedied(self, chips: str, *, prove: bool) -> bool:
        """Returns whether something fits on these chips, and keeps the fastest as a remedy."""
        devices, samples = parse_chips(chips).device_count, self.samples(chips)
        if samples % devices and not {"model", "sequence"} & set(self.can.limits[0]):
            return False
        mine, self.known = self.known, {}
        self.rank(chips)
        found, self.known = self._first_fit(self.ranked(), prove=prove), mine
        return found

    def _first_fit(self, candidates: Sequence[Candidate], *, prove: bool) -> bool:
        """Keeps the first candidate that fits, by the compiler if it is to prove it."""
        for each in [c for c in candidates if c.fits][:3]:
            made = (self._proved(each) or each) if prove else each
            if made.fits:
                self.remedies.append(made)
                return True
        return False

    def _shrink(self, name: str, *, prove: bool) -> None:
        """Looks for the largest batch that fits on the chips that were asked for."""
        chips = str(parse_chips(name))
        here = [c for c in self.ranked() if c.chips == chips]
        if not here or self.fixed.batch_per_device == "free":
            return
        mine, self.known = self.known, dict(self.known)
        now: Candidate | None = min(here, key=_peak)
        while now is not None and not now.fits and not now.samples % 2:
            now = self._try(dataclasses.replace(now.choice, samples=now.samples // 2, accumulate=1))
            if now is not None and self._first_fit([now], prove=prove):
                break
        self.known = mine

    def finish(self) -> None:
        """Writes what was found to the cache, and says what was not priced."""
        self.memory.write()
        if self.too_large:
            self.note(
                f"{counted(len(self.too_large), 'mesh was', 'meshes were')} not priced: parameters "
                f"and optimizer state alone exceed a device's memory"
            )


def _first(error: Exception) -> str:
    """Returns the first sentence of an error, which may go on in the next line."""
    first, *rest = str(error).splitlines() or [type(error).__name__]
    return f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first


def _peak(candidate: Candidate) -> int:
    return candidate.peak_bytes


def _order(candidate: Candidate) -> tuple[bool, float, str]:
    """Returns how good a candidate is, if one that nearly fits can still be made to."""
    over = candidate.estimate.state_bytes > candidate.estimate.capacity
    return over, candidate.sample_seconds, candidate.choice.key


def _near(place: Place, found: Sequence[Place], plain: Sequence[Place]) -> list[Place]:
    """Returns the neighbours of a place; of a plain one, those that are plain too."""
    known = set(plain if place.is_plain else found)
    return [near for near in place.neighbours() if near in known]


def _spread(found: Sequence[Place]) -> list[Place]:
    """Returns some of many places, evenly spaced."""
    step = -(-len(found) // _ALL)
    return list(found)[::step]
