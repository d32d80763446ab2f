"""FSDP: the storage of each leaf, split over one or more axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..._base import public
from ..._mesh import make_spec, padded
from ..._nnx import Leaf, Opinion
from ..rules import Rule, Scene, require_axes
from .picking import flat_axes, require_bytes, small_leaves, split_dim, stacks_of


@dataclasses.dataclass(frozen=True, slots=True)
class Fsdp:
    """Fully sharded data parallelism; see `fsdp`."""

    axes: tuple[str, ...]
    min_bytes: int | None

    def bind(self, leaves: Sequence[Leaf], scene: Scene) -> Rule:
        """Returns the rule, after checking that the mesh has the axes."""
        require_axes(self.axes, scene.sizes, "fsdp")
        ways = math.prod(scene.sizes[axis] for axis in self.axes)
        stacks = stacks_of(leaves, scene)
        picks = {leaf.path: self._pick(leaf, stacks[leaf.path]) for leaf in leaves}
        if self.min_bytes is None:
            picks |= small_leaves(leaves, picks, ways)
        return lambda leaf: picks[leaf.path]

    def _pick(self, leaf: Leaf, stacked: set[int]) -> Opinion:
        if leaf.faults:
            return Opinion(None, "an earlier rule's spec does not fit the leaf")
        taken = padded(leaf.spec, leaf.ndim)
        already = [a for entry in taken for a in entry if a in self.axes]
        axes = tuple(axis for axis in self.axes if axis not in already)
        if not axes:
            return Opinion(None, f"an earlier rule already uses axis {already[0]!r}")
        found = split_dim(leaf, taken, axes, stacked)
        if found is None:
            ways = math.prod(leaf.sizes[axis] for axis in axes)
            if leaf.shape and all(taken[d] or d in stacked for d in range(leaf.ndim)):
                return Opinion(None, f"no dim of {leaf.shape} is free")
            why = (
                f"no free dim of {leaf.shape} is divisible by {ways}" if leaf.shape else "a scalar"
            )
            return Opinion(None, why, left="indivisible")
        if self.min_bytes is not None and leaf.bytes < self.min_bytes:
            why = f"{leaf.bytes:,} bytes are fewer than min_bytes={self.min_bytes:,}"
            return Opinion(None, why, left="small")
        dim, reason = found
        taken[dim] = axes
        return Opinion(make_spec(taken), reason, refines=True, gathered=frozenset(axes))

    def __str__(self) -> str:
        """Returns it as it was written."""
        return f"fsdp({', '.join(map(repr, self.axes))})"


@public
def fsdp(*axes: str, min_bytes: int | None = None) -> Fsdp:
    """Returns the strategy that splits each leaf's storage over `axes` (FSDP, ZeRO-3).

    It splits the largest dim that is free, divisible, and not a stack of layers; a dim that
    another rule has split is left unchanged. Of a leaf of 1 MiB or more, it prefers a dim whose
    shards are whole TPU tiles: a multiple of 128 of the last dim, of 8 of the one before.

    Args:
        *axes: one mesh axis, or several that split the dim together.
        min_bytes: a leaf with fewer bytes is not split, since gathering it would cost more than it
            saves. By default, the smallest leaves, each under 1 MiB, stay replicated as long as
            they make up less than 1% of the model and add less than 10% to what each device
            holds. 0 splits every leaf that is divisible.

    Example:
        >>> import shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0))
        >>> layout = sw.layout(make, sw.mesh("data=8", on="none"), sw.fsdp("data"))
        >>> layout["kernel"].shard_shape, layout["bias"].shard_shape
        ((1024, 512), (4096,))
    """
    return Fsdp(flat_axes("fsdp", axes), require_bytes("fsdp", min_bytes))
