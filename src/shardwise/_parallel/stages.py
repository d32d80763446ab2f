"""A pipeline on global arrays: stages are a dim that is split over the axis.

All stages run at once, as `vmap` over that dim, and a shift along it hands each stage's result to
the next, which the compiler turns into a collective-permute. Every other axis stays automatic, so
that whatever the blocks do with them works as it does without a pipeline.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._jax import active_axis_rules
from .._mesh import AnyMesh, dim_axes
from .blocks import through
from .timetable import Timetable, slot

# Enough that the bubble is below a fifth of the step.
_MICROBATCHES_PER_STAGE = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a pipeline runs.

    Attributes:
        mesh: the mesh.
        is_set: whether it is the current mesh, rather than a given one.
        axis: the axis of the stages.
        rows: the axes that split the rows of the batch, in order; perhaps `axis` too.
    """

    mesh: AnyMesh
    is_set: bool
    axis: str
    rows: tuple[str, ...]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.mesh.shape[self.axis]

    @property
    def data(self) -> tuple[str, ...]:
        """The axes that split each microbatch."""
        return tuple(axis for axis in self.rows if axis != self.axis)

    @property
    def ways(self) -> int:
        """How many ways each microbatch is split."""
        return math.prod(self.mesh.shape[axis] for axis in self.data)

    def pin(self, x: Any, *entries: Any) -> Any:
        """Returns `x` with its leading dims split over these axes, the others as they are."""
        left = P.UNCONSTRAINED
        spec = P(*(left if e == () else e for e in entries), *[left] * (x.ndim - len(entries)))
        where: Any = spec if self.is_set else NamedSharding(self.mesh, spec)  # pyright: ignore[reportArgumentType]
        return jax.lax.with_sharding_constraint(x, where)


