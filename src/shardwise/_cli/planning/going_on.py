"""What `search` says below its table: the ends of the front, and the commands to go on with."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from ..._base import show_bytes, show_seconds

if TYPE_CHECKING:
    from ..._search import Candidate, Found


def summary_of(found: Found, target: str, batch: str | None, save: str | None) -> list[str]:
    """Returns the lines below the table: the ends of the front, and how to go on."""
    from ..._search import show_cost

    place = {id(candidate): i for i, candidate in enumerate(found.candidates, 1)}
    if not any(candidate.fits for candidate in found.candidates):
        if not found.remedies:
            return []
        return [
            "",
            "to go on with the first of them:",
            *_commands(found.remedies[0], target, batch),
        ]
    best, lines = found.best, [""]
    named: list[tuple[str, Any]] = [("fastest", best), ("smallest", found.smallest)]
    named += [("cheapest", found.cheapest)] if found.cheapest is not None else []
    for name, one in named:
        cost = f", ${show_cost(one.cost)} per step" if one.cost is not None else ""
        lines.append(
            f"{name:8}  {place[id(one)]}: {show_seconds(one.seconds)}, {show_bytes(one.peak_bytes)}"
            f"{cost}{_against(one, best)}"
        )
    if len(found.front) > 1:
        numbers = ", ".join(str(place[id(one)]) for one in found.front)
        lines.append(f"no other layout is both faster and smaller than {numbers}")
    return [*lines, "", "to go on with the fastest:", *_commands(best, target, batch, save)]


def _against(one: Candidate, best: Candidate) -> str:
    """Returns how far a candidate is from the best one."""
    if one is best:
        return ""
    time, memory = one.seconds / best.seconds - 1, one.peak_bytes / best.peak_bytes - 1
    text = f"; {abs(time):.0%} {'slower' if time >= 0 else 'faster'} than the fastest, "
    text += f"{abs(memory):.0%} {'less' if memory <= 0 else 'more'} memory"
    if one.cost is not None and best.cost:
        text += f", {abs(one.cost / best.cost - 1):.0%} {'less' if one.cost <= best.cost else 'more'} cost"
    return text


def _commands(one: Candidate, target: str, batch: str | None, save: str | None = None) -> list[str]:
    from ..published import is_named

    target = shlex.quote(target)
    sizes = f" --batch {_batch_of(one, batch)}" if batch or one.samples != _own(one) else ""
    if one.maker.names:
        # No option says what the names in the model's annotations stand for: a lockfile has specs.
        file = shlex.quote(save or "layout.json")
        first = [] if save else [f"  (add --save {file} to this search)"]
        return [
            *first,
            f"  shardwise compile {target} --on {one.chips} --layout {file}{sizes}",
            f"  shardwise train {target} --layout {file}{sizes} --steps 1000",
        ]
    lines = [f"  shardwise compile {target} {one.command}{sizes}"]
    if not is_named(target):
        where = f"{one.layout_options}{one.step_options}"
        where = f"--layout {shlex.quote(save)}" if save is not None else where
        lines.append(f"  shardwise train {target} {where}{sizes} --steps 1000")
    return lines


def _own(one: Candidate) -> int:
    """Returns the samples of the recipe that was searched."""
    import jax

    return next((x.shape[0] for x in jax.tree.leaves(one.maker.given.batch) if x.shape), 1)


def _batch_of(one: Candidate, batch: str | None) -> str:
    """Returns the batch as an option: the one that was given, with the samples that were chosen."""
    _, times, rest = (batch or "").partition("x")
    return f"{one.samples}{times}{rest}"
