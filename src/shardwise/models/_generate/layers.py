"""A decoder's blocks with a cache: over prompts, and over one more token of each sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .cache import Cache, Held, Pair, extend, fill

# A block, given how it attends.
Attend = Callable[[Any, jax.Array], jax.Array]


def over_prompts(model: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns the residual stream after all blocks, and fills the cache.

    Args:
        model: the decoder.
        x: the embedded prompts, `[batch, length, width]`.
        lengths: `[batch]`, how many tokens of each sequence are a prompt.
    """
    cache: Cache = model.cache

    def step(block: Any, x: jax.Array, held: Held) -> tuple[jax.Array, Held]:
        return _through(block, x, functools.partial(fill, lengths=lengths, held=held))

    if model.scan:
        graphdefs, states = zip(*(nnx.split(block) for block in model.blocks), strict=True)

        def period(x: jax.Array, scanned: Any) -> Any:
            states, held = scanned
            kept = []
            for graphdef, state, pair in zip(graphdefs, states, held, strict=True):
                x, new = step(nnx.merge(graphdef, state), x, pair)
                kept.append(new)
            return x, kept

        # Prompts fill the whole cache, so it is the loop's output, layer by layer.
        x, kept = jax.lax.scan(period, x, (states, [_values(pair) for pair in cache.blocks]))
        _store(cache.blocks, kept)
    for block, pair in _single(model):
        x, new = step(block, x, _values(pair))
        _store([pair], [new])
    cache.tokens[...] = lengths
    return x


def over_one(model: Any, x: jax.Array) -> jax.Array:
    """Returns the residual stream of one more token after all blocks, and extends the cache.

    Args:
        model: the decoder.
        x: the embedded tokens, `[batch, 1, width]`.
    """
    cache: Cache = model.cache
    at = cache.tokens[...]

    def step(block: Any, x: jax.Array, held: Held, layer: Any = None) -> tuple[jax.Array, Held]:
        return _through(block, x, functools.partial(extend, at=at, stack=held, layer=layer))

    if model.scan:
        graphdefs, states = zip(*(nnx.split(block) for block in model.blocks), strict=True)

        def period(carry: Any, scanned: Any) -> Any:
            x, stacks = carry
            layer, states = scanned
            kept = []
            for graphdef, state, stack in zip(graphdefs, states, stacks, strict=True):
                x, new = step(nnx.merge(graphdef, state), x, stack, layer)
                kept.append(new)
            return (x, kept), None

        # The stacks are carried, not scanned: each step then writes one token in place.
        start = (x, [_values(pair) for pair in cache.blocks])
        periods = cache.blocks[0].k.shape[0]
        (x, kept), _ = jax.lax.scan(period, start, (jnp.arange(periods), states))
        _store(cache.blocks, kept)
    for block, pair in _single(model):
        x, new = step(block, x, _values(pair))
        _store([pair], [new])
    cache.tokens[...] = at + 1
    return x


def _through(
    block: Any, x: jax.Array, attend: Callable[..., tuple[jax.Array, Held]]
) -> tuple[jax.Array, Held]:
    """Returns the residual stream after a block that attends with a cache, and that cache."""
    kept: list[Held] = []

    def mix(attention: Any, x: jax.Array) -> jax.Array:
        mixed, held = attend(attention, x)
        kept.append(held)
        return mixed

    return block(x, mix), kept[0]


def _single(model: Any) -> Any:
    """Returns the blocks that are not stacked, each with its part of the cache."""
    cache: Cache = model.cache
    if model.scan:
        return list(zip(model.rest, cache.rest, strict=True))
    return list(zip(model.blocks, cache.blocks, strict=True))


def _values(pair: Pair) -> Held:
    return pair.k[...], pair.v[...]


def _store(pairs: Any, kept: Any) -> None:
    for pair, (k, v) in zip(pairs, kept, strict=True):
        pair.k[...], pair.v[...] = k, v
