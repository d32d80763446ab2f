"""Training: the initial state in its shards, and the jitted step."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from .._base import public
from .._check import require_match
from .._layout import Layout
from .._mesh import show_mesh
from .._nnx import Recipe, keyed_leaves, show_path
from .._place import initialise, own_mesh, put_anywhere, require_mesh, wrap_keys
from .._step import (
    Blueprint,
    Bound,
    TrainState,
    local_spans,
    make_blueprint,
    named_arrays,
    require_batch,
    require_integers,
    require_not_donated,
    row_bounds,
    show_array,
)


@public
def train_state(
    recipe: Recipe, layout: Layout, *, model: Any = None, donate: bool = False
) -> TrainState:
    """Returns the state before the first step, initialised directly in its shards.

    Args:
        recipe: the recipe.
        layout: the layout of its model, on a mesh of available devices; the optimizer's state has the
            layout `layout.for_optimizer`.
        model: initial weights, which are copied into their shards: a model with arrays, its state,
            or a dict of arrays by dotted path. Every variable of the model must be included, with
            the same shape and dtype; take missing ones from a new state, as in
            `{**sw.train_state(recipe, layout).model, **mine}`. All processes must pass the same
            weights. By default, the recipe's model is initialised.
        donate: whether the arrays of `model` become those of the state, or are freed as they are
            copied, so that the weights are never there twice. They cannot be used any more.

    Raises:
        LayoutError: the layout has errors, or the layout or the weights do not match the model;
            nothing is allocated.

    Example:
        >>> import jax, optax, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(1024, 512, rngs=nnx.Rngs(0))
        >>> batch = jax.ShapeDtypeStruct((16, 1024), "float32")
        >>> recipe = sw.Recipe(model=make, loss=lambda model, x: (model(x) ** 2).mean(),
        ...                    optimizer=optax.adamw(1e-3), batch=batch)
        >>> layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), "fsdp")
        >>> state = sw.train_state(recipe, layout)
        >>> state.optimizer["0.mu.kernel"].addressable_shards[0].data.shape
        (128, 512)
    """
    blueprint = make_blueprint(recipe, layout)
    require_mesh(blueprint.layout)
    given = given_arrays(model, blueprint) if model is not None else None
    return begin(blueprint, given, donate=donate)


def given_arrays(model: Any, blueprint: Blueprint) -> dict[str, Any]:
    """Returns the arrays of a model, a state, or a dict, by path; nothing is moved yet.

    Raises:
        LayoutError: they do not match the blueprint's model; every difference is a finding.
        ValueError: `model` is none of these, or abstract.
    """
    if isinstance(model, nnx.Module):
        model = nnx.split(model)[1]
    planned = {leaf.path: leaf.keys for leaf in blueprint.layout.leaves}
    if isinstance(model, Mapping) and not isinstance(model, nnx.State):
        live = {planned.get(path, tuple(path.split("."))): x for path, x in _by_path(model)}
    elif isinstance(model, nnx.State):
        live = dict(keyed_leaves(model))
    else:
        raise ValueError(
            f"model has type {type(model).__name__}: give a model with arrays, its nnx.State, or a "
            f"dict of arrays by dotted path, such as state.model"
        )
    for keys, x in live.items():
        if isinstance(x, jax.ShapeDtypeStruct) or not hasattr(x, "dtype"):
            raise ValueError(
                f"{show_path(keys)} of the given model has type {type(x).__name__}, which has no "
                f"values: give arrays"
            )
    require_match(
        blueprint.layout,
        live,
        "give every array of the recipe's model; {**sw.train_state(recipe, layout).model, **weights} "
        "initialises those that the weights do not include",
    )
    return {path: live[keys] for path, keys in planned.items()}


def _by_path(arrays: Mapping[Any, Any], keys: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields the arrays of a dict, flat or nested, by dotted path."""
    for key, value in arrays.items():
        if isinstance(value, Mapping):
            yield from _by_path(value, (*keys, key))
        elif keys or not isinstance(key, str):
            yield show_path((*keys, key)), value
        else:
            yield key, value  # already a path


