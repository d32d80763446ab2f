"""The step of a smaller mesh, compiled for the chips that would be left."""

from __future__ import annotations

import math

from jax.sharding import Mesh

from .._base import show_bytes
from .._chips import CHIPS, Chips, tpu_slices
from .._compile import compile, step_machine
from .._layout import Layout
from .._mesh import AnyMesh, chips_of, show_mesh
from .._nnx import Recipe


def chips_left(mesh: AnyMesh, processes: int, each: int) -> Chips | None:
    """Returns the chips of so many processes; None if they cannot be foreseen.

    Fewer hosts of a TPU slice are another slice, if there is one with as many chips.
    """
    chips = chips_of(mesh)
    if chips is None and isinstance(mesh, Mesh):
        machine = step_machine(mesh)
        kind = mesh.devices.flat[0].device_kind
        tpu = (c for c in CHIPS.values() if c.platform == "tpu" and c.kind == kind)
        chip = machine.chips.chip if machine is not None else next(tpu, None)
    else:
        chip = chips.chip if chips is not None else None
    if chip is None:
        return None
    if chip.platform == "gpu":
        return Chips(chip, (processes, each))
    slices = (
        s for s in tpu_slices(chip.name) if math.prod(s) * chip.devices_per_chip == processes * each
    )
    found = next(slices, None)
    return None if found is None else Chips(chip, found)


def compiled_peak(recipe: Recipe, layout: Layout, capacity: int | None) -> tuple[int | None, str]:
    """Returns what one device needs (compiled), and why that does not fit, if it does not.

    Raises:
        ValueError: the compiler is not installed, or has failed.
    """
    found = compile(recipe, layout, show=False)
    peak = found.memory.peak if found.memory is not None else None
    if found.fits is False:
        return peak, found.verdict.splitlines()[0]
    if peak is not None and capacity is not None and peak > capacity:
        return peak, (
            f"each device of {show_mesh(layout.mesh)} needs {show_bytes(peak)} (compiled), and has "
            f"{show_bytes(capacity)}"
        )
    return peak, ""
