"""The parts of a block: norm, attention with rotary embeddings, gated MLP."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ._config import Config
from ._kernels import causal_attention
from ._names import constrain, named

into = nnx.initializers.normal(0.02)


def kernel(parameter: Any) -> Any:
    """Returns the array of a parameter; a quantised one of qwix as it is.

    Qwix finds the adapter of a quantised parameter by identity, and only then by its shape.
    """
    return parameter[...] if isinstance(parameter, nnx.Variable) else parameter


class Norm(nnx.Module):
    """RMSNorm, computed in float32 whatever the dtype of the input."""

    def __init__(self, width: int, config: Config, *, name: str = "embed"):
        """Makes the scale; `name` is the name of the dim that is normalised."""
        start = jnp.zeros if config.offset_norms else jnp.ones
        self.scale = named(start(width), name)
        self.offset = 1.0 if config.offset_norms else 0.0
        self.eps = config.norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns `x`, normalised to a mean square of 1 and scaled."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        return (wide * (scale + self.offset if self.offset else scale)).astype(x.dtype)


class Attention(nnx.Module):
    """Causal attention with rotary embeddings, over all earlier positions or over a window."""

    def __init__(self, config: Config, *, local: bool = False, rngs: nnx.Rngs):
        """Makes the four kernels."""
        width, depth = config.width, config.head_depth
        heads, kv_heads = config.heads, config.key_heads
        # Three separate products: a fused one made a step of 410 ms 3 to 5 ms slower on an H200.
        self.q = named(into(rngs.params(), (width, heads, depth)), "embed", "heads", "depth")
        self.k = named(into(rngs.params(), (width, kv_heads, depth)), "embed", "kv_heads", "depth")
        self.v = named(into(rngs.params(), (width, kv_heads, depth)), "embed", "kv_heads", "depth")
        self.out = named(into(rngs.params(), (heads, depth, width)), "heads", "depth", "embed")
        biased, key_shape = config.qkv_bias, (kv_heads, depth)
        self.q_bias = named(jnp.zeros((heads, depth)), "heads", "depth") if biased else None
        self.k_bias = named(jnp.zeros(key_shape), "kv_heads", "depth") if biased else None
        self.v_bias = named(jnp.zeros(key_shape), "kv_heads", "depth") if biased else None
        self.q_norm = Norm(depth, config, name="depth") if config.qk_norm else None
        self.k_norm = Norm(depth, config, name="depth") if config.qk_norm else None
        self.scale, self.cap = config.query_scale, config.attention_cap
        self.window = config.window if local else None
        self.rope = Rope.of(config, local=local)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns what is added to the residual stream."""
        q, k, v = self.project(x)
        q, k, v = (checkpoint_name(y, name) for y, name in ((q, "q"), (k, "k"), (v, "v")))
        mixed = causal_attention(q, k, v, scale=self.scale, window=self.window, cap=self.cap)
        return self.merge(mixed)

    def project(
        self, x: jax.Array, positions: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values, `[batch, length, heads, depth]`, rotated.

        Args:
            x: the residual stream.
            positions: `[batch, length]`, the position of each token; 0, 1, … if None.
        """
        q, k, v = (jnp.einsum("bld,dnh->blnh", x, kernel(w)) for w in (self.q, self.k, self.v))
        if self.q_bias is not None and self.k_bias is not None and self.v_bias is not None:
            q, k, v = q + self.q_bias[...], k + self.k_bias[...], v + self.v_bias[...]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (self.rope.rotate(y, positions) for y in (q, k))
        q = constrain(q, "batch", "length", "heads", "depth")
        k, v = (constrain(y, "batch", "length", "kv_heads", "depth") for y in (k, v))
        return q, k, v

    def merge(self, mixed: jax.Array) -> jax.Array:
        """Returns the product of what the heads found with the output kernel."""
        mixed = constrain(mixed, "batch", "length", "heads", "depth")
        return checkpoint_name(jnp.einsum("blnh,nhd->bld", mixed, kernel(self.out)), "out")


@dataclasses.dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embeddings.

    Attributes:
        theta: the base of the wavelengths.
        stretch: the factor by which positions are divided.
        bands: which wavelengths are stretched, see `Config.rope_bands`.
    """

    theta: float
    stretch: float = 1.0
    bands: tuple[float, float, int] | None = None

    @classmethod
    def of(cls, config: Config, *, local: bool) -> Rope:
        """Returns the rotary embeddings of a local, or of a global, layer."""
        if local and config.local_theta is not None:
            return cls(config.local_theta)
        return cls(config.rope_theta, config.rope_scale, config.rope_bands)

    def rates(self, half: int) -> jax.Array:
        """Returns the angle by which one position turns each of `half` pairs."""
        rates = self.theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
        if self.bands is None:
            return rates / self.stretch if self.stretch != 1.0 else rates
        low, high, length = self.bands
        turns = length * rates / (2 * math.pi)
        kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1 - kept) * (rates / self.stretch) + kept * rates

    def rotate(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Returns `x`, `[batch, length, heads, depth]`, rotated.

        Args:
            x: queries or keys.
            positions: `[batch, length]`, the position of each token; 0, 1, … if None.
        """
        rates = self.rates(x.shape[-1] // 2)
        if positions is None:
            positions = jnp.arange(x.shape[1], dtype=jnp.float32)
        angles = positions.astype(jnp.float32)[..., None] * rates
        return turned(x, angles)


def turned(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Returns `x`, `[batch, length, heads, depth]`, with each pair turned by its angle.

    Args:
        x: queries or keys; pair `i` is the dims `i` and `i + depth / 2` of a head.
        angles: `[length, depth / 2]`, or with a batch dim in front.
    """
    half = x.shape[-1] // 2
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    both = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(both, axis=-1).astype(x.dtype)


def gated(both: jax.Array, activation: str) -> jax.Array:
    """Returns the activated gate times the other half of `[..., 2, hidden]`: `[..., hidden]`."""
    # Indexed, not split: the gradient of a split took 16 GiB more on an H200, and was no faster.
    gate, up = both[..., 0, :].astype(jnp.float32), both[..., 1, :].astype(jnp.float32)
    opened = nnx.silu(gate) if activation == "silu" else nnx.gelu(gate, approximate=True)
    return (opened * up).astype(both.dtype)
