"""The recipe: all that is needed to build one training step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._base import public
from .._jax import show_value

Remat = str | Callable[..., Any]


@public
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model with its loss, its optimizer and the shape of its batch.

    Attributes:
        model: a function of no arguments that returns the model.
        loss: `loss(model, batch)` returns a scalar, or a scalar and a dict of metrics.
        optimizer: an optax transformation.
        batch: a pytree of `jax.ShapeDtypeStruct`s: one global batch.
        accumulate: into how many parts a batch is cut, whose gradients are averaged before the
            optimizer sees them. Part j has the samples j, j + n, j + 2n, …
        clip: the largest global norm of the gradients; longer ones are scaled down to it, and
            the norm is reported as `metrics["grad_norm"]`.
        compute_dtype: what parameters and floating inputs are cast to within the loss, such as
            `"bfloat16"`; parameters, gradients and optimizer stay as they are.
        remat: what the backward pass computes again instead of keeping: the name of one of
            `jax.checkpoint_policies`, or such a policy, for the whole loss; or a dict of path
            patterns of modules, each with its policy: `{"blocks.*": "dots_saveable"}`.
        wrt: which variables are trained, as a filter of Flax NNX.
        rngs: a seed; the loss is then called with a third argument, an `nnx.Rngs` that differs
            at each step. A model that holds its own `nnx.Rngs` needs none.
        ema: the decay of a moving average of the trained variables, kept in `state.ema`.
        batch_spec: how the batch is split: a `PartitionSpec`, or a pytree of them like the
            batch. Without, dim 0 of every leaf over the mesh's data axes.
        compiler_options: options of XLA for the step, by name, on top of those that the kind of
            device gets by default.

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
    accumulate: int = 1
    clip: float | None = None
    compute_dtype: Any = None
    remat: Remat | Mapping[str, Remat] | None = None
    wrt: Any = nnx.Param
    rngs: int | None = None
    ema: float | None = None
    batch_spec: Any = None
    compiler_options: Mapping[str, Any] | None = None

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
                    f"{jax.tree_util.keystr(path)} is {show_value(leaf)}: use jax.ShapeDtypeStruct"
                )
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise ValueError(
                f"a recipe accumulates over 1 part or more, got {show_value(self.accumulate)}"
            )
        if self.accumulate > 1:
            self._require_divisible()
        if self.clip is not None and not (_is_number(self.clip) and self.clip > 0):
            raise ValueError(
                f"a recipe clips gradients to a positive norm, got {show_value(self.clip)}"
            )
        if self.ema is not None and not (_is_number(self.ema) and 0 <= self.ema < 1):
            raise ValueError(
                f"a recipe's ema is a decay from 0 to below 1, such as 0.999, got {show_value(self.ema)}"
            )
        if self.rngs is not None and (
            isinstance(self.rngs, bool) or not isinstance(self.rngs, int)
        ):
            raise ValueError(f"a recipe's rngs is a seed, a number, got {show_value(self.rngs)}")
        if self.compute_dtype is not None:
            try:
                floating = jnp.issubdtype(jnp.dtype(self.compute_dtype), jnp.floating)
            except TypeError:
                floating = False
            if not floating:
                raise ValueError(
                    f"a recipe's compute_dtype is a floating one, such as 'bfloat16', "
                    f"got {show_value(self.compute_dtype)}"
                )
        for policy in self.remat.values() if isinstance(self.remat, Mapping) else (self.remat,):
            if policy is not None:
                remat_policy(policy)

    def _require_divisible(self) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.batch):
            if leaf.shape and leaf.shape[0] % self.accumulate:
                raise ValueError(
                    f"accumulate={self.accumulate} cannot cut batch{jax.tree_util.keystr(path)} "
                    f"of shape {tuple(leaf.shape)}: dim 0 (size {leaf.shape[0]}) does not divide"
                )


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def remat_policy(given: Remat) -> Callable[..., Any]:
    """Returns the policy that a recipe's `remat` names.

    Raises:
        ValueError: JAX has no policy of this name.
    """
    if callable(given):
        return given
    # Some of the names make a policy from arguments; those are given as the policy itself.
    plain = ("dots_", "nothing_", "everything_", "checkpoint_dots")
    names = [n for n in dir(jax.checkpoint_policies) if n.startswith(plain)]
    if given not in names:
        raise ValueError(
            f"remat={show_value(given)} is no policy without arguments of jax.checkpoint_policies: they are "
            f"{', '.join(names)}; others are given themselves, such as "
            f"jax.checkpoint_policies.save_only_these_names('attention')"
        )
    return getattr(jax.checkpoint_policies, given)
