"""The best strategy for a mesh that is already chosen."""

from __future__ import annotations

from typing import Any

from .._base import either
from .._check import LayoutError
from .._estimate import Estimate, estimate
from .._layout import Layout, layout
from .._mesh import AnyMesh, chips_of, show_mesh
from .._nnx import Recipe

# The simplest comes first: of equals, it is taken.
NAMES = ("dp", "fsdp", "tensor", "fsdp+tensor")


def rank_strategies(
    recipe: Recipe, mesh: AnyMesh, **options: Any
) -> list[tuple[str, Layout, Estimate]]:
    """Returns the strategies that this mesh has axes for, those that fit first, fastest first.

    Args:
        recipe: the model, loss, optimizer and batch.
        mesh: a mesh of known chips.
        options: what else `sw.layout` takes.

    Raises:
        ValueError: nobody knows how fast the mesh's devices are, or no strategy can be used.
    """
    if chips_of(mesh) is None:
        raise ValueError(
            f"the best strategy is only known for chips: give the mesh some, as in "
            f"{either('sw.mesh(..., on=', '--on ')}{either(repr('h100:1x8'), 'h100:1x8')}"
            f"{either(')', '')}"
        )
    found, failed = [], ""
    for name in NAMES:
        try:
            made = layout(recipe, mesh, name, **options)
            found.append((name, made, estimate(recipe, made)))
        except (LayoutError, ValueError) as error:
            failed = failed or str(error).splitlines()[0]
    if not found:
        raise ValueError(f"no strategy can be used on {show_mesh(mesh)}: {failed}")
    return sorted(found, key=lambda row: (not row[2].fits, row[2].seconds, row[2].peak_bytes))
