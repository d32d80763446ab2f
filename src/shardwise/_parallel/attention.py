"""Attention with the sequence split over a mesh axis: keys and values go round, queries stay."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._base import public
from .._mesh import AnyMesh
from .manual import find_mesh, in_body, run_manual, vary

_MASKED = -1e30


@public
def sequence_parallel_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis: str,
    causal: bool = False,
    scale: float | None = None,
    block: int = 512,
    mesh: AnyMesh | str | None = None,
) -> jax.Array:
    """Returns softmax attention, exact, with the sequence split over `axis` (ring attention).

    Each device holds the same part of the queries, keys and values. Keys and values go round the
    ring by `ppermute`; what each device keeps is a running softmax of its own queries. The backward
    pass goes round once more and recomputes the scores, so that no device ever holds more than its
    part of anything: memory falls as 1/axis.

    Where it runs is where it is called, as for `sw.pipeline`: in the body of a `jax.shard_map` or
    `sw.simulate` the arrays are this device's own; elsewhere they are whole, and it runs along
    `axis` of `mesh`, or of the mesh that `jax.set_mesh` has set.

    Args:
        query: `(batch, length, heads, head_dim)`, as in `jax.nn.dot_product_attention`.
        key: `(batch, key_length, key_heads, head_dim)`; `heads` is a multiple of `key_heads`.
        value: as `key`; its last dim may differ.
        axis: the mesh axis that splits the length.
        causal: whether a position sees only itself and what is before it.
        scale: of the scores; `1/sqrt(head_dim)` by default.
        block: how many keys are scored at a time, at most; it bounds the memory of the scores.
        mesh: see above.

    Raises:
        ValueError: the shapes do not fit each other or the axis.

    Example:
        >>> import jax, jax.numpy as jnp, shardwise as sw
        >>> q = jax.random.normal(jax.random.key(0), (2, 16, 4, 8))
        >>> out = sw.sequence_parallel_attention(q, q, q, axis="seq", causal=True, mesh="seq=4")
        >>> want = jax.nn.dot_product_attention(q, q, q, is_causal=True)
        >>> bool(jnp.allclose(out, want, atol=1e-5))
        True
    """
    _require_shapes(query, key, value, causal)
    if not isinstance(block, int) or block < 1:
        raise ValueError(f"block is {block!r}: give a number of keys, at least 1")
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    how = Ring(axis, causal, factor, block)
    if in_body(axis):
        # All three alike for JAX's account of what varies, so that their cotangents are too.
        return _attend(how, *vary((query, key, value), like=(query, key, value), axes=(axis,)))
    found = find_mesh(axis, mesh, "sequence_parallel_attention")
    for name, array in (("query", query), ("key", key)):
        if array.shape[1] % found.shape[axis]:
            raise ValueError(
                f"the {name} has length {array.shape[1]}, which axis {axis!r} of size "
                f"{found.shape[axis]} cannot split evenly"
            )
    spec = P(None, axis)
    run = run_manual(
        lambda *arrays: sequence_parallel_attention(
            *arrays, axis=axis, causal=causal, scale=scale, block=block
        ),
        mesh=found,
        is_set=mesh is None,
        axis=axis,
        in_specs=(spec, spec, spec),
        out_specs=spec,
    )
    return run(query, key, value)


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """What is fixed of one attention: the axis, the mask, the scale, and the keys at a time."""

    axis: str
    causal: bool
    scale: float
    block: int

    @property
    def devices(self) -> int:
        """How many devices go round."""
        return jax.lax.axis_size(self.axis)

    def rotate(self, tree: Any) -> Any:
        """Returns what the device before held."""
        ring = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, ring), tree)

    def source(self, steps: Any) -> Any:
        """Returns whose keys are here after so many steps."""
        return (jax.lax.axis_index(self.axis) - steps) % self.devices

    def blocks(self, length: int) -> int:
        """Returns into how many blocks a device's keys are cut, evenly."""
        return next(n for n in range(-(-length // self.block), length + 1) if length % n == 0)

    def scores(self, query: Any, keys: Any, first_key: Any) -> Any:
        """Returns scaled scores `(batch, key_heads, group, queries, keys)` in float32.

        Args:
            query: `(batch, queries, key_heads, group, head_dim)`.
            keys: `(batch, keys, key_heads, head_dim)`.
            first_key: the position of the first key in the whole sequence.
        """
        found = jnp.einsum("bqkgh,bskh->bkgqs", query, keys, preferred_element_type="float32")
        found = found * self.scale
        if not self.causal:
            return found
        queries = jax.lax.axis_index(self.axis) * query.shape[1] + jnp.arange(query.shape[1])
        seen = queries[:, None] >= first_key + jnp.arange(keys.shape[1])
        return jnp.where(seen, found, _MASKED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: Ring, query: Any, key: Any, value: Any) -> Any:
    return _forward(how, query, key, value)[0]


def _forward(how: Ring, query: Any, key: Any, value: Any) -> Any:
    grouped = _group(query, key)
    batch, queries, heads, group, _ = grouped.shape

    def add(state: Any, now: Any) -> tuple[Any, None]:
        """Takes one block of keys into the running softmax."""
        top, total, out = state
        keys, values, first_key = now
        scores = how.scores(grouped, keys, first_key)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights, fade = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
        part = jnp.einsum("bkgqs,bskh->bkgqh", weights, values, preferred_element_type="float32")
        return (new_top, total * fade + weights.sum(-1), out * fade[..., None] + part), None

    def visit(state: Any, keys: Any, values: Any, steps: Any) -> Any:
        return jax.lax.scan(add, state, _in_blocks(how, keys, values, steps))[0]

    shape = (batch, heads, group, queries)
    empty = (
        jnp.full(shape, _MASKED, "float32"),
        jnp.zeros(shape, "float32"),
        jnp.zeros((*shape, value.shape[-1]), "float32"),
    )
    state = visit(vary(empty, like=(query, key, value)), key, value, 0)

    def step(carry: Any, steps: Any) -> tuple[Any, None]:
        state, pair = carry
        pair = how.rotate(pair)
        return (visit(state, pair[0], pair[1], steps), pair), None

    ((top, total, out), _), _ = jax.lax.scan(
        step, (state, (key, value)), jnp.arange(1, how.devices, dtype="int32")
    )
    out = out / total[..., None]
    whole = jnp.moveaxis(out, 3, 1).reshape(*query.shape[:3], -1).astype(query.dtype)
    return whole, (query, key, value, whole, top + jnp.log(total))


def _backward(how: Ring, kept: Any, cotangent: Any) -> Any:
    query, key, value, out, log_total = kept
    grouped, pulled = _group(query, key), _group(cotangent, key)
    # What the softmax's normalisation takes back from each score.
    owed = jnp.sum(cotangent.astype("float32") * out.astype("float32"), axis=-1)
    owed = jnp.moveaxis(_group(owed[..., None], key)[..., 0], 1, 3)

    def pull(to_query: Any, now: Any) -> tuple[Any, Any]:
        keys, values, first_key = now
        weights = jnp.exp(how.scores(grouped, keys, first_key) - log_total[..., None])
        product = functools.partial(jnp.einsum, preferred_element_type="float32")
        to_weights = product("bqkgh,bskh->bkgqs", pulled, values)
        to_scores = weights * (to_weights - owed[..., None]) * how.scale
        to_query = to_query + product("bkgqs,bskh->bqkgh", to_scores, keys)
        to_keys = product("bkgqs,bqkgh->bskh", to_scores, grouped)
        return to_query, (to_keys, product("bkgqs,bqkgh->bskh", weights, pulled))

    def visit(to_query: Any, keys: Any, values: Any, steps: Any) -> Any:
        to_query, parts = jax.lax.scan(pull, to_query, _in_blocks(how, keys, values, steps))
        return to_query, tuple(
            _whole(part, like) for part, like in zip(parts, (keys, values), strict=True)
        )

    to_query = vary(jnp.zeros(grouped.shape, "float32"), like=(query, key, value))
    to_query, to_pair = visit(to_query, key, value, 0)

    def step(carry: Any, steps: Any) -> tuple[Any, None]:
        to_query, to_pair, pair = carry
        # A key's cotangent travels with it, and every device adds its part.
        to_pair, pair = how.rotate((to_pair, pair))
        to_query, parts = visit(to_query, pair[0], pair[1], steps)
        return (to_query, jax.tree.map(jnp.add, to_pair, parts), pair), None

    (to_query, to_pair, _), _ = jax.lax.scan(
        step, (to_query, to_pair, (key, value)), jnp.arange(1, how.devices, dtype="int32")
    )
    to_key, to_value = how.rotate(to_pair)  # home
    return (
        to_query.reshape(query.shape).astype(query.dtype),
        to_key.astype(key.dtype),
        to_value.astype(value.dtype),
    )


_attend.defvjp(_forward, _backward)


def _group(query: Any, key: Any) -> Any:
    """Returns queries by the key head that they share: `(batch, queries, key_heads, group, dim)`."""
    batch, length, heads, dim = query.shape
    return query.reshape(batch, length, key.shape[2], heads // key.shape[2], dim)


def _in_blocks(how: Ring, keys: Any, values: Any, steps: Any) -> tuple[Any, Any, Any]:
    """Returns keys and values block by block, and the position of each block's first key."""
    count = how.blocks(keys.shape[1])

    def cut(x: Any) -> Any:
        return jnp.moveaxis(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 1, 0)

    size = keys.shape[1] // count
    first = how.source(steps) * keys.shape[1] + jnp.arange(count, dtype="int32") * size
    return cut(keys), cut(values), first


def _whole(parts: Any, like: Any) -> Any:
    return jnp.moveaxis(parts, 0, 1).reshape(like.shape)


def _require_shapes(query: Any, key: Any, value: Any, causal: bool) -> None:
    for name, array in (("query", query), ("key", key), ("value", value)):
        if jnp.ndim(array) != 4:
            raise ValueError(
                f"the {name} has shape {jnp.shape(array)}: give (batch, length, heads, head_dim)"
            )
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"key {key.shape} and value {value.shape} differ in batch, length or heads"
        )
    if (query.shape[0], query.shape[-1]) != (key.shape[0], key.shape[-1]):
        raise ValueError(f"query {query.shape} and key {key.shape} differ in batch or head_dim")
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"{query.shape[2]} query heads cannot share {key.shape[2]} key heads evenly"
        )
    if causal and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"causal attention is of one sequence, but the query has length {query.shape[1]} and "
            f"the key {key.shape[1]}"
        )
