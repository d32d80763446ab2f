"""Decoders: published sizes, scanned against unrolled, names against strategies, kernels."""

import dataclasses
import functools
import re
import sys

import forked
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import spmd
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise import models
from shardwise._step.activations import activation_rules, named_activations
from shardwise._step.blueprint import make_blueprint
from shardwise._step.state import TrainState
from shardwise.models import _kernels, _names, _splash

BATCH, LENGTH = 64, 40
SMALL = models.Config(layers=2, width=64, hidden=96, heads=8, kv_heads=4, vocab=128)
# Every option that Gemma 3 uses, and one block left over after two periods of two.
GEMMA = models.Config(
    layers=5,
    width=16,
    hidden=24,
    heads=4,
    kv_heads=2,
    vocab=32,
    tied=True,
    rope_theta=1e6,
    rope_scale=8.0,
    window=3,
    period=2,
    local_theta=1e4,
    query_scale=0.3,
    qk_norm=True,
    post_norms=True,
    offset_norms=True,
    scale_embed=True,
    activation="gelu",
)
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 8)).astype("int32")


def make(config):
    return lambda: models.Decoder(config, rngs=nnx.Rngs(0))


def filled(config):
    """Returns a decoder with random weights; compiling its initialisers would take longer."""
    model, draw = nnx.eval_shape(make(config)), np.random.default_rng(0)
    for _, variable in nnx.to_flat_state(nnx.state(model)):
        values = draw.normal(0.5, 0.2, variable.shape).astype("float32")
        variable.set_value(jnp.asarray(values - 0.5 * (variable.ndim > 2)))
    return model


# Counts from the model cards and the published checkpoints.
PUBLISHED = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma3-1b": 999_885_952,
    "mixtral-8x7b": 46_702_792_704,
}


def arithmetic(c):
    """Returns the number of parameters, computed from the papers' descriptions."""
    attention = c.width * c.depth * (2 * c.heads + 2 * c.kv_heads) + 2 * c.depth
    norms = 4 * c.width
    block = attention + norms + 3 * c.width * c.hidden
    return c.layers * block + c.vocab * c.width + c.width


@pytest.mark.parametrize("name", models.CONFIGS)
def test_published_decoders_have_their_published_sizes(name):
    config = models.CONFIGS[name]
    state = nnx.state(nnx.eval_shape(make(config)))
    count = sum(int(np.prod(x.shape, dtype="int64")) for x in jax.tree.leaves(state))
    assert count == (PUBLISHED[name] if name in PUBLISHED else arithmetic(config))
    assert config.scan and len(jax.tree.leaves(state)) < 140


def test_the_parameter_count_matches_the_published_one():
    config = models.CONFIGS["gemma3-1b"]
    assert arithmetic(config) == PUBLISHED["gemma3-1b"]
    assert [config.is_local(i) for i in range(7)] == [True] * 5 + [False, True]


