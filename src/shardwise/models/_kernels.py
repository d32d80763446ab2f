"""The best kernel of the device for each part of a decoder, chosen in one place."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns causal attention: cuDNN's on a GPU in 16 bits, XLA's elsewhere.

    Args:
        q: queries, `[batch, length, heads, depth]`.
        k: keys, `[batch, length, kv_heads, depth]`; several heads of queries may share one.
        v: values, of the keys' shape.
    """
    cudnn = jax.default_backend() == "gpu" and q.dtype in (jnp.bfloat16, jnp.float16)
    kernel = "cudnn" if cudnn else "xla"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)


def look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns rows of `table`; their gradients are summed in float32, whatever its dtype."""
    found: Any = _look_up(table, tokens, table.shape[0])
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _look_up(table: jax.Array, tokens: jax.Array, rows: int) -> jax.Array:
    return table[tokens]


def _looked_up(table: jax.Array, tokens: jax.Array, rows: int) -> Any:
    return table[tokens], tokens


def _look_up_backward(rows: int, tokens: jax.Array, gradient: jax.Array) -> Any:
    zeros = jnp.zeros((rows, gradient.shape[-1]), jnp.float32)
    return zeros.at[tokens].add(gradient.astype(jnp.float32)).astype(gradient.dtype), None


_look_up.defvjp(_looked_up, _look_up_backward)


def mean_nll(logits: jax.Array, targets: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns the mean negative log-likelihood of `targets`, in float32.

    The logits stay in the dtype that they have: a product that gives float32 would make the
    products of the backward pass float32 too.

    Args:
        logits: `[batch, length, vocabulary]`.
        targets: `[batch, length]`, integers.
        counts: `[batch, length]`, which positions count.
    """
    wide = logits.astype(jnp.float32)
    # A comparison, not a gather: it fuses, and splits over a sharded vocabulary.
    places = jax.lax.broadcasted_iota(targets.dtype, wide.shape, wide.ndim - 1)
    picked = jnp.sum(jnp.where(places == targets[..., None], wide, 0), axis=-1)
    losses = jax.nn.logsumexp(wide, axis=-1) - picked
    return jnp.sum(jnp.where(counts, losses, 0)) / jnp.maximum(counts.sum(), 1)
