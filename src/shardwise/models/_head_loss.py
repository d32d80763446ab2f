"""The loss of a language model, from logits or in chunks from hidden states and the head."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._base import public
from .._jax import chosen_chunks
from ._names import auto_mesh, axes_of


@public
def head_loss(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    *,
    weights: jax.Array | None = None,
    softcap: float | None = None,
    chunks: int | None = None,
) -> jax.Array:
    """Returns the mean cross-entropy of `targets` under the logits `hidden @ kernel`, in float32.

    In chunks, the logits of one chunk exist at a time, forward and backward: their gradients are
    computed in the forward pass, so that no product runs twice. Each device computes the chunks of
    its own shard of the batch, and the kernel is gathered, and its gradient summed, once.

    Args:
        hidden: the last hidden states, `[…, length, width]`.
        kernel: the output head, `[width, vocabulary]`; `embedding.T` if it is tied.
        targets: `[…, length]`, integers.
        weights: `[…, length]`, how much each position counts, such as a mask; all alike if None.
            They are not differentiated.
        softcap: if given, logits become `softcap * tanh(logits / softcap)`.
        chunks: how many chunks the positions are split into; a recipe's `loss_chunks` if None.

    Raises:
        ValueError: the shapes do not match, or the chunks do not divide the positions.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardwise import models
        >>> hidden, kernel = jnp.ones((2, 8, 16)), jnp.zeros((16, 256))
        >>> models.head_loss(hidden, kernel, jnp.ones((2, 8), "int32"), chunks=4)
        Array(5.5451775, dtype=float32)
    """
    count = chosen_chunks() if chunks is None else chunks
    _require_shapes(hidden, kernel, targets, weights, count)
    wide = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
    wide = jax.lax.stop_gradient(wide)
    total = jnp.maximum(wide.sum(), 1e-9)
    if count == 1:
        return _sum(hidden, kernel, targets, wide, softcap) / total
    found: Any = _in_chunks(hidden, kernel, targets, wide, total, count, softcap)
    return found


def mean_nll(logits: jax.Array, targets: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns the mean negative log-likelihood of `targets`, in float32.

    The logits keep their dtype: a product that returns float32 would make the products of the
    backward pass float32 too.

    Args:
        logits: `[batch, length, vocabulary]`.
        targets: `[batch, length]`, integers.
        counts: `[batch, length]`, whether each position counts.
    """
    return jnp.sum(jnp.where(counts, _nll(logits, targets), 0)) / jnp.maximum(counts.sum(), 1)


def _nll(logits: jax.Array, targets: jax.Array, softcap: float | None = None) -> jax.Array:
    wide = logits.astype(jnp.float32)
    if softcap is not None:
        wide = softcap * jnp.tanh(wide / softcap)
    # A comparison, not a gather: it fuses, and splits over a sharded vocabulary.
    places = jax.lax.broadcasted_iota(targets.dtype, wide.shape, wide.ndim - 1)
    picked = jnp.sum(jnp.where(places == targets[..., None], wide, 0), axis=-1)
    return jax.nn.logsumexp(wide, axis=-1) - picked


def _sum(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    softcap: float | None,
) -> jax.Array:
    # Where, since 0 × inf is not 0.
    losses = _nll(hidden @ kernel, targets, softcap)
    return jnp.sum(jnp.where(weights == 0, 0, weights * losses))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _in_chunks(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    total: jax.Array,
    chunks: int,
    softcap: float | None,
) -> jax.Array:
    run = functools.partial(_loss, chunks=chunks, softcap=softcap)
    return _split(run, hidden, kernel, targets, weights) / total


def _forward(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    total: jax.Array,
    chunks: int,
    softcap: float | None,
) -> Any:
    run = functools.partial(_loss_and_gradients, chunks=chunks, softcap=softcap)
    loss, back, kernel_back = _split(run, hidden, kernel, targets, weights)
    # Empty arrays, for their dtypes.
    kinds = (jnp.zeros(0, hidden.dtype), jnp.zeros(0, kernel.dtype))
    return loss / total, (back, kernel_back, total, kinds)


def _backward(chunks: int, softcap: float | None, kept: Any, gradient: jax.Array) -> Any:
    back, kernel_back, total, kinds = kept
    # Divided only here: in float16, the quotients of single tokens would vanish.
    scale = gradient / total
    found = [(x * scale).astype(k.dtype) for x, k in zip((back, kernel_back), kinds, strict=True)]
    return (*found, None, None, None)


_in_chunks.defvjp(_forward, _backward)


