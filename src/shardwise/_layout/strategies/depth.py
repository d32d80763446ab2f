"""The stages of a pipeline: stacks of layers, split by depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..._base import either, public
from ..._mesh import make_spec, padded
from ..._nnx import Leaf, Opinion
from ..rules import Rule, Scene, require_axes
from .picking import scanned_dims


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
