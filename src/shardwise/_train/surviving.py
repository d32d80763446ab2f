"""An elastic run: what `fit` does so that it can go on with fewer processes, and with more again."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._base import count, either, show_bytes
from .._checkpoint import Checkpoints
from .._elastic import (
    Copies,
    DamagedCopy,
    Found,
    compile_ahead,
    device_capacity,
    elastic_plan,
    scaled,
)
from .._layout import Layout
from .._nnx import Recipe
from .._place import require_mesh
from .._processes import AGAIN_EXIT_CODE, COPIES, MOST, distributed_address, elastic_run, exchange
from .._step import Blueprint, TrainState
from .stopping import Stopped

_PLANNED = 8


class Again(Stopped):
    """The run has saved a checkpoint, and is to be started again with other processes."""

    def __init__(self, step: int):
        """Stores the step."""
        SystemExit.__init__(self, AGAIN_EXIT_CODE)
        self.status, self.step, self.signal = AGAIN_EXIT_CODE, step, ""

    def __str__(self) -> str:
        """Returns what happened."""
        return f"to be started again after step {self.step}"


class Surviving:
    """What an elastic run needs beside its training loop.

    Attributes:
        round: how often the launcher has started the processes before.
        lines: what to say at the start.
    """

    def __init__(self, elastic: int, copies_every: int | None) -> None:
        """Takes the number of processes of a run that has lost none, and when copies are made."""
        self.run = elastic_run()
        self.full = elastic
        self.round = self.run.round if self.run is not None else 0
        self.lines: list[str] = []
        self.copies: Copies | None = None
        self._every = copies_every
        self._told = False
        self._compiles: Callable[[], object] | None = None

    def arguments(self) -> str:
        """Returns what must be the same on all processes."""
        return f"{self.full} processes, copies every {self._every}"

    def recipe_for(self, recipe: Recipe, layout: Layout) -> Recipe:
        """Returns the recipe for the processes that are here; plans for fewer at the first start.

        Raises:
            LayoutError: the run cannot go on with fewer processes.
            ValueError: the mesh does not follow the number of processes.
        """
        here = jax.process_count()
        if here < self.full:
            found = scaled(recipe, layout, here, self.full)
            self.lines.append(
                f"going on with {count(here, 'process', 'processes')} of {self.full}: "
                f"accumulate={found.accumulate} instead of {recipe.accumulate}"
            )
            if any(leaf.kind == "BatchStat" for leaf in layout.leaves):
                self.lines.append(
                    "batch statistics are those of smaller microbatches from here on, so losses are "
                    "those of a run with this accumulate="
                )
            return found
        if jax.process_index() == 0 and self.round == 0:
            self._plan(recipe, layout)
        return recipe

    def _plan(self, recipe: Recipe, layout: Layout) -> None:
        least = self.run.least if self.run is not None else None
        sizes = _worth_planning(self.full, least)
        capacity = device_capacity(require_mesh(layout))
        found = elastic_plan(recipe, layout, self.full, sizes=sizes, capacity=capacity)
        found.require(least if least != self.full else None)
        self.lines += [
            f"elastic: {smaller.processes} of {self.full} cannot go on: {smaller.problem.message}"
            if smaller.problem
            else f"elastic: {smaller}"
            for smaller in found
        ]
        if self.run is not None:
            self.run.plan(found.sizes)
        self._compiles = lambda: compile_ahead(recipe, layout, found, self.run, capacity, _warn)

    def open_copies(self, blueprint: Blueprint, checkpoints: Checkpoints) -> None:
        """Prepares copies in memory, if they are wanted and have a place.

        Raises:
            ValueError: they do not fit this host's memory.
        """
        place = os.environ.get(COPIES)
        if self._every is None or not place:
            return
        folder = Path(place)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        run = str(checkpoints.directory)
        where = distributed_address()
        copies = Copies(blueprint, folder, run=run, coordinator=where, warn=_warn)
        missing = copies.room_missing()
        if missing:
            raise ValueError(
                f"{missing}: "
                + either(
                    "give copies_every=None to go on from checkpoints alone",
                    "give --copies-every 0 to go on from checkpoints alone",
                )
            )
        self.copies = copies
        kept = (
            "two hosts" if copies.survives_a_host else "this host, where they outlive its processes"
        )
        self.lines.append(
            f"copies in memory every {count(self._every, 'step')}, on {kept}: "
            f"{show_bytes(copies.bytes_here)} here (exact)"
        )

    def newest(self, saved: int | None) -> Found | None:
        """Returns the newest copy in memory, unless a checkpoint is newer."""
        found = self.copies.newest() if self.copies is not None else None
        lost = self.copies.incomplete if self.copies is not None else None
        if lost is not None and lost > max(saved or 0, found.step if found is not None else 0):
            self.lines.append(f"the copy in memory of step {lost} is not complete")
        return None if found is None or (saved is not None and saved > found.step) else found

    def restore(self, found: Found) -> tuple[TrainState, int] | None:
        """Returns the state and the position of a copy; None, on all processes, if it is damaged."""
        assert self.copies is not None
        restored, problem = None, ""
        try:
            restored = self.copies.restore(found)
        except DamagedCopy as error:
            problem = str(error)
        problems = [*filter(None, exchange("restoring from memory", problem))]
        if problems:
            self.lines.append(
                f"the copy of step {found.step} in memory cannot be used: {problems[0]}"
            )
            return None
        return restored

    def is_offered_more(self) -> bool:
        """Returns whether the launcher has more processes for this run."""
        return self.run is not None and jax.process_index() == 0 and self.run.is_asked_to_grow()

    def finished(self, step: int, metrics: Any) -> None:
        """Tells the launcher of the first step that these processes have finished."""
        if self.run is not None and not self._told:
            self._told = True
            jax.block_until_ready(metrics)
            if jax.process_index() == 0:
                self.run.went_on(step)
        if self._compiles is not None:
            # The first step was compiled before: two compilations at once would need twice the memory.
            jax.block_until_ready(metrics)
            threading.Thread(target=self._compiles, name="shardwise-ahead", daemon=True).start()
            self._compiles = None

    def copy_is_due(self, step: int) -> bool:
        """Returns whether the state after this step is to be copied."""
        return self.copies is not None and self._every is not None and step % self._every == 0

    def is_started_again(self) -> bool:
        """Returns whether a launcher starts these processes again if some of them leave."""
        return self.run is not None

    def close(self) -> None:
        """Waits for the current copy."""
        if self.copies is not None:
            self.copies.close()


def _warn(text: str) -> None:
    print(f"shardwise: {text}", file=sys.stderr, flush=True)


def surviving(
    elastic: bool | int, copies_every: int | None, checkpoints: Checkpoints | None
) -> Surviving | None:
    """Returns what an elastic run needs, or None if the run is not elastic.

    Raises:
        ValueError: the run cannot be elastic.
    """
    if copies_every is not None and (
        isinstance(copies_every, bool)
        or not isinstance(copies_every, int | np.integer)
        or copies_every < 1
    ):
        raise ValueError(f"copies_every must be a positive integer or None, got {copies_every!r}")
    if elastic is False:
        return None
    here, run = jax.process_count(), elastic_run()
    if checkpoints is None:
        raise ValueError(
            "an elastic run needs checkpoints, to go on from when no copy in memory is left: "
            + either("give fit checkpoints=", "give --checkpoints DIR")
        )
    if elastic is True:
        if run is None and (most := os.environ.get(MOST, "")).isdecimal():
            elastic = int(most)
        elif run is None:
            raise ValueError(
                f"elastic=True needs a launcher that starts the processes again, and this run of "
                f"{count(here, 'process', 'processes')} has none: start it with shardwise launch "
                f"--elastic -n N, or give elastic=N, the number of processes when none is lost"
            )
        else:
            return Surviving(run.most, copies_every)
    if not isinstance(elastic, int | np.integer) or elastic < max(here, 2):
        raise ValueError(
            f"elastic must be True, or the number of processes when none is lost, which is at least "
            f"{max(here, 2)} here, got {elastic!r}"
        )
    return Surviving(int(elastic), copies_every)


def _worth_planning(full: int, least: int | None) -> list[int]:
    """Returns the numbers of processes to plan for: the next ones, then fewer and fewer."""
    every = range(full - 1, max(least or 1, 1) - 1, -1)
    if len(every) <= _PLANNED:
        return [*every]
    halves = [full >> n for n in range(1, full.bit_length())]
    return sorted({*every[: _PLANNED // 2], *(set(halves) & {*every}), every[-1]}, reverse=True)