def _loss(
    hidden: Any, kernel: Any, targets: Any, weights: Any, *, chunks: int, softcap: Any
) -> Any:
    """Returns the sum of the losses of one device's tokens."""
    take = functools.partial(_chunk, dim=hidden.ndim - 2, chunks=chunks)

    def one(loss: Any, i: Any) -> Any:
        return loss + _sum(
            take(hidden, i), kernel, take(targets, i), take(weights, i), softcap
        ), None

    return jax.lax.scan(one, jnp.zeros((), jnp.float32), jnp.arange(chunks))[0]


def _loss_and_gradients(
    hidden: Any, kernel: Any, targets: Any, weights: Any, *, chunks: int, softcap: Any
) -> Any:
    """Returns the sum of the losses of one device's tokens, and its gradients."""
    dim = hidden.ndim - 2
    take = functools.partial(_chunk, dim=dim, chunks=chunks)
    size = hidden.shape[dim] // chunks
    differentiate = jax.value_and_grad(_sum, argnums=(0, 1))

    def one(carry: Any, i: Any) -> Any:
        loss, back, kernel_back = carry
        part = (take(hidden, i), kernel, take(targets, i), take(weights, i))
        new, (at_hidden, at_kernel) = differentiate(*part, softcap)
        back = jax.lax.dynamic_update_slice_in_dim(back, at_hidden, i * size, dim)
        return (loss + new, back, kernel_back + at_kernel.astype(jnp.float32)), None

    zero = jnp.zeros((), jnp.float32)
    start = (zero, jnp.zeros_like(hidden), jnp.zeros_like(kernel, jnp.float32))
    (loss, back, kernel_back), _ = jax.lax.scan(one, start, jnp.arange(chunks))
    # Sums over all tokens may be beyond float16.
    kept = jnp.float32 if kernel.dtype == jnp.float16 else kernel.dtype
    return loss, back, kernel_back.astype(kept)


def _chunk(x: jax.Array, i: Any, *, dim: int, chunks: int) -> jax.Array:
    size = x.shape[dim] // chunks
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, dim)


def _split(run: Any, hidden: Any, kernel: Any, targets: Any, weights: Any) -> Any:
    """Returns what `run` returns for all tokens, computed by each device for its own.

    The compiler would sum the kernel's gradient over the devices once a chunk.
    """
    mesh = auto_mesh()
    names = ("batch", *[None] * (hidden.ndim - 3), "length", None)[-hidden.ndim :]
    if hidden.ndim == 2:
        names = ("batch", None)
    split = axes_of(hidden.shape, names, mesh) if mesh is not None else []
    axes = tuple(axis for dim in split for axis in dim)
    if mesh is None or not axes:
        return run(hidden, kernel, targets, weights)
    spec = P(*(dim or None for dim in split))
    tokens = P(*spec[:-1])

    def each(hidden: Any, kernel: Any, targets: Any, weights: Any) -> Any:
        found = run(hidden, kernel, targets, weights)
        if not isinstance(found, tuple):
            return jax.lax.psum(found, axes)
        loss, back, kernel_back = found
        return jax.lax.psum(loss, axes), back, jax.lax.psum(kernel_back, axes)

    outs = (P(), spec, P()) if run.func is _loss_and_gradients else P()
    return jax.shard_map(
        each,
        mesh=mesh,
        in_specs=(spec, P(), tokens, tokens),
        out_specs=outs,
        axis_names=set(axes),
        # Zeros, with which the loop starts, do not vary; nothing is differentiated through this.
        check_vma=False,
    )(hidden, kernel, targets, weights)


def _require_shapes(hidden: Any, kernel: Any, targets: Any, weights: Any, chunks: Any) -> None:
    if hidden.ndim < 2 or kernel.ndim != 2 or hidden.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"hidden states of shape {hidden.shape} and a kernel of shape {kernel.shape} make no "
            f"logits: want […, length, width] and [width, vocabulary]"
        )
    for name, x in (("targets", targets), ("weights", weights)):
        if x is not None and x.shape != hidden.shape[:-1]:
            raise ValueError(f"{name} must have the shape {hidden.shape[:-1]}, got {x.shape}")
    if type(chunks) is not int or chunks < 1:
        raise ValueError(f"chunks must be a positive integer, got {chunks!r}")
    if hidden.shape[-2] % chunks:
        raise ValueError(
            f"{chunks} chunks do not divide {hidden.shape[-2]} positions (dim {hidden.ndim - 2} of "
            f"hidden states of shape {hidden.shape})"
        )
