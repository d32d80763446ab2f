"""Tensor parallelism: specs, and the all-reduces of the real compiled forward pass."""

import re

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw

COLUMN, ROW = P(None, "model"), P("model")


def rngs():
    return nnx.Rngs(0)


def run(model, args):
    """Returns the output of the compiled forward pass, and how often each collective is in it."""
    graphdef, state = nnx.split(model)
    compiled = jax.jit(lambda s, a: nnx.merge(graphdef, s)(*a)).lower(state, args).compile()
    return compiled(state, args), count(compiled)


def collectives(model, args):
    """Returns how often each collective stands in the compiled forward pass."""
    return run(model, args)[1]


def count(compiled):
    """Returns how often each collective stands in a compiled program."""
    found = re.findall(
        r"= (?:\([^=]*?\)|\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(",
        compiled.as_text(),
    )
    return {kind: found.count(kind) for kind in set(found)}


X = jax.ShapeDtypeStruct((2, 6, 16), "float32")
TOKENS = jax.ShapeDtypeStruct((2, 6), "int32")

# model, inputs, wanted specs, all-reduces in the forward pass
CASES = {
    "linear-act-linear": (
        lambda: models.Mlp(16, 32, rngs()),
        X,
        {"up.kernel": COLUMN, "up.bias": ROW, "down.kernel": ROW, "down.bias": P()},
        1,
    ),
    "gated": (
        lambda: models.GatedMlp(16, 32, rngs()),
        X,
        {"gate.kernel": COLUMN, "up.kernel": COLUMN, "down.kernel": ROW},
        1,
    ),
    "narrow-hidden": (  # the hidden width is smaller than the model's: names and sizes tell nothing
        lambda: models.Mlp(16, 8, rngs()),
        X,
        {"up.kernel": COLUMN, "up.bias": ROW, "down.kernel": ROW, "down.bias": P()},
        1,
    ),
    "multi-head-attention": (
        lambda: nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs()),
        X,
        {
            **{f"{p}.kernel": COLUMN for p in ("query", "key", "value")},
            **{f"{p}.bias": ROW for p in ("query", "key", "value")},
            "out.kernel": ROW,
            "out.bias": P(),
        },
        1,
    ),
    "grouped-kv-repeated": (
        lambda: models.GroupedAttention(16, 8, 4, 4, rngs()),
        X,
        {"q.kernel": COLUMN, "k.kernel": COLUMN, "v.kernel": COLUMN, "o.kernel": ROW},
        1,
    ),
    "grouped-kv-grouped": (
        lambda: models.GroupedAttention(16, 8, 4, 4, rngs(), repeat=False),
        X,
        {"q.kernel": COLUMN, "k.kernel": COLUMN, "v.kernel": COLUMN, "o.kernel": ROW},
        1,
    ),
    "fewer-kv-heads-than-devices": (  # two KV heads cannot be split four ways: they stay whole
        lambda: models.GroupedAttention(16, 8, 2, 4, rngs()),
        X,
        {"q.kernel": COLUMN, "k.kernel": P(), "v.kernel": P(), "o.kernel": ROW},
        1,
    ),
    "fewer-kv-heads-grouped": (
        lambda: models.GroupedAttention(16, 8, 2, 4, rngs(), repeat=False),
        X,
        {"q.kernel": COLUMN, "k.kernel": P(), "v.kernel": P(), "o.kernel": ROW},
        1,
    ),
    "square-projections": (  # every kernel is 16 by 16
        lambda: models.GroupedAttention(16, 4, 4, 4, rngs()),
        X,
        {"q.kernel": COLUMN, "k.kernel": COLUMN, "v.kernel": COLUMN, "o.kernel": ROW},
        1,
    ),
    "einsum": (
        lambda: models.Einsums(rngs()),
        X,
        {
            "qkv.kernel": P(None, None, "model"),
            "out.kernel": ROW,
            "out.bias": P(),
            "up.kernel": P(None, None, "model"),
            "down.kernel": ROW,
        },
        2,
    ),
    "transformer-tied": (
        lambda: models.Transformer(rngs()),
        TOKENS,
        {
            "embed.embedding": ROW,
            "blocks.0.attention.query.kernel": COLUMN,
            "blocks.1.mlp.down.kernel": ROW,
            "blocks.0.norm1.scale": P(),
            "norm.bias": P(),
        },
        1 + 2 * 2,
    ),
    "transformer-untied": (
        lambda: models.Transformer(rngs(), tied=False),
        TOKENS,
        {"embed.embedding": ROW, "head.kernel": COLUMN, "head.bias": ROW},
        1 + 2 * 2,
    ),
    "scanned": (
        lambda: models.Scanned(rngs()),
        TOKENS,
        {
            "blocks.attention.query.kernel": P(None, None, "model"),
            "blocks.attention.query.bias": COLUMN,
            "blocks.attention.out.kernel": COLUMN,
            "blocks.mlp.up.kernel": P(None, None, "model"),
            "blocks.mlp.down.kernel": COLUMN,
            "blocks.norm1.scale": P(),
        },
        1 + 2,  # the loop's body stands once in the program
    ),
    "conv-chain": (
        lambda: models.ConvNet(rngs()),
        jax.ShapeDtypeStruct((2, 8, 8, 3), "float32"),
        {
            "conv2.kernel": P(None, None, None, "model"),
            "conv3.kernel": P(None, None, "model"),
            "conv2.bias": ROW,
            "conv4.kernel": P(None, None, None, "model"),
            "head.kernel": ROW,
        },
        2,
    ),
    "chain-of-four": (
        lambda: nnx.Sequential(
            *[m for _ in range(4) for m in (nnx.Linear(16, 16, rngs=rngs()), nnx.relu)]
        ),
        X,
        {
            "layers.0.kernel": COLUMN,
            "layers.2.kernel": ROW,
            "layers.4.kernel": COLUMN,
            "layers.6.kernel": ROW,
        },
        2,
    ),
    "lone-linear": (
        lambda: nnx.Linear(16, 32, rngs=rngs()),
        X,
        {"kernel": COLUMN, "bias": ROW},
        0,
    ),
    "lora": (
        lambda: nnx.Sequential(
            nnx.LoRALinear(16, 32, lora_rank=2, rngs=rngs()),
            nnx.gelu,
            nnx.Linear(32, 16, rngs=rngs()),
        ),
        X,
        {
            "layers.0.kernel": COLUMN,
            "layers.0.lora.lora_b": COLUMN,
            "layers.0.lora.lora_a": P(),
            "layers.2.kernel": ROW,
        },
        1,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_pairs_by_dataflow(case):
    make, inputs, wanted, all_reduces = CASES[case]
    mesh = sw.mesh("model=4", on="cpu:4")
    layout = sw.layout(make, mesh, sw.tensor("model"), inputs=inputs)
    assert {path: layout[path].spec for path in wanted} == wanted
    assert not sw.check(layout).errors

    model = sw.init(make, layout)
    assert not sw.audit(layout, model)
    key = jax.random.key(1)
    if inputs.dtype == jnp.int32:
        x = jax.random.randint(key, inputs.shape, 0, 64)
    else:
        x = jax.random.normal(key, inputs.shape)
    output, found = run(model, (jax.device_put(x, NamedSharding(mesh, P())),))
    assert found == ({"all-reduce": all_reduces} if all_reduces else {})
    gathered = sw.shard(model, sw.layout(model, sw.mesh("model=1", on="cpu:1"), sw.replicate()))
    np.testing.assert_allclose(output, run(gathered, (x,))[0], rtol=2e-4, atol=2e-5)
