"""A mixture of experts: every token goes to a few of many MLPs, on whichever devices they are."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from ._config import Config
from ._layers import gated, into
from ._names import auto_mesh, axes_of, in_pipeline, named


class Experts(nnx.Module):
    """MLPs of which a router chooses a few for each token.

    If the name `experts` maps to a mesh axis, each device holds some of the experts, and tokens
    travel to them and back in two all-to-alls. Sequences are routed independently, so which tokens
    exceed an expert's capacity does not depend on the mesh.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from shardwise import models
        >>> from shardwise.models._experts import Experts
        >>> config = models.Config(layers=1, width=8, hidden=16, heads=2, vocab=32, experts=4)
        >>> nnx.eval_shape(lambda: Experts(config, rngs=nnx.Rngs(0))(jnp.ones((2, 3, 8)))).shape
        (2, 3, 8)
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        """Makes the router and the MLPs."""
        if config.experts is None:
            raise ValueError("a config without experts= has no experts to choose from")
        count, width, hidden = config.experts, config.width, config.hidden
        # The router is small and every device needs it: its experts dim has no name.
        self.router = named(into(rngs.params(), (width, count)), "embed", None)
        up = into(rngs.params(), (count, width, 2, hidden))
        self.up = named(up, "experts", "embed", None, "mlp")
        self.down = named(into(rngs.params(), (count, hidden, width)), "experts", "mlp", "embed")
        self.chosen, self.capacity = config.chosen, config.capacity
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns what is added to the residual stream `x`, `[batch, length, width]`."""
        mix = functools.partial(
            _mix, chosen=self.chosen, capacity=self.capacity, activation=self.activation
        )
        weights = (self.router[...], self.up[...], self.down[...])
        mesh = auto_mesh()
        if mesh is None:
            return mix(x, *weights)
        experts, _, _, mlp = axes_of(self.up.shape, ("experts", None, None, "mlp"), mesh)
        (batch,) = axes_of(x.shape[:1], ("batch",), mesh)
        # Devices that exchange tokens must each have tokens of their own: split the batch over
        # the expert axes too.
        batch = (*batch, *(axis for axis in experts if axis not in batch))
        mlp = tuple(axis for axis in mlp if axis not in batch)
        if not (batch or mlp):
            return mix(x, *weights)
        ways = math.prod(mesh.shape[axis] for axis in batch)
        if x.shape[0] % ways:
            raise ValueError(
                f"{x.shape[0]} sequences cannot be split {ways} ways over {'+'.join(batch)}, as "
                f"experts need: make the batch a multiple of {ways}"
            )
        return jax.shard_map(
            functools.partial(mix, experts=experts, mlp=mlp),
            mesh=mesh,
            in_specs=(P(batch), P(), P(experts, None, None, mlp), P(experts, mlp)),
            out_specs=P(batch),
            # JAX cannot check this under the vmap of a pipeline: it compares what the function
            # returns, which varies along the stages, with specs that do not name them yet.
            check_vma=not in_pipeline(),
        )(x, *weights)


def _mix(
    x: jax.Array,
    router: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    chosen: int,
    capacity: float | None,
    activation: str,
    experts: tuple[str, ...] = (),
    mlp: tuple[str, ...] = (),
) -> jax.Array:
    """Returns the mixed outputs of the experts for one device's sequences.

    Args:
        x: the sequences, `[batch, length, width]`.
        router: `[width, all experts]`.
        up: this device's shard, `[experts, width, 2, hidden]`.
        down: this device's shard, `[experts, hidden, width]`.
        chosen: how many experts a token goes to.
        capacity: a multiple of an expert's even share; None for no limit.
        activation: the activation of the gate.
        experts: the axes over which the experts are split.
        mlp: the axes over which `hidden` is split.
    """
    scores = jnp.einsum("bld,de->ble", x, router, preferred_element_type=jnp.float32)
    best, ids = jax.lax.top_k(scores, chosen)
    shares = jax.nn.softmax(best, axis=-1)
    if capacity is None and not experts:
        answers = _sorted(x, ids, up, down, activation)
    else:
        count, length = router.shape[1], x.shape[1]
        # No expert gets a token twice, so `length` places are always enough.
        places = length if capacity is None else math.ceil(capacity * length * chosen / count)
        places = min(places, length)
        answers = _exchanged(x, ids, up, down, activation, (count, places), experts)
    mixed = jnp.einsum("blkd,blk->bld", answers, shares, preferred_element_type=jnp.float32)
    # Summed after mixing rather than per expert: there is then only one vector per token.
    mixed = jax.lax.psum(mixed, mlp) if mlp else mixed
    return mixed.astype(x.dtype)


def _sorted(
    x: jax.Array, ids: jax.Array, up: jax.Array, down: jax.Array, activation: str
) -> jax.Array:
    """Returns `[batch, length, chosen, width]`, with tokens sorted by expert and no padding."""
    count, width = up.shape[:2]
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    rows = x.reshape(-1, width)[order // ids.shape[-1]]
    sizes = jnp.bincount(flat, length=count).astype(jnp.int32)
    both = jax.lax.ragged_dot(rows, up.reshape(count, width, -1), sizes)
    hidden = gated(both.reshape(len(rows), 2, -1), activation)
    answers = jax.lax.ragged_dot(hidden, down, sizes)
    return answers[jnp.argsort(order)].reshape(*ids.shape, width)


def _exchanged(
    x: jax.Array,
    ids: jax.Array,
    up: jax.Array,
    down: jax.Array,
    activation: str,
    shape: tuple[int, int],
    experts: tuple[str, ...],
) -> jax.Array:
    """Returns `[batch, length, chosen, width]`, with a fixed number of places per expert.

    Args:
        x: the sequences, `[batch, length, width]`.
        ids: the chosen experts, `[batch, length, chosen]`.
        up: this device's shard.
        down: this device's shard.
        activation: the activation of the gate.
        shape: the number of all experts, and of places per sequence in each.
        experts: the axes over which the experts are split.
    """
    count, places = shape
    batch, length, chosen = ids.shape
    # First choices come before second choices, and earlier tokens before later ones.
    wanted = jnp.swapaxes(ids, 1, 2).reshape(batch, -1)
    ranks = jnp.cumsum(jax.nn.one_hot(wanted, count, dtype=jnp.int32), axis=1)
    rank = jnp.take_along_axis(ranks, wanted[..., None], axis=2)[..., 0] - 1
    # Tokens without a place use the slot one past the end: writes there are dropped, and reads
    # give zeros.
    slot = jnp.where(rank < places, wanted * places + rank, count * places)
    rows = jnp.tile(x, (1, chosen, 1))

    def fill(slot: jax.Array, rows: jax.Array) -> jax.Array:
        empty = jnp.zeros((count * places, rows.shape[-1]), rows.dtype)
        return empty.at[slot].set(rows, mode="drop")

    sent = jax.vmap(fill)(slot, rows).reshape(batch, count, places, -1)
    if experts:
        sent = jax.lax.all_to_all(sent, experts, split_axis=1, concat_axis=0, tiled=True)
    hidden = gated(jnp.einsum("becd,edgf->becgf", sent, up), activation)
    answers = jnp.einsum("becf,efd->becd", hidden, down)
    if experts:
        answers = jax.lax.all_to_all(answers, experts, split_axis=0, concat_axis=1, tiled=True)
    answers = answers.reshape(batch, count * places, -1)
    found = jax.vmap(lambda a, s: a.at[s].get(mode="fill", fill_value=0))(answers, slot)
    return jnp.swapaxes(found.reshape(batch, chosen, length, -1), 1, 2)
