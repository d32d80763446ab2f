"""Splash attention, the TPU kernel, on each device's shard of the batch and of the heads."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from .._jax import splash_attention
from ._names import auto_mesh, axes_of

# The block size is the largest of these that divides the length.
_BLOCKS = (512, 256, 128)


def splash_fits(q: jax.Array) -> bool:
    """Returns whether length and depth are multiples of the kernel's block sizes."""
    length, depth = q.shape[1], q.shape[3]
    return length % _BLOCKS[-1] == 0 and depth % 64 == 0


def splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    window: int | None,
    cap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns causal attention on one device; see `causal_attention`.

    Args:
        q: queries, `[batch, length, heads, depth]`.
        k: keys, `[batch, length, kv_heads, depth]`.
        v: values, with the shape of the keys.
        scale: the factor of the queries.
        window: how many positions each position attends to; all earlier ones if None.
        cap: if given, scores become `cap * tanh(scores / cap)`.
        interpret: whether Pallas interprets the kernel, which works on any device.
    """
    sa = splash_attention()

    length, heads = q.shape[1:3]
    shape = (length, length)
    mask = sa.CausalMask(shape) if window is None else sa.LocalMask(shape, (window - 1, 0), 0)
    block = next(size for size in _BLOCKS if length % size == 0)
    sizes = sa.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    kernel: Any = sa.make_splash_mha(
        mask=sa.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=cap,
        residual_checkpoint_name="context",
        interpret=interpret,
    )
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (scaled, k, v))
    mixed: Any = jax.vmap(kernel)(q, k, v)
    return jnp.swapaxes(mixed, 1, 2)


def split_splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    window: int | None,
    cap: float | None = None,
    interpret: bool = False,
) -> jax.Array | None:
    """Returns `splash` on each device's shard, or None if no rule says how to split the arrays.

    The compiler cannot partition a Pallas kernel: it would gather the arrays. So they are split
    here, over the axes that the names `batch` and `heads` map to.
    """
    attend = functools.partial(splash, scale=scale, window=window, cap=cap, interpret=interpret)
    kinds = set(jax.sharding.get_abstract_mesh().axis_types)
    mesh = auto_mesh()
    if kinds <= {AxisType.Manual} or (mesh is not None and mesh.size == 1):
        return attend(q, k, v)
    if mesh is None:
        return None
    batch, _, heads, _ = axes_of(q.shape, ("batch", None, "heads", None), mesh)
    if not batch and not heads:
        return None
    ways = math.prod(mesh.shape[axis] for axis in heads)
    copies = ways // math.gcd(ways, k.shape[2])
    if q.shape[2] % (k.shape[2] * copies):
        return None
    if copies > 1:  # fewer key heads than devices: neighbouring devices share one
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
    spec = P(batch or None, None, heads or None, None)
    # A Pallas kernel does not declare the axes along which its results vary.
    return jax.shard_map(
        attend, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False
    )(q, k, v)
