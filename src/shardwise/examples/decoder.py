"""A small decoder in Flax NNX that knows nothing about meshes.

`shardwise plan shardwise.examples.decoder:make --mesh data=2,model=4 --strategy fsdp+tensor`
"""

import jax
import jax.numpy as jnp
from flax import nnx

VOCAB, WIDTH, HIDDEN, HEADS, LAYERS = 8192, 512, 2048, 8, 4


class Block(nnx.Module):
    """Attention and a gated MLP, each added to the residual stream."""

    def __init__(self, rngs: nnx.Rngs):
        """Makes the layers."""
        self.norm1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns the residual stream after this block."""
        x = x + self.attention(self.norm1(x), mask=mask)
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Decoder(nnx.Module):
    """A decoder from tokens to logits, whose head shares the embedding's weights."""

    def __init__(self, rngs: nnx.Rngs):
        """Makes the layers."""
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits for every position."""
        mask = nnx.make_causal_mask(tokens)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


def make() -> Decoder:
    """Returns the decoder, with 21 million parameters."""
    return Decoder(nnx.Rngs(0))


def loss(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of each next token."""
    logits = jax.nn.log_softmax(model(tokens[:, :-1]))
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)
    return -picked.mean()
