"""Strategies by name, FSDP, ZeRO 1 and 2, experts, and the stages of a pipeline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from .._base import either, public, show_bytes
from .._jax import show_value
from .._mesh import (
    DATA_AXES,
    SEQUENCE_AXES,
    Axes,
    divisible_dims,
    make_spec,
    padded,
    show_spec,
)
from .._mesh import ways as cut_ways
from .._nnx import Leaf, Opinion
from .flow import Flow
from .rules import Rule, Rules, Scene, patterns, replicate, require_axes
from .tensor_parallel import Experts, tensor

# The leaves that fsdp does not split are a small share of the model, and add little to what each
# device holds: on a large mesh, one percent of the model is many times a device's own part.
SMALL_SHARE, SMALL_GROWTH = 0.01, 0.1
# Above this size, the bytes that a gather moves cost more than its latency.
SMALL_BYTES = 2**20

FSDP_AXES = ("fsdp", "data")
TENSOR_AXES = ("tensor", "tp", "model")
PIPELINE_AXES = ("pipe", "stage")
EXPERT_AXES = ("expert", "experts")
# The axes that each part of a strategy's name takes, the first that the mesh has.
PART_AXES = {
    "dp": (),
    "fsdp": FSDP_AXES,
    "zero1": DATA_AXES,
    "zero2": DATA_AXES,
    "expert": EXPERT_AXES,
    "sequence": SEQUENCE_AXES,
    "tensor": TENSOR_AXES,
    "pipeline": PIPELINE_AXES,
}
# What a strategy is called where its axis has another name.
_FUNCTIONS = {
    "fsdp": "sw.fsdp(axis)",
    "zero1": "sw.zero1(axis)",
    "zero2": "sw.zero2(axis)",
    "tensor": "sw.tensor(axis)",
    "pipeline": "sw.stages(axis)",
    "expert": "logical={'experts': axis}",
    "sequence": "Recipe(batch_spec=)",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Fsdp:
    """Fully sharded data parallelism; see `fsdp`."""

    axes: tuple[str, ...]
    min_bytes: int | None

    def bind(self, leaves: Sequence[Leaf], scene: Scene) -> Rule:
        """Returns the rule, after checking that the mesh has the axes."""
        require_axes(self.axes, scene.sizes, "fsdp")
        ways = math.prod(scene.sizes[axis] for axis in self.axes)
        stacks = _stacks(leaves, scene)
        sizes = scene.sizes
        picks = {leaf.path: self._pick(leaf, sizes, stacks[leaf.path]) for leaf in leaves}
        if self.min_bytes is None:
            picks |= _small(leaves, picks, ways)
        return lambda leaf: picks[leaf.path]

    def _pick(self, leaf: Leaf, sizes: Mapping[str, int], stacked: set[int]) -> Opinion:
        if leaf.faults:
            return Opinion(None, "an earlier rule's spec does not fit the leaf")
        taken = padded(leaf.spec, leaf.ndim)
        already = [a for entry in taken for a in entry if a in self.axes]
        axes = tuple(axis for axis in self.axes if axis not in already)
        if not axes:
            return Opinion(None, f"an earlier rule already uses axis {already[0]!r}")
        ways = math.prod(sizes[axis] for axis in axes)
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
        taken[dims[0]] = axes
        return Opinion(
            make_spec(taken),
            f"dim {dims[0]} (size {leaf.shape[dims[0]]}) is the largest free dim divisible by {ways}",
            refines=True,
            gathered=frozenset(axes),
        )

    def __str__(self) -> str:
        """Returns it as it was written."""
        return f"fsdp({', '.join(map(repr, self.axes))})"


def _stacks(leaves: Sequence[Leaf], scene: Scene) -> dict[str, set[int]]:
    """Returns, by path, the dims that are never split: stacks of layers, and ranks of adapters."""
    flow = scene.known()  # not worth tracing a loss for
    scanned = {} if flow is None else scanned_dims(leaves, flow)
    return {
        leaf.path: {*leaf.stacked, *scanned.get(leaf.path, ()), *_rank(leaf)} for leaf in leaves
    }


def _rank(leaf: Leaf) -> tuple[int, ...]:
    return () if leaf.follows is None or leaf.follows.rank is None else (leaf.follows.rank,)


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
    return Fsdp(_flat_axes("fsdp", axes), _require_bytes("fsdp", min_bytes))


def _flat_axes(name: str, axes: Sequence[Any]) -> Axes:
    flat = tuple(a for axis in axes for a in (axis if isinstance(axis, tuple | list) else (axis,)))
    named = all(isinstance(a, str) and a for a in flat)
    if not flat or not named or len(set(flat)) != len(flat):
        raise ValueError(
            f"{name}({', '.join(map(repr, axes))}) needs one or more distinct axis names"
        )
    return flat


def _require_bytes(name: str, min_bytes: Any) -> int | None:
    is_count = isinstance(min_bytes, int) and not isinstance(min_bytes, bool) and min_bytes >= 0
    if min_bytes is not None and not is_count:
        raise ValueError(
            f"{name} has min_bytes={show_value(min_bytes)}: it must be a non-negative integer"
        )
    return min_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Zero:
    """Optimizer state, and from stage 2 gradients, in shards; see `zero1` and `zero2`."""

    stage: int
    axes: Axes
    min_bytes: int | None

    def bind(self, leaves: Sequence[Leaf], scene: Scene) -> Rule:
        """Returns the rule.

        Raises:
            ValueError: the mesh does not have the axes, or FSDP already uses all of them.
        """
        require_axes(self.axes, scene.sizes, f"zero{self.stage}")
        gathered = {axis for leaf in leaves for axis in leaf.gathered}
        if gathered.issuperset(self.axes):
            raise ValueError(_beside_fsdp(f"zero{self.stage}", sorted(gathered)))
        stacks = _stacks(leaves, scene)
        trained = [leaf for leaf in leaves if _is_trainable(leaf)]
        picks = {leaf.path: self._pick(leaf, stacks[leaf.path]) for leaf in trained}
        if self.min_bytes is None:
            ways = math.prod(scene.sizes[axis] for axis in self.axes)
            picks |= _small(trained, picks, ways)
        return lambda leaf: self._opinion(leaf, picks.get(leaf.path))

    def _opinion(self, leaf: Leaf, pick: Opinion | None) -> Opinion:
        if pick is None:
            return Opinion(None, f"a variable of type {leaf.kind} has no optimizer state")
        if leaf.faults:
            return Opinion(None, "an earlier rule's spec does not fit the leaf")
        spec = leaf.spec if pick.spec is None else pick.spec
        what = "optimizer state" if self.stage == 1 else "gradient and optimizer state"
        reason = f"{what} as {show_spec(spec)}: {pick.reason}"
        gradients = spec if self.stage > 1 else None
        return Opinion(
            None, reason, intentional=True, left=pick.left, moments=spec, gradients=gradients
        )

    def _pick(self, leaf: Leaf, stacked: set[int]) -> Opinion:
        """Returns the spec of the leaf's optimizer state; None if it can be split no further."""
        if leaf.faults:
            return Opinion(None)
        taken = padded(leaf.spec, leaf.ndim)
        used = {axis for entry in taken for axis in entry}
        axes = tuple(axis for axis in self.axes if axis not in used and leaf.sizes[axis] > 1)
        if not axes:
            idle = [axis for axis in self.axes if axis not in used]
            if idle:
                return Opinion(None, f"axis {idle[0]!r} has size 1")
            return Opinion(None, f"axis {self.axes[0]!r} already splits the leaf itself")
        if self.min_bytes is not None and leaf.bytes < self.min_bytes:
            why = f"{leaf.bytes:,} bytes are fewer than min_bytes={self.min_bytes:,}"
            return Opinion(None, why, left="small")
        reasons = []
        # Together on one dim if possible; otherwise each axis where it fits.
        together = _room(leaf, taken, axes, stacked) is not None
        for group in [axes] if together else [(axis,) for axis in axes]:
            ways = math.prod(leaf.sizes[axis] for axis in group)
            dim = _room(leaf, taken, group, stacked)
            if dim is not None:
                free = "free " if not taken[dim] else ""
                reasons.append(
                    f"dim {dim} (size {leaf.shape[dim]}) is the largest {free}dim divisible by "
                    f"{ways * math.prod(leaf.sizes[axis] for axis in taken[dim])}"
                )
                taken[dim] = (*taken[dim], *group)
        if not reasons:
            ways = math.prod(leaf.sizes[axis] for axis in axes)
            why = (
                f"no dim of {leaf.shape} can be split {ways} ways more"
                if leaf.shape
                else "a scalar"
            )
            return Opinion(None, why, left="indivisible")
        return Opinion(make_spec(taken), " and ".join(reasons))

    def __str__(self) -> str:
        """Returns it as it was written."""
        return f"zero{self.stage}({', '.join(map(repr, self.axes))})"


