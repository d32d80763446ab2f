"""The steps that targets name: published shapes such as `llama3-70b`, and recipes with options."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

from .._nnx import Recipe, policy_names, remat_policy
from .._search import parse_batch, with_batch, with_step
from .._step import with_optimizer
from ..models import CONFIGS, Decoder, next_token_loss
from .target import contained, load_target

_SEQUENCES, _TOKENS = 8, 2048  # without --batch


def is_named(target: str) -> bool:
    """Returns whether a target is the name of a published shape, or looks like one."""
    return ":" not in target and not target.endswith(".py")


def make_named(name: str) -> Callable[[], nnx.Module]:
    """Returns the function that makes a model of a published shape.

    Raises:
        ValueError: there is no shape of this name.
    """
    if name not in CONFIGS:
        if Path(name).is_file():
            raise ValueError(
                f"target {name!r} is a file: name what makes the model in a file of Python, as in "
                f"path/to/file.py:name"
            )
        near = difflib.get_close_matches(name, CONFIGS, n=3, cutoff=0.4) or list(CONFIGS)[:5]
        raise ValueError(
            f"target {name!r} is not a published shape (the nearest are {', '.join(near)}; "
            f"shardwise models lists them all), nor of the form path/to/file.py:name"
        )
    return functools.partial(_make, name)


def _make(name: str, remat: str | None = None) -> nnx.Module:
    return Decoder(dataclasses.replace(CONFIGS[name], remat=remat), rngs=nnx.Rngs(0))


def named_recipe(
    name: str,
    batch: tuple[int, ...] | None,
    remat: str | None = "nothing_saveable",
    *,
    devices: int = 1,
) -> Recipe:
    """Returns a recipe for a published shape: AdamW, bfloat16 compute, float32 parameters.

    Args:
        name: the name of the shape.
        batch: the number of sequences, and of tokens in each.
        remat: the policy of `jax.checkpoint_policies` for each block; None for no
            rematerialisation.
        devices: how many the mesh has: without a batch, the number of sequences is a multiple of it.
    """
    sizes = batch or (-(-_SEQUENCES // devices) * devices, _TOKENS)
    if len(sizes) != 2:
        raise ValueError(
            f"--batch {'x'.join(map(str, sizes))}: {name} takes sequences x tokens, such as 256x4096"
        )
    make_named(name)  # raises if there is no such shape
    if remat is not None:
        remat_policy(remat)
    return Recipe(
        model=functools.partial(_make, name, remat),
        loss=next_token_loss,
        optimizer=optax.adamw(1e-4),
        batch=jax.ShapeDtypeStruct(sizes, "int32"),
        compute_dtype="bfloat16",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class StepOptions:
    """What the options say of a step; None where they say nothing.

    Attributes:
        batch: the leading dims of a recipe's batch, such as `256x4096`.
        remat: the name of a policy, or `none`.
        accumulate: the number of microbatches.
        loss_chunks: in how many chunks the loss is computed.
        offload: what is kept in the memory of the hosts, or `none`.
        microbatches: those of a pipeline.
        optimizer: the name of one that replaces the recipe's.
    """

    batch: str | None = None
    remat: str | None = None
    accumulate: int | None = None
    loss_chunks: int | None = None
    offload: str | None = None
    microbatches: int | None = None
    optimizer: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """What they say, apart from batch and optimizer, as a recipe takes it."""
        names = ("remat", "accumulate", "loss_chunks", "offload", "microbatches")
        values = {name: getattr(self, name) for name in names}
        found = {name: value for name, value in values.items() if value is not None}
        if found.get("remat") == "none":
            found["remat"] = None
        if found.get("offload") == "none":
            found["offload"] = ""
        return found


def load_step(target: str, options: StepOptions, *, devices: int = 1, loaded: Any = None) -> Any:
    """Returns what a target names, with what the options say of its step.

    Args:
        target: the target.
        options: the options.
        devices: how many a published shape's batch is for, if it is not given.
        loaded: what the target names, if it is loaded already.

    Raises:
        ValueError: an option needs a recipe, and the target is a model.
    """
    sizes = parse_batch(options.batch) if options.batch is not None else None
    given = options.given
    if options.remat is not None:
        _require_policy(options.remat)
    if is_named(target):
        found: Any = named_recipe(
            target, sizes, given.pop("remat", "nothing_saveable"), devices=devices
        )
    else:
        found = load_target(target) if loaded is None else loaded
        needs = next(iter(given), None) or ("batch" if sizes is not None else None)
        needs = needs or ("optimizer" if options.optimizer is not None else None)
        if needs is not None and not isinstance(found, Recipe):
            needs = needs.replace("_", "-")
            raise ValueError(f"--{needs} needs a recipe, and target {target!r} is not one")
        if sizes is not None:
            found = with_batch(found, sizes)
    if options.optimizer is not None:
        found = with_optimizer(found, options.optimizer)
    if not given:
        return found
    with contained(f"making the model of {target}"):
        return with_step(found, given)


def _require_policy(remat: str) -> None:
    from .._jax import SAVING_FORM, is_saving, parse_saving

    if is_saving(remat):
        parse_saving(remat)
        return
    # A shell can only give the name of a policy that takes no arguments.
    names = ["none", *policy_names()]
    if remat not in names:
        raise ValueError(
            f"--remat {remat!r} is not a policy: give one of {', '.join(names)}; or {SAVING_FORM}"
        )
