"""A stack of blocks: its state with leading dims, and what a run of its layers returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._layout import show_shape
from .._nnx import dotted
from .manual import vary


def through(
    graphdef: Any,
    state: Any,
    value: Any,
    extras: tuple[Any, ...],
    microbatch: Any = None,
    *,
    counts_are_kept: bool = True,
) -> tuple[Any, Any]:
    """Returns the output of consecutive layers for a microbatch, and their random counts after it.

    Args:
        graphdef: the structure of one block.
        state: the arrays of all, stacked.
        value: the input of the first.
        extras: further arguments of each.
        microbatch: the number of the microbatch, from which random keys are derived; None to use
            the keys as they are.
        counts_are_kept: whether the caller keeps the random counts; if not, a block that changes
            them is rejected.
    """

    def layer(value: Any, part: Any) -> tuple[Any, Any]:
        keys, counts, rest = nnx.split_state(part, nnx.RngKey, nnx.RngCount, ...)
        if microbatch is not None:
            keys = jax.tree.map(lambda key: jax.random.fold_in(key, microbatch), keys)
        # The block may change these trees in place.
        before = [jax.tree_util.tree_leaves_with_path(tree) for tree in (keys, rest, counts)]
        block = nnx.merge(graphdef, keys, counts, rest)
        out = block(value, *extras)
        _require_same(value, out)
        after_graphdef, keys, counts, rest = nnx.split(block, nnx.RngKey, nnx.RngCount, ...)
        kept = (keys, rest) if counts_are_kept else (keys, rest, counts)
        _require_pure(graphdef, after_graphdef, before, kept)
        return vary(out, like=value), counts

    return jax.lax.scan(layer, value, state)


def _require_same(value: Any, out: Any) -> None:
    """Rejects a block whose output cannot be the next block's input."""
    before, after = (jax.tree.map(_describe, tree) for tree in (value, out))
    if before != after:
        raise ValueError(
            f"a block of the pipeline maps {before} to {after}: its output must match its input, "
            f"since it is the next block's input"
        )


def _require_pure(graphdef: Any, after: Any, before: list[Any], trees: tuple[Any, ...]) -> None:
    """Rejects a block that changes its own state, which would be lost."""
    for old_leaves, new in zip(before, trees, strict=False):
        for (path, old), now in zip(old_leaves, jax.tree.leaves(new), strict=False):
            if old is not now:
                raise ValueError(
                    f"a block of the pipeline changes its {dotted(path)}, and the change would be "
                    f"lost: stages run many microbatches at once. Make it deterministic, or pass "
                    f"what it needs with the batch"
                )
    if after != graphdef:
        raise ValueError(
            "a block of the pipeline changes its own structure (does it sow?), which would be lost"
        )


def depth_of(state: Any, wanted: int) -> tuple[int, ...]:
    """Returns the stack's leading dims: layers, or rounds and layers per round.

    Raises:
        ValueError: the arrays of the stack have different ones.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    depths = {path: leaf.shape[:wanted] for path, leaf in leaves}
    first = next(iter(depths.values()))
    for path, depth in depths.items():
        if depth != first or len(depth) < wanted:
            raise ValueError(
                f"{dotted(path)} has leading dims {depth}, but others have {first}: all arrays "
                f"of a stack must have the same leading dims, "
                f"{'(rounds, layers)' if wanted == 2 else '(layers,)'}"
            )
    return first


def fold(state: Any, rounds: int) -> Any:
    """Returns the state with its leading dim folded to rounds and layers per round."""

    def folded(leaf: Any) -> Any:
        if leaf.shape[0] % rounds:
            raise ValueError(f"{leaf.shape[0]} layers cannot be folded into {rounds} rounds")
        return leaf.reshape(rounds, leaf.shape[0] // rounds, *leaf.shape[1:])

    return jax.tree.map(folded, state)


def stack_state(stack: Any) -> tuple[Any, Any]:
    """Returns the graphdef of one block, and the stacked state of all."""
    if isinstance(stack, nnx.Sequential):
        stack = stack.layers
    if isinstance(stack, nnx.Module) and not isinstance(stack, nnx.List):
        graphdef, state = nnx.split(stack)
    elif isinstance(stack, Sequence | nnx.List):
        graphdef, state = _stack_up(list(stack))
    else:
        raise ValueError(
            f"a pipeline takes a stacked nnx.Module or a sequence of modules, got "
            f"{type(stack).__name__}"
        )
    if not jax.tree.leaves(state):
        raise ValueError("the stack has no arrays: there is nothing to split over the stages")
    return graphdef, state


def _stack_up(blocks: list[Any]) -> tuple[Any, Any]:
    if not blocks:
        raise ValueError("the stack is empty: give at least one block")
    for i, block in enumerate(blocks):
        if not isinstance(block, nnx.Module):
            raise ValueError(
                f"block {i} of the stack must be an nnx.Module, got {type(block).__name__}"
            )
    parts = [nnx.split(block) for block in blocks]
    graphdef, first = parts[0]
    shapes = jax.tree.map(_describe, first)
    for i, (other, state) in enumerate(parts):
        if other != graphdef or jax.tree.map(_describe, state) != shapes:
            raise ValueError(
                f"block {i} of the stack differs from block 0: the blocks of a pipeline may differ "
                f"only in the values of their arrays"
            )
    return graphdef, jax.tree.map(lambda *leaves: jnp.stack(leaves), *(s for _, s in parts))


def _describe(x: Any) -> str:
    return show_shape(jnp.asarray(x))
