"""Tensor parallelism: specs, and the all-reduces of the real compiled forward pass."""

import re

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx
from forward import collectives, count, run
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw

pytestmark = pytest.mark.usefixtures("built_once")

COLUMN, ROW = P(None, "model"), P("model")


def rngs():
    return nnx.Rngs(0)


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
    "fewer-kv-heads-than-devices": (  # two KV heads cannot be split four ways: they stay replicated
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


def conv(hidden, rngs, **options):
    return nnx.Conv(hidden, hidden, (3, 3), **options, rngs=rngs)


def resized(x):
    return jax.image.resize(x, (x.shape[0], 16, 16, x.shape[3]), "bilinear")


# Operations between two convolutions, and whether channels can be split through them.
BETWEEN = {
    "depthwise": (lambda h, r: conv(h, r, feature_group_count=h), True),
    "depthwise-strided": (lambda h, r: conv(h, r, feature_group_count=h, strides=(2, 2)), True),
    "depthwise-dilated": (
        lambda h, r: conv(h, r, feature_group_count=h, kernel_dilation=(2, 2)),
        True,
    ),
    "grouped": (lambda h, r: conv(h, r, feature_group_count=8), False),  # XLA would gather it
    "average-pool": (lambda h, r: lambda x: nnx.avg_pool(x, (2, 2), (2, 2)), True),
    "resize": (lambda h, r: resized, True),
    "batch-norm": (lambda h, r: nnx.BatchNorm(h, rngs=r), True),
    "group-norm": (lambda h, r: nnx.GroupNorm(h, 8, rngs=r), True),
    "group-norm-of-too-few": (lambda h, r: nnx.GroupNorm(h, 2, rngs=r), False),
}


@pytest.mark.parametrize("case", BETWEEN)
def test_channels_are_split_through_operations_that_keep_them_separate(case):
    between, splits = BETWEEN[case]
    make = lambda: models.Separable(rngs(), between)  # noqa: E731
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 8))
    mesh = sw.mesh("model=4", on="cpu:4")
    layout = sw.layout(make, mesh, sw.tensor("model"), inputs=x)
    assert (layout["up.kernel"].spec == P(None, None, None, "model")) == splits
    assert (layout["down.kernel"].spec == P(None, None, "model")) == splits
    if case == "depthwise":
        assert layout["middle.kernel"].spec == P(None, None, None, "model")
        assert layout["middle.bias"].spec == ROW
    model = sw.init(make, layout)
    output, found = run(model, (jax.device_put(x, NamedSharding(mesh, P())),))
    if splits:
        assert found == {"all-reduce": 1}
    else:
        assert not set(found) - {"all-reduce"}
    gathered = sw.shard(model, sw.layout(model, sw.mesh("model=1", on="cpu:1"), sw.replicate()))
    np.testing.assert_allclose(output, run(gathered, (x,))[0], rtol=2e-4, atol=2e-5)


def cache(kv_heads=4):
    keys, values = jax.random.normal(jax.random.key(2), (2, 2, 8, kv_heads, 8))
    return {"keys": keys, "values": values, "index": jnp.array(2)}