def rule_axes(name: str, mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the axes of the mesh that Flax's active logical rules map a name to."""
    rules = dict(active_axis_rules())
    return tuple(axis for axis in dim_axes(rules.get(name)) if axis in mesh.shape)


def find_place(axis: str, mesh: AnyMesh, is_set: bool) -> Place | None:
    """Returns where a pipeline of global arrays runs, or None if the mesh has other axes than Auto."""
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None
    if not is_set and not isinstance(mesh, Mesh):
        return None
    return Place(mesh, is_set, axis, rule_axes("batch", mesh))


def choose_microbatches(rows: int, stages: int, ways: int, rounds: int) -> int:
    """Returns the default number of microbatches: up to four for each stage, as the rows allow.

    Args:
        rows: the rows of the batch.
        stages: the number of stages.
        ways: how many ways each microbatch is split.
        rounds: the number of rounds.
    """
    own = rows // ways if rows % ways == 0 else rows
    most = _MICROBATCHES_PER_STAGE * stages
    fits = [count for count in range(1, min(own, most) + 1) if own % count == 0]
    full = [count for count in fits if count % stages == 0]
    if rounds > 1 and not full:
        raise ValueError(
            f"a batch of {rows} rows, split {ways} ways, cannot be split into a multiple of "
            f"{stages} microbatches, which the circular schedule needs on {stages} stages: make "
            f"the batch a multiple of {stages * ways}"
        )
    return max(full or fits)


def require_rows(batch: Any, microbatches: int, place: Place) -> None:
    """Rejects microbatches that the axes of the batch cannot split."""
    for leaf in jax.tree.leaves(batch):
        rows = leaf.shape[0] // microbatches
        if rows % place.ways:
            raise ValueError(
                f"{microbatches} microbatches of {rows} rows cannot be split {place.ways} ways over "
                f"{'+'.join(place.data)}: make the batch a multiple of "
                f"{microbatches * place.ways}, or use fewer microbatches"
            )


def run_stages(
    graphdef: Any,
    state: Any,
    batch: Any,
    extras: tuple[Any, ...],
    place: Place,
    timetable: Timetable,
    *,
    is_folded: bool,
    counts_are_kept: bool,
) -> tuple[Any, Any]:
    """Returns the output of a stack for a batch, and the stack's random counts after it.

    Args:
        graphdef: the structure of one block.
        state: the arrays of the stack.
        batch: the input of the first block.
        extras: further arguments of every block.
        place: where it runs.
        timetable: the schedule.
        is_folded: whether the stack has two leading dims, rounds and layers per round.
        counts_are_kept: whether the caller keeps the random counts.
    """
    stages, rounds = timetable.stages, timetable.rounds
    slots = -(-timetable.microbatches // stages)
    items = timetable.microbatches * rounds
    weights = jax.tree.map(lambda x: to_stages(x, place, rounds, is_folded=is_folded), state)
    counts = nnx.filter_state(weights, nnx.RngCount)
    has_keys = bool(jax.tree.leaves(nnx.filter_state(weights, nnx.RngKey)))
    number = jnp.arange(stages, dtype="int32")

    def stage(part: Any, counts: Any, value: Any, microbatch: Any, round_: Any) -> Any:
        layers = jax.tree.map(lambda x: _take(x, round_, 0), part)
        which = microbatch if has_keys else None
        out, after = through(
            graphdef, layers, value, extras, which, counts_are_kept=counts_are_kept
        )
        return out, jax.tree.map(lambda old, new: _put(old, new, round_, 0), counts, after)

    run = jax.vmap(stage, spmd_axis_name=place.axis)

    def tick(carry: Any, now: Any) -> tuple[Any, None]:
        received, inputs, outputs, counts = carry
        microbatch, round_ = slot(jnp.clip(now - number, 0, items - 1), stages, rounds)
        enters = (now < items) & (round_[0] == 0)
        leaves = (now >= stages - 1) & (round_[-1] == rounds - 1)
        first, last = microbatch[0] % slots, microbatch[-1] % slots

        # A slot of the inputs is shifted towards stage 0 as that takes its part of it; one of the
        # outputs is shifted as the last stage fills it. Both end where their rows are.
        fresh = jax.tree.map(lambda x: _take(x, first, 1), inputs)
        value = jax.tree.map(
            lambda new, old: place.pin(
                jnp.where(_along(number == 0, new) & enters, new, old), place.axis, place.data
            ),
            fresh,
            received,
        )
        inputs = jax.tree.map(
            lambda x, new: _put(x, jnp.where(enters, jnp.roll(new, -1, 0), new), first, 1),
            inputs,
            fresh,
        )
        out, counts = run(weights, counts, value, microbatch, round_)
        out = jax.tree.map(lambda x: place.pin(x, place.axis, place.data), out)

        def write(x: Any, new: Any) -> Any:
            old = _take(x, last, 1)
            shifted = jnp.where(_along(number == stages - 1, new), new, jnp.roll(old, -1, 0))
            return _put(x, jnp.where(leaves, shifted, old), last, 1)

        outputs = jax.tree.map(write, outputs, out)
        return (jax.tree.map(lambda x: jnp.roll(x, 1, 0), out), inputs, outputs, counts), None

    inputs = jax.tree.map(lambda x: _cut(x, place, timetable.microbatches), batch)
    # Idle stages compute on real data too, so that their unused results stay finite.
    start = jax.tree.map(lambda x: x[:, 0], inputs)
    outputs = jax.tree.map(lambda x: _pinned(jnp.zeros_like(x), place), inputs)
    inner = [(name, _without(axes, place.axis)) for name, axes in active_axis_rules()]
    with nnx.logical_axis_rules(inner):
        carry = (start, inputs, outputs, counts)
        _, _, outputs, counts = jax.lax.scan(
            tick, carry, jnp.arange(timetable.ticks, dtype="int32")
        )[0]
    joined = jax.tree.map(
        lambda x, old: _join(x, old.shape, place, timetable.microbatches), outputs, batch
    )
    return joined, jax.tree.map(from_stages, counts)


def to_stages(x: Any, place: Place, rounds: int, *, is_folded: bool) -> Any:
    """Returns a stack as `[stages, rounds, layers of a run, …]`, the first dim split over the axis.

    Args:
        x: `[layers, …]`, in order; or `[rounds, layers per round, …]`.
        place: where the pipeline runs.
        rounds: the number of rounds.
        is_folded: whether the stack has the second form, of which every stage has its own part.
    """
    stages = place.stages
    if is_folded:
        split = x.reshape(rounds, stages, x.shape[1] // stages, *x.shape[2:])
        return jnp.moveaxis(place.pin(split, None, place.axis, None), 1, 0)
    x = place.pin(
        x.reshape(stages, rounds, x.shape[0] // stages // rounds, *x.shape[1:]), place.axis
    )
    return x if rounds == 1 else place.pin(_exchange(x, stages, rounds), place.axis)


def _exchange(x: Any, stages: int, rounds: int) -> Any:
    """Returns runs of layers on the stages that run them, from those that store them in order.

    Stored in order, run `n` is on stage `n // rounds`; stage `n % stages` runs it. The runs that
    move by as many stages go together, so that each of them is one shift: left to itself, the
    compiler would gather the whole stack on every device.
    """
    pool, at = [], {}
    for by in range(stages):
        moves = [
            [n for n in range(s * rounds, (s + 1) * rounds) if n % stages == (s + by) % stages]
            for s in range(stages)
        ]
        most = max(map(len, moves))
        if not most:
            continue
        start = sum(part.shape[1] for part in pool)
        at |= {n: start + i for runs in moves for i, n in enumerate(runs)}
        taken = [[n % rounds for n in runs] + [0] * (most - len(runs)) for runs in moves]
        pool.append(jnp.roll(_pick(x, taken), by, 0))
    own = [[at[r * stages + s] for r in range(rounds)] for s in range(stages)]
    return _pick(jnp.concatenate(pool, axis=1), own)


def _pick(x: Any, rows: list[list[int]]) -> Any:
    """Returns the rows of each stage that are listed for it."""
    return jax.vmap(lambda part, which: jnp.take(part, which, axis=0))(x, jnp.asarray(rows))


def from_stages(x: Any) -> Any:
    """Returns `[rounds, layers per round, …]` from what `to_stages` returned."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _cut(x: Any, place: Place, microbatches: int) -> Any:
    """Returns rows as `[stages, microbatches of a stage, rows of a microbatch, …]`.

    Every device cuts its own rows where the batch is split over the stages too: nothing moves.
    """
    stages, rest = place.stages, x.shape[1:]
    if microbatches % stages:
        sizes = [place.mesh.shape[axis] for axis in place.data]
        x = x.reshape(*sizes, microbatches, -1, *rest)
        x = jnp.moveaxis(x, len(sizes), 0).reshape(microbatches, -1, *rest)
        slots = -(-microbatches // stages)
        filler = jnp.broadcast_to(x[:1], (slots * stages - microbatches, *x.shape[1:]))
        x = jnp.concatenate([x, filler])
        return _pinned(x.reshape(stages, slots, *x.shape[1:]), place)
    order, sizes, slots, rows = _order(x.shape[0], place, microbatches)
    x = place.pin(x.reshape(*sizes, slots, rows, *rest), *order)
    at = order.index(place.axis)
    x = jnp.moveaxis(x, (at, len(order)), (0, 1))
    return _pinned(x.reshape(stages, slots, -1, *rest), place)


def _join(x: Any, shape: tuple[int, ...], place: Place, microbatches: int) -> Any:
    """Returns the rows in their order before `_cut`."""
    rest = shape[1:]
    if microbatches % place.stages:
        sizes = [place.mesh.shape[axis] for axis in place.data]
        stages, slots = x.shape[:2]
        # Fewer shifts than stages: where the last of each slot ends is where the outputs end.
        ends = [stages - 1 - (microbatches - 1 - m) // slots for m in range(microbatches)]
        places = [end * slots + m % slots for m, end in enumerate(ends)]
        x = x.reshape(-1, *x.shape[2:])[jnp.asarray(places)]
        x = jnp.moveaxis(x.reshape(microbatches, *sizes, -1, *rest), 0, len(sizes))
        return place.pin(x.reshape(shape), place.rows)
    order, sizes, slots, rows = _order(shape[0], place, microbatches)
    at = order.index(place.axis)
    others = [size for i, size in enumerate(sizes) if i != at]
    x = x.reshape(place.stages, slots, *others, rows, *rest)
    x = place.pin(jnp.moveaxis(x, (0, 1), (at, len(order))), *order)
    return place.pin(x.reshape(shape), place.rows)


def _order(total: int, place: Place, microbatches: int) -> tuple[list[str], list[int], int, int]:
    """Returns the axes of the rows with the stages among them, their sizes, and what is left."""
    order = [*place.rows, *([] if place.axis in place.rows else [place.axis])]
    sizes = [place.mesh.shape[axis] for axis in order]
    return order, sizes, microbatches // place.stages, total // microbatches // place.ways


def _pinned(x: Any, place: Place) -> Any:
    return place.pin(x, place.axis, None, place.data)


def _take(x: Any, index: Any, dim: int) -> Any:
    return jax.lax.dynamic_index_in_dim(x, index, dim, keepdims=False)


def _put(x: Any, part: Any, index: Any, dim: int) -> Any:
    return jax.lax.dynamic_update_index_in_dim(x, part, index, dim)


def _along(mask: Any, x: Any) -> Any:
    return mask.reshape(-1, *[1] * (x.ndim - 1))


def _without(axes: Any, axis: str) -> tuple[str, ...]:
    return tuple(a for a in dim_axes(axes) if a != axis)
