"""Pipeline parallelism: a stack of identical blocks, split by depth over a mesh axis."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from .._base import public
from .._jax import see_pipeline
from .._mesh import STAGES, AnyMesh
from .._nnx import dotted
from .._simulate import is_traced
from .adapting import adapt_stack, is_adapting
from .blocks import depth_of, fold, stack_state, through
from .manual import find_mesh, in_body, run_manual, vary
from .stages import choose_microbatches, find_place, require_rows, rule_axes, run_stages
from .timetable import Timetable, slot

_SCHEDULES = ("gpipe", "circular")


@public
def pipeline(
    stack: Any,
    *,
    axis: str | None = None,
    microbatches: int | None = None,
    schedule: str = "gpipe",
    rounds: int | None = None,
    mesh: AnyMesh | str | None = None,
) -> Pipeline:
    """Returns a function of a batch that runs `stack` with its depth split over an axis.

    Each position along the axis is a stage. It holds its part of the layers, works on one
    microbatch per tick, and passes it on to the next stage. Values and gradients equal those of the
    plain stack.

    A model calls it in its forward pass, as `sw.pipeline(self.blocks)(x)`, and the layout decides:
    in a step whose layout splits stacks of layers over an axis (`sw.stages`, or the strategy
    `"pipeline"`), it runs along that axis; elsewhere, it runs the stack unsplit. Other axes are
    left to the compiler.

    With `axis`, where you call it decides where it runs. In the body of a `jax.shard_map` or
    `sw.simulate` that has the axis, `stack` and the batch are this device's shards, and the body
    may use the other axes as it likes. Elsewhere they are global arrays, and the pipeline runs
    along `axis` of `mesh` (on real devices, or simulated if the mesh is abstract) or of the mesh
    that `jax.set_mesh` has set.

    The stages are idle for `(stages - 1) / (microbatches + stages - 1)` of the time with GPipe, and
    for `(stages - 1) / (microbatches * rounds + stages - 1)` with the circular schedule.

    Args:
        stack: blocks that differ only in the values of their arrays. Each maps its input to an
            output of the same shapes and dtypes and changes no state other than the counts of
            random streams, as dropout does. Either one module whose arrays are stacked along a
            leading dim (as `nnx.vmap` makes them), or a sequence of modules.
        axis: the mesh axis of the stages; by default, the one over which the layout splits stacks.
        microbatches: how many microbatches the batch (dim 0 of each array) is split into. By
            default, up to four for each stage, as many as its rows allow.
        schedule: `"gpipe"`: each stage holds consecutive layers, `P(axis)` of the stack.
            `"circular"`: each stage holds several shorter runs of layers and microbatches go round
            several times, which divides the bubble by the number of rounds. The stack then has two
            leading dims, rounds and layers per round, and the second is split: `P(None, axis)`.
        rounds: for the circular schedule, the number of rounds to fold a global `stack` into if it
            has one leading dim or is a sequence. Layers keep their order in the stack, so those of
            `P(axis)` move to their stages in each step.
        mesh: the mesh to run on; see above.

    Raises:
        ValueError: if the stack, the batch and the schedule do not match.

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
        raise ValueError(f"schedule must be one of {', '.join(_SCHEDULES)}, got {schedule!r}")
    if schedule == "gpipe" and rounds is not None:
        raise ValueError("rounds applies only to schedule='circular': gpipe has one round")
    if mesh is not None and axis is None:
        raise ValueError("a pipeline with mesh= needs axis=, the mesh axis of its stages")
    graphdef, state = stack_state(stack)
    if rounds is not None:
        fold(state, rounds)  # raises if the layers do not divide
    is_stacked = isinstance(stack, nnx.Module) and not isinstance(stack, nnx.List | nnx.Sequential)
    module = stack if is_stacked else None
    return Pipeline(graphdef, state, axis, microbatches, schedule, rounds, mesh, module)


