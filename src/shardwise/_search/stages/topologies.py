"""How many chips: the topologies that a chip comes in, smallest first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..._chips import CHIPS, parse_chips, tpu_slices

if TYPE_CHECKING:
    from .proving import Searcher

# How many sizes are looked at beyond the first that fits.
_BEYOND = 2
_MOST = 4096


def sizes(name: str) -> list[str]:
    """Returns the topologies of a chip as `sw.mesh` names them, one for each number of chips.

    Raises:
        ValueError: there is no such chip.
    """
    chip = CHIPS.get(name)
    if chip is None:
        parse_chips(name)  # says which chips there are
        return []
    if chip.platform == "gpu":
        hosts = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        return [f"{name}:1x{n}" for n in (1, 2, 4)] + [f"{name}:{n}x8" for n in hosts]
    found: dict[int, str] = {}
    for topology in tpu_slices(name):
        count = math.prod(topology)
        # Of one number of chips the last is the most cubic; numbers that are no power of 2 rarely
        # divide a model.
        if count <= _MOST and count & (count - 1) == 0:
            found[count] = f"{name}:{'x'.join(map(str, topology))}"
    return list(found.values())


def after(chips: str) -> list[str]:
    """Returns the next larger topologies of the same chip."""
    here = parse_chips(chips)
    return [
        each for each in sizes(here.chip.name) if parse_chips(each).device_count > here.device_count
    ]


def growing(searcher: Searcher, name: str) -> None:
    """Ranks layouts on more and more chips, until a few sizes fit."""
    fitting = 0
    for chips in sizes(name):
        devices = parse_chips(chips).device_count
        if not searcher.may_fit(chips):
            continue
        samples = searcher.samples(chips)
        if devices > samples:
            # Beyond one sample each, only splits of a sample could use more.
            searcher.note(
                f"more than {samples} devices of {name} were not tried: the batch has "
                f"{samples} samples"
            )
            break
        searcher.rank(chips)
        fitting += any(c.fits for c in searcher.ranked() if c.chips == chips)
        if fitting > _BEYOND:
            break
