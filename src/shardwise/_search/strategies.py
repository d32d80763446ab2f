"""The best strategy for a mesh that is already chosen."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from .._base import either, show_seconds
from .._check import LayoutError
from .._compile import step_machine
from .._estimate import Estimate, estimate
from .._layout import PART_AXES, Layout, layout
from .._mesh import AnyMesh, show_mesh
from .._nnx import Recipe
from .applied import axes_of_names


def strategies_of(mesh: AnyMesh) -> list[str]:
    """Returns the strategies that a mesh has axes for, the simplest first.

    Example:
        >>> import shardwise as sw
        >>> from shardwise._search.strategies import strategies_of
        >>> strategies_of(sw.mesh("data=2", on="none"))
        ['dp', 'fsdp', 'zero1', 'zero2']
    """
    has = [part for part, axes in PART_AXES.items() if any(axis in mesh.shape for axis in axes)]
    split = [part for part in ("expert", "sequence", "tensor", "pipeline") if part in has]
    state = [part for part in has if part not in split]
    found = ["dp"]
    for number in range(len(split) + 1):
        for parts in itertools.combinations(split, number):
            # A sequence axis splits the batch whatever the strategy is.
            if "sequence" in parts or "sequence" not in has:
                found += ["+".join(parts), *("+".join((first, *parts)) for first in state)]
    return [name for name in dict.fromkeys(found) if name]


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
    if step_machine(mesh, None) is None:
        raise ValueError(
            f"the best strategy is only known for chips: give the mesh some, as in "
            f"{either('sw.mesh(..., on=', '--on ')}{either(repr('h100:1x8'), 'h100:1x8')}"
            f"{either(')', '')}"
        )
    if names := axes_of_names(layout(recipe, mesh, **options)):
        # Strategies that keep the annotation would fail, and one that overrides it would win.
        said, first = ", ".join(map(repr, names)), next(iter(names))
        raise ValueError(
            f"the model's annotations have names that are no axes of {show_mesh(mesh)}, {said}, so "
            f"strategies cannot be compared: give each an axis or none, such as "
            f"{either(f'logical={{{first!r}: None}}', f'--rules with [logical] {first} = []')}"
        )
    found, failed = [], ""
    for name in strategies_of(mesh):
        try:
            made = layout(recipe, mesh, name, **options)
            found.append((name, made, estimate(recipe, made)))
        except (LayoutError, ValueError) as error:
            failed = failed or str(error).splitlines()[0]
    if not found:
        raise ValueError(f"no strategy can be used on {show_mesh(mesh)}: {failed}")
    return sorted(found, key=lambda row: (row[2].fits is False, row[2].seconds, row[2].peak_bytes))


def best_layout(recipe: Any, mesh: AnyMesh, **options: Any) -> Layout:
    """Returns the layout of the strategy with the fastest step, which its reasons name.

    Args:
        recipe: the model, loss, optimizer and batch.
        mesh: a mesh of known chips.
        options: what else `sw.layout` takes.

    Raises:
        ValueError: it is no recipe, or see `rank_strategies`.
    """
    if not isinstance(recipe, Recipe):
        raise ValueError("the strategy 'best' needs a recipe: a model alone has no step to time")
    (name, made, found), *others = rank_strategies(recipe, mesh, **options)
    fits = {True: "", False: "; it does not fit", None: "; it may fit"}[found.fits]
    chosen = (
        f"best of {len(others) + 1} strategies, {name} ({show_seconds(found.seconds)} per step, "
        f"modelled{fits})"
    )
    leaves = tuple(
        dataclasses.replace(leaf, reason=f"{chosen}: {leaf.reason}" if leaf.reason else chosen)
        for leaf in made.leaves
    )
    return dataclasses.replace(made, leaves=leaves)
