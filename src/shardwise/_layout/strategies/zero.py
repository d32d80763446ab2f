"""ZeRO 1 and 2: optimizer state and gradients in shards, beside replicated weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp

from ..._base import public
from ..._mesh import Axes, make_spec, padded, show_spec
from ..._nnx import Leaf, Opinion
from ..rules import Rule, Scene, require_axes
from .picking import flat_axes, require_bytes, small_leaves, split_dim, stacks_of


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
            raise ValueError(beside_fsdp(f"zero{self.stage}", sorted(gathered)))
        stacks = stacks_of(leaves, scene)
        trained = [leaf for leaf in leaves if _is_trainable(leaf)]
        picks = {leaf.path: self._pick(leaf, stacks[leaf.path]) for leaf in trained}
        if self.min_bytes is None:
            ways = math.prod(scene.sizes[axis] for axis in self.axes)
            picks |= small_leaves(trained, picks, ways)
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
        together = split_dim(leaf, taken, axes, stacked, further=True) is not None
        for group in [axes] if together else [(axis,) for axis in axes]:
            found = split_dim(leaf, taken, group, stacked, further=True)
            if found is not None:
                dim, reason = found
                reasons.append(reason)
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


def beside_fsdp(name: str, axes: Sequence[str]) -> str:
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

    The largest dim that is free, divisible, and not a stack of layers is split, or of a large leaf
    one with whole TPU tiles, as `fsdp` does; failing that, a dim that another rule has split is
    split further. It applies after all other rules, wherever it
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
    return Zero(1, flat_axes("zero1", axes), require_bytes("zero1", min_bytes))


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
    return Zero(2, flat_axes("zero2", axes), require_bytes("zero2", min_bytes))


def zero_axes(leaves: Sequence[Leaf]) -> tuple[str, ...]:
    """Returns the axes that split only gradients and optimizer state, and no leaf."""
    used = {axis for leaf in leaves for entry in padded(leaf.spec, 0) for axis in entry}
    split = {axis for leaf in leaves if leaf.moments is not None for axis in leaf.update_axes}
    return tuple(sorted(split - used))
