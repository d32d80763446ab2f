"""The best kernel of the target platform for each part of a decoder, chosen in one place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ._splash import splash_fits, split_splash


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Returns causal attention: cuDNN on a GPU with 16-bit dtypes, splash on a TPU, else XLA.

    cuDNN's kernel has no soft caps, so with a cap a GPU runs XLA's attention, which writes the
    scores of all positions to memory.

    Args:
        q: queries, `[batch, length, heads, depth]`.
        k: keys, `[batch, length, kv_heads, depth]`; several query heads may share one key head.
        v: values, with the shape of the keys.
        scale: the factor of the queries; `depth ** -0.5` if None.
        window: how many positions each position attends to, including its own; all earlier ones
            if None.
        cap: if given, scores become `cap * tanh(scores / cap)`.
    """
    # Choosing a kernel repairs nothing: all of them compute this function, up to rounding. Which
    # one was chosen shows in a compilation's buffers and kernels, and `shardwise doctor` says
    # whether cuDNN is installed.
    factor: float = q.shape[-1] ** -0.5 if scale is None else scale
    window = None if window is None or window >= q.shape[1] else window
    platform = target_platform()
    if platform == "tpu" and splash_fits(q):
        mixed = split_splash(q, k, v, scale=factor, window=window, cap=cap)
        if mixed is not None:
            return mixed
    attend: Any = functools.partial(
        jax.nn.dot_product_attention,
        is_causal=True,
        scale=factor,
        local_window_size=None if window is None else (window - 1, 0),
    )
    if cap is not None:
        attend = functools.partial(_capped, scale=factor, window=window, cap=cap)
    elif platform in ("gpu", "cuda") and q.dtype in (jnp.bfloat16, jnp.float16):
        cudnn = functools.partial(attend, implementation="cudnn")
        if _traces(cudnn, q, k, v):
            return cudnn(q, k, v)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        # Kernels name what they return, with what else the backward pass needs of it: see `Saving`.
        mixed = attend(q, k, v) if cap is not None else attend(q, k, v, implementation="xla")
        return checkpoint_name(mixed, "context")

    if not platform and not jax.sharding.get_abstract_mesh().empty:
        # Only for planning: like the kernels of real devices, this does not keep the scores.
        return jax.checkpoint(plain)(q, k, v)
    return plain(q, k, v)


def _capped(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, window: int | None, cap: float
) -> jax.Array:
    """Returns causal attention with capped scores; see `causal_attention`."""
    ahead = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    seen = ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)
    return attend_seen(q, k, v, seen[None], scale=scale, cap=cap)


def attend_seen(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    *,
    scale: float,
    cap: float | None,
) -> jax.Array:
    """Returns attention to the positions that `seen` says, with scores and softmax in float32.

    Args:
        q: queries, `[batch, length, heads, depth]`.
        k: keys, `[batch, positions, kv_heads, depth]`.
        v: values, with the shape of the keys.
        seen: `[batch or 1, length, positions]`, whether a query sees a key.
        scale: the factor of the queries.
        cap: if given, scores become `cap * tanh(scores / cap)`.
    """
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("blngh,bsnh->bngls", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * scale
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bngls,bsnh->blngh", shares, v).reshape(q.shape)


def target_platform() -> str:
    """Returns the platform being traced for: that of the current mesh, else JAX's default.

    The mesh comes first, since its devices may be absent ones that JAX only compiles for. A mesh
    without devices, for planning, has the platform `""`, so that plans are the same everywhere.

    Example:
        >>> import jax
        >>> from shardwise.models._kernels import target_platform
        >>> with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("data",))):
        ...     target_platform()
        ''
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.default_backend()
    device = mesh.abstract_device
    return "" if device is None else device.platform


def _traces(attend: Callable[..., jax.Array], *args: jax.Array) -> bool:
    """Returns whether JAX accepts these arguments, forward and backward."""

    def both(*args: jax.Array) -> Any:
        out, back = jax.vjp(attend, *args)
        return back(out)

    try:
        jax.eval_shape(both, *args)
    # cuDNN is not installed (compiling for an absent GPU does not require it), or it has no kernel
    # for these sizes.
    except (RuntimeError, NotImplementedError):
        return False
    return True


def look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns rows of `table`, whose gradients are summed in float32 whatever the dtype."""
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
