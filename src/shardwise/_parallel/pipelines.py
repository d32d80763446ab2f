"""Pipeline parallelism: a stack of alike blocks, split depth-wise over a mesh axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from .._base import public
from .._layout import show_shape
from .._mesh import AnyMesh
from .._nnx import dotted
from .manual import find_mesh, in_body, run_manual, vary
from .timetable import Timetable, slot

_SCHEDULES = ("gpipe", "circular")


@public
def pipeline(
    stack: Any,
    *,
    axis: str,
    microbatches: int,
    schedule: str = "gpipe",
    rounds: int | None = None,
    mesh: AnyMesh | str | None = None,
) -> Pipeline:
    """Returns a function of a batch that runs `stack` with its depth split over `axis`.

    Each device along the axis is a stage: it holds its part of the depth, works on one microbatch
    at a tick and hands it on by `ppermute`. The result equals the unsplit stack's, in value and
    gradient, and is the same on all stages.

    Where it runs is where it is called. In the body of a `jax.shard_map` or `sw.simulate` that has
    the axis, `stack` and the batch are this device's own, and other axes are the body's to use.
    Elsewhere they are whole, and it runs along `axis` of `mesh` (real devices, or simulated ones if
    the mesh has none) or of the mesh that `jax.set_mesh` has set; other axes stay the compiler's.

    Args:
        stack: blocks alike in all but their numbers, each of which maps its input to an output of
            the same shapes and dtypes and changes no state: one module whose arrays are stacked
            along a leading dim (as `nnx.vmap` makes them), or a sequence of modules.
        axis: the mesh axis of the stages.
        microbatches: into how many parts the batch (dim 0 of each array) is cut.
        schedule: `"gpipe"`: each stage holds a run of neighbouring layers, `P(axis)` of the stack.
            `"circular"`: each holds several shorter runs and microbatches go round several times,
            which divides the bubble by the number of rounds. The stack has then two leading dims,
            rounds and layers of a round, and the second is split: `P(None, axis)`.
        rounds: for the circular schedule, where `stack` is whole and has one leading dim or is a
            sequence: the number of rounds to fold it into.
        mesh: see above.

    Raises:
        ValueError: the stack, the batch and the schedule do not fit each other.

    Example:
        >>> import jax.numpy as jnp, shardwise as sw
        >>> from flax import nnx
        >>> blocks = [nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(4)]
        >>> pipe = sw.pipeline(blocks, axis="stage", microbatches=6, mesh="stage=4")
        >>> pipe(jnp.ones((12, 8))).shape
        (12, 8)
        >>> print(pipe.timetable())
        stage 0  0 1 2 3 4 5 · · ·
        stage 1  · 0 1 2 3 4 5 · ·
        stage 2  · · 0 1 2 3 4 5 ·
        stage 3  · · · 0 1 2 3 4 5
        9 ticks, 3 of them idle on each stage: bubble 50.0% of the work
    """
    if schedule not in _SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}: it is one of {', '.join(_SCHEDULES)}")
    if schedule == "gpipe" and rounds is not None:
        raise ValueError("rounds belong to schedule='circular': gpipe has one")
    graphdef, state = _stacked(stack, rounds)
    return Pipeline(graphdef, state, axis, microbatches, schedule, rounds, mesh)


@public
@dataclasses.dataclass(frozen=True, repr=False)
class Pipeline:
    """A stack that is ready to run as a pipeline: call it with a batch. See `pipeline`."""

    graphdef: Any
    state: Any
    axis: str
    microbatches: int
    schedule: str
    rounds: int | None
    mesh: AnyMesh | str | None

    def __call__(self, batch: Any, *extras: Any) -> Any:
        """Returns the stack's output for a batch.

        Args:
            batch: an array, or a pytree of them, that the first block takes; dim 0 is cut.
            *extras: further arguments, the same for every block and microbatch.
        """
        if in_body(self.axis):
            if self.rounds is not None:
                raise ValueError(
                    "rounds folds a whole stack, but in a body the stack is this device's part: "
                    "fold it before, as (rounds, layers of a round, ...) under P(None, axis)"
                )
            return self._run(self.state, batch, extras)
        found = find_mesh(self.axis, self.mesh, "a pipeline")
        timetable, depth = self._timetable(found.shape[self.axis]), self._depth()
        if depth[-1] % timetable.stages:
            raise ValueError(
                f"{depth[-1]} layers{' of a round' if len(depth) > 1 else ''} cannot be split over "
                f"{timetable.stages} stages: give a multiple"
            )
        self._cut(batch)
        # Trailing dims may be split over other axes, which are not this body's.
        spec = P(self.axis) if self.schedule == "gpipe" else P(None, self.axis)
        run = run_manual(
            self._run,
            mesh=found,
            is_set=self.mesh is None,
            axis=self.axis,
            in_specs=(spec, P(), P()),
            out_specs=P(),
        )
        return run(self.state, batch, extras)

    def __repr__(self) -> str:
        """Returns what it splits, and how."""
        layers = " × ".join(map(str, self._depth()))
        return (
            f"Pipeline({layers} layers over axis {self.axis!r}, "
            f"{self.microbatches} microbatches, {self.schedule})"
        )

    def timetable(self, stages: int | None = None) -> Timetable:
        """Returns which microbatch each stage works on at each tick, and the bubble.

        Args:
            stages: the size of the axis; by default that of the body's or the given mesh.
        """
        if stages is not None:
            return self._timetable(stages)
        if in_body(self.axis):
            return self._timetable(jax.lax.axis_size(self.axis))
        return self._timetable(find_mesh(self.axis, self.mesh, "a timetable").shape[self.axis])

    def _timetable(self, stages: int) -> Timetable:
        return Timetable(stages, self.microbatches, self._depth()[0] if self._is_circular else 1)

    @property
    def _is_circular(self) -> bool:
        return self.schedule == "circular"

    def _depth(self) -> tuple[int, ...]:
        """Returns the stack's leading dims: layers, or rounds and layers of a round."""
        wanted = 2 if self._is_circular else 1
        leaves = jax.tree_util.tree_leaves_with_path(self.state)
        depths = {path: leaf.shape[:wanted] for path, leaf in leaves}
        first = next(iter(depths.values()))
        for path, depth in depths.items():
            if depth != first or len(depth) < wanted:
                raise ValueError(
                    f"{dotted(path)} has leading dims {depth}, but others have {first}: all arrays "
                    f"of a stack start with {'(rounds, layers)' if wanted == 2 else '(layers,)'}"
                )
        return first

    def _cut(self, batch: Any) -> Any:
        """Returns the batch as microbatches."""
        count = self.microbatches

        def cut(path: Any, leaf: Any) -> Any:
            if jnp.ndim(leaf) == 0 or leaf.shape[0] % count:
                size = leaf.shape[0] if jnp.ndim(leaf) else "none"
                name = f"batch.{dotted(path)}" if path else "batch"
                raise ValueError(
                    f"{name} has {size} rows, which {count} microbatches cannot split evenly: "
                    f"give a multiple of {count}"
                )
            return jnp.reshape(leaf, (count, leaf.shape[0] // count, *leaf.shape[1:]))

        return jax.tree_util.tree_map_with_path(cut, batch)

    def _run(self, state: Any, batch: Any, extras: tuple[Any, ...]) -> Any:
        """Returns the output on one device, which is one stage."""
        axis, stages = self.axis, jax.lax.axis_size(self.axis)
        own = dataclasses.replace(self, state=state)
        own._depth()
        timetable = own._timetable(stages)
        items = timetable.microbatches * timetable.rounds
        stage = jax.lax.axis_index(axis)
        fresh = vary(self._cut(batch), axes=(axis,))
        is_first, is_last = stage == 0, stage == stages - 1
        # Round the ring only where a microbatch comes again.
        ring = [(s, (s + 1) % stages) for s in range(stages - (timetable.rounds == 1))]

        def tick(received: Any, now: Any) -> tuple[Any, Any]:
            item = jnp.clip(now - stage, 0, items - 1)
            microbatch, round_ = slot(item, stages, timetable.rounds)
            enters = is_first & (round_ == 0)
            new = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, microbatch, 0, False), fresh
            )
            given = jax.tree.map(lambda a, b: jnp.where(enters, a, b), new, received)
            part = state
            if self._is_circular:
                part = jax.tree.map(
                    lambda p: jax.lax.dynamic_index_in_dim(p, round_, 0, False), state
                )
            out = _through(self.graphdef, part, given, extras)
            return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, ring), out), out

        # Idle stages work on real data too, so that what they compute in vain is finite.
        start = jax.tree.map(lambda x: x[0], fresh)
        _, outs = jax.lax.scan(tick, start, jnp.arange(timetable.ticks, dtype="int32"))
        done = [
            t
            for t in range(timetable.ticks)
            if (at := timetable.at(t, stages - 1)) and at[1] == timetable.rounds - 1
        ]

        def collect(out: Any) -> Any:
            final = out[stages - 1 :] if timetable.rounds == 1 else out[jnp.asarray(done)]
            final = jax.lax.psum(jnp.where(is_last, final, jnp.zeros_like(final)), axis)
            return final.reshape(-1, *final.shape[2:])

        return jax.tree.map(collect, outs)