REJECTED = {
    "heads": ({"width": 65}, "width 65 is not a multiple of heads 8: set depth="),
    "kv-heads": ({"kv_heads": 3}, "heads 8 is not a multiple of kv_heads 3"),
    "odd": ({"depth": 7}, "depth 7 is odd"),
    "no-period": ({"period": 0}, "period 0 and window None do not go together"),
    "bands": ({"rope_bands": (4.0, 1.0, 64)}, "rope_bands must be (low, high, length) with"),
    "cap": ({"attention_cap": 0.0}, "attention_cap must be positive, got 0.0"),
    "theta": ({"rope_theta": -1.0}, "rope_theta must be positive, got -1.0"),
    "period": ({"period": 4}, "period 4 and window None do not go together"),
    "no-window": ({"window": 0, "period": 2}, "window must be a positive integer, got 0"),
    "activation": ({"activation": "relu"}, "activation must be silu or gelu, got 'relu'"),
    "chosen": (
        {"experts": 2, "chosen": 3},
        "chosen must be between 1 and the number of experts, 2, got 3",
    ),
    "capacity": ({"capacity": 1.0}, "capacity is 1.0 and experts is None"),
    "param-dtype": ({"param_dtype": "int8"}, "param_dtype must be float32, bfloat16 or float16"),
    "saved": (
        {"remat": "save:q,w"},
        "remat 'save:q,w' names w: the activations of a block are input",
    ),
    "saved-experts": ({"remat": "save:up", "experts": 2}, "remat 'save:up' names up"),
    "remat": ({"remat": "some"}, "remat 'some' is not a policy in jax.checkpoint_policies"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_invalid_configs_are_rejected(case):
    change, words = REJECTED[case]
    with pytest.raises(ValueError, match=re.escape(words)):
        dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize("scan", [False, True])
def test_parameters_have_the_dtype_of_the_config(scan):
    config = dataclasses.replace(GEMMA, scan=scan)
    wide, narrow = (
        nnx.eval_shape(make(dataclasses.replace(config, param_dtype=dtype)))
        for dtype in ("float32", "bfloat16")
    )
    shapes = zip(*(nnx.to_flat_state(nnx.state(model)) for model in (wide, narrow)), strict=True)
    for (path, one), (same, other) in shapes:
        assert path == same and one.shape == other.shape
        assert one.out_sharding == other.out_sharding
        assert (one.dtype, other.dtype) == (jnp.float32, jnp.bfloat16)
    # AdamW's moments too: what stays on the devices between steps is halved.
    sizes = [
        sum(
            x.size * x.dtype.itemsize
            for x in jax.tree.leaves(nnx.eval_shape(optax.adamw(1e-3).init, state))
        )
        for state in (nnx.state(wide, nnx.Param), nnx.state(narrow, nnx.Param))
    ]
    assert sizes[0] - 2 * sizes[1] == -4  # the count of steps


def unrolled(model, config):
    """Returns an unrolled decoder with the weights of a scanned one."""
    plain = nnx.eval_shape(make(dataclasses.replace(config, scan=False, remat=None)))
    weights = {}
    periods = config.layers // config.period
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        kind, value = path[0], variable.get_value()
        if kind == "blocks":
            places = [path[1] + i * config.period for i in range(periods)]
            weights |= {(kind, at, *path[2:]): x for at, x in zip(places, value, strict=True)}
        elif kind == "rest":
            weights["blocks", path[1] + periods * config.period, *path[2:]] = value
        else:
            weights[path] = value
    for path, variable in nnx.to_flat_state(nnx.state(plain)):
        variable.set_value(weights.pop(path))
    assert not weights
    return plain


SCANNED = {
    "gemma": dataclasses.replace(GEMMA, remat="nothing_saveable", scan=True),
    "experts": dataclasses.replace(SMALL, vocab=32, experts=4, remat="dots_saveable", scan=True),
}


@pytest.mark.parametrize("case", SCANNED)
def test_scanned_and_unrolled_are_the_same(case):
    config = SCANNED[case]
    model = filled(config)

    run = nnx.jit(lambda model: model(TOKENS))
    got, want = run(model), run(unrolled(model, config))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("scan", [False, True])
def test_remat_keeps_only_the_residual_stream(scan):
    config = dataclasses.replace(SMALL, remat="nothing_saveable", scan=scan)
    graphdef, state = nnx.split(nnx.eval_shape(make(config)))

    def forward(state):
        return jax.vjp(lambda state: nnx.merge(graphdef, state)(TOKENS), state)[1]

    kept = [x.shape for x in jax.tree.leaves(jax.eval_shape(forward, state))]
    hidden = [shape for shape in kept if config.hidden in shape[-1:] and 8 in shape]
    assert not hidden
    # A scan keeps one per layer, stacked, and no weights besides the inputs.
    assert not scan or sum(shape == (2, 2, 8, 64) for shape in kept) == 1
    weights = [x.shape for x in jax.tree.leaves(state) if x.ndim > 2]
    assert all(kept.count(shape) <= weights.count(shape) for shape in weights)


def test_local_layers_see_their_window_and_no_layer_the_future():
    config = dataclasses.replace(GEMMA, layers=2, period=3, scan=True)  # both local, not scanned
    model = filled(config)
    assert not model.scan and len(model.blocks) == 2
    logits = jax.jit(lambda x: model(x))
    want = np.asarray(logits(TOKENS))
    # Two layers with a window of three: a position sees itself and the four before it.
    for changed, seen in ((0, range(0, 5)), (3, range(3, 8)), (7, (7,))):
        other = TOKENS.copy()
        other[:, changed] = (other[:, changed] + 1) % 32
        moved = np.abs(np.asarray(logits(other)) - want).max((0, 2)) > 1e-6
        assert np.flatnonzero(moved).tolist() == list(seen)


def test_scaled_positions_are_divided_positions():
    x = jax.random.normal(jax.random.key(0), (1, 17, 1, 8))
    from shardwise.models._layers import Rope

    np.testing.assert_allclose(
        Rope(1e4, 8.0).rotate(jnp.broadcast_to(x[:, :1], x.shape))[:, ::8],
        Rope(1e4).rotate(jnp.broadcast_to(x[:, :1], (1, 3, 1, 8))),
        atol=1e-5,
    )


# Names.


def bare(config):
    """Returns a function that builds the same decoder without any names."""

    def build():
        model = make(config)()
        for _, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Variable):
                node.del_metadata("out_sharding")
                node.del_metadata("sharding_rules")
        return model

    return build


STRATEGIES = {
    "none": ("data=8", None),
    "fsdp": ("data=8", [sw.fsdp("data", min_bytes=0)]),
    "fsdp+tensor": ("data=2,model=4", [sw.tensor("model"), sw.fsdp("data", min_bytes=0)]),
    "patterns": ("data=2,model=4", {"**.q": P(None, "model")}),
}
INPUTS = jax.ShapeDtypeStruct((BATCH, LENGTH), "int32")


@pytest.mark.parametrize("case", STRATEGIES)
def test_names_do_not_change_strategies(case):
    axes, rules = STRATEGIES[case]
    mesh = sw.mesh(axes, on="none")
    for config in (SMALL, dataclasses.replace(SMALL, scan=True)):
        named, plain = (
            sw.layout(m, mesh, rules, inputs=INPUTS) for m in (make(config), bare(config))
        )
        assert [(a.path, a.shard_shape) for a in named.leaves] == [
            (b.path, b.shard_shape) for b in plain.leaves
        ]
        codes = [[(f.code, f.path) for f in sw.check(x)] for x in (named, plain)]
        assert codes[0] == codes[1]
    assert case == "none" or any(leaf.copies < 8 for leaf in named.leaves)


LOGICAL = {
    "embed": "data",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "vocab": "model",
    "layers": None,
}


def test_a_layout_by_names_alone():
    config = dataclasses.replace(SMALL, scan=True, experts=4)
    mesh = sw.mesh("data=2,model=4", on="none")
    layout = sw.layout(make(config), mesh, logical={**LOGICAL, "experts": "data", "embed": None})
    assert layout["blocks.0.experts.up"].spec == P(None, "data", None, None, "model")
    layout = sw.layout(make(dataclasses.replace(SMALL, scan=True)), mesh, logical=LOGICAL)
    assert layout["blocks.0.attention.q"].spec == P(None, "data", "model", None)
    assert layout["embed"].spec == P("model", "data")
    assert layout["norm.scale"].spec == P("data")
    assert not sw.check(layout).errors


@pytest.mark.parametrize("eager", [True, False])
def test_decoders_are_made_with_and_without_a_mesh(eager):
    with nnx.use_eager_sharding(eager):
        for config in (dataclasses.replace(SMALL, layers=1, scan=scan) for scan in (False, True)):
            free = nnx.state(nnx.eval_shape(make(config)))
            with jax.set_mesh(sw.mesh("data=8", on="cpu:8")):
                held = nnx.state(make(config)())
            assert jax.tree.structure(free) == jax.tree.structure(held)
            assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(held))