# Variables of Flax's own that no optimizer trains.
_UNTRAINED = {
    "BatchStat",
    "Cache",
    "Intermediate",
    "Perturbation",
    "RngCount",
    "RngKey",
    "RngState",
}


def _is_trainable(leaf: Leaf) -> bool:
    return leaf.kind not in _UNTRAINED and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _room(leaf: Leaf, taken: Sequence[Axes], axes: Axes, stacked: set[int]) -> int | None:
    """Returns the dim that these axes can split: the largest free one, or one already split."""
    ways = math.prod(leaf.sizes[axis] for axis in axes)
    local = [
        size // math.prod(leaf.sizes[axis] for axis in entry)
        for size, entry in zip(leaf.shape, taken, strict=True)
    ]
    free = divisible_dims(local, taken, ways, skip=stacked)
    return next(iter(free or divisible_dims(local, [()] * leaf.ndim, ways, skip=stacked)), None)


def _beside_fsdp(name: str, axes: Sequence[str]) -> str:
    """Returns why FSDP leaves nothing to this strategy."""
    return (
        f"{name} has nothing to split: fsdp over {', '.join(map(repr, axes))} already splits weights, "
        f"gradients and optimizer state (ZeRO 3); use fsdp alone, or a mesh with one axis for each, "
        f"such as data=2,fsdp=4"
    )


