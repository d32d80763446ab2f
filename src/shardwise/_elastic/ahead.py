"""The steps of the smaller meshes, compiled while the run goes on, before they are needed."""

from __future__ import annotations

from collections.abc import Callable

from .._compile import find_compiler
from .._layout import Layout
from .._nnx import Recipe
from .._processes import Elastic
from .chips_left import chips_left
from .plan import ElasticPlan, elastic_plan

# What a compiler says may fill pages.
_LONGEST = 400


def compile_ahead(
    recipe: Recipe,
    layout: Layout,
    planned: ElasticPlan,
    run: Elastic | None,
    capacity: int | None,
    say: Callable[[str], None],
) -> list[int]:
    """Compiles the step of each smaller number of processes that the run may go on with.

    A number that does not fit is not used, and the launcher no longer offers it. Returns the others.
    Nothing is compiled for CPU devices, whose memory has no limit.

    Args:
        recipe: the recipe, for all processes.
        layout: its layout, on the mesh of all processes.
        planned: what was planned without compiling.
        run: the launcher's run, if there is a launcher.
        capacity: the bytes of one device, where they are known.
        say: prints a line.
    """
    sizes, full = planned.sizes, planned.processes
    first = chips_left(layout.mesh, full, layout.mesh.size // full)
    if first is None:
        return sizes
    if missing := find_compiler(first.platform).problem:
        say(f"elastic: the memory with fewer processes is not compiled ahead: {first} {missing}")
        return sizes
    for size in sorted(set(sizes) - {full}, reverse=True):
        try:
            (found,) = elastic_plan(
                recipe, layout, full, sizes=[size], capacity=capacity, compiled=True
            )
        except Exception as error:  # of the compiler, or of the user's code: the run goes on
            why = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
            say(f"elastic: {size} of {full} could not be compiled ahead: {why}")
            continue
        if found.problem is not None:
            sizes = [s for s in sizes if s != size]
            if run is not None:
                run.plan(sizes)
            say(f"elastic: {size} of {full} cannot go on: {found.problem.message}")
        elif found.compiled_bytes is not None:
            say(f"elastic: {found}")
    return sizes
