"""The recipe: everything needed to build one training step."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._base import public, show_type
from .._jax import SAVING_FORM, is_saving, parse_saving, shorten, show_value

Remat = str | Callable[..., Any]
OFFLOADABLE = ("optimizer", "ema")


@public
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model with its loss, its optimizer and the shape of its batch.

    Attributes:
        model: a function of no arguments that returns the model.
        loss: `loss(model, batch)` returns a scalar, or a scalar and a dict of metrics.
        optimizer: an optax transformation.
        batch: a pytree of `jax.ShapeDtypeStruct`s: one global batch.
        accumulate: the number n of microbatches that a batch is split into; their gradients are
            averaged before the optimizer sees them. Microbatch j has samples j, j + n, j + 2n, …
        clip: the maximum global norm of the gradients; larger gradients are scaled down to it,
            and the norm is reported as `metrics["grad_norm"]`.
        compute_dtype: the dtype that parameters and floating-point inputs are cast to within the
            loss, such as `"bfloat16"`; parameters, gradients and optimizer state keep theirs.
        remat: what the backward pass recomputes instead of saving: the name of one of
            `jax.checkpoint_policies`; or `"save:q,k,v+offload:input"`, the activations (named by
            `jax.ad_checkpoint.checkpoint_name`) that are saved on the device or offloaded to the
            host's memory; or a policy itself. For the whole loss, or in a dict from path patterns of
            modules to policies: `{"blocks.*": "dots_saveable"}`.
        loss_chunks: in how many chunks the loss is computed with the output head, so that the
            logits never exist all at once; for losses that use `models.head_loss` or
            `models.next_token_loss`.
        offload: what is kept in the memory of the hosts between steps, and moved to the devices for
            its update: `"optimizer"` (its state), `"ema"`, or both, `"optimizer,ema"`.
        wrt: which variables are trained, as a Flax NNX filter.
        rngs: a seed; the loss is then called with a third argument, an `nnx.Rngs` that differs
            at each step. A model with its own `nnx.Rngs` does not need it.
        ema: the decay of a moving average of the trained variables, kept in `state.ema`.
        batch_spec: how the batch is split: a `PartitionSpec`, or a pytree of them like the
            batch. By default, dim 0 of every leaf is split over the mesh's data axes, and dim 1
            over its axis `sequence`, if it has one.
        compiler_options: XLA options for the step, by name, in addition to the defaults for the
            kind of device.

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
    loss_chunks: int = 1
    offload: str = ""
    wrt: Any = nnx.Param
    rngs: int | None = None
    ema: float | None = None
    batch_spec: Any = None
    compiler_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises a ValueError if the fields cannot make a training step."""
        if isinstance(self.model, nnx.Module) or not callable(self.model):
            raise ValueError(
                f"a recipe's model must be a function of no arguments that returns an nnx.Module, "
                f"got {show_type(self.model)}"
            )
        if not callable(self.loss):
            raise ValueError(
                f"a recipe's loss must be a function of a model and a batch, "
                f"got {show_type(self.loss)}"
            )
        if not (hasattr(self.optimizer, "init") and hasattr(self.optimizer, "update")):
            raise ValueError(
                f"a recipe's optimizer must be an optax transformation, "
                f"got {show_type(self.optimizer)}"
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.batch):
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise ValueError(
                    f"a recipe's batch must consist of shapes and dtypes, but batch"
                    f"{jax.tree_util.keystr(path)} is {show_value(leaf)}: use jax.ShapeDtypeStruct"
                )
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise ValueError(
                f"a recipe's accumulate must be a positive integer, got {show_value(self.accumulate)}"
            )
        if type(self.loss_chunks) is not int or self.loss_chunks < 1:
            raise ValueError(
                f"a recipe's loss_chunks must be a positive integer, "
                f"got {show_value(self.loss_chunks)}"
            )
        self._require_parts()
        if self.accumulate > 1:
            self._require_divisible()
        if self.clip is not None and not (_is_number(self.clip) and self.clip > 0):
            raise ValueError(
                f"a recipe's clip must be a positive norm, got {show_value(self.clip)}"
            )
        if self.ema is not None and not (_is_number(self.ema) and 0 <= self.ema < 1):
            raise ValueError(
                f"a recipe's ema must be a decay of at least 0 and below 1, such as 0.999, "
                f"got {show_value(self.ema)}"
            )
        if self.rngs is not None and (
            isinstance(self.rngs, bool) or not isinstance(self.rngs, int)
        ):
            raise ValueError(
                f"a recipe's rngs must be an integer seed, got {show_value(self.rngs)}"
            )
        self._require_arguments()
        if self.compute_dtype is not None:
            try:
                floating = jnp.issubdtype(jnp.dtype(self.compute_dtype), jnp.floating)
            except TypeError:
                floating = False
            if not floating:
                raise ValueError(
                    f"a recipe's compute_dtype must be a floating-point dtype, such as 'bfloat16', "
                    f"got {show_value(self.compute_dtype)}"
                )
        for policy in self.remat.values() if isinstance(self.remat, Mapping) else (self.remat,):
            if policy is not None:
                remat_policy(policy)

    def _require_arguments(self) -> None:
        """Raises if the loss cannot be called with what a step gives it."""
        try:
            signature = inspect.signature(self.loss)
        except (TypeError, ValueError):
            return  # it has none, like some functions that are written in C
        two, three = ("model", "batch"), ("model", "batch", "rngs")
        names, others = (two, three) if self.rngs is None else (three, two)
        if _takes(signature, names):
            return
        hint = "it must take a model and a batch"
        if _takes(signature, others):
            hint = (
                "give the recipe rngs=0, for a third argument"
                if self.rngs is None
                else "leave out rngs=, or add the argument"
            )
        raise ValueError(
            f"a recipe's loss is called as loss({', '.join(names)}), but its arguments are "
            f"{shorten(str(signature))}: {hint}"
        )

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The parts of the state that are kept in the memory of the hosts."""
        return tuple(self.offload.split(",")) if self.offload else ()

    def _require_parts(self) -> None:
        parts = self.offload.split(",") if isinstance(self.offload, str) else [self.offload]
        if self.offload != "" and (
            not set(parts) <= set(OFFLOADABLE) or len(set(parts)) < len(parts)
        ):
            raise ValueError(
                f"a recipe's offload must be {', '.join(map(repr, OFFLOADABLE))} or both, joined by "
                f"a comma, got {show_value(self.offload)}"
            )
        if "ema" in parts and self.ema is None:
            raise ValueError("a recipe's offload names 'ema', but it has no ema=")

    def _require_divisible(self) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.batch):
            if leaf.shape and leaf.shape[0] % self.accumulate:
                raise ValueError(
                    f"accumulate={self.accumulate} cannot split batch{jax.tree_util.keystr(path)} "
                    f"of shape {tuple(leaf.shape)}: dim 0 (size {leaf.shape[0]}) is not divisible"
                )


def _takes(signature: inspect.Signature, names: tuple[str, ...]) -> bool:
    try:
        signature.bind(*names)
    except TypeError:
        return False
    return True


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def remat_policy(policy: Remat) -> Callable[..., Any]:
    """Returns the policy that a recipe's `remat` names.

    Raises:
        ValueError: JAX has no policy of this name.
    """
    if callable(policy):
        return policy
    if isinstance(policy, str) and is_saving(policy):
        return parse_saving(policy).policy()
    names = policy_names()
    if policy not in names:
        raise ValueError(
            f"remat={show_value(policy)} is not a policy of jax.checkpoint_policies that takes no "
            f"arguments: use {', '.join(names)}; or {SAVING_FORM}; or pass a policy object, "
            f"such as jax.checkpoint_policies.save_only_these_names('attention')"
        )
    return getattr(jax.checkpoint_policies, policy)


def policy_names() -> list[str]:
    """Returns the names of JAX's rematerialisation policies that take no arguments."""
    # The other names make a policy from arguments; users pass the policy itself.
    plain = ("dots_", "nothing_", "everything_", "checkpoint_dots")
    return [n for n in dir(jax.checkpoint_policies) if n.startswith(plain)]
