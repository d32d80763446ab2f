"""The one place where a layout is matched to a model: leaf by leaf, by path, shape and dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from .._base import show_bytes
from .._layout import Layout
from .._nnx import Keys, Leaf, array_bytes, keyed_leaves, shape_of, show_path
from .findings import Finding, Findings, make_finding

_HELP = "make the layout again from this model"


def matched(layout: Layout, state: Any) -> Layout:
    """Returns the layout with its leaves in the order and the structure of a model's state.

    Args:
        layout: the layout.
        state: the state of a model or of an optimizer, of arrays or abstract.

    Raises:
        LayoutError: the layout is not of this model; every difference is a finding.
    """
    keyed = keyed_leaves(state)
    require_match(layout, dict(keyed))
    leaves = {leaf.keys: leaf for leaf in layout.leaves}
    return dataclasses.replace(
        layout,
        leaves=tuple(leaves[keys] for keys, _ in keyed),
        treedef=jax.tree.structure(state),
    )


def require_match(layout: Layout, live: Mapping[Keys, Any], help: str = _HELP) -> None:
    """Raises if the arrays are not those of the layout.

    Args:
        layout: the layout.
        live: the arrays, by keys.
        help: what to do about a difference.

    Raises:
        LayoutError: they differ; every difference is a finding.
    """
    Findings(tuple(match_findings(layout, live, help))).raise_if_errors()


def match_findings(
    layout: Layout, live: Mapping[Keys, Any], help: str = _HELP
) -> Iterator[Finding]:
    """Yields leaves that are missing, unplanned, or differ in shape or dtype."""
    planned = {leaf.keys: leaf for leaf in layout.leaves}
    for keys, leaf in planned.items():
        if keys not in live:
            yield make_finding(
                "SW202",
                leaf.path,
                f"the layout has this leaf of {show_bytes(leaf.bytes)}, but the model does not",
                help,
            )
        elif not is_alike(leaf, live[keys]):
            have = shape_of(live[keys])
            yield make_finding(
                "SW204",
                leaf.path,
                f"the layout has {leaf.dtype}{list(leaf.shape)}, the model has "
                f"{have.dtype}{list(have.shape)}",
                help,
            )
    for keys in live:
        if keys not in planned:
            have = shape_of(live[keys])
            size = show_bytes(array_bytes(have.shape, have.dtype))
            yield make_finding(
                "SW203",
                show_path(keys),
                f"the model has this leaf of {size}, but the layout does not",
                help,
            )


def is_alike(leaf: Leaf, array: Any) -> bool:
    """Says whether an array has the leaf's shape and dtype."""
    have = shape_of(array)
    return tuple(have.shape) == leaf.shape and have.dtype == leaf.dtype
