"""What one choice takes: a layout, the partitioned program, an estimate; each is made once."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..._base import count as counted
from ..._base import option
from ..._check import LayoutError
from ..._chips import parse_chips
from ..._compile import Compiled
from ..._compile import compile as compile_step
from ..._estimate import Partitioned, partition_step
from ..._layout import Layout
from ..._mesh import mesh as make_mesh
from ..._nnx import Recipe
from ..abilities import Abilities
from ..applied import laid_out, samples_of, with_choice
from ..found import Candidate, rank
from ..remembered import Remembered
from ..space import Choice, Fixed, Place


class Maker:
    """Makes recipes and layouts of choices, each once."""

    def __init__(self, given: Recipe, calibration: str | os.PathLike[str] | None):
        """Takes the recipe that is searched."""
        self.given, self.calibration = given, calibration
        self.layouts: dict[Any, Layout] = {}
        self.names: Mapping[str, str | None] = {}

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
            self.layouts[key] = laid_out(self.given, mesh, choice.strategy)
        return self.layouts[key]

    def compiled(self, recipe: Recipe, layout: Layout) -> Compiled:
        """Returns a step, compiled for the layout's chips; what was compiled before is cached."""
        return compile_step(recipe, layout, calibration=self.calibration, show=False)


class Pricer:
    """Prices the layouts of one recipe, each once."""

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
        if self.can.names_of_axes:
            self.maker.names = names = self.can.names_of_axes
            split = [f"{name!r} is taken as {axis}" for name, axis in names.items() if axis]
            free = [repr(name) for name, axis in names.items() if axis is None]
            split += [
                f"{', '.join(free)} {'is' if len(free) == 1 else 'are'} left to the strategy"
            ] * bool(free)
            self.note(f"names in the model's annotations: {', '.join(split)}")
        self.remats, why = self.can.remats
        if fixed.remat != "free":
            if self.remats == [""]:
                raise ValueError(
                    f"{option('remat', fixed.remat or 'none')} has nothing to act on: {why}"
                )
            self.remats = [fixed.remat]
        elif why:
            self.note(f"remat was not searched: {why}")
        self.memory = Remembered(recipe, calibration, lambda: self.can.unsplit)
        self.known: dict[Choice, Candidate | None] = {}
        self.steps: dict[str, Partitioned] = {}
        self.remedies: list[Candidate] = []
        self.leader: Candidate | None = None
        self.too_large: set[str] = set()
        # By chips, how many times an estimate's peak a compiled one was, where that did not fit.
        self.swollen: dict[str, float] = {}
        # By reason, what was dropped for it.
        self.dropped: dict[str, list[str]] = {}
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

    def state_bytes(self, chips: str, place: Place) -> int:
        """Returns the parameters and the optimizer's state on one device; 0 without a layout."""
        choice = self.choice(chips, place, self.remats[-1])
        size = self.memory.state_bytes(choice.key)
        if size is None:
            self.check_time()
            try:
                made = self.maker.layout(choice)
                moments = made.for_optimizer(self.recipe.optimizer, wrt=self.recipe.wrt)
                offloaded = "optimizer" in self.recipe.offloaded
                size = made.bytes_per_device + (0 if offloaded else moments.bytes_per_device)
            except ValueError:
                size = 0
            self.memory.keep(choice.key, size)
        return size

    def choice(self, chips: str, place: Place, remat: str | None, **changes: Any) -> Choice:
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

    def price(self, choice: Choice) -> Candidate | None:
        """Prices one choice; None if it cannot be laid out."""
        if choice not in self.known:
            self.check_time()
            found = self.known[choice] = self._priced(choice)
            if found is not None:
                self._tell_best(found)
        return self.known[choice]

    def check_time(self) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise TimeoutError

    def _priced(self, choice: Choice) -> Candidate | None:
        if choice.samples % (choice.data_ways * choice.accumulate):
            if self.fixed.mesh is not None or self.fixed.accumulate is not None:
                parts = f", {choice.accumulate} parts each" if choice.accumulate > 1 else ""
                why = (
                    f"a batch of {counted(choice.samples, 'sample')} cannot be split over "
                    f"{counted(choice.data_ways, 'device')}{parts}"
                )
                self.dropped.setdefault(why, []).append(f"{choice.mesh} {choice.strategy}")
            return None
        estimate = self.memory.estimate(choice.key)
        if estimate is None:
            estimate = self._estimated(choice)
            self.memory.keep(choice.key, estimate)
        if isinstance(estimate, str):
            self.dropped.setdefault(estimate, []).append(f"{choice.mesh} {choice.strategy}")
            return None
        chip = parse_chips(choice.chips).chip.name
        return Candidate(choice, estimate, self.maker, price=self.prices.get(chip))

    def _estimated(self, choice: Choice) -> Any:
        """Returns an estimate, or why there is none."""
        try:
            made = self.maker.layout(choice)
        except ValueError as error:
            return f"it cannot be laid out: {first_line(error)}"
        if "model" in choice.sizes and not any("model" in str(leaf.spec) for leaf in made.leaves):
            size = choice.sizes["model"]
            return f"no pair of dims is divisible by {size}"
        # The same axes in another order are the same partitioned program.
        key = dataclasses.replace(choice, axes=tuple(sorted(choice.axes))).key
        try:
            if key not in self.steps:
                recipe = self.maker.recipe(choice)
                self.steps[key] = partition_step(recipe, made, calibration=self.calibration)
            return self.steps[key].on(made.mesh)
        except (LayoutError, ValueError) as error:
            return first_line(error)

    def _tell_best(self, found: Candidate) -> None:
        """Says which candidate is the best so far."""
        self.priced += 1
        if self.leader is None or rank([self.leader, found])[0] is found:
            self.leader = found
        self.seen(found)
        self.progress(f"best of {self.priced}: {self.leader}")


def first_line(error: Exception) -> str:
    """Returns what an error says: its first line, and of a user's traceback or a finding the reason."""
    first, *rest = str(error).splitlines() or [type(error).__name__]
    if not rest or not (first.endswith(":") or isinstance(error, LayoutError)):
        return first
    raised = next((line for line in rest if line and line == line.lstrip()), rest[0].strip())
    return f"{first}: {rest[0].strip()}" if isinstance(error, LayoutError) else f"{first} {raised}"
