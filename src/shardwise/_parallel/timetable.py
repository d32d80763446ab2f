"""Which microbatch each stage of a pipeline works on, tick by tick, and how long it stands idle."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._base import public

_MOST_TICKS = 40


def slot(item: Any, stages: int, rounds: int) -> tuple[Any, Any]:
    """Returns the microbatch and the round of a stage's n-th piece of work.

    Microbatches go round in groups of as many as there are stages: what leaves the last stage is
    needed by the first on the very next tick. Works on numbers and on traced arrays alike.
    """
    group, within = item // (stages * rounds), item % stages
    return group * stages + within, (item // stages) % rounds


@public
@dataclasses.dataclass(frozen=True, slots=True)
class Timetable:
    """The work of a pipeline. Prints as a grid of stages and ticks.

    Attributes:
        stages: the size of the pipeline's axis.
        microbatches: how many parts the batch is cut into.
        rounds: how often each microbatch goes through all stages: 1 for GPipe.
    """

    stages: int
    microbatches: int
    rounds: int = 1

    def __post_init__(self) -> None:
        """Refuses what the schedule cannot run."""
        for word in ("stages", "microbatches", "rounds"):
            count = getattr(self, word)
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"{word} is {count!r}: give a number of at least 1")
        if self.rounds > 1 and self.microbatches % self.stages:
            raise ValueError(
                f"{self.microbatches} microbatches cannot go round {self.stages} stages: the "
                f"circular schedule takes a multiple of {self.stages}, such as "
                f"{-(-self.microbatches // self.stages) * self.stages}"
            )

    @property
    def ticks(self) -> int:
        """How many ticks the whole takes."""
        return self.microbatches * self.rounds + self.stages - 1

    def at(self, tick: int, stage: int) -> tuple[int, int] | None:
        """Returns the microbatch and round that a stage works on, or None if it is idle."""
        item = tick - stage
        if not 0 <= item < self.microbatches * self.rounds:
            return None
        return slot(item, self.stages, self.rounds)

    @property
    def bubble(self) -> float:
        """Idle ticks for each tick of work, counted on the grid; theory says (S-1)/(M·R)."""
        cells = [self.at(t, s) for t in range(self.ticks) for s in range(self.stages)]
        idle = cells.count(None)
        return idle / (len(cells) - idle)

    def __str__(self) -> str:
        """Returns the grid: microbatch numbers, with the round as a letter where there are several."""
        ticks = range(min(self.ticks, _MOST_TICKS))
        width = max(len(self._cell(t, s)) for t in ticks for s in range(self.stages))
        more = f" … {self.ticks - _MOST_TICKS} more" if self.ticks > _MOST_TICKS else ""
        lines = [
            f"stage {s:<3}" + " ".join(self._cell(t, s).rjust(width) for t in ticks) + more
            for s in range(self.stages)
        ]
        idle = self.ticks - self.microbatches * self.rounds
        lines.append(
            f"{self.ticks} ticks, {idle} of them idle on each stage: "
            f"bubble {100 * self.bubble:.1f}% of the work"
        )
        return "\n".join(lines)

    __repr__ = __str__

    def _cell(self, tick: int, stage: int) -> str:
        found = self.at(tick, stage)
        if found is None:
            return "·"
        microbatch, round_ = found
        return f"{microbatch}{chr(ord('a') + round_ % 26) if self.rounds > 1 else ''}"