# Activations.


RULES = {
    "dp": ("data=8", "dp", None, {"batch": ("data",)}),
    "fsdp": ("data=8", [sw.fsdp("data", min_bytes=0)], None, {"batch": ("data",)}),
    "names": (
        "data=2,model=4",
        None,
        LOGICAL,
        {"batch": ("data",), **{n: ("model",) for n, a in LOGICAL.items() if a == "model"}},
    ),
    "differ": (
        "data=2,model=4",
        {"**.q": P(None, "model"), "**.up": P(None, None, "model"), "**.down": P("model")},
        None,
        {"batch": ("data",), "mlp": ("model",)},  # the heads of the output are not split
    ),
    "experts": ("data=2,expert=4", None, {"experts": "expert"}, None),
    "experts-data": ("data=4,model=2", None, {"experts": "data"}, None),
}


@pytest.mark.parametrize("case", RULES)
def test_activation_rules(case):
    axes, rules, logical, want = RULES[case]
    config = dataclasses.replace(SMALL, experts=4) if case.startswith("experts") else SMALL
    layout = sw.layout(make(config), sw.mesh(axes, on="none"), rules, logical=logical)
    if case == "experts":
        want = {"batch": ("data", "expert"), "experts": ("expert",)}
    if case == "experts-data":
        want = {"batch": ("data",), "experts": ("data",)}
    assert dict(activation_rules(layout)) == want


