"""The next token from logits: the likeliest, or drawn with a temperature from the likeliest few."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: what logits are divided by; 0 takes the likeliest token.
        top_p: only the likeliest tokens whose probabilities reach this sum are drawn.
    """

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Rejects what is not a way to sample."""
        if not self.temperature >= 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    def choose(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """Returns a token for each row of `[batch, vocab]`.

        Args:
            logits: the logits.
            key: the key of this step; rows are drawn independently.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from shardwise.models._generate.sampling import Sampling
            >>> logits = jnp.log(jnp.array([[0.2, 0.5, 0.3]]))
            >>> Sampling().choose(logits, jax.random.key(0)).tolist()
            [1]
        """
        logits = logits.astype(jnp.float32)
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_p < 1:
            logits = _nucleus(logits, self.top_p)
        return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def _nucleus(logits: jax.Array, top_p: float) -> jax.Array:
    """Returns the logits, with -inf for tokens after the first whose sum reaches `top_p`."""
    ordered = -jnp.sort(-logits, axis=-1)
    shares = jax.nn.softmax(ordered, axis=-1)
    # What is before a token: the first is always kept.
    before = jnp.cumsum(shares, axis=-1) - shares
    kept = jnp.where(before < top_p, ordered, jnp.inf)
    return jnp.where(logits >= kept.min(axis=-1, keepdims=True), logits, -jnp.inf)
