"""The training state: every array of a run, by path."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from .._base import public
from .._nnx import abstract_model, keyed_leaves, show_path

# Plain dicts: JAX flattens them without calling into Python, so dispatching a step costs the same
# as a hand-written one, and reading a checkpoint needs none of our classes.
Arrays = dict[str, Any]


@public
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class TrainState:
    """Every array of a run. Created by `sw.train_state`, updated by a step.

    Attributes:
        step: the number of steps taken, a scalar.
        model: the model's variables, of every kind, by dotted path.
        optimizer: the optimizer's state, by the paths of `layout.for_optimizer`.
        ema: the moving average of the trained variables; empty without `Recipe.ema`.
    """

    step: Any
    model: Arrays
    optimizer: Arrays
    ema: Arrays

    def to_model(self, make: Callable[[], nnx.Module], *, ema: bool = False) -> nnx.Module:
        """Returns the model with this state's arrays.

        They are not copied, so a step that donates this state also invalidates the model.

        Args:
            make: the function that builds the model, `recipe.model`.
            ema: whether to take the trained variables from the moving average.

        Example:
            >>> import jax, optax, shardwise as sw
            >>> from flax import nnx
            >>> make = lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0))
            >>> recipe = sw.Recipe(model=make, loss=lambda model, x: model(x).mean(),
            ...                    optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((8, 16), "float32"))
            >>> layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), "dp")
            >>> sw.train_state(recipe, layout).to_model(make).kernel.shape
            (16, 32)
        """
        require_not_donated(self)
        if ema and not self.ema:
            raise ValueError("the state has no moving average: give the recipe ema=0.999")
        arrays = {**self.model, **(self.ema if ema else {})}
        abstract = abstract_model(make, self.step.sharding.mesh)
        paths = [show_path(keys) for keys, _ in keyed_leaves(abstract.state)]
        if set(paths) != set(arrays):
            raise ValueError(
                f"the state belongs to another model: it has {len(arrays)} variables, this model has "
                f"{len(paths)}, and they first differ at {min(set(paths) ^ set(arrays))!r}"
            )
        state = jax.tree.unflatten(jax.tree.structure(abstract.state), [arrays[p] for p in paths])
        return nnx.merge(abstract.graphdef, state)


def require_not_donated(state: TrainState) -> None:
    """Raises a ValueError if a step has reused the buffers of a state."""
    if getattr(state.step, "is_deleted", bool)():
        raise ValueError(
            "this state was donated to a step, which reused its buffers: use the state that the step "
            "returned, as in state, metrics = step(state, batch)"
        )


@public
class NotFinite(FloatingPointError):
    """The loss, or the state, became NaN or infinite."""


def named_arrays(state: Any) -> dict[str, Any]:
    """Returns the arrays of a training state by the names that checkpoints store them under."""
    rows = {"step": state.step}
    for part in ("model", "optimizer", "ema"):
        rows |= {f"{part}.{path}": x for path, x in getattr(state, part).items()}
    return rows


def show_array(name: str) -> str:
    """Returns the path of an array as messages spell it.

    Model arrays are spelled as in the layout, others keep their prefix: `up.kernel`,
    `optimizer.0.mu.up.kernel`, `ema.up.kernel`.
    """
    return name.removeprefix("model.")
