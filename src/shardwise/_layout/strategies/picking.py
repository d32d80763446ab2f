"""What FSDP and ZeRO share: which dim is split, which leaves are too small, what they are given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..._base import either, show_bytes
from ..._jax import show_value
from ..._mesh import Axes, divisible_dims
from ..._mesh import ways as cut_ways
from ..._nnx import Leaf, Opinion
from ..flow import Flow
from ..rules import Scene

# The leaves that fsdp does not split are a small share of the model, and add little to what each
# device holds: on a large mesh, one percent of the model is many times a device's own part.
SMALL_SHARE, SMALL_GROWTH = 0.01, 0.1
# Above this size, the bytes that a gather moves cost more than its latency.
SMALL_BYTES = 2**20
# Sublanes and lanes: a TPU keeps the last two dims of an array in tiles of this size. A shard with
# parts of tiles is padded, and what was gathered along such a dim is transposed before it is used.
# Other chips have no tiles and lose nothing by them, so that one model has one layout everywhere.
TILE = (8, 128)


def scanned_dims(leaves: Sequence[Leaf], flow: Flow) -> dict[str, tuple[int, ...]]:
    """Returns, by path, the dims of leaves that a loop steps along."""
    found = {}
    for leaf, dims in zip(leaves, flow.leaf_groups, strict=True):
        scanned = tuple(d for d, ids in enumerate(dims) if any(flow.groups[i].scanned for i in ids))
        if scanned:
            found[leaf.path] = scanned
    return found


def stacks_of(leaves: Sequence[Leaf], scene: Scene) -> dict[str, set[int]]:
    """Returns, by path, the dims that are never split: stacks of layers, and ranks of adapters."""
    flow = scene.known()  # not worth tracing a loss for
    scanned = {} if flow is None else scanned_dims(leaves, flow)
    return {
        leaf.path: {*leaf.stacked, *scanned.get(leaf.path, ()), *_rank(leaf)} for leaf in leaves
    }


def _rank(leaf: Leaf) -> tuple[int, ...]:
    return () if leaf.follows is None or leaf.follows.rank is None else (leaf.follows.rank,)


def small_leaves(
    leaves: Sequence[Leaf], picks: Mapping[str, Opinion], ways: int
) -> dict[str, Opinion]:
    """Returns, by path, why leaves that are too small to matter are not split.

    What counts are the bytes on each device after earlier rules. All leaves of one size are
    treated the same, so that identical layers are laid out identically.
    """
    resident = {leaf.path: _resident_bytes(leaf, picks[leaf.path]) for leaf in leaves}
    before = sum(resident.values())
    by_size: dict[int, list[str]] = {}
    for path, size in resident.items():
        if picks[path].spec is not None:
            by_size.setdefault(size, []).append(path)
    splittable = sum(size * len(paths) for size, paths in by_size.items())
    after = before - splittable + splittable / ways
    budget = min(SMALL_SHARE * before, SMALL_GROWTH * after)
    left: list[str] = []
    total = 0
    for size, paths in sorted(by_size.items()):
        if size >= SMALL_BYTES or total + size * len(paths) >= budget:
            break
        total += size * len(paths)
        left += paths
    if not left:
        return {}
    share = f"{total / before:.1%}" if total >= before / 1000 else "under 0.1%"
    size = f"{show_bytes(total)}{' in total' if len(left) > 1 else ''} ({share} of the model)"
    none = either("min_bytes=0", "--min-bytes 0")
    why = (
        f"one of {len(left)} small leaves, {size}: not split, since gathering each would cost more "
        f"than it saves; {none} splits them"
        if len(left) != 1
        else f"a small leaf, {size}: not split, since gathering it would cost more than it saves; "
        f"{none} splits it"
    )
    return dict.fromkeys(left, Opinion(None, why, left="small"))


def _resident_bytes(leaf: Leaf, pick: Opinion) -> int:
    if pick.spec is None:
        return leaf.resident_bytes
    return leaf.bytes // cut_ways(leaf.spec, leaf.sizes)  # its spec has no faults


def split_dim(
    leaf: Leaf, taken: Sequence[Axes], axes: Axes, stacked: set[int], *, further: bool = False
) -> tuple[int, str] | None:
    """Returns the dim of a leaf to split over `axes`, and why; None if no dim can be.

    It is the largest one that is divisible; of a large leaf, one whose shards are whole tiles.

    Args:
        leaf: the leaf.
        taken: the axes that split each of its dims already.
        axes: those that are to split it.
        stacked: the dims that are stacks of layers: not split.
        further: whether to split a dim that is split already if no other one can be.
    """
    ways = math.prod(leaf.sizes[axis] for axis in axes)
    before = [math.prod(leaf.sizes[axis] for axis in entry) for entry in taken]
    local = [size // cut for size, cut in zip(leaf.shape, before, strict=True)]
    dims = divisible_dims(local, taken, ways, skip=stacked)
    if not dims and further:
        dims = divisible_dims(local, [()] * leaf.ndim, ways, skip=stacked)
    if not dims:
        return None
    whole = [dim for dim in dims if _is_whole(local, dim, ways)]
    dim, why = dims[0], ""
    if leaf.bytes >= SMALL_BYTES and whole and whole[0] != dim:
        sublanes, lanes = TILE
        why = (
            f" with whole {sublanes}x{lanes} tiles in each shard, unlike dim {dim} "
            f"(size {leaf.shape[dim]})"
        )
        dim = whole[0]
    free = "" if taken[dim] else "free "
    return dim, (
        f"dim {dim} (size {leaf.shape[dim]}) is the largest {free}dim divisible by "
        f"{ways * before[dim]}{why}"
    )


def _is_whole(shape: Sequence[int], dim: int, ways: int) -> bool:
    """Returns whether shards are made of whole tiles if a dim is split."""
    tile = {len(shape) - 2: TILE[0], len(shape) - 1: TILE[1]}.get(dim, 1)
    return shape[dim] // ways % tile == 0


def flat_axes(name: str, axes: Sequence[Any]) -> Axes:
    flat = tuple(a for axis in axes for a in (axis if isinstance(axis, tuple | list) else (axis,)))
    named = all(isinstance(a, str) and a for a in flat)
    if not flat or not named or len(set(flat)) != len(flat):
        raise ValueError(
            f"{name}({', '.join(map(repr, axes))}) needs one or more distinct axis names"
        )
    return flat


def require_bytes(name: str, min_bytes: Any) -> int | None:
    is_count = isinstance(min_bytes, int) and not isinstance(min_bytes, bool) and min_bytes >= 0
    if min_bytes is not None and not is_count:
        raise ValueError(
            f"{name} has min_bytes={show_value(min_bytes)}: it must be a non-negative integer"
        )
    return min_bytes
