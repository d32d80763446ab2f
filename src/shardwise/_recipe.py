"""The recipe: all that is needed to build one training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model with its loss, its optimizer and the shape of its batch.

    Attributes:
        model: a function of no arguments that returns the model.
        loss: `loss(model, batch)` returns a scalar, or a scalar and a dict of metrics.
        optimizer: an optax transformation.
        batch: a pytree of `jax.ShapeDtypeStruct`s: one global batch.

    Example:
        >>> import jax, optax, shardwise as sw
        >>> from shardwise.examples import decoder
        >>> recipe = sw.Recipe(model=decoder.make, loss=decoder.loss, optimizer=optax.adamw(1e-3),
        ...                    batch=jax.ShapeDtypeStruct((64, 128), "int32"))
        >>> recipe.batch.shape
        (64, 128)
    """

    model: Callable[[], nnx.Module]
    loss: Callable[..., Any]
    optimizer: Any
    batch: Any

    def __post_init__(self) -> None:
        """Refuses what can make no training step."""
        if isinstance(self.model, nnx.Module) or not callable(self.model):
            raise ValueError(
                f"a recipe's model is a function of no arguments that returns an nnx.Module, "
                f"got a {type(self.model).__name__}"
            )
        if not callable(self.loss):
            raise ValueError(
                f"a recipe's loss is a function of a model and a batch, "
                f"got a {type(self.loss).__name__}"
            )
        if not (hasattr(self.optimizer, "init") and hasattr(self.optimizer, "update")):
            raise ValueError(
                f"a recipe's optimizer is an optax transformation, "
                f"got a {type(self.optimizer).__name__}"
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.batch):
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise ValueError(
                    f"a recipe's batch has shapes and dtypes, but batch"
                    f"{jax.tree_util.keystr(path)} is {leaf!r}: use jax.ShapeDtypeStruct"
                )
