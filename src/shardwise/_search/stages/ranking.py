"""Which meshes are tried, and how the step is computed on the best of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ..._chips import parse_chips
from ..._layout import PART_AXES
from ..abilities import CHUNKS
from ..found import Candidate
from ..space import Choice, Place, accumulations, beyond, corners, orders, places
from .pricing import Pricer

# Up to this many meshes are all priced; of more, the neighbours of the best.
_ALL = 24
_KEPT = 4
# State over the data axes, between none of it split (dp) and all of it (fsdp).
_ZERO = tuple(name for name in ("zero1", "zero2") if name in PART_AXES)


class Ranker(Pricer):
    """Ranks layouts by their estimates."""

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
                priced = self.price(self.choice(chips, place, self.remats[-1]))
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
        if samples % devices and found:
            self.note(
                f"a batch of {samples} samples does not divide by {devices} devices: only meshes "
                f"that split something else too were tried"
            )
        if missing and devices > 1:
            self.note(f"the model does not allow {missing}: not tried")
        return found

    def _affordable(
        self, chips: str, wanted: Sequence[Place], seen: Mapping[Place, Candidate]
    ) -> list[Place]:
        """Returns the places whose state alone is within a device's memory; all if none is."""
        capacity = parse_chips(chips).chip.capacity_bytes
        fitting = [place for place in wanted if self.state_bytes(chips, place) <= capacity]
        if not fitting and not any(c.estimate.state_bytes <= capacity for c in seen.values()):
            return list(wanted)
        self.too_large |= {f"{chips} {p.sizes}" for p in wanted if p not in fitting}
        return fitting

    def _refine(self, chips: str, seen: Mapping[Place, Candidate]) -> None:
        """Tries how the step is computed, and orders of the axes, on the best meshes."""
        best = sorted(seen, key=lambda place: _order(seen[place]))[:_KEPT]
        small = sorted(seen, key=lambda place: seen[place].peak_bytes)[:1]
        for place in dict.fromkeys([*best, *small]):
            thorough = place in (*best[:2], *small)
            for remat in self.remats:
                self._fit(self.choice(chips, place, remat), thorough=thorough)
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
                again = self.price(choice)
                if again is not None and again is not each and again.seconds > 0.995 * each.seconds:
                    self.known[choice] = None  # the same layout in another order, no faster

    def _fit(self, choice: Choice, *, thorough: bool) -> None:
        """Prices a choice, and the least that would make it fit."""
        found = self.price(choice)
        if found is None or found.fits:
            return
        lean = found
        if thorough and self.fixed.loss_chunks is None and self.can.chunks:
            again = self.price(dataclasses.replace(choice, loss_chunks=CHUNKS))
            if again is not None and again.fits:
                return
            if again is not None and again.peak_bytes < 0.98 * found.peak_bytes:
                lean = again
        self._accumulate(lean)
        if thorough and choice.remat == self.remats[-1]:
            self.offload(lean)

    def _accumulate(self, found: Candidate) -> Candidate | None:
        """Returns a candidate with the least accumulation with which it would fit."""
        free = found.estimate.capacity - found.estimate.state_bytes
        if self.fixed.accumulate is not None or free <= 0:
            return None
        choice = found.choice
        parts = choice.accumulate * (found.peak_bytes - found.estimate.state_bytes) / free
        numbers = [n for n in accumulations(choice.samples, choice.data_ways) if n >= parts]
        for number in [n for n in numbers if n > choice.accumulate][:3]:
            again = self.price(dataclasses.replace(choice, accumulate=number))
            if again is not None and again.fits:
                return again
        return None

    def offload(self, lean: Candidate) -> None:
        """Tries to keep activations, the optimizer's state, or both in the memory of the hosts."""
        tries: list[Candidate | None] = []
        if self.fixed.remat == "free" and lean.remat != "":
            for policy in self.can.offloaded:
                tries.append(self.price(dataclasses.replace(lean.choice, remat=policy)))
            if not self.can.offloaded:
                self.note("activations were not offloaded: the model gives none of them a name")
        if self.fixed.offload is None and not self.recipe.offload:
            away = dataclasses.replace(lean.choice, offload="optimizer")
            tries.append(self.price(away))
            if not any(c is not None and c.fits for c in tries):
                smallest = min((c for c in tries if c is not None), default=None, key=peak_of)
                if smallest is not None:
                    both = dataclasses.replace(smallest.choice, offload="optimizer")
                    tries.append(self.price(both))
        if not any(c is not None and c.fits for c in tries):
            for each in sorted((c for c in tries if c is not None), key=peak_of)[:1]:
                self._accumulate(each)

    def _save_more(self, found: Candidate) -> None:
        """Tries to save named activations where all are recomputed, and fewer policies fit."""
        if self.fixed.remat != "free" or found.remat != self.remats[-1] or found.remat == "":
            return
        for policy in self.can.saved:
            self.price(dataclasses.replace(found.choice, remat=policy))

    def _repartition(self, found: Candidate) -> None:
        """Tries other numbers of microbatches of a pipeline."""
        stages = found.choice.sizes.get("pipe", 1)
        if stages == 1 or not self.can.own_microbatches:
            return
        for factor in (1, 2, 8):
            self.price(dataclasses.replace(found.choice, microbatches=factor * stages))

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
            self.price(self.choice(chips, whole, self.remats[-1], strategy=strategy))

    def _resize(self, candidates: Sequence[Candidate]) -> None:
        """Tries larger batches as long as they fit and gain; smaller ones until they fit."""
        for each in candidates:
            now, before = each, math.inf
            while now is not None and now.fits and now.sample_seconds < 0.995 * before:
                before = now.sample_seconds
                now = self.price(dataclasses.replace(now.choice, samples=2 * now.samples))
            now = each
            while now is not None and not now.fits and not now.samples % 2:
                now = self.price(dataclasses.replace(now.choice, samples=now.samples // 2))


def peak_of(candidate: Candidate) -> int:
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