def begin(
    blueprint: Blueprint, given: Mapping[str, Any] | None = None, *, donate: bool = False
) -> TrainState:
    """Returns the state before the first step, from given or newly initialised arrays."""
    with own_mesh(blueprint.layout.mesh):
        if given is None:
            initial = initialise(blueprint.model, blueprint.layout)
            paths = (leaf.path for leaf in blueprint.layout.leaves)
            arrays = dict(zip(paths, jax.tree.leaves(initial), strict=True))
        else:
            shardings = blueprint.shardings.model
            place = _taken if donate else _copied
            times = collections.Counter(map(_memory, given.values()))
            arrays = {
                # What two leaves share is copied: a step cannot donate it twice.
                path: (_copied if times[_memory(x)] > 1 else place)(x, shardings[path])
                for path, x in given.items()
            }
        return _begin(blueprint, arrays)


def _memory(x: Any) -> int:
    """Returns a number that is the same for arrays that share memory."""
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    if not isinstance(x, jax.Array) or is_key or x.size == 0 or x.is_deleted():
        return id(x)
    return x.addressable_data(0).unsafe_buffer_pointer()


def _taken(x: Any, sharding: NamedSharding) -> jax.Array:
    """Returns the array itself if it is placed as it should be; otherwise a copy, and it is freed."""
    if isinstance(x, jax.Array) and x.sharding == sharding:
        return x
    placed = _copied(x, sharding)
    if isinstance(x, jax.Array):
        jax.block_until_ready(placed)
        x.delete()
    return placed


def _copied(x: Any, sharding: NamedSharding) -> jax.Array:
    """Returns a sharded copy that shares no buffers, since the first step donates them."""
    placed = put_anywhere(x, sharding)
    if not isinstance(x, jax.Array):
        return placed
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jnp.copy(jax.random.key_data(placed))
        return wrap_keys(data, sharding, str(jax.random.key_impl(placed)))
    return jnp.copy(placed)


def _begin(blueprint: Blueprint, arrays: Mapping[str, jax.Array]) -> TrainState:
    recipe = blueprint.recipe
    # Weak types would make the second step compile again.
    model = {
        path: array.astype(array.dtype) if getattr(array, "weak_type", False) else array
        for path, array in arrays.items()
    }

    def begin(trained: dict[str, Any]) -> Any:
        return (
            blueprint.flat_optimizer(recipe.optimizer.init(blueprint.as_parameters(trained))),
            # A copy, since the step donates the buffers of both.
            {path: jnp.copy(trained[path]) for path in blueprint.shardings.ema},
            jnp.zeros((), "int32"),
        )

    shardings = (blueprint.shardings.optimizer, blueprint.shardings.ema, blueprint.shardings.step)
    trained = {path: model[path] for path in blueprint.trained}
    optimizer, ema, step = jax.jit(begin, out_shardings=shardings)(trained)
    return TrainState(step, model, optimizer, ema)


