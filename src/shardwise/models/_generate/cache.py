"""The keys and values of the tokens that a decoder has seen, and attention to them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._config import Config
from .._kernels import attend_seen, causal_attention
from .._layers import Attention
from .._names import constrain, named

NAMES = ("batch", None, "kv_heads", "depth")


class Pair(nnx.Module):
    """The keys and values of one layer, or of a stack of them.

    A local layer keeps as many positions as its window has: position `p` is in slot `p % size`.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, *, stacked: int | None = None):
        """Makes them, empty; `shape` is `[batch, size, kv_heads, depth]`."""
        names = NAMES if stacked is None else ("layers", *NAMES)
        full = shape if stacked is None else (stacked, *shape)
        self.k = named(jnp.zeros(full, dtype), *names, kind=nnx.Cache)
        self.v = named(jnp.zeros(full, dtype), *names, kind=nnx.Cache)


class Cache(nnx.Module):
    """The keys and values of all layers, and how many tokens of each sequence they are of.

    `blocks` and `rest` are as in the decoder: stacked where its blocks are.
    """

    def __init__(self, config: Config, batch: int, length: int, dtype: Any):
        """Makes an empty cache."""

        def pair(layer: int, stacked: int | None = None) -> Pair:
            size = min(config.window or length, length) if config.is_local(layer) else length
            shape = (batch, size, config.key_heads, config.head_depth)
            return Pair(shape, dtype, stacked=stacked)

        periods, left = divmod(config.layers, config.period)
        if config.scan and periods:
            self.blocks = nnx.List([pair(i, periods) for i in range(config.period)])
            self.rest = nnx.List([pair(i) for i in range(left)])
        else:
            self.blocks = nnx.List([pair(i) for i in range(config.layers)])
            self.rest = nnx.List([])
        self.tokens = named(jnp.zeros((batch,), jnp.int32), "batch", kind=nnx.Cache)
        self.length = length


Held = tuple[jax.Array, jax.Array]


def fill(
    attention: Attention, x: jax.Array, lengths: jax.Array, held: Held
) -> tuple[jax.Array, Held]:
    """Returns attention over prompts, and the cache of one layer with their keys and values.

    Args:
        attention: the layer's attention.
        x: the normalised residual stream, `[batch, length, width]`.
        lengths: `[batch]`, how many tokens of each sequence are a prompt; the rest is padding.
        held: the keys and values of one layer.
    """
    q, k, v = attention.project(x)
    mixed = causal_attention(
        q, k, v, scale=attention.scale, window=attention.window, cap=attention.cap
    )
    size, length = held[0].shape[1], x.shape[1]

    def kept(new: jax.Array, old: jax.Array) -> jax.Array:
        new = new.astype(old.dtype)
        if length <= size:
            # What padding leaves behind is not seen: later tokens overwrite it first.
            return jax.lax.dynamic_update_slice_in_dim(old, new, 0, axis=1)
        at = jnp.maximum(positions_in(lengths - 1, size), 0)
        return jnp.take_along_axis(new, at[..., None, None], axis=1)

    filled = [constrain(kept(new, old), *NAMES) for new, old in zip((k, v), held, strict=True)]
    return attention.merge(mixed), (filled[0], filled[1])


def extend(
    attention: Attention, x: jax.Array, at: jax.Array, stack: Held, layer: Any = None
) -> tuple[jax.Array, Held]:
    """Returns attention of one more token to all before it, and the cache with its key and value.

    Args:
        attention: the layer's attention.
        x: the normalised residual stream, `[batch, 1, width]`.
        at: `[batch]`, the position of the token.
        stack: keys and values of the layer, or of a stack of layers.
        layer: which layer of the stack.
    """
    q, k, v = attention.project(x, at[:, None])
    size = stack[0].shape[-3]
    k_all, v_all = (
        _written(old, new[:, 0].astype(old.dtype), at % size, layer)
        for old, new in zip(stack, (k, v), strict=True)
    )
    keys, values = (
        x if layer is None else jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)
        for x in (k_all, v_all)
    )
    seen = positions_in(at, size) >= 0
    scale = q.shape[-1] ** -0.5 if attention.scale is None else attention.scale
    mixed = attend_seen(q, keys, values, seen[:, None], scale=scale, cap=attention.cap)
    return attention.merge(mixed.astype(x.dtype)), (k_all, v_all)


def positions_in(last: jax.Array, size: int) -> jax.Array:
    """Returns the position that is in each slot, `[batch, size]`; negative if the slot is empty.

    Args:
        last: `[batch]`, the last position that was written.
        size: the number of slots.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardwise.models._generate.cache import positions_in
        >>> positions_in(jnp.array([1, 5]), 4).tolist()
        [[0, 1, -2, -1], [4, 5, 2, 3]]
    """
    return last[:, None] - (last[:, None] - jnp.arange(size)) % size


def _written(cache: jax.Array, new: jax.Array, slots: jax.Array, layer: Any) -> jax.Array:
    """Returns the cache with the key or value of each sequence, `[batch, kv_heads, depth]`.

    One scatter that is batched over the sequences: it runs in place, and each device writes those
    of its own sequences.
    """
    places = slots[:, None]
    if layer is not None:
        places = jnp.concatenate((jnp.full_like(places, layer), places), axis=1)
    dims = (0, 2) if layer is not None else (1,)
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2),
        inserted_window_dims=dims,
        scatter_dims_to_operand_dims=dims,
        operand_batching_dims=(1,) if layer is not None else (0,),
        scatter_indices_batching_dims=(0,),
    )
    return jax.lax.scatter(
        cache,
        places,
        new,
        numbers,
        unique_indices=True,
        mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
