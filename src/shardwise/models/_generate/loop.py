"""Text, token by token: prompts into the cache, then one token of each sequence at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..._base import public
from ..._layout import Layout
from ..._nnx import is_bypassed
from ..._step import data_axes, named_activations, on_mesh
from .sampling import Sampling

# Prompts are padded to a multiple of this, so that few lengths are compiled.
_PADDED = 64


@public
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    layout: Layout | None = None,
) -> Iterator[np.ndarray]:
    """Yields the next token of every sequence, `[batch]`, one step after another.

    Args:
        model: a `models.Decoder` with a cache for as many sequences as there are prompts; see
            `Decoder.init_cache`. What the cache had in it is overwritten.
        prompts: the token ids of each prompt; their lengths may differ.
        tokens: how many tokens to generate.
        temperature: what logits are divided by; 0 takes the likeliest token.
        top_p: only the likeliest tokens whose probabilities reach this sum are drawn.
        seed: the seed of what is drawn.
        layout: the layout that `model` was placed with, if it is sharded.

    Raises:
        ValueError: the cache is missing or too small, a prompt is empty or has an unknown token, or
            an argument is out of range.

    Example:
        >>> from flax import nnx
        >>> from shardwise import models
        >>> config = models.Config(layers=1, width=8, hidden=16, heads=2, vocab=32)
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> model.init_cache(batch=2, length=16)
        >>> len(list(models.generate(model, [[1, 2, 3], [4]], tokens=5)))
        5
    """
    sampling = Sampling(temperature, top_p)
    _require(model, prompts, tokens)
    if layout is not None:
        ways = math.prod(layout.mesh.shape[axis] for axis in data_axes(layout))
        if len(prompts) % ways:
            raise ValueError(
                f"{len(prompts)} prompts cannot be split {ways} ways over "
                f"{'+'.join(data_axes(layout))}: give a multiple of {ways}, or lay the model out "
                f"without these axes"
            )
    return _steps(model, prompts, tokens, sampling, seed, layout)


def _require(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    if is_bypassed(model, "decode"):
        raise ValueError(
            "qwix adapted this decoder, and adapters apply only when it is called: generate with the "
            "plain model, which sw.merge_adapters(model, make) returns"
        )
    cache = getattr(model, "cache", None)
    if cache is None:
        raise ValueError(
            "the decoder has no cache: call model.init_cache(batch, length) where it is made"
        )
    batch = cache.tokens.shape[0]
    if len(prompts) != batch:
        raise ValueError(f"the cache is for {batch} sequences, got {len(prompts)} prompts")
    if tokens < 1:
        raise ValueError(f"tokens must be a positive integer, got {tokens}")
    vocab = model.config.vocab
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {number} is empty: give at least one token")
        wrong = [token for token in prompt if not 0 <= token < vocab]
        if wrong:
            raise ValueError(f"prompt {number} has token {wrong[0]}, the vocabulary has {vocab}")
        if len(prompt) + tokens > cache.length:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, and {tokens} more do not fit in a cache "
                f"of length {cache.length}: make it {len(prompt) + tokens} long"
            )


def _steps(
    model: Any,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sampling,
    seed: int,
    layout: Layout | None,
) -> Iterator[np.ndarray]:
    lengths = np.array([len(prompt) for prompt in prompts], "int32")
    most = min(-(-int(lengths.max()) // _PADDED) * _PADDED, model.cache.length)
    padded = np.zeros((len(prompts), most), "int32")
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    place = jnp.asarray
    if layout is not None:
        sharding = NamedSharding(layout.mesh, P(data_axes(layout) or None))
        place = functools.partial(jax.device_put, device=sharding)
    # Split anew in each call, since the arrays of the cache are donated.
    graphdef, cache, weights = nnx.split(model, nnx.Cache, ...)
    key = jax.random.key(seed)
    inputs = (place(padded), place(lengths))
    for number in range(tokens):
        found, cache = _step(
            graphdef, sampling, layout, weights, cache, jax.random.fold_in(key, number), *inputs
        )
        nnx.update(model, cache)
        yield np.asarray(found)
        inputs = (found,)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _step(
    graphdef: Any,
    sampling: Sampling,
    layout: Layout | None,
    weights: Any,
    cache: Any,
    key: jax.Array,
    *inputs: jax.Array,
) -> Any:
    """Returns the next tokens, and the cache with the prompts, or with one more token of each."""
    model = nnx.merge(graphdef, cache, weights)
    run = model.prefill if len(inputs) == 2 else model.decode
    if layout is None:
        return sampling.choose(run(*inputs), key), nnx.state(model, nnx.Cache)
    sharding = NamedSharding(layout.mesh, P(data_axes(layout) or None))
    kinds = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in inputs]
    specs = {leaf.path: leaf.spec for leaf in layout.leaves}
    with on_mesh(layout.mesh), named_activations(layout, kinds):
        found, cache = sampling.choose(run(*inputs), key), nnx.state(model, nnx.Cache)
        for path, variable in nnx.to_flat_state(cache):
            spec = specs[".".join(map(str, path))]
            variable.set_value(jax.lax.with_sharding_constraint(variable.get_value(), spec))
        return jax.lax.with_sharding_constraint(found, sharding.spec), cache
