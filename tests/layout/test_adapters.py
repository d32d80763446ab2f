"""Adapters and quantised arrays follow the leaves that they belong to, whatever lays those out."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise import models
from shardwise._nnx import plain_path

qwix = pytest.importorskip("qwix")

pytestmark = pytest.mark.usefixtures("built_once")

X = jax.ShapeDtypeStruct((8, 16), "float32")
TOKENS = jax.ShapeDtypeStruct((4, 8), "int32")
COLUMN, ROW = P(None, "model"), P("model")


def rngs():
    return nnx.Rngs(0)


def mesh(axes="data=2,model=4", on="none"):
    return sw.mesh(axes, on=on)


class Mlp(nnx.Module):
    def __init__(self, layer=nnx.Linear, **options):
        self.up = layer(16, 32, use_bias=False, rngs=rngs(), **options)
        self.down = layer(32, 16, use_bias=False, rngs=rngs(), **options)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class Wrapped(nnx.Module):
    def __init__(self):
        for name, (inner, outer) in {"up": (16, 32), "down": (32, 16)}.items():
            base = nnx.Linear(inner, outer, use_bias=False, rngs=rngs())
            setattr(self, name, nnx.LoRA(inner, 4, outer, base_module=base, rngs=rngs()))

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def adapted(make, x, **options):
    """Returns what qwix makes of a model."""
    provider = qwix.LoraProvider(module_path=".*", rank=4, alpha=8.0, **options)
    x = jnp.ones(x.shape, x.dtype)
    return qwix.apply_lora_to_model(make(), provider, x, rngs=rngs())


def decoder(**config):
    sizes = {"layers": 2, "width": 16, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 64}
    return models.Decoder(models.Config(**{**sizes, **config}), rngs=rngs())


def specs(layout, *paths):
    return [layout[path].spec for path in paths]


FLAX = {
    "LoRALinear": (lambda: Mlp(nnx.LoRALinear, lora_rank=4), "{}.kernel", "{}.lora."),
    "LoRA": (Wrapped, "{}.base_module.kernel", "{}."),
    "qwix": (lambda: adapted(Mlp, X), "{}.kernel", "{}.kernel_"),
    "int8": (
        lambda: adapted(Mlp, X, weight_qtype="int8"),
        "{}.kernel.array.qvalue",
        "{}.kernel_",
    ),
}


@pytest.mark.parametrize("how", ["traced", "guessed", "rules"])
@pytest.mark.parametrize("kind", FLAX)
def test_halves_follow_input_and_output(kind, how):
    make, base, half = FLAX[kind]
    up, down = base.format("up"), base.format("down")
    rules = {"up.kernel": COLUMN, "down.kernel": ROW} if how == "rules" else sw.tensor("model")
    layout = sw.layout(make, mesh(), rules, inputs=X if how == "traced" else None)
    if how == "guessed" and layout[up].spec == P():
        return  # the types of wrapped layers say too little, and adapters follow that
    assert specs(layout, up, down) == [COLUMN, ROW]
    paths = [half.format(name) + ab for name in ("up", "down") for ab in ("lora_a", "lora_b")]
    assert specs(layout, *paths) == [P(), COLUMN, ROW, P()]
    assert not [f for f in sw.check(layout) if f.code == "SW113"]
    told = layout.explain(paths[1])
    assert (
        f"decided by adapter: follows {up} P(None, 'model'): dim 1 as its dim 1; its rank, dim 0, never is"
        in told
    )


STRATEGIES = ["fsdp", "tensor", "fsdp+tensor", "zero1", "zero2+tensor", "dp+tensor"]


@functools.cache  # one factory, so that it is traced once
def factories(scan):
    base = functools.partial(decoder, scan=scan)
    return base, functools.partial(adapted, base, TOKENS, weight_qtype="int4")


@pytest.mark.parametrize(
    ("strategy", "scan"), [*((name, True) for name in STRATEGIES), ("fsdp+tensor", False)]
)
def test_no_strategy_splits_a_rank_nor_contradicts_a_base(strategy, scan):
    base, make = factories(scan)
    layout = sw.layout(make, mesh(), strategy, inputs=TOKENS)
    plain = sw.layout(base, mesh(), strategy, inputs=TOKENS)
    adapters = [leaf for leaf in layout.leaves if leaf.follows and leaf.follows.rank is not None]
    assert len(adapters) == 2 * (6 if scan else 12) + 2
    for leaf in adapters:
        for spec in (leaf.spec, leaf.update_spec):
            assert (*spec, *[None] * leaf.ndim)[leaf.follows.rank] is None, leaf.path
    assert not [f for f in sw.check(layout) if f.code in ("SW104", "SW113")]
    bases = {plain_path(leaf): leaf.spec for leaf in layout.leaves if not leaf.follows}
    for leaf in plain.leaves:  # the base is laid out as if it had no adapters
        found = [[axis == "model" for axis in spec] for spec in (leaf.spec, bases[leaf.path])]
        assert [any(one) and one.index(True) for one in found[:1]] == [
            any(one) and one.index(True) for one in found[1:]
        ], leaf.path


def test_annotations_of_the_base_are_those_of_its_adapters():
    make = functools.partial(adapted, lambda: decoder(scan=True, qkv_bias=True), TOKENS)
    layout = sw.layout(make, mesh(), logical={"embed": "data", "heads": "model", "mlp": "model"})
    found = specs(layout, *(f"blocks.0.attention.{name}" for name in ("q_lora_a", "q_lora_b")))
    assert found == [P(None, "data"), P(None, None, "model")]
    assert specs(layout, "blocks.0.up_lora_b") == [P(None, None, None, "model")]
    # A later rule for the base moves its adapters too.
    later = sw.layout(make, mesh(), {"blocks.0.attention.q": P(None, None, "data")})
    assert specs(later, "blocks.0.attention.q_lora_a", "blocks.0.attention.q_lora_b") == [
        P(),
        P(None, None, "data"),
    ]
    stages = sw.layout(make, mesh("pipe=2"), sw.stages("pipe"))
    assert {leaf.spec for leaf in stages.leaves if leaf.path.startswith("blocks")} == {P("pipe")}


def test_easydel_255_rules_without_lora_leave_no_adapter_replicated():
    # EasyDeL#255: out of memory after an upgrade, since no rule named `lora_a` and `lora_b`.
    make = lambda: Mlp(nnx.LoRALinear, lora_rank=4)  # noqa: E731
    layout = sw.layout(
        make, mesh(), {"up.kernel": P("data", "model"), "down.kernel": P("model", "data")}
    )
    assert [leaf.spec for leaf in layout.leaves if leaf.follows] == [
        ROW,
        P(None, "data"),
        P("data"),
        COLUMN,
    ]
    assert not sw.check(layout)


def test_rules_of_the_user_win():
    make = lambda: Mlp(nnx.LoRALinear, lora_rank=4)  # noqa: E731
    rules = [{"up.kernel": COLUMN, "up.lora.lora_b": P(), "down.lora.lora_a": P(None, "data")}]
    layout = sw.layout(make, mesh(), rules)
    assert specs(layout, "up.lora.lora_b", "down.lora.lora_a") == [P(), P(None, "data")]
    found = {f.path: f.code for f in sw.check(layout) if f.code == "SW113"}
    assert set(found) == {"up.lora.lora_b", "down.lora.lora_a"}
    by_rank = sw.layout(make, mesh(), sw.by_rank({2: COLUMN}))  # about kernels
    assert specs(by_rank, "up.lora.lora_a", "up.lora.lora_b") == [P(), COLUMN]


def conv():
    return nnx.Conv(8, 16, (3, 3), use_bias=False, rngs=rngs())


def general():
    return nnx.LinearGeneral((4, 8), (2, 16), axis=(-2, -1), use_bias=False, rngs=rngs())


def einsum():
    return nnx.Einsum("btd,vd->btv", (16, 16), rngs=rngs())  # square, and the output dim is first


@pytest.mark.parametrize(
    ("make", "shape", "spec", "a", "b"),
    [
        (conv, (2, 5, 5, 8), P(None, None, "data", "model"), P(None, None, "data"), COLUMN),
        # Dims that qwix joins are split as the first of them.
        (general, (2, 4, 8), P("model", None, "data", None), ROW, P(None, "data")),
        (einsum, (2, 3, 16), P("model", "data"), P("data"), COLUMN),
    ],
    ids=["conv", "general", "einsum"],
)
def test_layers_of_qwix(make, shape, spec, a, b):
    adapted_ = functools.partial(adapted, make, jax.ShapeDtypeStruct(shape, "float32"))
    layout = sw.layout(adapted_, mesh(), {"kernel": spec})
    assert specs(layout, "kernel_lora_a", "kernel_lora_b") == [a, b]


class Dora(nnx.LoRALinear):
    def __init__(self):
        super().__init__(16, 32, lora_rank=4, rngs=rngs())
        self.lora.magnitude = nnx.LoRAParam(jnp.ones((1, 32)))
        self.norm_magnitude = nnx.Param(jnp.ones(32))


def test_magnitudes_follow_the_output_dim():
    layout = sw.layout(Dora, mesh(), {"kernel": COLUMN})
    assert layout["lora.magnitude"].spec == COLUMN
    assert layout["norm_magnitude"].follows is None  # of nothing that is called `norm`


TUNIX = {
    "tunix#1138": ({"weight_qtype": "int4", "tile_size": 4}, P(None, "model"), P(None, "model")),
    "tunix#1180": ({"weight_qtype": "int8"}, P("model"), P()),
    "tunix#1186": ({"weight_qtype": "nf4", "tile_size": 8}, P("model", "data"), P(None, "data")),
}


@pytest.mark.parametrize("thread", TUNIX)
def test_scales_follow_their_values_where_they_divide(thread):
    # The threads ask for specs of LoRA and QLoRA leaves that fit those of the base.
    options, spec, scale = TUNIX[thread]
    make = functools.partial(adapted, Mlp, X, **options)
    layout = sw.layout(make, mesh(), {"up.kernel": spec})  # the rules of the plain model
    assert layout["up.kernel.array.qvalue"].spec == spec and not layout.dead_patterns
    assert layout["up.kernel.array.scale"].spec == scale
    assert (*layout["up.kernel_lora_a"].spec, None)[0] == spec[0]
    assert not [f for f in sw.check(layout) if f.code in ("SW104", "SW113")]
    model = sw.init(make, layout.on(mesh(on="cpu:8")))
    assert not sw.audit(layout.on(mesh(on="cpu:8")), model)


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn", "int4", "nf4"])
def test_bytes_are_those_of_live_arrays(qtype):
    make = functools.partial(adapted, Mlp, X, weight_qtype=qtype)
    layout = sw.layout(make, mesh(on="cpu:8"), "fsdp+tensor", inputs=X)
    model = sw.init(make, layout)
    state = nnx.state(model)
    if qtype in ("int8", "float8_e4m3fn"):
        first = jax.devices()[0]
        shards = (s for x in jax.tree.leaves(state) for s in x.addressable_shards)
        assert layout.bytes_per_device == sum(s.data.nbytes for s in shards if s.device == first)
    # Of four bits NumPy knows only bytes; what a program takes is packed.
    taken = jax.jit(lambda state: state).lower(state).compile().memory_analysis()
    assert layout.bytes_per_device == taken.argument_size_in_bytes


def test_a_lockfile_keeps_what_a_leaf_follows(tmp_path):
    make = functools.partial(adapted, Mlp, X, weight_qtype="int8")
    layout = sw.layout(make, mesh(), {"up.kernel_lora_b": ROW})
    layout.save(tmp_path / "layout.json")
    loaded = sw.load_layout(tmp_path / "layout.json")
    by_path = {leaf.path: leaf.follows for leaf in loaded.leaves}
    assert by_path == {leaf.path: leaf.follows for leaf in layout.leaves}
    assert str(sw.check(loaded)) == str(sw.check(layout)) and "SW113" in str(sw.check(loaded))
