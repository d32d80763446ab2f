"""Compares two layouts: what changed, and what it costs."""

from __future__ import annotations

import dataclasses

from .._base import public, show_bytes
from .._mesh import mesh_types, normal_spec, show_mesh, show_spec
from .._nnx import Leaf
from .layouts import Layout
from .rows import show_shape


@public
@dataclasses.dataclass(frozen=True, slots=True)
class LayoutDiff:
    """What differs between two layouts. It is truthy if anything does.

    Attributes:
        meshes: both meshes, as `data=2,model=4`.
        added: paths that only the new layout has.
        removed: paths that only the old layout has.
        changed: for each path that is in both and differs, the old and the new.
        bytes_per_device: bytes on each device, before and after (exact).
    """

    meshes: tuple[str, str]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: dict[str, tuple[str, str]]
    bytes_per_device: tuple[int, int]

    def __bool__(self) -> bool:
        """Returns whether anything differs."""
        return bool(self.added or self.removed or self.changed or self.meshes[0] != self.meshes[1])

    def __str__(self) -> str:
        """Returns one line for each difference."""
        lines = []
        if self.meshes[0] != self.meshes[1]:
            lines.append(f"mesh {self.meshes[0]} -> {self.meshes[1]}")
        lines += [f"- {path}" for path in self.removed]
        lines += [f"+ {path}" for path in self.added]
        lines += [f"~ {path}  {old} -> {new}" for path, (old, new) in self.changed.items()]
        old, new = self.bytes_per_device
        step = f"{'+' if new >= old else '-'}{show_bytes(abs(new - old))}"
        lines.append(f"{show_bytes(old)} -> {show_bytes(new)} on each device ({step}, exact)")
        return "\n".join(lines if self else ["no difference"])


def _show(layout: Layout) -> str:
    types = mesh_types(layout.mesh)
    others = ", ".join(f"{axis} is {kind}" for axis, kind in types.items() if kind != "Auto")
    return show_mesh(layout.mesh) + (f" ({others})" if others else "")


def _updates(leaf: Leaf) -> str:
    """Returns the specs of gradient and optimizer state, where they are not that of the leaf."""
    own = normal_spec(leaf.spec)
    specs = {"gradient": leaf.gradients, "optimizer state": leaf.moments}
    return "".join(
        f", {what} {show_spec(normal_spec(spec))}"
        for what, spec in specs.items()
        if spec is not None and normal_spec(spec) != own
    )


def diff_layouts(old: Layout, new: Layout) -> LayoutDiff:
    """Returns what differs between two layouts."""
    before = {leaf.path: leaf for leaf in old.leaves}
    after = {leaf.path: leaf for leaf in new.leaves}
    changed = {}
    for path in before.keys() & after.keys():
        was, now = (
            f"{show_shape(x)} {show_spec(normal_spec(x.spec))}{_updates(x)}"
            for x in (before[path], after[path])
        )
        if was != now:
            changed[path] = (was, now)
    return LayoutDiff(
        meshes=(_show(old), _show(new)),
        added=tuple(p for p in after if p not in before),
        removed=tuple(p for p in before if p not in after),
        changed={path: changed[path] for path in before if path in changed},
        bytes_per_device=(old.bytes_per_device, new.bytes_per_device),
    )
