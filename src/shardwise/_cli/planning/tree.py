"""A layout as a tree of modules, with identical layers folded into one row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from ..._base import count, fold_numbers, show_bytes, show_devices, text_table
from ..._layout import Layout, show_shape
from ..._mesh import show_mesh, show_spec, spec_axes
from ..._nnx import Leaf

_HEADER = ("model", "bytes/device", "share", "split", "shape")


@dataclasses.dataclass
class Node:
    """A module or a leaf, or several identical ones.

    Attributes:
        name: the last step of its path, or several steps joined if a module has a single child.
        bytes: the bytes of all of it that one device holds.
        leaf: the leaf, or None for a module.
        children: the contents of a module.
        alike: how many identical ones it stands for.
    """

    name: str
    bytes: int
    leaf: Leaf | None
    children: list[Node]
    alike: int = 1


def tree_text(layout: Layout) -> str:
    """Returns a layout's tree as text: bytes per device, their share, and how it is split."""
    total = layout.bytes_per_device
    nodes = _nodes([(leaf.keys, leaf) for leaf in layout.leaves])
    rows = [
        (
            f"{guide}{node.name}{f' ×{node.alike}' if node.alike > 1 else ''}",
            show_bytes(node.bytes),
            f"{node.bytes / total:.1%}" if total else "",
            _split(node),
            show_shape(node.leaf) if node.leaf is not None else "",
        )
        for guide, node in _walk(nodes)
    ]
    replicated = [leaf for leaf in layout.leaves if leaf.is_replicated]
    copied = sum(leaf.shard_bytes for leaf in replicated)
    share = f"{copied / total:.1%} of them" if total else "none"
    caption = (
        f"{show_bytes(total)} on {show_devices(layout.mesh.size)} of {show_mesh(layout.mesh)} (exact), "
        f"{share} in {count(len(replicated), 'replicated leaf', 'replicated leaves')}; "
        f"a folded row is the sum of its layers"
    )
    return text_table(_HEADER, rows, caption, right=(1, 2))


def _nodes(rows: list[tuple[tuple[Any, ...], Leaf]]) -> list[Node]:
    """Returns the nodes under one module, from its leaves and the rest of their paths."""
    by_key: dict[Any, list[tuple[tuple[Any, ...], Leaf]]] = {}
    for keys, leaf in rows:
        by_key.setdefault(keys[0] if keys else "", []).append((keys[1:], leaf))
    keyed: list[tuple[Any, Node]] = []
    for key, below in by_key.items():
        if len(below) == 1 and not below[0][0]:
            leaf = below[0][1]
            node = Node(str(key), leaf.resident_bytes, leaf, [])
        else:
            children = _nodes(below)
            node = Node(str(key), sum(child.bytes for child in children), None, children)
        keyed.append((key, node))
    nodes = _fold(keyed)
    for node in nodes:
        # A module with a single child shares its row.
        while len(node.children) == 1:
            only = node.children[0]
            node.name, node.alike = f"{node.name}.{only.name}", node.alike * only.alike
            node.leaf, node.children = only.leaf, only.children
    return nodes


def _fold(keyed: list[tuple[Any, Node]]) -> list[Node]:
    groups: dict[Any, list[tuple[Any, Node]]] = {}
    for key, node in keyed:
        same = _signature(node) if isinstance(key, int) else key
        groups.setdefault(same, []).append((key, node))
    folded = []
    for group in groups.values():
        node = group[0][1]
        if len(group) > 1:
            numbers = sorted(key for key, _ in group)
            node = dataclasses.replace(_times(node, len(group)), name=fold_numbers(numbers))
            node.alike = len(group)
        folded.append(node)
    return folded


def _times(node: Node, count: int) -> Node:
    children = [_times(child, count) for child in node.children]
    return dataclasses.replace(node, bytes=node.bytes * count, children=children)


def _signature(node: Node) -> tuple[Any, ...]:
    """Returns everything that identical layers share: all but their number."""
    if node.leaf is not None:
        leaf = node.leaf
        return (leaf.shape, str(leaf.dtype), show_spec(leaf.spec), bool(leaf.faults))
    return tuple((child.name, child.alike, _signature(child)) for child in node.children)


def _walk(nodes: list[Node], guide: str = "") -> Iterable[tuple[str, Node]]:
    for i, node in enumerate(nodes):
        last = i == len(nodes) - 1
        yield f"{guide}{'└── ' if last else '├── '}", node
        yield from _walk(node.children, f"{guide}{'    ' if last else '│   '}")


def _split(node: Node) -> str:
    if node.leaf is not None:
        leaf = node.leaf
        if leaf.faults:
            return f"{show_spec(leaf.spec)} error {leaf.faults[0].code}"
        return "replicated" if leaf.is_replicated else show_spec(leaf.spec)
    leaves = list(_leaves(node))
    if all(leaf.is_replicated for leaf in leaves):
        return "replicated"
    used = {axis for leaf in leaves for axes in spec_axes(leaf.spec) for axis in axes}
    axes = [axis for axis in leaves[0].sizes if axis in used]
    return f"over {', '.join(axes)}" if axes else ""


def _leaves(node: Node) -> Iterable[Leaf]:
    if node.leaf is not None:
        yield node.leaf
    for child in node.children:
        yield from _leaves(child)
