"""How activations are sharded: the mesh axes of each logical name, derived from a layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from .._jax import active_axis_rules
from .._layout import Layout, stage_axes
from .._mesh import STAGES, Axes, dim_axes, padded
from .batch import data_axes

ActivationRules = tuple[tuple[str, tuple[str, ...]], ...]

# Tokens travel to their experts along any axis, whereas other dims of a model stay in place.
_VISITED = "experts"


def activation_rules(layout: Layout, batch: Any = None) -> ActivationRules:
    """Returns the axes that split activations, by the names on their dims.

    `batch` maps to the axes of the batch and those of `experts`. Each name on a leaf maps to the
    axes that split its dims, except axes that only shard storage (FSDP) or split the batch; a name
    that leaves split differently has no rule. `stages` maps to the axis that splits stacks of
    layers.

    Args:
        layout: the layout.
        batch: the batch with its shardings, a pytree of `jax.ShapeDtypeStruct`s; by default it is
            assumed to be split over the layout's data axes.

    Example:
        >>> import shardwise as sw
        >>> from flax import nnx
        >>> from shardwise import models
        >>> from shardwise._step.activations import activation_rules
        >>> config = models.Config(layers=1, width=64, hidden=128, heads=4, vocab=256)
        >>> make = lambda: models.Decoder(config, rngs=nnx.Rngs(0))
        >>> mesh = sw.mesh("data=2,model=4", on="none")
        >>> activation_rules(sw.layout(make, mesh, logical={"mlp": "model", "embed": "data"}))
        (('batch', ('data',)), ('mlp', ('model',)))
    """
    rows, columns = _batch_axes(batch, 0), _batch_axes(batch, 1)
    data = data_axes(layout) if batch is None else rows
    split = _split_names(layout, frozenset(data_axes(layout)) | frozenset(data))
    experts = split.get(_VISITED, ())
    rules = {"batch": (*data, *(axis for axis in experts if axis not in data)), "length": columns}
    rules.update((name, axes) for name, axes in split.items() if name not in rules)
    rules[STAGES] = stage_axes(layout.leaves)
    return tuple((name, axes) for name, axes in rules.items() if axes)


@contextlib.contextmanager
def named_activations(layout: Layout, batch: Any = None) -> Iterator[None]:
    """Makes the names that a traced model gives to dims of activations resolve to this layout's axes.

    The caller's rules still apply to names that the layout does not know.
    """
    rules = dict(activation_rules(layout, batch))
    own = {"batch", "length", STAGES}.union(*(leaf.annotation_names for leaf in layout.leaves))
    outer = [pair for pair in active_axis_rules() if pair[0] not in own]
    with nnx.logical_axis_rules((*outer, *rules.items())):
        yield


def _split_names(layout: Layout, data: frozenset[str]) -> dict[str, Axes]:
    """Returns the axes of each name whose dims all leaves split the same way."""
    found: dict[str, set[Axes]] = {}
    for leaf in layout.leaves:
        for names, axes in zip(leaf.names or (), padded(leaf.spec, leaf.ndim), strict=False):
            for name in dim_axes(names):
                stays = leaf.gathered if name == _VISITED else leaf.gathered | data
                kept = tuple(axis for axis in axes if axis not in stays)
                found.setdefault(name, set()).add(kept)
    return {name: axes for name, (axes, *more) in found.items() if axes and not more}


def _batch_axes(batch: Any, dim: int) -> Axes:
    """Returns the axes that split this dim of every leaf of the batch; none if they differ."""
    found = {
        padded(leaf.sharding.spec, len(leaf.shape))[dim]
        for leaf in jax.tree.leaves(batch)
        if len(leaf.shape) > dim
    }
    return found.pop() if len(found) == 1 else ()