def _through(graphdef: Any, state: Any, given: Any, extras: tuple[Any, ...]) -> Any:
    """Returns what a stage's own layers make of a microbatch."""

    def layer(value: Any, part: Any) -> tuple[Any, None]:
        before = jax.tree_util.tree_leaves_with_path(part)  # the block shares and changes `part`
        block = nnx.merge(graphdef, part)
        out = block(value, *extras)
        _require_same(value, out)
        _require_pure(block, graphdef, before)
        return vary(out, like=value), None

    return jax.lax.scan(layer, given, state)[0]


def _require_same(given: Any, out: Any) -> None:
    """Refuses a block whose output cannot be the next one's input."""
    before, after = (jax.tree.map(_describe, tree) for tree in (given, out))
    if before != after:
        raise ValueError(
            f"a block of the pipeline maps {before} to {after}: its output must be as its input, "
            f"since it is the next block's input"
        )


def _require_pure(block: Any, graphdef: Any, before: list[Any]) -> None:
    """Refuses a block that changes its own state, which would be lost."""
    new_graphdef, new = nnx.split(block)
    for (path, old), now in zip(before, jax.tree.leaves(new), strict=False):
        if old is not now:
            raise ValueError(
                f"a block of the pipeline changes its {dotted(path)}, which would be lost: stages "
                f"run many microbatches at once. Make it deterministic, or pass what it needs with "
                f"the batch"
            )
    if new_graphdef != graphdef:
        raise ValueError(
            "a block of the pipeline changes its own structure (does it sow?), which would be lost"
        )