@public
def zero1(*axes: str, min_bytes: int | None = None) -> Zero:
    """Returns the strategy that splits each leaf's optimizer state over `axes` (ZeRO 1).

    Weights stay as other rules lay them out, replicated over `axes`, and so do gradients. Each
    device updates its part of the weights, which are then gathered. A moving average
    (`Recipe.ema`) is split like the optimizer's state.

    The largest dim that is free, divisible, and not a stack of layers is split; failing that, a
    dim that another rule has split is split further. It applies after all other rules, wherever it
    stands among them.

    Args:
        *axes: one or more axes of the mesh along which weights are replicated, such as those that
            split the batch.
        min_bytes: the optimizer state of a leaf with fewer bytes is not split. By default, the
            smallest leaves, each under 1 MiB, are left alone as `fsdp` leaves them. 0 splits all
            that are divisible.

    Example:
        >>> import optax, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0))
        >>> layout = sw.layout(make, sw.mesh("data=8", on="none"), sw.zero1("data"))
        >>> layout["kernel"].spec, layout.for_optimizer(optax.adamw(1e-3))["0.mu.kernel"].spec
        (P(), P(None, 'data'))
    """
    return Zero(1, _flat_axes("zero1", axes), _require_bytes("zero1", min_bytes))


@public
def zero2(*axes: str, min_bytes: int | None = None) -> Zero:
    """Returns the strategy that splits gradients and optimizer state over `axes` (ZeRO 2).

    As `zero1`, but each gradient is split too, as soon as it is computed: a device receives only
    its part of the sum (a reduce-scatter), and only that part is accumulated over microbatches
    (`Recipe.accumulate`).

    Args:
        *axes: one or more axes of the mesh along which weights are replicated, such as those that
            split the batch.
        min_bytes: gradient and optimizer state of a leaf with fewer bytes are not split, as in
            `zero1`.

    Example:
        >>> import shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0))
        >>> from jax.sharding import PartitionSpec as P
        >>> rules = [{"kernel": P(None, "model")}, sw.zero2("data")]
        >>> layout = sw.layout(make, sw.mesh("data=2,model=4", on="none"), rules)
        >>> layout["kernel"].spec, layout["kernel"].moments, layout["kernel"].gradients
        (P(None, 'model'), P('data', 'model'), P('data', 'model'))
    """
    return Zero(2, _flat_axes("zero2", axes), _require_bytes("zero2", min_bytes))


