"""Strategies by name, FSDP, and the stages of a pipeline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._base import either, public, show_bytes
from .._jax import show_value
from .._mesh import divisible_dims, make_spec, padded
from .._mesh import ways as cut_ways
from .._nnx import Leaf, Opinion
from .flow import Flow
from .rules import Rule, Rules, Scene, patterns, replicate, require_axes
from .tensor_parallel import tensor

# The leaves that fsdp does not split are a small share of the model, and add little to what each
# device holds: on a large mesh, one percent of the model is many times a device's own part.
SMALL_SHARE, SMALL_GROWTH = 0.01, 0.1
# Above this size, the bytes that a gather moves cost more than its latency.
SMALL_BYTES = 2**20

FSDP_AXES = ("fsdp", "data")
TENSOR_AXES = ("tensor", "tp", "model")
PIPELINE_AXES = ("pipe", "stage")
# Where a strategy's function has another name than the strategy.
_FUNCTIONS = {"pipeline": "stages"}


@dataclasses.dataclass(frozen=True, slots=True)
class Fsdp:
    """Fully sharded data parallelism; see `fsdp`."""

    axes: tuple[str, ...]
    min_bytes: int | None

    def bind(self, leaves: Sequence[Leaf], scene: Scene) -> Rule:
        """Returns the rule, after checking that the mesh has the axes."""
        require_axes(self.axes, scene.sizes, "fsdp")
        ways = math.prod(scene.sizes[axis] for axis in self.axes)
        flow = scene.known()  # not worth tracing a loss for
        scanned = {} if flow is None else scanned_dims(leaves, flow)
        stacks = {leaf.path: {*leaf.stacked, *scanned.get(leaf.path, ())} for leaf in leaves}
        picks = {leaf.path: self._pick(leaf, ways, stacks[leaf.path]) for leaf in leaves}
        if self.min_bytes is None:
            picks |= _small(leaves, picks, ways)
        return lambda leaf: picks[leaf.path]

    def _pick(self, leaf: Leaf, ways: int, stacked: set[int]) -> Opinion:
        if leaf.faults:
            return Opinion(None, "an earlier rule's spec does not fit the leaf")
        taken = padded(leaf.spec, leaf.ndim)
        already = [a for entry in taken for a in entry if a in self.axes]
        if already:
            return Opinion(None, f"an earlier rule already uses axis {already[0]!r}")
        dims = divisible_dims(leaf.shape, taken, ways, skip=stacked)
        if not dims:
            if leaf.shape and all(taken[d] or d in stacked for d in range(leaf.ndim)):
                return Opinion(None, f"no dim of {leaf.shape} is free")
            why = (
                f"no free dim of {leaf.shape} is divisible by {ways}" if leaf.shape else "a scalar"
            )
            return Opinion(None, why, left="indivisible")
        if self.min_bytes is not None and leaf.bytes < self.min_bytes:
            why = f"{leaf.bytes:,} bytes are fewer than min_bytes={self.min_bytes:,}"
            return Opinion(None, why, left="small")
        taken[dims[0]] = self.axes
        return Opinion(
            make_spec(taken),
            f"dim {dims[0]} (size {leaf.shape[dims[0]]}) is the largest free dim divisible by {ways}",
            refines=True,
            gathered=frozenset(self.axes),
        )

    def __str__(self) -> str:
        """Returns it as it was written."""
        return f"fsdp({', '.join(map(repr, self.axes))})"


def _small(leaves: Sequence[Leaf], picks: Mapping[str, Opinion], ways: int) -> dict[str, Opinion]:
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


@public
def fsdp(*axes: str, min_bytes: int | None = None) -> Fsdp:
    """Returns the strategy that splits each leaf's storage over `axes` (FSDP, ZeRO-3).

    It splits the largest dim that is free, divisible, and not a stack of layers; a dim that
    another rule has split is left unchanged.

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
    flat = tuple(a for axis in axes for a in (axis if isinstance(axis, tuple | list) else (axis,)))
    named = all(isinstance(a, str) and a for a in flat)
    if not flat or not named or len(set(flat)) != len(flat):
        raise ValueError(
            f"fsdp({', '.join(map(repr, axes))}) needs one or more distinct axis names"
        )
    is_count = isinstance(min_bytes, int) and not isinstance(min_bytes, bool) and min_bytes >= 0
    if min_bytes is not None and not is_count:
        raise ValueError(
            f"fsdp has min_bytes={show_value(min_bytes)}: it must be a non-negative integer"
        )
    return Fsdp(flat, min_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Stages:
    """Pipeline parallelism over one axis; see `stages`."""

    axis: str

    def bind(self, leaves: Sequence[Leaf], scene: Scene) -> Rule:
        """Returns the rule: the leading dim of every stack of layers is split.

        Raises:
            ValueError: the mesh does not have the axis, or the model has no stack.
        """
        require_axes((self.axis,), scene.sizes, "stages")
        stacks = {leaf.path: leaf.stacked for leaf in leaves if leaf.stacked}
        # Only a trace knows the stacks of modules that are not Flax's own.
        if (flow := scene.known() if stacks else scene.flow()) is not None:
            stacks = scanned_dims(leaves, flow) or stacks
        if not any(stacks.values()):
            raise ValueError(
                "stages found no stack of layers: make the blocks one module with nnx.vmap (in a "
                "Decoder, Config(scan=True)), and run them with sw.pipeline"
                + (
                    f"; {either('inputs=', '--inputs')} lets a trace of the forward pass find "
                    f"stacks in modules of your own"
                    if flow is None
                    else ""
                )
            )
        return lambda leaf: self._pick(leaf, stacks.get(leaf.path, ()))

    def _pick(self, leaf: Leaf, stacked: Sequence[int]) -> Opinion:
        if not stacked:
            return Opinion(None, "not in a stack of layers: every stage holds it")
        dim = min(stacked)
        taken = padded(leaf.spec, leaf.ndim)
        if any(self.axis in entry for entry in taken):
            return Opinion(None, f"an earlier rule already uses axis {self.axis!r}")
        if taken[dim]:
            return Opinion(None, f"an earlier rule already splits dim {dim}, its stack of layers")
        # A stack that does not divide is split all the same: `check` reports it.
        taken[dim] = (self.axis,)
        reason = f"dim {dim}, a stack of {leaf.shape[dim]} layers"
        return Opinion(make_spec(taken), reason, refines=True, stacked=(dim,))

    def __str__(self) -> str:
        """Returns it as it was written."""
        return f"stages({self.axis!r})"


@public
def stages(axis: str) -> Stages:
    """Returns the strategy that splits stacks of layers over `axis`, a stage to each device.

    The leading dim of every stack (made by `nnx.vmap` or run by a loop) is split; other leaves are
    left alone, for other rules. A model that runs its stack with `sw.pipeline` is then pipelined
    along the axis. The batch is split over it too, so that what is not in a stack, such as the
    embedding and the loss, is computed once and not by every stage.

    Example:
        >>> import shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.vmap(lambda rngs: nnx.Linear(64, 64, rngs=rngs))(nnx.Rngs(0).split(8))
        >>> layout = sw.layout(make, sw.mesh("pipe=4", on="none"), sw.stages("pipe"))
        >>> layout["kernel"].spec, layout["kernel"].shard_shape
        (P('pipe',), (2, 64, 64))
    """
    if not isinstance(axis, str) or not axis:
        raise ValueError(f"stages({axis!r}) needs the name of one axis")
    return Stages(axis)


def scanned_dims(leaves: Sequence[Leaf], flow: Flow) -> dict[str, tuple[int, ...]]:
    """Returns, by path, the dims of leaves that a loop steps along."""
    found = {}
    for leaf, dims in zip(leaves, flow.leaf_groups, strict=True):
        scanned = tuple(d for d, ids in enumerate(dims) if any(flow.groups[i].scanned for i in ids))
        if scanned:
            found[leaf.path] = scanned
    return found


def stage_axes(leaves: Sequence[Leaf]) -> tuple[str, ...]:
    """Returns the axes that split stacks of layers by depth, and nothing else.

    Example:
        >>> import shardwise as sw
        >>> from flax import nnx
        >>> from shardwise._layout import stage_axes
        >>> make = lambda: nnx.vmap(lambda rngs: nnx.Linear(64, 64, rngs=rngs))(nnx.Rngs(0).split(8))
        >>> layout = sw.layout(make, sw.mesh("data=2,pipe=4", on="none"), "fsdp+pipeline")
        >>> layout["kernel"].spec, stage_axes(layout.leaves)
        (P('pipe', 'data'), ('pipe',))
    """
    along: dict[str, None] = {}
    across: set[str] = set()
    for leaf in leaves:
        first = min(leaf.stacked, default=None)
        for dim, axes in enumerate(padded(leaf.spec, leaf.ndim)):
            if dim == first:
                along.update(dict.fromkeys(axes))
            else:
                across.update(axes)
    return tuple(axis for axis in along if axis not in across)


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """A strategy by name, with the options that a name cannot express."""

    name: str
    min_bytes: int | None = None


def flatten_rules(rules: Rules | Named, sizes: Mapping[str, int]) -> list[tuple[str, Any]]:
    """Returns the rules one by one, in order, each with its name.

    Raises:
        ValueError: something among them is not a rule.
    """
    if rules is None:
        return []
    if isinstance(rules, str | Named):
        named = Named(rules) if isinstance(rules, str) else rules
        return [(f"strategy {named.name!r}: {label}", r) for label, r in _named(named, sizes)]
    if isinstance(rules, Mapping):
        return [("patterns", patterns(rules))]
    if isinstance(rules, Sequence):
        return [pair for rule in rules for pair in flatten_rules(rule, sizes)]
    if hasattr(rules, "bind"):
        return [(str(rules), rules)]
    if callable(rules):
        return [(getattr(rules, "__name__", None) or type(rules).__name__, rules)]
    raise ValueError(
        f"{show_value(rules)} is not a rule: give a dict of path patterns, a function of a leaf, "
        f"a strategy such as sw.fsdp('data') or its name, or a list of these"
    )


def _named(strategy: Named, sizes: Mapping[str, int]) -> list[tuple[str, Any]]:
    name = strategy.name
    parts = [part.strip() for part in name.split("+")]
    known = ("dp", "fsdp", "tensor", "pipeline")
    for part in parts:
        if part not in known:
            raise ValueError(
                f"unknown strategy {name!r}: use 'dp', 'fsdp', 'tensor', 'pipeline', or "
                f"several joined by +, such as 'fsdp+tensor'"
                + either("; sw.search finds the best" if name == "best" else "", "")
            )
    if len(set(parts)) != len(parts) or {"dp", "fsdp"} <= set(parts):
        raise ValueError(
            f"strategy {name!r} contradicts itself: use each part once, and either dp or fsdp"
        )
    chosen: list[tuple[str, Any]] = []
    if "dp" in parts:
        chosen.append(("replicate", replicate()))
    if "tensor" in parts:  # before fsdp, which takes what is left
        rule = tensor(_pick_axis("tensor", TENSOR_AXES, sizes))
        chosen.append((str(rule), rule))
    if "pipeline" in parts:
        rule = stages(_pick_axis("pipeline", PIPELINE_AXES, sizes))
        chosen.append((str(rule), rule))
    if "fsdp" in parts:
        rule = fsdp(_pick_axis("fsdp", FSDP_AXES, sizes), min_bytes=strategy.min_bytes)
        chosen.append((str(rule), rule))
    return chosen


def _pick_axis(strategy: str, wanted: tuple[str, ...], sizes: Mapping[str, int]) -> str:
    for axis in wanted:
        if axis in sizes:
            return axis
    raise ValueError(
        f"strategy {strategy!r} needs an axis named {' or '.join(map(repr, wanted))}, but the mesh "
        f"has {', '.join(f'{a}={s}' for a, s in sizes.items())}: rename one"
        + either(f", or use sw.{_FUNCTIONS.get(strategy, strategy)}(axis)", "")
    )