def test_rules_of_the_batch_and_of_the_caller():
    layout = sw.layout(make(SMALL), sw.mesh("data=2,seq=4", on="none"), "dp")
    recipe = recipe_of(SMALL, batch_spec=P("data", "seq"))
    batch = make_blueprint(recipe, layout).batch
    assert dict(activation_rules(layout, batch)) == {"batch": ("data",), "length": ("seq",)}
    with spmd.logical_axis_rules((("mine", "seq"), ("embed", "data"), ("batch", "seq"))):
        with named_activations(layout, batch):
            active = dict(spmd.get_logical_axis_rules())
            # The layout's rules replace those for its own names; the others stay.
            assert active == {"mine": "seq", "batch": ("data",), "length": ("seq",)}
        assert dict(spmd.get_logical_axis_rules())["embed"] == "data"


CONSTRAINED = {
    "names": ((8, 6, 4), ("batch", None, "heads"), "[{'data'}, {?}, {'model'}]"),
    "indivisible": ((8, 6), ("batch", "heads"), "[{'data'}, {?}]"),
    "unknown": ((8, 4), ("other", "elsewhere"), None),
    "twice": ((8, 4), ("batch", "again"), "[{'data'}, {?}]"),
}


@pytest.mark.parametrize("case", CONSTRAINED)
def test_constraints_by_name(case):
    shape, names, want = CONSTRAINED[case]
    rules = (("batch", ("data",)), ("heads", "model"), ("again", "data"), ("elsewhere", "gone"))
    mesh = sw.mesh("data=2,model=4", on="cpu:8")
    x = jax.ShapeDtypeStruct(shape, "float32")
    function = _names.constrain

    def lowered():
        return jax.jit(lambda x: function(x, *names)).lower(x).as_text().replace('"', "'")

    with jax.set_mesh(mesh):
        assert "sharding_constraint" not in lowered()  # no rules
        with spmd.logical_axis_rules(rules):
            text = lowered()
            assert want is None or want in text
            assert ("sharding_constraint" in text) == (want is not None)
    y = np.ones(shape)
    with spmd.logical_axis_rules(rules):
        assert function(y, *names) is y  # no mesh
        for kind in (AxisType.Explicit, AxisType.Manual):
            other = AbstractMesh((2, 4), ("data", "model"), axis_types=(kind, AxisType.Auto))
            with jax.sharding.use_abstract_mesh(other):
                assert function(y, *names) is y


def recipe_of(config, **more):
    given = {"compute_dtype": "bfloat16", "optimizer": optax.adamw(1e-3), **more}
    batch = jax.ShapeDtypeStruct((BATCH, LENGTH), "int32")
    return sw.Recipe(model=make(config), loss=models.next_token_loss, batch=batch, **given)


# Run in a separate process, since XLA's warnings go to the stderr of the process.
COMPILE = """
import dataclasses, re, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
sys.path[:0] = sys.argv[1:]
import shardwise as sw
import test_models as t
for case, scan in (("fsdp", False), ("fsdp+tensor", True)):
    config = dataclasses.replace(t.SMALL, scan=scan, layers=2 if scan else 1)
    axes, rules = t.STRATEGIES[case]
    layout = sw.layout(t.make(config), sw.mesh(axes, on="cpu:8"), rules, inputs=t.INPUTS)
    plan = t.make_blueprint(t.recipe_of(config), layout)
    text = jax.jit(plan.step, donate_argnums=0).lower(plan.abstract, plan.batch).compile().as_text()
    print(case, scan, sorted(set(re.findall(r"(?:f32|bf16)\\[64,40[^\\]]*\\]", text))))
    assert re.search(r"(?:f32|bf16)\\[(?:8|32),40", text)
    # The layers of a stack are gathered one at a time.
    assert not re.search(r"\\[2,64[^\\]]*\\]\\S* all-gather", text), scan
"""


def test_no_device_holds_activations_of_the_whole_batch(request):
    folders = [str(request.path.parent), str(request.path.parents[1] / "support")]
    done = forked.run([sys.executable, "-c", COMPILE, *folders])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["fsdp False []", "fsdp+tensor True []"]
    assert "Involuntary full rematerialization" not in done.stderr