@public
@dataclasses.dataclass(frozen=True, repr=False)
class Pipeline:
    """A stack that runs as a pipeline: call it with a batch. See `pipeline`."""

    graphdef: Any
    state: Any
    axis: str | None
    microbatches: int | None
    schedule: str
    rounds: int | None
    mesh: AnyMesh | str | None
    module: nnx.Module | None = None

    def __call__(self, batch: Any, *extras: Any) -> Any:
        """Returns the stack's output for a batch.

        Args:
            batch: the input of the first block, an array or a pytree of arrays; dim 0 is split.
            *extras: further arguments, the same for every block and microbatch.
        """
        _require_plain(extras)
        if self.module is not None and is_adapting(self.module):
            return adapt_stack(self.module, batch, extras)
        axis = self._layout_axis() if self.axis is None else self.axis
        if axis is None:
            return self._unsplit(batch, extras)
        if in_body(axis):
            if self.rounds is not None:
                raise ValueError(
                    "rounds folds a global stack, but in a body the stack is this device's shard: "
                    "fold it first, to (rounds, layers per round, ...) under P(None, axis)"
                )
            return self._run(self._as_run(), batch, extras, axis)
        found = find_mesh(axis, self.mesh, "a pipeline")
        place = find_place(axis, found, self.mesh is None)
        ways = 1 if place is None else place.ways
        timetable = self._timetable(found.shape[axis], batch, ways)
        depth = self._depth()
        if depth[-1] % timetable.stages:
            raise ValueError(
                f"{depth[-1]} layers{' per round' if len(depth) > 1 else ''} cannot be split over "
                f"{timetable.stages} stages: use a multiple of {timetable.stages}"
            )
        _cut(batch, timetable.microbatches)
        if place is None:
            # Trailing dims may be split over other axes, which this body does not see.
            spec = P(None, axis) if self._is_circular else P(axis)
            run = run_manual(
                lambda state, batch, extras: self._run(state, batch, extras, axis),
                mesh=found,
                is_set=self.mesh is None,
                axis=axis,
                in_specs=(spec, P(), P()),
                out_specs=P(),
            )
            return run(self._as_run(), batch, extras)
        require_rows(batch, timetable.microbatches, place)

        def everywhere(state: Any, batch: Any, extras: tuple[Any, ...]) -> Any:
            return run_stages(
                self.graphdef,
                state,
                batch,
                extras,
                place,
                timetable,
                is_folded=self._is_folded,
                counts_are_kept=self.module is not None,
            )

        # Outside of a trace each operation would be compiled on its own.
        in_trace = any(map(is_traced, jax.tree.leaves((self.state, batch))))
        out, counts = (everywhere if in_trace else jax.jit(everywhere))(self.state, batch, extras)
        self._count(counts)
        return out

    def __repr__(self) -> str:
        """Returns the layers, the axis, the microbatches and the schedule."""
        layers = " × ".join(map(str, self._depth()))
        over = "the layout's axis" if self.axis is None else f"axis {self.axis!r}"
        count = "" if self.microbatches is None else f"{self.microbatches} microbatches, "
        return f"Pipeline({layers} layers over {over}, {count}{self.schedule})"

    def timetable(self, stages: int | None = None) -> Timetable:
        """Returns which microbatch each stage works on at each tick, and the bubble.

        Args:
            stages: the size of the axis; by default its size on the current mesh or on `mesh`.
        """
        if self.microbatches is None:
            raise ValueError(
                "the number of microbatches is chosen for the batch that the pipeline is called "
                "with: give microbatches= for a timetable before that"
            )
        if stages is not None:
            return self._timetable(stages)
        axis = self._layout_axis() if self.axis is None else self.axis
        if axis is None:
            raise ValueError(
                "a timetable is asked for outside of any step whose layout splits stacks of "
                "layers: give stages="
            )
        if in_body(axis):
            return self._timetable(jax.lax.axis_size(axis))
        return self._timetable(find_mesh(axis, self.mesh, "a timetable").shape[axis])

    def _layout_axis(self) -> str | None:
        """Returns the axis over which the layout of the current step splits stacks, if it does."""
        mesh: Any = jax.sharding.get_abstract_mesh()
        axes = [axis for axis in rule_axes(STAGES, mesh) if mesh.shape[axis] > 1]
        if len(axes) > 1:
            raise ValueError(
                f"the layout splits stacks of layers over {' and '.join(axes)}: a pipeline runs "
                f"along one axis"
            )
        if axes:
            see_pipeline()
        return axes[0] if axes else None

    def _timetable(self, stages: int, batch: Any = None, ways: int = 1) -> Timetable:
        rounds = self._depth()[0] if self._is_circular else 1
        count = self.microbatches
        if count is None:
            rows = [leaf.shape[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)]
            count = choose_microbatches(min(rows, default=1), stages, ways, rounds)
        return Timetable(stages, count, rounds)

    @property
    def _is_circular(self) -> bool:
        return self.schedule == "circular"

    @property
    def _is_folded(self) -> bool:
        """Whether the stack has two leading dims, rounds and layers per round."""
        return self._is_circular and self.rounds is None

    def _as_run(self) -> Any:
        """Returns the stack's state with the leading dims that the schedule needs."""
        return self.state if self.rounds is None else fold(self.state, self.rounds)

    def _depth(self) -> tuple[int, ...]:
        """Returns the stack's leading dims: layers, or rounds and layers per round."""
        if self.rounds is not None:
            return self.rounds, depth_of(self.state, 1)[0] // self.rounds
        return depth_of(self.state, 2 if self._is_circular else 1)

    def _unsplit(self, batch: Any, extras: tuple[Any, ...]) -> Any:
        """Returns the output of the plain stack."""
        state = self.state
        if self._is_folded:
            state = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), state)
        depth_of(state, 1)
        kept = self.module is not None
        out, counts = through(self.graphdef, state, batch, extras, counts_are_kept=kept)
        self._count(counts)
        return out

    def _count(self, counts: Any) -> None:
        """Writes the counts of random streams back to the stack."""
        if self.module is not None and jax.tree.leaves(counts):
            shaped = jax.tree.map(
                lambda new, old: new.reshape(old.shape),
                counts,
                nnx.filter_state(self.state, nnx.RngCount),
            )
            nnx.update(self.module, shaped)

    def _run(self, state: Any, batch: Any, extras: tuple[Any, ...], axis: str) -> Any:
        """Returns the output on one device, which is one stage."""
        stages = jax.lax.axis_size(axis)
        own = dataclasses.replace(self, state=state, rounds=None)
        timetable = own._timetable(stages, batch)
        items = timetable.microbatches * timetable.rounds
        stage = jax.lax.axis_index(axis)
        fresh = vary(_cut(batch, timetable.microbatches), axes=(axis,))
        is_first, is_last = stage == 0, stage == stages - 1
        # The ring is closed only if microbatches go round more than once.
        ring = [(s, (s + 1) % stages) for s in range(stages - (timetable.rounds == 1))]

        def tick(received: Any, now: Any) -> tuple[Any, Any]:
            item = jnp.clip(now - stage, 0, items - 1)
            microbatch, round_ = slot(item, stages, timetable.rounds)
            enters = is_first & (round_ == 0)
            new = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, microbatch, 0, False), fresh
            )
            value = jax.tree.map(lambda a, b: jnp.where(enters, a, b), new, received)
            part = state
            if self._is_circular:
                part = jax.tree.map(
                    lambda p: jax.lax.dynamic_index_in_dim(p, round_, 0, False), state
                )
            out, _ = through(self.graphdef, part, value, extras, counts_are_kept=False)
            return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, ring), out), out

        # Idle stages compute on real data too, so that their unused results stay finite.
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


def _cut(batch: Any, count: int) -> Any:
    """Returns the batch split into microbatches."""

    def cut(path: Any, leaf: Any) -> Any:
        if jnp.ndim(leaf) == 0 or leaf.shape[0] % count:
            size = leaf.shape[0] if jnp.ndim(leaf) else "no"
            name = f"batch.{dotted(path)}" if path else "batch"
            raise ValueError(
                f"{name} has {size} rows, which cannot be split evenly into {count} "
                f"microbatches: use a multiple of {count}"
            )
        return jnp.reshape(leaf, (count, leaf.shape[0] // count, *leaf.shape[1:]))

    return jax.tree_util.tree_map_with_path(cut, batch)


def _require_plain(extras: tuple[Any, ...]) -> None:
    """Rejects extras with state of their own, which stages cannot change together."""
    for extra in jax.tree.leaves(
        extras, is_leaf=lambda x: isinstance(x, nnx.Pytree | nnx.Variable)
    ):
        if isinstance(extra, nnx.Pytree | nnx.Variable):
            raise ValueError(
                f"an argument of the pipeline has type {type(extra).__name__}, whose state the "
                f"stages would change all at once: give arrays, and random streams to the blocks "
                f"when they are made"
            )
