"""Estimates of layouts that only come out right if the step is partitioned as XLA has it."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw


def sent(found):
    return {axis: sum(b for _, b in kinds.values()) for axis, kinds in found.by_axis.items()}


class Ring(nnx.Module):
    """A decoder of one layer, whose attention runs around the ring of the axis `seq`."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(512, 128, rngs=rngs)
        self.norm = nnx.LayerNorm(128, rngs=rngs)
        self.qkv = nnx.Linear(128, 384, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(128, 512, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        q, k, v = jnp.split(self.qkv(self.norm(x)).reshape(*x.shape[:2], 6, 64), 3, axis=2)
        mixed = sw.sequence_parallel_attention(q, k, v, axis="seq", causal=True)
        return self.head(x + mixed.reshape(x.shape))


def ring():
    def loss(model, tokens):
        logits = model(tokens).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    return sw.Recipe(
        model=lambda: Ring(nnx.Rngs(0)),
        loss=loss,
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((8, 256), "int32"),
        batch_spec=P("data", "seq"),
        compute_dtype="bfloat16",
    )


def test_sequence_parallelism_sends_what_the_compiled_step_sends():
    """Shardy would split features in place of the batch, if it saw the step as JAX lowers it."""
    recipe = ring()
    rules = sw.fsdp("data", min_bytes=0)
    layout = sw.layout(recipe.model, sw.mesh("data=2,seq=2", on="h100:1x4"), rules)
    compiled = sw.compile(recipe, layout, show=False)
    mine, theirs = sw.estimate(recipe, layout).by_axis, compiled.by_axis
    # The ring. How gradients are summed over both axes differs between versions of XLA.
    assert mine["seq"]["collective-permute"][1] == theirs["seq"]["collective-permute"][1]
    assert sum(sent(compiled).values()) == pytest.approx(
        sum(b for kinds in mine.values() for _, b in kinds.values()), rel=0.2
    )
    assert "all-to-all" not in mine["data"]
    # What the compiler made without a name (merged products, fusions) has the line of its parts.
    time = compiled.time
    assert time is not None
    assert sum(line.seconds for line in time.lines) > 0.75 * time.seconds
    # Slices of a track follow or contain each other to the nanosecond, in order.
    ends = {}
    for event in compiled.timeline().to_chrome()["traceEvents"]:
        if event["ph"] == "X":
            begin, end = round(1000 * event["ts"]), round(1000 * (event["ts"] + event["dur"]))
            assert begin >= ends.get(event["tid"], 0)
            ends[event["tid"]] = end


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.cell = nnx.GRUCell(128, 128, rngs=rngs)

    def __call__(self, x):
        start = jnp.zeros((x.shape[0], 128))
        return jax.lax.scan(self.cell, start, jnp.swapaxes(x, 0, 1))[1]


def test_a_loop_reduces_what_it_sums_once():
    recipe = sw.Recipe(
        model=lambda: Recurrent(nnx.Rngs(0)),
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((16, 64, 128), "float32"),
    )
    layout = sw.layout(recipe.model, sw.mesh("data=4", on="h100:1x4"), "dp")
    parameters = 2 * 3 * 128 * 128 * 4
    assert sent(sw.estimate(recipe, layout))["data"] == pytest.approx(1.5 * parameters, rel=0.01)


class Experts(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Param(jnp.zeros((4, 64, 128)))
        self.down = nnx.Param(jnp.zeros((4, 128, 64)))

    def __call__(self, x):
        sizes = jnp.full(4, x.shape[0] // 4)
        return jax.lax.ragged_dot(jax.lax.ragged_dot(x, self.up[...], sizes), self.down[...], sizes)


@pytest.mark.parametrize(("on", "times"), [("h100:1x1", 4), ("v5e:1x1", 1)])
def test_ragged_products_have_operations(on, times):
    """A GPU's compiler computes all rows with each expert's matrix."""
    recipe = sw.Recipe(
        model=lambda: Experts(nnx.Rngs(0)),
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((1024, 64), "float32"),
    )
    layout = sw.layout(recipe.model, sw.mesh("data=1", on=on), "dp")
    # Forward, and the gradients of both weights and of what is between them.
    assert sw.estimate(recipe, layout).flops == times * 5 * 2 * 1024 * 64 * 128


def test_complex_constants_are_read_past():
    recipe = sw.Recipe(
        model=lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)),
        loss=lambda model, x: (jnp.abs(jnp.fft.fft(model(x)) * (2 + 1j)) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((8, 16), "float32"),
    )
    layout = sw.layout(recipe.model, sw.mesh("data=2", on="h100:1x2"), "dp")
    assert sw.estimate(recipe, layout).seconds > 0
