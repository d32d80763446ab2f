"""Llama 3 shapes as plain unrolled NNX models for the benchmarks, with nine leaves per layer."""

import jax
import jax.numpy as jnp
from flax import nnx

SHAPES = {  # layers, width, hidden, heads, KV heads, head depth, vocabulary
    "70B": (80, 8192, 28672, 64, 8, 128, 128256),
    "405B": (126, 16384, 53248, 128, 8, 128, 128256),
}


class Layer(nnx.Module):
    """Grouped-query attention and a gated MLP."""

    def __init__(self, width, hidden, heads, kv_heads, depth, rngs):
        """Makes seven kernels and two norms."""

        def linear(a, b):
            return nnx.Linear(a, b, use_bias=False, param_dtype=jnp.bfloat16, rngs=rngs)

        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.q, self.k = linear(width, heads * depth), linear(width, kv_heads * depth)
        self.v, self.o = linear(width, kv_heads * depth), linear(heads * depth, width)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.gate, self.up = linear(width, hidden), linear(width, hidden)
        self.down = linear(hidden, width)
        self.heads, self.kv_heads, self.depth = heads, kv_heads, depth

    def __call__(self, x):
        """Returns the residual stream after this layer."""
        y = self.norm1(x)
        batch, length, _ = x.shape
        q = self.q(y).reshape(batch, length, self.heads, self.depth)
        k = self.k(y).reshape(batch, length, self.kv_heads, self.depth)
        v = self.v(y).reshape(batch, length, self.kv_heads, self.depth)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.reshape(batch, length, -1))
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    """A decoder with an untied head."""

    def __init__(self, layers, width, hidden, heads, kv_heads, depth, vocab, rngs):
        """Makes the layers."""
        self.embed = nnx.Embed(vocab, width, param_dtype=jnp.bfloat16, rngs=rngs)
        self.layers = nnx.List(
            [Layer(width, hidden, heads, kv_heads, depth, rngs) for _ in range(layers)]
        )
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocab, use_bias=False, param_dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens):
        """Returns logits."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make(name):
    """Returns a function that builds the named model."""
    return lambda: Llama(*SHAPES[name], rngs=nnx.Rngs(0))