@pytest.mark.parametrize("write", ["slice", "at", "vmap"])
def test_heads_are_split_with_a_cache_among_the_inputs(write):
    make = lambda: models.CachedAttention(16, 8, 4, 8, rngs(), write=write)  # noqa: E731
    x = jax.random.normal(jax.random.key(1), (2, 3, 16))
    mesh = sw.mesh("model=4", on="cpu:4")
    layout = sw.layout(make, mesh, sw.tensor("model"), inputs={"x": x, "cache": cache()})
    wanted = {"q": COLUMN, "k": COLUMN, "v": COLUMN, "o": ROW}
    assert {leaf.path: leaf.spec for leaf in layout.leaves} == wanted
    message = "split the inputs that share it the same way: cache['keys'] (dim 2), cache['values'] (dim 2)"
    assert layout["q"].reason.endswith(message)

    model = sw.init(make, layout)
    heads = NamedSharding(mesh, P(None, None, "model"))
    replicated = NamedSharding(mesh, P())
    placed = {"keys": heads, "values": heads, "index": replicated}
    (output, after), found = run(
        model, (jax.device_put(x, replicated), jax.device_put(cache(), placed))
    )
    assert found == {"all-reduce": 1}
    assert after["keys"].sharding.is_equivalent_to(heads, 4)
    gathered = sw.shard(model, sw.layout(model, sw.mesh("model=1", on="cpu:1"), sw.replicate()))
    (wanted_output, wanted_after), _ = run(gathered, (x, cache()))
    np.testing.assert_allclose(output, wanted_output, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(after["values"], wanted_after["values"], rtol=2e-4, atol=2e-5)


def test_heads_are_split_with_a_cache_that_the_model_keeps():
    make = lambda: models.CachedAttention(16, 8, 4, 8, rngs(), own=(2, 8))  # noqa: E731
    x = jax.random.normal(jax.random.key(1), (2, 3, 16))
    mesh = sw.mesh("model=4", on="cpu:4")
    layout = sw.layout(make, mesh, sw.tensor("model"), inputs=x)
    assert layout["keys"].spec == layout["values"].spec == P(None, None, "model")
    assert layout["q"].spec == COLUMN
    found = collectives(sw.init(make, layout), (jax.device_put(x, NamedSharding(mesh, P())),))
    assert found == {"all-reduce": 1}


def test_a_cache_that_cannot_be_split_keeps_its_heads():
    # Its queries alone could be split, but then the compiler gathers the cache at each call.
    make = lambda: models.CachedAttention(16, 8, 2, 8, rngs())  # noqa: E731
    mesh = sw.mesh("model=4", on="none")
    inputs = {"x": X, "cache": cache(2)}
    layout = sw.layout(make, mesh, sw.tensor("model"), inputs=inputs)
    assert layout["q"].spec == P()
    assert "size 2 cannot be split 4 ways, nor can the cache that has it" in layout.explain("q")


@pytest.mark.parametrize("spec", [P(), P(None, None, "model")], ids=["replicated", "split"])
def test_keys_among_the_inputs_do_not_prevent_a_split(spec):
    make = lambda: models.CrossAttention(16, 8, 8, rngs())  # noqa: E731
    x = jax.random.normal(jax.random.key(1), (2, 3, 16))
    keys, values = jax.random.normal(jax.random.key(2), (2, 2, 5, 8, 8))
    mesh = sw.mesh("model=4", on="cpu:4")
    layout = sw.layout(make, mesh, sw.tensor("model"), inputs=(x, keys, values))
    assert layout["q.kernel"].spec == COLUMN
    assert layout["o.kernel"].spec == ROW
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    args = (place(x, P()), place(keys, spec), place(values, spec))
    assert collectives(sw.init(make, layout), args) == {"all-reduce": 1}


def test_dims_of_the_batch_are_not_split():
    # Input features, and a sequence to which a table of positions is added.
    class Positions(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Param(jnp.zeros((8, 16)))
            self.scale = nnx.Param(jnp.zeros(16))

        def __call__(self, x):
            return (x + self.table[...]) * self.scale[...]

    mesh = sw.mesh("model=4", on="none")
    x = jax.ShapeDtypeStruct((4, 8, 16), "float32")
    layout = sw.layout(lambda: Positions(rngs()), mesh, sw.tensor("model"), inputs=x)
    assert all(leaf.spec == P() for leaf in layout.leaves)
    assert "it is a dim of the inputs" in layout.explain("table")


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


def loss(model, batch):
    logits = model.logits(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


BODY = {
    "embed.embedding": ROW,
    "block.attention.query.kernel": COLUMN,
    "block.mlp.down.kernel": ROW,
}


def body_and_head():
    return models.BodyAndHead(rngs())


def test_a_recipe_is_traced_by_its_loss():
    batch = jax.ShapeDtypeStruct((2, 7), "int32")
    recipe = sw.Recipe(model=body_and_head, loss=loss, optimizer=optax.sgd(0.1), batch=batch)
    mesh = sw.mesh("model=4", on="cpu:4")
    layout = sw.layout(recipe, mesh, "tensor")
    wanted = BODY | {"head.kernel": COLUMN}
    assert {path: layout[path].spec for path in wanted} == wanted
    assert layout["head.kernel"].reason.endswith(
        "no all-reduce, except where the loss reduces along it"
    )

    graphdef, state = nnx.split(sw.init(body_and_head, layout))
    tokens = jax.device_put(jnp.ones((2, 7), int), NamedSharding(mesh, P()))
    step = jax.jit(lambda s, b: loss(nnx.merge(graphdef, s), b)).lower(state, tokens).compile()
    assert set(count(step)) == {"all-reduce"}  # the loss's are of [2, 6], not of the vocabulary
    assert not re.search(r"\[2,6,64\]\S* all-reduce", step.as_text())


def test_a_method_is_traced_by_its_name_or_as_a_function():
    mesh = sw.mesh("model=4", on="cpu:4")
    for method in ("logits", lambda model, tokens: model.logits(tokens)):
        layout = sw.layout(body_and_head, mesh, "tensor", inputs=TOKENS, method=method)
        wanted = BODY | {"head.kernel": COLUMN}
        assert {path: layout[path].spec for path in wanted} == wanted
        assert "traced as one dim of 64" in layout["head.kernel"].reason
        compiled = sw.compile(body_and_head, layout, inputs=TOKENS, method=method)
        assert {row.kind for row in compiled.collectives} == {"all-reduce"}


def test_leaves_that_the_trace_never_reaches_are_guessed():
    mesh = sw.mesh("model=4", on="none")
    layout = sw.layout(body_and_head, mesh, "tensor", inputs=TOKENS)
    wanted = BODY | {"head.kernel": COLUMN}
    assert {path: layout[path].spec for path in wanted} == wanted
    assert layout["head.kernel"].reason == (
        "strategy 'tensor': tensor('model'): dim 1, an output head over a vocabulary of 64; "
        "guessed from module types and widths, since __call__ never uses it"
    )
    layout = sw.layout(body_and_head, mesh, "tensor", inputs=TOKENS, method="embed")
    assert layout["block.norm1.scale"].trail[-1].reason == (
        "left alone: embed never uses it, and its role is not clear from its module's type and widths"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"inputs": TOKENS, "method": "logit"},
            "the model, a BodyAndHead, has no method 'logit'; it has logits",
        ),
        ({"method": "logits"}, "method='logits' needs inputs= to call it with"),
    ],
    ids=["unknown", "without inputs"],
)
def test_a_method_that_cannot_be_traced(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sw.layout(body_and_head, sw.mesh("model=4", on="none"), "tensor", **options)


def test_a_model_that_names_axes_is_traced_on_explicit_axes():
    make = lambda: models.Resharded(rngs())  # noqa: E731
    layout = sw.layout(make, sw.mesh("model=4", on="none", explicit=True), "tensor", inputs=X)
    assert (layout["up.kernel"].spec, layout["down.kernel"].spec) == (COLUMN, ROW)
    message = (
        r"Resharded.__call__ itself names mesh axes, with out_sharding= or reshard at "
        r"\S*models.py:\d+, which needs Explicit axes: make the mesh with "
        r"sw.mesh\(..., explicit=True\)$"
    )
    with pytest.raises(ValueError, match=message):
        sw.layout(make, sw.mesh("model=4", on="none"), "tensor", inputs=X)


def test_inputs_that_fail_are_shown_by_shape_after_the_cause():
    def make():
        return models.CachedAttention(16, 8, 4, 8, rngs())

    inputs = {"x": jnp.ones((2, 3, 15)), "cache": cache()}
    with pytest.raises(ValueError) as caught:
        sw.layout(make, sw.mesh("model=4", on="none"), "tensor", inputs=inputs)
    message = str(caught.value)
    assert message.startswith(
        "CachedAttention.__call__ cannot be traced: ValueError: Size of label "
    )
    assert message.endswith(
        "it was called with x=float32[2,3,15], cache={'keys': float32[2,8,4,8], "
        "'values': float32[2,8,4,8], 'index': int32[]}"
    )


@pytest.mark.parametrize("rule", ["fsdp", sw.tensor("data")], ids=["untraced", "traced"])
@pytest.mark.parametrize("inputs", ["int32[8,128]", {"x": "int32[8, 128]"}], ids=["text", "named"])
def test_shapes_as_text_are_for_the_command_line(rule, inputs):
    make = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))  # noqa: E731
    words = r"inputs has the text 'int32\[.*give jax.ShapeDtypeStruct\(\(8, 128\), 'int32'\)"
    with pytest.raises(ValueError, match=words):
        sw.layout(make, sw.mesh("data=2", on="none"), rule, inputs=inputs)
