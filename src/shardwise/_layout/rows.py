"""Leaves as rows of a table, with repeated layers folded into one row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .._base import Row, fold_numbers, show_bytes
from .._mesh import show_spec
from .._nnx import Leaf, show_path

HEADER: Row = ("path", "shape", "spec", "shard", "bytes/device", "copies")


def show_shape(leaf: Any) -> str:
    """Returns the dtype and shape of a leaf or an array: `float32[8,16]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def leaf_rows(leaves: Iterable[Leaf]) -> list[Row]:
    """Returns one row per leaf; leaves that differ only in the layer's number share a row."""
    groups: dict[tuple[str, Row], list[Leaf]] = {}
    for leaf in leaves:
        shape = show_path(tuple("\0" if isinstance(k, int) else k for k in leaf.keys))
        groups.setdefault((shape, _cells(leaf)), []).append(leaf)
    return [(fold_paths([leaf.keys for leaf in g]), *cells) for (_, cells), g in groups.items()]


def fold_paths(paths: Sequence[tuple]) -> str:
    """Returns paths that differ only in numbers as one: `layers.{0..79}.kernel ×80`."""
    if len(paths) == 1:
        return show_path(paths[0])
    keys = []
    for step in zip(*paths, strict=True):
        numbers = sorted(set(step)) if isinstance(step[0], int) else step[:1]
        if len(numbers) == 1:
            keys.append(step[0])
        else:
            keys.append(fold_numbers(numbers))
    text = ".".join(map(str, keys))
    return f"{text} ×{len(paths)}"


def _cells(leaf: Leaf) -> Row:
    shape, spec = show_shape(leaf), show_spec(leaf.spec)
    found = leaf.faults
    if found:
        return (shape, spec, f"error {found[0].code}", show_bytes(leaf.bytes), "-")
    shard = f"[{','.join(map(str, leaf.shard_shape))}]"
    return (shape, spec, shard, show_bytes(leaf.shard_bytes), str(leaf.copies))
