"""A training state as it is stored: raw keys, no empty arrays, and digests of the values."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._layout import key_impl
from .._place import initialise_some, put_anywhere, wrap_keys
from .._step import Blueprint, TrainState, named_arrays, show_array
from . import digest_v1
from .digest import ALGORITHM, digests
from .errors import CheckpointError


def on_disk(state: TrainState) -> TrainState:
    """Returns the state, live or abstract, with random keys as raw key data."""

    def one(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        if isinstance(x, jax.Array):
            return jax.random.key_data(x)
        data = jax.eval_shape(jax.random.key_data, x)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)

    return jax.tree.map(one, state)


def in_memory(state: TrainState, blueprint: Blueprint) -> TrainState:
    """Returns a state that was read from disk, with its random keys wrapped again."""

    def one(x: Any, like: Any) -> Any:
        if not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
            return x
        return wrap_keys(x, like.sharding, key_impl(str(like.dtype)))

    return jax.tree.map(one, state, blueprint.abstract)


# What TensorStore has no dtype for is stored as its bits. Digests and `about` keep the real dtype.
_AS_BITS = {"uint2": "uint8", "uint4": "uint8", "float8_e4m3": "uint8"}


def _stored(x: Any) -> Any:
    """Returns an array, live or abstract, in a dtype that TensorStore has."""
    dtype = _AS_BITS.get(str(x.dtype))
    if dtype is None:
        return x
    if isinstance(x, jax.Array):
        return _cast(x, dtype)
    return jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype), sharding=x.sharding)


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns the bits of an array as another dtype; of integers, which may be narrower, the values."""
    dtype = jnp.dtype(dtype)
    is_float = any(jnp.issubdtype(kind, jnp.floating) for kind in (x.dtype, dtype))
    cast = jax.lax.bitcast_convert_type if is_float else jax.lax.convert_element_type
    return jax.jit(lambda x: cast(x, dtype), out_shardings=x.sharding)(x)


def to_tree(state: TrainState) -> dict[str, Any]:
    """Returns the state as the tree that Orbax writes."""
    parts = {"model": state.model, "optimizer": state.optimizer, "ema": state.ema}
    # Orbax does not write empty arrays, and there is nothing to read.
    parts = {
        name: {k: _stored(x) for k, x in part.items() if x.size} for name, part in parts.items()
    }
    return {"step": state.step, **{name: part for name, part in parts.items() if part}}


def from_tree(tree: dict[str, Any], like: TrainState) -> TrainState:
    """Returns the state of a tree that Orbax read; `like` is the state that it was read for."""

    def part(name: str) -> dict[str, Any]:
        read = tree.get(name, {})
        return {
            k: _loaded(read[k], x)
            if x.size
            else put_anywhere(np.zeros(x.shape, x.dtype), x.sharding)
            for k, x in getattr(like, name).items()
        }

    return TrainState(tree["step"], part("model"), part("optimizer"), part("ema"))


def _loaded(x: jax.Array, like: Any) -> jax.Array:
    return _cast(x, like.dtype) if str(like.dtype) in _AS_BITS else x


def without(state: TrainState, frozen: Collection[str]) -> TrainState:
    """Returns the state without the model's arrays at these paths."""
    model = {path: x for path, x in state.model.items() if path not in frozen}
    return dataclasses.replace(state, model=model)


def frozen_paths(about: Mapping[str, Any]) -> frozenset[str]:
    """Returns the paths of the model's arrays that a checkpoint has only digests of."""
    rows = about["arrays"].items()
    return frozenset(show_array(name) for name, row in rows if row.get("frozen"))


def with_frozen(
    state: TrainState, frozen: Collection[str], blueprint: Blueprint, given: Mapping[str, Any]
) -> TrainState:
    """Returns the state with the arrays that were not saved: given, or initialised."""
    if not frozen:
        return state
    leaves = list(enumerate(blueprint.layout.leaves))
    made = [n for n, leaf in leaves if leaf.path in frozen and given.get(leaf.path) is None]
    initial = initialise_some(blueprint.model, blueprint.layout, made)
    model = {}
    for number, leaf in leaves:
        if leaf.path not in frozen:
            model[leaf.path] = state.model[leaf.path]
        elif number in initial:
            model[leaf.path] = initial[number]
        else:
            # A copy, since the first step donates it.
            sharding = blueprint.shardings.model[leaf.path]
            model[leaf.path] = jnp.copy(put_anywhere(given[leaf.path], sharding))
    return dataclasses.replace(state, model=model)


def wrong_arrays(state: TrainState, about: dict[str, Any]) -> list[str]:
    """Returns the arrays whose values are not those that were saved."""
    arrays, rows = named_arrays(state), about["arrays"]
    if about["format"] == 1:
        found: dict[str, Any] = dict(digest_v1.sums(arrays))
    else:
        if about["digest"] != ALGORITHM:
            raise CheckpointError(
                f"step {about['step']} has digests of type {about['digest']}, which this version "
                f"cannot verify: it computes {ALGORITHM}"
            )
        found = {name: digest.value for name, digest in digests(arrays)().items()}
    return [show_array(name) for name in found if found[name] != rows[name]["digest"]]