def _stacked(stack: Any, rounds: int | None) -> tuple[Any, Any]:
    """Returns the graphdef of one block, and the state of all."""
    if isinstance(stack, nnx.Sequential):
        stack = stack.layers
    if isinstance(stack, nnx.Module) and not isinstance(stack, nnx.List):
        graphdef, state = nnx.split(stack)
    elif isinstance(stack, Sequence | nnx.List):
        graphdef, state = _stack_up(list(stack))
    else:
        raise ValueError(
            f"a pipeline takes a stacked nnx.Module or a sequence of them, got a "
            f"{type(stack).__name__}"
        )
    if not jax.tree.leaves(state):
        raise ValueError("the stack has no arrays: there is nothing to split over the stages")
    if rounds is None:
        return graphdef, state

    def fold(path: Any, leaf: Any) -> Any:
        if leaf.shape[0] % rounds:
            raise ValueError(f"{leaf.shape[0]} layers cannot be folded into {rounds} rounds")
        return leaf.reshape(rounds, leaf.shape[0] // rounds, *leaf.shape[1:])

    return graphdef, jax.tree_util.tree_map_with_path(fold, state)


def _stack_up(blocks: list[Any]) -> tuple[Any, Any]:
    if not blocks:
        raise ValueError("the stack is empty: give at least one block")
    for i, block in enumerate(blocks):
        if not isinstance(block, nnx.Module):
            raise ValueError(f"block {i} of the stack is a {type(block).__name__}, no nnx.Module")
    parts = [nnx.split(block) for block in blocks]
    graphdef, first = parts[0]
    shapes = jax.tree.map(_describe, first)
    for i, (other, state) in enumerate(parts):
        if other != graphdef or jax.tree.map(_describe, state) != shapes:
            raise ValueError(
                f"block {i} of the stack is not like block 0: a pipeline's blocks differ in their "
                f"numbers only"
            )
    return graphdef, jax.tree.map(lambda *leaves: jnp.stack(leaves), *(s for _, s in parts))


def _describe(x: Any) -> str:
    return show_shape(jnp.asarray(x))