@public
class Step:
    """A training step: `step(state, batch) -> (state, metrics)`. Made by `sw.train_step`.

    The given state is donated: its buffers are reused for the returned state.

    Attributes:
        blueprint: what the step is built from.
        jitted: the jitted step, for `lower` and `compile`.
    """

    def __init__(self, blueprint: Blueprint):
        """Jits the step; nothing is compiled before the first call."""
        require_mesh(blueprint.layout)
        self.blueprint = blueprint
        self._put = Putter(blueprint)
        self.jitted = blueprint.jitted()

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Returns the state after the step, and the metrics.

        Raises:
            ValueError: the batch or the state does not match the recipe; nothing is compiled or
                changed.
        """
        batch = self._put(batch)
        # JAX 0.10 aborts the process if a donated buffer is passed.
        if not isinstance(state, TrainState) or state.step.is_deleted():
            require_state(state, self.blueprint)
        try:
            if jax.sharding.get_abstract_mesh().empty:
                return self.jitted(state, batch)
            with own_mesh(self.blueprint.layout.mesh):
                return self.jitted(state, batch)
        except (TypeError, ValueError):
            # JAX's own messages for these do not name the leaf; JAX checks anyway, so we only do so now.
            require_state(state, self.blueprint)
            raise


@public
def train_step(recipe: Recipe, layout: Layout) -> Step:
    """Returns the recipe's training step on this layout: `step(state, batch) -> (state, metrics)`.

    `metrics["loss"]` is the loss before the update. The step is jitted once, with the layout's
    shardings for inputs and outputs, and the state's buffers donated. A batch may be host arrays
    (the full batch or, with several processes, each one's part) or arrays on devices.

    Raises:
        LayoutError: the layout has errors, or belongs to another model.

    Example:
        >>> import jax, numpy as np, optax, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(16, 1, rngs=nnx.Rngs(0))
        >>> loss = lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean()
        >>> batch = {"x": np.ones((64, 16), "float32"), "y": np.ones((64, 1), "float32")}
        >>> recipe = sw.Recipe(model=make, loss=loss, optimizer=optax.sgd(0.01), batch=batch)
        >>> layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), "dp")
        >>> state, step = sw.train_state(recipe, layout), sw.train_step(recipe, layout)
        >>> state, first = step(state, batch)
        >>> state, second = step(state, batch)
        >>> bool(second["loss"] < first["loss"]), int(state.step)
        (True, 2)
    """
    return Step(make_blueprint(recipe, layout))


class Putter:
    """Places batches according to the blueprint: `put(batch)`."""

    def __init__(self, blueprint: Blueprint, bounds: Sequence[Bound] = ()):
        """Computes which part of a batch this process holds."""
        self.bounds = row_bounds(bounds, blueprint.batch)
        self.planned = blueprint.batch
        self.given = blueprint.recipe.batch
        flat, self.treedef = jax.tree.flatten(self.planned)
        self.shardings = jax.tree.map(lambda leaf: leaf.sharding, self.planned)
        self.many = jax.process_count() > 1
        self.local = None
        if self.many:
            self.local = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(_local_shape(leaf), leaf.dtype), self.planned
            )
        self.expected = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in flat]

    def __call__(self, batch: Any) -> Any:
        """Returns the batch on its devices; host arrays are checked against the recipe first."""
        flat, treedef = jax.tree.flatten(batch)
        if treedef == self.treedef:
            for x, (shape, dtype, sharding) in zip(flat, self.expected, strict=True):
                if not isinstance(x, jax.Array) or x.sharding != sharding:
                    break
                if x.shape != shape or x.dtype != dtype:
                    break
            else:
                return batch
        require_batch(batch, self.planned, self.local, self.given)
        self._require_integers(flat)
        placed = [
            self._place(x, shape, sharding)
            for x, (shape, _, sharding) in zip(flat, self.expected, strict=True)
        ]
        return jax.tree.unflatten(treedef, placed)

    def _require_integers(self, flat: list[Any]) -> None:
        """Raises if integers would change, also in one process's part or beside device arrays.

        Which samples a part has is not known here, so lookups are checked in full batches only.
        """
        is_full = all(
            isinstance(x, np.ndarray) and x.shape == shape
            for x, (shape, _, _) in zip(flat, self.expected, strict=True)
        )
        batch = jax.tree.unflatten(self.treedef, flat)
        require_integers(batch, self.planned, self.bounds if is_full else (), lambda row: row)

    def _place(self, x: Any, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
        if not self.many or (isinstance(x, jax.Array) and not x.is_fully_addressable):
            return jax.device_put(x, sharding)
        x = np.asarray(x)
        if x.shape == shape:
            return jax.make_array_from_callback(shape, sharding, lambda index: x[index])
        return jax.make_array_from_process_local_data(sharding, x, shape)


def require_state(state: Any, blueprint: Blueprint) -> None:
    """Raises if a state does not match the blueprint; the message names the first differences."""
    if not isinstance(state, TrainState):
        raise ValueError(
            f"the state has type {type(state).__name__}: create one with sw.train_state"
        )
    require_not_donated(state)
    wanted, got = (
        {show_array(name): x for name, x in named_arrays(each).items()}
        for each in (blueprint.abstract, state)
    )
    wrong = [f"{name} is missing" for name in wanted if name not in got]
    wrong += [f"{name} is not in the recipe" for name in got if name not in wanted]
    for name in (name for name in wanted if name in got):
        want, have = wanted[name], got[name]
        if tuple(have.shape) != want.shape or have.dtype != want.dtype:
            wrong.append(
                f"{name} is {have.dtype}{list(have.shape)}, wanted {want.dtype}{list(want.shape)}"
            )
        elif getattr(have, "is_deleted", bool)():
            wrong.append(f"{name} was donated to an earlier step, which reused its buffer")
        elif not have.sharding.is_equivalent_to(want.sharding, len(want.shape)):
            wrong.append(
                f"{name} has sharding {have.sharding.spec} on {show_mesh(have.sharding.mesh)}, wanted "
                f"{want.sharding.spec} on {show_mesh(want.sharding.mesh)}"
            )
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"the state does not match this step: {'; '.join(wrong[:3])}{more}")


def _local_shape(leaf: Any) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in spans) for spans in local_spans(leaf))