def zero_axes(leaves: Sequence[Leaf]) -> tuple[str, ...]:
    """Returns the axes that split only gradients and optimizer state, and no leaf."""
    used = {axis for leaf in leaves for entry in padded(leaf.spec, 0) for axis in entry}
    split = {axis for leaf in leaves if leaf.moments is not None for axis in leaf.update_axes}
    return tuple(sorted(split - used))


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
    for part in parts:
        if part not in PART_AXES:
            raise ValueError(
                f"unknown strategy {name!r}: use {', '.join(map(repr, PART_AXES))}, or several "
                f"joined by +, such as 'fsdp+tensor'"
                + either("; 'best' cannot be one of several rules" if name == "best" else "", "")
            )
    both = any({*pair} <= set(parts) for pair in (("dp", "fsdp"), ("zero1", "zero2")))
    if len(set(parts)) != len(parts) or both:
        raise ValueError(
            f"strategy {name!r} contradicts itself: use each part once, and either dp or fsdp, "
            f"zero1 or zero2"
        )
    chosen: list[tuple[str, Any]] = []
    axes = {part: _pick_axis(part, PART_AXES[part], sizes) for part in parts if part not in _FREE}
    if "dp" in parts:
        chosen.append(("replicate", replicate()))
    if "expert" in parts:
        rule = Experts(axes["expert"])
        chosen.append((str(rule), rule))
    if "tensor" in parts:  # before fsdp, which takes what is left
        rule = tensor(axes["tensor"])
        chosen.append((str(rule), rule))
    if "pipeline" in parts:
        rule = stages(axes["pipeline"])
        chosen.append((str(rule), rule))
    if "fsdp" in parts:
        # Whatever else splits the batch stores its part of the parameters too.
        more = [axes[part] for part in ("expert", "sequence") if part in parts]
        own = [axis for axis in FSDP_AXES if axis in sizes][:1]
        own = own or ([] if more else [_pick_axis("fsdp", FSDP_AXES, sizes)])
        rule = fsdp(*own, *more, min_bytes=strategy.min_bytes)
        chosen.append((str(rule), rule))
    for part in ("zero1", "zero2"):
        if part in parts:
            taken = [axis for _, rule in chosen if isinstance(rule, Fsdp) for axis in rule.axes]
            rule = Zero(int(part[-1]), _free_data_axes(part, taken, sizes), strategy.min_bytes)
            chosen.append((str(rule), rule))
    return chosen


# Parts of a strategy's name whose axes are not the first that the mesh has.
_FREE = ("dp", "fsdp", "zero1", "zero2")


def _free_data_axes(strategy: str, taken: Sequence[str], sizes: Mapping[str, int]) -> Axes:
    """Returns all axes that split the batch, except those that FSDP takes."""
    _pick_axis(strategy, DATA_AXES, sizes)
    axes = tuple(axis for axis in sizes if axis in DATA_AXES and axis not in taken)
    if not axes:
        raise ValueError(_beside_fsdp(strategy, taken))
    return tuple(axis for axis in axes if sizes[axis] > 1) or axes


def _pick_axis(strategy: str, wanted: tuple[str, ...], sizes: Mapping[str, int]) -> str:
    for axis in wanted:
        if axis in sizes:
            return axis
    raise ValueError(
        f"strategy {strategy!r} needs an axis named {' or '.join(map(repr, wanted))}, but the mesh "
        f"has {', '.join(f'{a}={s}' for a, s in sizes.items())}: rename one"
        + either(f", or use {_FUNCTIONS[strategy]}", "")
    )