def test_a_step_on_a_mesh_equals_that_of_one_device():
    config = dataclasses.replace(SMALL, layers=1)
    tokens = np.random.default_rng(0).integers(0, 128, (BATCH, LENGTH)).astype("int32")
    weights = nnx.state(filled(config))
    found = []
    for axes, rules, logical in (("data=1", "dp", None), ("data=2,model=4", None, LOGICAL)):
        recipe = recipe_of(config, compute_dtype=None, optimizer=optax.sgd(0.5))
        mesh = sw.mesh(axes, on="cpu:1" if axes == "data=1" else "cpu:8")
        plan = make_blueprint(recipe, sw.layout(make(config), mesh, rules, logical=logical))
        leaves = zip(jax.tree.leaves(weights), jax.tree.leaves(plan.abstract.model), strict=True)
        model = [jax.device_put(x, planned.sharding) for x, planned in leaves]
        zero = jnp.zeros((), "int32", device=plan.abstract.step.sharding)
        paths = [leaf.path for leaf in plan.layout.leaves]
        state = TrainState(zero, dict(zip(paths, model, strict=True)), {}, {})
        batch = jax.device_put(tokens, plan.batch.sharding)
        after, metrics = jax.jit(plan.step)(state, batch)
        found.append((float(metrics["loss"]), np.asarray(after.model["blocks.0.attention.k"])))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=2e-5)
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=2e-4, atol=2e-5)


# Kernels.


def qkv(heads, kv_heads, depth, length=256):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, length, n, depth) for n in (heads, kv_heads, kv_heads, heads)]
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


SPLASH = {
    "grouped": (4, 2, 64, None, None),
    "window": (4, 1, 128, 100, None),
    "capped": (4, 2, 64, 100, 0.5),
}


@pytest.mark.parametrize("case", SPLASH)
def test_splash_attention_is_attention(case):
    heads, kv_heads, depth, window, cap = SPLASH[case]
    q, k, v, weights = qkv(heads, kv_heads, depth)
    mesh = sw.mesh("data=2,model=4", on="cpu:8")

    def run(attend):
        def total(q, k, v):
            return (attend(q, k, v, scale=0.1, window=window, cap=cap) * weights).sum()

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(q, k, v)

    want = run(_kernels.causal_attention)
    with jax.set_mesh(mesh):
        no_rules = jax.eval_shape(
            functools.partial(_splash.split_splash, scale=1.0, window=None), q, k, v
        )
        with spmd.logical_axis_rules((("batch", ("data",)), ("heads", ("model",)))):
            split = run(functools.partial(_splash.split_splash, interpret=True))
    assert no_rules is None
    for got in (run(functools.partial(_splash.splash, interpret=True)), split):
        np.testing.assert_allclose(got[0], want[0], rtol=1e-4)
        for a, b in zip(got[1], want[1], strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


def lowered_for(platform, kind, config):
    """Returns the training step lowered for absent devices."""
    mesh = AbstractMesh(
        (2, 2),
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
        abstract_device=AbstractDevice(device_kind=kind, num_cores=None, platform=platform),
    )
    layout = sw.layout(make(config), mesh, logical={**LOGICAL, "vocab": None})
    recipe = dataclasses.replace(
        recipe_of(config), batch=jax.ShapeDtypeStruct((4, 256), "int32"), batch_spec=P("data")
    )
    blueprint = make_blueprint(recipe, layout)
    step = jax.jit(blueprint.step).trace(blueprint.abstract, blueprint.batch)
    name = {"gpu": "cuda"}.get(platform, platform)
    return step.lower(lowering_platforms=(name,)).as_text()


def test_each_platform_gets_its_own_attention():
    config = dataclasses.replace(SMALL, depth=64, window=128, period=2)
    text = lowered_for("tpu", "TPU v5", config)
    assert "tpu_custom_call" in text and "splash" in text
    short = lowered_for("tpu", "TPU v5", dataclasses.replace(config, depth=32))
    assert "tpu_custom_call" not in short
    # Lowering for a GPU works whether cuDNN is installed or not.
    assert "tpu_custom_call" not in lowered_for("gpu", "NVIDIA H200", config)
    assert "custom_call" not in lowered_for("cpu", "cpu", config).replace("@Sharding", "")
