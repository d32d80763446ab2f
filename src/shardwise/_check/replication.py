"""Unintentional replication: large leaves one by one, and all small ones together (SW105)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from jax.sharding import PartitionSpec as P

from .._base import count, either, show_bytes
from .._layout import FSDP_AXES, Layout, fold_paths
from .._mesh import (
    DATA_AXES,
    Axes,
    divisible_dims,
    make_spec,
    padded,
    shard_shape,
    show_mesh,
    show_spec,
)
from .._nnx import Leaf, array_bytes, show_path
from .findings import Finding, make_finding

REPLICATED_BYTES = 2**20
# Of what each device holds. Larger than what fsdp leaves replicated by default.
REPLICATED_SHARE = 0.1
# Padding a large dim to a multiple of this costs little, and suits matrix units.
_ROUND = 128


class Replication:
    """Finds leaves that are replicated, but not intentionally.

    Each large leaf is a finding of its own. All small leaves, and those that a strategy left
    unsplit as small, share one finding, if they are a large part of what each device holds.
    """

    def __init__(self, layout: Layout, threshold: int, allowed: Callable[[str], bool]):
        self.layout, self.threshold, self.allowed = layout, threshold, allowed
        self.devices = layout.mesh.size
        self.total = layout.total_bytes
        self.rest: list[Leaf] = []
        self.reported = False

    def of_leaf(self, leaf: Leaf, context: str) -> Iterator[Finding]:
        """Yields the finding for a leaf whose spec has no faults, or adds the leaf to the rest."""
        if leaf.intentional or self.devices == 1 or not (leaf.is_replicated or leaf.left):
            return
        if leaf.left == "small" or leaf.shard_bytes < self.threshold:
            self.rest.append(leaf)
            return
        spec = _better(leaf) if leaf.is_replicated else None
        if spec is not None:
            left = array_bytes(shard_shape(leaf.shape, spec, leaf.sizes), leaf.dtype)
            help_text = f"{show_spec(spec)} would leave {show_bytes(left)} on each device"
            why = ""
        else:
            axis, size = _largest_free_axis(leaf)
            help_text = _padding(leaf, size)
            why = f"; no free dim is divisible by {size}, the size of axis {axis!r}"
        self.reported = True
        yield make_finding(
            "SW105",
            leaf.path,
            f"{self._where(leaf)}: {100 * leaf.bytes / self.total:.1f}% of the model's "
            f"{show_bytes(self.total)}, and {self._copies(leaf)} of extra copies{why}",
            f"{help_text}; {allowing(leaf.path)} if replication is intentional",
            f"{context}  ({leaf.reason})",
        )

    def of_the_rest(self) -> Iterator[Finding]:
        """Yields one finding for all small leaves together, if they are large in total."""
        if not self._much(self.rest):
            return
        self.reported = True
        for leaf in self.rest:
            if self.allowed(leaf.path):  # the allowance is used, and the leaf no longer counts
                yield make_finding("SW105", leaf.path, f"{self._where(leaf)}")
        rest = [leaf for leaf in self.rest if not self.allowed(leaf.path)]
        if not self._much(rest):
            return
        size = sum(leaf.shard_bytes for leaf in rest)
        share = size / self.layout.bytes_per_device
        yield make_finding(
            "SW105",
            "**",
            f"{count(len(rest), 'small replicated leaf', 'small replicated leaves')}, "
            f"{show_bytes(size)} in total: {100 * share:.1f}% of the "
            f"{show_bytes(self.layout.bytes_per_device)} on each of {self.devices} devices",
            f"{self._split_all(rest)}; {allowing('**')} or their paths if replication is "
            f"intentional",
            f"mesh {show_mesh(self.layout.mesh)}  the largest: {_largest(rest)}",
        )

    def of_an_idle_strategy(self) -> Iterator[Finding]:
        """Yields a finding if fsdp or ZeRO split nothing, on a model too small for other findings."""
        leaves = self.layout.leaves
        left = [leaf for leaf in leaves if leaf.left]
        used = {axis for leaf in leaves for axis in (*leaf.gathered, *leaf.update_axes)}
        name = "fsdp"
        if any(leaf.moments is not None for leaf in leaves):
            name = "zero2" if any(leaf.gradients is not None for leaf in leaves) else "zero1"
        axis, ways = self._fsdp_axis() if self.devices > 1 else ("", 1)
        # An axis that is not for the batch is reported as unused anyway.
        if self.reported or not left or used or axis not in DATA_AXES or axis == "fsdp":
            return
        small = [leaf for leaf in left if leaf.left == "small"]
        indivisible = [leaf for leaf in left if leaf.left == "indivisible"]
        reasons = []
        if indivisible:
            many = count(len(indivisible), "leaf has", "leaves have")
            reasons.append(f"{many} no free dim divisible by {ways}")
        if small:
            reasons.append(f"{count(len(small), 'leaf is', 'leaves are')} below min_bytes")
        yield make_finding(
            "SW111",
            axis,
            f"{name} split nothing over axis {axis!r} of size {ways}: {' and '.join(reasons)}, "
            f"{show_bytes(sum(leaf.resident_bytes for leaf in left))} on each device",
            self._split_all(small, name)
            if small
            else _padding(max(left, key=lambda x: x.bytes), ways),
            f"mesh {show_mesh(self.layout.mesh)}  the largest: {_largest(left)}",
        )

    def _much(self, leaves: Sequence[Leaf]) -> bool:
        size = sum(leaf.shard_bytes for leaf in leaves)
        return size >= self.threshold and size > REPLICATED_SHARE * self.layout.bytes_per_device

    def _split_all(self, leaves: Sequence[Leaf], name: str = "fsdp") -> str:
        axis, ways = self._fsdp_axis()
        left = 0
        for leaf in leaves:
            taken = padded(leaf.spec, leaf.ndim)
            dims = divisible_dims(leaf.shape, taken, ways, skip=leaf.stacked)
            left += leaf.shard_bytes // (ways if dims else 1)
        if left == sum(leaf.shard_bytes for leaf in leaves):
            return f"none of their dims is divisible by {ways}: pad them, or use another mesh"
        small = any(leaf.left == "small" for leaf in leaves)
        how = either(
            f"sw.{name}({axis!r}{', min_bytes=0' if small else ''})",
            "--min-bytes 0" if small else f"--strategy {name}",
        )
        of = "" if name == "fsdp" else "of each moment "
        return f"{how} would leave {show_bytes(left)} {of}on each device"

    def _fsdp_axis(self) -> tuple[str, int]:
        """Returns the axis that fsdp uses in this layout, or would use, or else the largest."""
        sizes = {axis: size for axis, size in self.layout.mesh.shape.items() if size > 1}
        used = [axis for leaf in self.layout.leaves for axis in sorted(leaf.gathered)]
        for axis in (*used, *FSDP_AXES):
            if axis in sizes:
                return axis, sizes[axis]
        return max(sizes.items(), key=lambda item: item[1])

    def _where(self, leaf: Leaf) -> str:
        if leaf.is_replicated:
            return f"{show_bytes(leaf.bytes)} replicated on all {self.devices} devices"
        return (
            f"{show_bytes(leaf.shard_bytes)} on each of {self.devices} devices, every shard on "
            f"{leaf.copies} of them"
        )

    def _copies(self, leaf: Leaf) -> str:
        return show_bytes(leaf.bytes * (leaf.copies - 1))


def _better(leaf: Leaf) -> P | None:
    """Returns a spec that splits a replicated leaf over all the axes that divide it, or None."""
    taken: list[Axes] = [()] * leaf.ndim
    for axis, size in sorted(leaf.sizes.items(), key=lambda item: -item[1]):
        dims = divisible_dims(leaf.shape, taken, size, skip=leaf.stacked) if size > 1 else []
        if dims:
            taken[dims[0]] = (axis,)
    return make_spec(taken) if any(taken) else None


def _largest_free_axis(leaf: Leaf) -> tuple[str, int]:
    used = {axis for entry in padded(leaf.spec, leaf.ndim) for axis in entry}
    free = [item for item in leaf.sizes.items() if item[0] not in used]
    return max(free, key=lambda item: item[1])


def _padding(leaf: Leaf, ways: int) -> str:
    """Returns help for a leaf without a free dim that is divisible by `ways`."""
    taken = padded(leaf.spec, leaf.ndim)
    free = [d for d in range(leaf.ndim) if not taken[d] and d not in leaf.stacked]
    if not free:
        return "none of its dims is free: use another mesh"
    dim = max(free, key=lambda d: leaf.shape[d])
    size = leaf.shape[dim]
    step = math.lcm(ways, _ROUND) if size >= 8 * math.lcm(ways, _ROUND) else ways
    wanted = -(-size // step) * step
    if wanted <= 1.25 * size:
        of = f", a multiple of {step}" if step != ways else ""
        return f"pad dim {dim} from {size} to {wanted}{of}, or use an axis whose size divides a dim"
    by, dim = max((math.gcd(leaf.shape[d], ways), d) for d in free)
    if by == 1:
        return "use an axis whose size divides a dim"
    return f"use an axis of size {by}, which divides dim {dim} (size {leaf.shape[dim]})"


def _largest(leaves: Sequence[Leaf]) -> str:
    """Returns the three largest, with identical layers as one."""
    groups: dict[tuple[str, int], list[Leaf]] = {}
    for leaf in leaves:
        numberless = show_path(tuple("\0" if isinstance(k, int) else k for k in leaf.keys))
        groups.setdefault((numberless, leaf.shard_bytes), []).append(leaf)
    ordered = sorted(groups.values(), key=lambda g: -sum(leaf.shard_bytes for leaf in g))
    listed = [
        f"{fold_paths([leaf.keys for leaf in group])} "
        f"({show_bytes(sum(leaf.shard_bytes for leaf in group))})"
        for group in ordered[:3]
    ]
    return ", ".join(listed) + (", …" if len(ordered) > 3 else "")


def allowing(pattern: str) -> str:
    """Returns how to allow SW105 for the paths that match a pattern."""
    return either(f"allow={{'SW105': {pattern!r}}}", f"--allow 'SW105:{pattern}'")
