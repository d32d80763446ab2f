"""A decoder: RMSNorm, rotary embeddings, grouped-query attention, a gated MLP."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ._kernels import causal_attention, look_up, mean_nll


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The sizes of a decoder.

    Attributes:
        layers: how many blocks.
        width: of the residual stream.
        hidden: of the MLP.
        heads: of queries.
        vocab: how many tokens there are.
        kv_heads: of keys and values; as many as of queries if None.
        depth: of a head; `width // heads` if None.
        tied: whether the head is the embedding.
        rope_theta: the base of the rotary wavelengths.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int | None = None
    depth: int | None = None
    tied: bool = False
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        """Refuses sizes that make no decoder."""
        if self.depth is None and self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of heads {self.heads}: give depth="
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")


class Norm(nnx.Module):
    """RMSNorm, in float32 whatever comes in."""

    def __init__(self, width: int):
        """Makes the scale."""
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns `x` at a mean square of 1, scaled."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Causal attention with rotary positions."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        """Makes the four kernels."""
        depth = config.depth or config.width // config.heads
        into, kv_heads = nnx.initializers.normal(0.02), config.kv_heads or config.heads
        self.q = nnx.Param(into(rngs.params(), (config.width, config.heads, depth)))
        self.k = nnx.Param(into(rngs.params(), (config.width, kv_heads, depth)))
        self.v = nnx.Param(into(rngs.params(), (config.width, kv_heads, depth)))
        self.out = nnx.Param(into(rngs.params(), (config.heads, depth, config.width)))
        self.theta = config.rope_theta

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns what is added to the residual stream."""
        q, k, v = (jnp.einsum("bld,dnh->blnh", x, w[...]) for w in (self.q, self.k, self.v))
        mixed = causal_attention(rotate(q, self.theta), rotate(k, self.theta), v)
        return jnp.einsum("blnh,nhd->bld", mixed, self.out[...])


class Block(nnx.Module):
    """Attention and a gated MLP, each added to the residual stream."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        """Makes the layers."""
        into = nnx.initializers.normal(0.02)
        self.norm1 = Norm(config.width)
        self.attention = Attention(config, rngs=rngs)
        self.norm2 = Norm(config.width)
        # Gate and up side by side: one product, and a split over `hidden` splits both alike.
        self.up = nnx.Param(into(rngs.params(), (config.width, 2, config.hidden)))
        self.down = nnx.Param(into(rngs.params(), (config.hidden, config.width)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the residual stream after this block."""
        x = x + self.attention(self.norm1(x))
        both = jnp.einsum("bld,dgf->blgf", self.norm2(x), self.up[...])
        # Indexed, not split: the gradient of a split took 16 GiB more on an H200, and no less time.
        gate, up = both[:, :, 0].astype(jnp.float32), both[:, :, 1].astype(jnp.float32)
        return x + (nnx.silu(gate) * up).astype(x.dtype) @ self.down[...]


class Decoder(nnx.Module):
    """Tokens to logits.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from shardwise import models
        >>> config = models.Config(layers=2, width=64, hidden=128, heads=4, vocab=256)
        >>> models.Decoder(config, rngs=nnx.Rngs(0))(jnp.zeros((1, 8), "int32")).shape
        (1, 8, 256)
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        """Makes the layers."""
        into = nnx.initializers.normal(0.02)
        self.embed = nnx.Param(into(rngs.params(), (config.vocab, config.width)))
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = Norm(config.width)
        shape = (config.width, config.vocab)
        self.head = None if config.tied else nnx.Param(into(rngs.params(), shape))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits for every position."""
        table = self.embed[...]
        x = look_up(table, tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ (table.T if self.head is None else self.head[...])


def next_token_loss(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of each next token.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from shardwise import models
        >>> config = models.Config(layers=1, width=64, hidden=128, heads=4, vocab=256)
        >>> loss = models.next_token_loss(models.Decoder(config, rngs=nnx.Rngs(0)), jnp.ones((2, 8), "int32"))
        >>> loss.shape
        ()
    """
    # All positions go through the layers, so that a length of a power of two stays one; the
    # last one has no next token and does not count.
    targets = jnp.roll(tokens, -1, axis=1)
    counts = jnp.broadcast_to(jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1, tokens.shape)
    return mean_nll(model(tokens), targets, counts)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Returns `x`, `[batch, length, heads, depth]`, with rotary positions."""
    half = x.shape[-1] // 2
    rates = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rates
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
