"""Rules and strategies: their order, what they refuse, and what tensor splits and leaves alone."""

import functools

import forward
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._base import show_line

pytestmark = pytest.mark.usefixtures("built_once")

COLUMN, ROW = P(None, "model"), P("model")
SIXTEEN = P(("model", "seq"))
PAIR = {"up.kernel": COLUMN, "up.bias": ROW, "down.kernel": ROW, "down.bias": P()}
X = jax.ShapeDtypeStruct((2, 6, 16), "float32")
TOKENS = jax.ShapeDtypeStruct((2, 6), "int32")


def lay(make, rules=None, axes="data=2,model=4", **options):
    return sw.layout(make, sw.mesh(axes, on="none"), rules, **options)


def specs(layout):
    return {leaf.path: leaf.spec for leaf in layout.leaves}


def rngs():
    return nnx.Rngs(0)


def mlp():
    return models.Mlp(16, 32, rngs())


def linear(inner, outer, **options):
    return lambda: nnx.Linear(inner, outer, rngs=rngs(), **options)


def conv(inner, outer, **options):
    return lambda: nnx.Conv(inner, outer, (3,), rngs=rngs(), **options)


def named():
    """Returns a layer whose kernel is annotated with two logical names."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
    return linear(8, 16, kernel_init=init)()


class Net(nnx.Module):
    """Modules by name, and the function that calls them."""

    def __init__(self, call, parts):
        self.call = call
        for name, make in parts.items():
            setattr(self, name, make())

    def __call__(self, *args):
        return self.call(self, *args)


def net(call=None, **parts):
    return lambda: Net(call, parts)


# fmt: off
# rules, the spec of up.kernel, and its reason
ORDER = {
    "none": ([None, [], {}], P(), "no rule: replicated on every device"),
    "later overrides": ([{"**": ROW}, {"up.*": COLUMN}], COLUMN, "patterns: path matches 'up.*'"),
    "nested lists": ([[{"up.*": COLUMN}], ({"u?.k*l": ROW},)], ROW, "patterns: path matches 'u?.k*l'"),
    "no opinion": ([{"**.kernel": ROW}, lambda leaf: None], ROW, "patterns: path matches '**.kernel'"),
    "a function sees the spec": ([{"up.kernel": ROW}, lambda leaf: P(*leaf.spec, "data")], P("model", "data"), "<lambda>"),
    "an opinion": (lambda leaf: sw.Opinion(ROW, "so"), ROW, "<lambda>: so"),
    "refined": ([{"*.*": ROW}, lambda leaf: sw.Opinion(P("data"), "so", refines=True)], P("data"), "patterns: path matches '*.*'; then <lambda>: so"),
    "by rank": (sw.by_rank({2: COLUMN, 1: ROW}), COLUMN, "by_rank: a leaf of 2 dims"),
    "replicated on purpose": ([{"**": ROW}, sw.replicate()], P(), "replicate: replicated on every device, as requested"),
    "fsdp": (sw.fsdp("data", min_bytes=2048), P(None, "data"), "fsdp('data'): dim 1 (size 32) is the largest free dim divisible by 2"),
    "fsdp of two axes": (sw.fsdp("data", "model", min_bytes=0), P(None, ("data", "model")), "fsdp('data', 'model'): dim 1 (size 32) is the largest free dim divisible by 8"),
    "fsdp of what is free": ([{"up.*": COLUMN}, sw.fsdp("data", min_bytes=0)], P("data", "model"), "patterns: path matches 'up.*'; then fsdp('data'): dim 0 (size 16) is the largest free dim divisible by 2"),
}
NO_OPINION = {
    "small": (sw.fsdp("data", min_bytes=2049), "2,048 bytes are fewer than min_bytes=2,049"),
    "taken": ([{"**": P("data")}, sw.fsdp("data", min_bytes=0)], "an earlier rule already uses axis 'data'"),
    "indivisible": (sw.fsdp("seq", min_bytes=0), "no free dim of (16, 32) is divisible by 3"),
    "faulty": ([{"**.kernel": P("modle")}, sw.fsdp("data", min_bytes=0)], "an earlier rule's spec does not fit the leaf"),
}

FORM = "give a dict of path patterns, a function of a leaf, a strategy such as sw.fsdp('data') or its name, or a list of these"
STEPS = "is not a path pattern: separate steps with dots, such as 'layers.*.kernel' (one step) or '**.kernel' (any number of steps)"
SPEC = "a rule gives a PartitionSpec, or None for no opinion"
KNOWN = "use 'dp', 'fsdp', 'zero1', 'zero2', 'expert', 'sequence', 'tensor', 'pipeline', or several joined by +, such as 'fsdp+tensor'"
TO = "is not an axis: give an axis name, a tuple of them, or None"
REFUSED = {
    "model": (lambda: lay(3), "the model is 3, an int: give an nnx.Module, or a function of no arguments that returns one"),
    "factory": (lambda: lay(lambda: 3), "the model's factory returned an int: it must return an nnx.Module"),
    "arguments": (lambda: lay(lambda config, *, seed=0: 3), "the model's factory '<lambda>' needs the argument 'config': give a function of no arguments, such as lambda: Model(config, rngs=...)"),
    "mesh": (lambda: sw.layout(mlp, "data=2"), "the mesh is 'data=2', a str: give sw.mesh('data=2,model=4') or a jax.sharding.Mesh"),
    "other mesh": (lambda: lay(mlp).on(None), "the mesh is None, a NoneType: give sw.mesh('data=2,model=4') or a jax.sharding.Mesh"),
    "rule": (lambda: lay(mlp, [5]), f"5 is not a rule: {FORM}"),
    "a bare spec": (lambda: lay(mlp, COLUMN), f"P(None, 'model') is not a rule: {FORM}"),
    "pattern": (lambda: lay(mlp, {"up..kernel": ROW}), f"'up..kernel' {STEPS}"),
    "pattern's type": (lambda: lay(mlp, {3: ROW}), f"3 {STEPS}"),
    "pattern's spec": (lambda: lay(mlp, {"**": "model"}), f"pattern '**' gave 'model', which is a str: {SPEC}"),
    "function": (lambda: lay(mlp, lambda leaf: ("model",)), f"rule '<lambda>' at 'down.bias' gave ('model',), which is a tuple: {SPEC}"),
    "entry": (lambda: lay(mlp, lambda leaf: P(3)), "rule '<lambda>' at 'down.bias' gave P(3), whose entry 3 is not None, an axis name, or a tuple of axis names"),
    "by_rank": (lambda: sw.by_rank([P()]), "by_rank takes {rank: spec}, got a list"),
    "by_rank's rank": (lambda: sw.by_rank({"2": P()}), "by_rank has the rank '2': a rank must be a non-negative integer"),
    "by_rank's spec": (lambda: sw.by_rank({2: "model"}), f"by_rank({{2: ...}}) gave 'model', which is a str: {SPEC}"),
    "fsdp of nothing": (lambda: sw.fsdp(), "fsdp() needs one or more distinct axis names"),
    "fsdp twice": (lambda: sw.fsdp("a", "a"), "fsdp('a', 'a') needs one or more distinct axis names"),
    "fsdp's min_bytes": (lambda: sw.fsdp("data", min_bytes=-1), "fsdp has min_bytes=-1: it must be a non-negative integer"),
    "fsdp's axis": (lambda: lay(mlp, sw.fsdp("dta")), "fsdp uses axis 'dta', which the mesh does not have: did you mean 'data'? its axes are data=2, model=4"),
    "tensor's axis": (lambda: lay(mlp, sw.tensor("tp")), "tensor uses axis 'tp', which the mesh does not have: its axes are data=2, model=4"),
    "tensor of two": (lambda: sw.tensor(("data", "model")), "tensor(('data', 'model')) needs the name of one axis"),
    "unknown": (lambda: lay(mlp, "fsdp+zero"), f"unknown strategy 'fsdp+zero': did you mean 'fsdp+zero2'? U{KNOWN[1:]}"),
    "empty": (lambda: lay(mlp, ""), f"unknown strategy '': {KNOWN}"),
    "contradiction": (lambda: lay(mlp, "fsdp+dp"), "strategy 'fsdp+dp' contradicts itself: use each part once, and either dp or fsdp, zero1 or zero2"),
    "twice": (lambda: lay(mlp, "tensor+tensor"), "strategy 'tensor+tensor' contradicts itself: use each part once, and either dp or fsdp, zero1 or zero2"),
    "no axis for fsdp": (lambda: lay(mlp, "fsdp", "x=2"), "strategy 'fsdp' needs an axis named 'fsdp' or 'data', but the mesh has x=2: rename one, or use sw.fsdp(axis)"),
    "no axis for tensor": (lambda: lay(mlp, "tensor", "x=2"), "strategy 'tensor' needs an axis named 'tensor' or 'tp' or 'model', but the mesh has x=2: rename one, or use sw.tensor(axis)"),
    "logical": (lambda: lay(named, logical={"mlp": 3}), f"logical={{'mlp': 3}} {TO}"),
    "logical tuple": (lambda: lay(named, logical={"mlp": ("data", 3)}), f"logical={{'mlp': ('data', 3)}} {TO}"),
    "inputs of another width": (lambda: lay(mlp, "tensor", inputs=TOKENS), f"Mlp.__call__ cannot be traced: TypeError: dot_general requires contracting dimensions to have the same shape, got (6,) and (16,) at {show_line(models.__file__, 14)}; it was called with int32[2,6]"),
    "too many inputs": (lambda: lay(mlp, "tensor", inputs=(X, X)), "Mlp.__call__ cannot be traced: TypeError: Mlp.__call__() takes 2 positional arguments but 3 were given; it was called with float32[2,6,16], float32[2,6,16]"),
    "unknown input": (lambda: lay(mlp, "tensor", inputs={"y": X}), "Mlp.__call__ cannot be traced: TypeError: Mlp.__call__() got an unexpected keyword argument 'y'; it was called with y=float32[2,6,16]"),
    "nothing to call": (lambda: lay(nnx.Module, "tensor", inputs=X), "Module.__call__ cannot be traced: TypeError: 'Module' object is not callable; it was called with float32[2,6,16]"),
}
# fmt: on


@pytest.mark.parametrize("case", ORDER)
def test_rules_in_order(case):
    rules, spec, reason = ORDER[case]
    leaf = lay(mlp, rules)["up.kernel"]
    assert (leaf.spec, leaf.reason) == (spec, reason)


@pytest.mark.parametrize("case", NO_OPINION)
def test_fsdp_leaves_a_leaf_unsplit(case):
    rules, reason = NO_OPINION[case]
    leaf = lay(mlp, rules, "data=2,model=4,seq=3")["up.kernel"]
    assert (leaf.trail[-1].spec, leaf.trail[-1].reason) == (None, reason)


def test_fsdp_takes_the_axes_that_are_left():
    rules = [{"up.kernel": P("data")}, sw.fsdp("data", "model", min_bytes=0)]
    laid_out = lay(mlp, rules, "data=2,model=4")
    assert laid_out["up.kernel"].spec == P("data", "model")
    assert laid_out["down.kernel"].copies == 1


# The shape of a large leaf, its spec over eight devices, and why it is not the largest dim.
TILES = {
    "rows": ((1024, 1152), P("data"), "dim 0 (size 1024) is the largest free dim divisible by 8 with whole 8x128 tiles in each shard, unlike dim 1 (size 1152)"),
    "heads": ((1024, 8, 64), P("data"), "dim 0 (size 1024) is the largest free dim divisible by 8"),
    "leading dim": ((96, 64, 1000), P("data"), "dim 0 (size 96) is the largest free dim divisible by 8 with whole 8x128 tiles in each shard, unlike dim 2 (size 1000)"),
    "neither": ((536, 1000), P(None, "data"), "dim 1 (size 1000) is the largest free dim divisible by 8"),
    "small": ((128, 1152), P(None, "data"), "dim 1 (size 1152) is the largest free dim divisible by 8"),
}  # fmt: skip


@pytest.mark.parametrize("case", TILES)
def test_fsdp_and_zero_prefer_shards_of_whole_tiles(case):
    shape, spec, reason = TILES[case]
    make = net(weight=lambda: nnx.Param(jnp.zeros(shape)))
    leaf = lay(make, sw.fsdp("data", min_bytes=0), "data=8")["weight"]
    assert (leaf.spec, leaf.trail[-1].reason) == (spec, reason)
    assert lay(make, sw.zero1("data", min_bytes=0), "data=8")["weight"].moments == spec


class Gpt(nnx.Module):
    """Many leaves under 1 MiB, as in small models."""

    def __init__(self, layers=8, width=256, vocab=512):
        self.embed = nnx.Embed(vocab, width, rngs=rngs())
        self.blocks = nnx.List([models.Mlp(width, 2 * width, rngs()) for _ in range(layers)])
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs()) for _ in range(layers)])


def test_fsdp_splits_a_small_model_of_small_leaves():
    layout = lay(Gpt, "fsdp", "data=8")
    assert all(leaf.bytes < 2**20 for leaf in layout.leaves)
    assert layout.bytes_per_device < 1.1 * layout.total_bytes / 8
    left = [leaf for leaf in layout.leaves if leaf.left]
    assert {leaf.ndim for leaf in left} == {1} and not sw.check(layout)
    size = sum(leaf.bytes for leaf in left)
    assert str(layout).endswith(f"; not split: 24 small leaves ({size / 1024:.1f} KiB)")
    assert layout["blocks.3.up.bias"].reason == (
        f"strategy 'fsdp': fsdp('data'): one of 24 small leaves, {size / 1024:.1f} KiB in total "
        f"({size / layout.total_bytes:.1%} of the model): not split, since gathering each would "
        f"cost more than it saves; min_bytes=0 splits them"
    )


@functools.cache
def abstract_gpt(layers, width):
    return nnx.eval_shape(lambda: Gpt(layers, width))


# What fsdp leaves unsplit by default: layers, width, mesh. On more devices less is left.
SIZES = [(1, 32), (8, 256), (24, 64), (40, 8), (3, 1000)]


@pytest.mark.parametrize("axes", ["data=2", "data=8", "data=64", "data=8,model=4", "data=1"])
@pytest.mark.parametrize("layers, width", SIZES)
def test_fsdp_leaves_only_a_small_share_of_the_model_and_of_each_device_unsplit(
    layers, width, axes
):
    model = abstract_gpt(layers, width)
    rules = [{"blocks.*.up.kernel": COLUMN}] if "model" in axes else []
    before, after = lay(model, rules, axes), lay(model, [*rules, sw.fsdp("data")], axes)
    split = lay(model, [*rules, sw.fsdp("data", min_bytes=0)], axes)
    left = [leaf for leaf in after.leaves if leaf.left == "small"]
    size = sum(leaf.shard_bytes for leaf in left)
    assert all(leaf.shard_bytes < 2**20 for leaf in left)
    assert size < 0.01 * before.bytes_per_device or not left
    assert after.bytes_per_device <= 1.1 * split.bytes_per_device
    # Never one of two equal leaves, and never a leaf that is larger than one that is split.
    was = {leaf.path: leaf.shard_bytes for leaf in before.leaves}
    cut = [leaf for leaf in after.leaves if leaf.gathered]
    assert max((was[leaf.path] for leaf in left), default=0) < min(was[x.path] for x in cut)
    again = lay(model, [*rules, sw.fsdp("data")], axes)
    assert specs(again) == specs(after)


def test_fsdp_counts_what_earlier_rules_left_on_each_device():
    # Split four ways by a rule, the kernels are the smallest leaves; unsplit they are the largest.
    parts = {"big": linear(64, 64, use_bias=False), "small": linear(40, 40, use_bias=False)}
    parts |= {"huge": linear(1024, 1024, use_bias=False)}
    left = lay(net(**parts), [{"big.kernel": SIXTEEN}, sw.fsdp("data")], "data=2,model=4,seq=4")
    assert [leaf.path for leaf in left.leaves if leaf.left] == ["big.kernel", "small.kernel"]
    assert left["big.kernel"].spec == SIXTEEN
    assert left["big.kernel"].trail[-1].reason.startswith("one of 2 small leaves, 7.2 KiB in total")
    assert left["small.kernel"].reason.startswith("fsdp('data'): one of 2 small leaves, 7.2 KiB")


def test_indivisible_leaves_are_reported_and_not_counted_as_small():
    make = net(odd=linear(7, 9), drop=lambda: nnx.Dropout(0.1, rngs=rngs()), even=linear(64, 64))
    layout = lay(make, sw.fsdp("data"), "data=8")
    why = {leaf.path: (leaf.left, leaf.reason) for leaf in layout.leaves if leaf.ndim != 2}
    assert why["odd.bias"] == ("indivisible", "fsdp('data'): no free dim of (9,) is divisible by 8")
    assert why["drop.rngs.count"] == ("indivisible", "fsdp('data'): a scalar")
    assert layout["even.kernel"].spec == P("data")
    assert "; not split: 4 indivisible leaves (" in str(layout)


def test_a_saved_layout_and_an_optimizer_layout_keep_what_was_left_unsplit(tmp_path):
    layout = lay(Gpt, "fsdp", "data=8")
    layout.save(tmp_path / "layout.json")
    assert str(sw.load_layout(tmp_path / "layout.json")) == str(layout)
    state = layout.for_optimizer(optax.adam(1e-3))
    assert state["0.mu.blocks.0.up.bias"].left == layout["blocks.0.up.bias"].left == "small"


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == message


def test_a_rule_that_raises_says_where():
    with pytest.raises(ZeroDivisionError) as caught:
        lay(mlp, lambda leaf: 1 / 0)
    assert "raised by the rule '<lambda>' for the leaf 'down.bias'" in caught.value.__notes__


@pytest.mark.parametrize(
    ("axes", "kernel"),
    [
        ("data=2,model=4", P("data", "model")),
        ("data=2,fsdp=2,tp=2", P("fsdp", "tp")),
        ("data=2,tensor=2,tp=2,model=2", P("data", "tensor")),
        ("fsdp=4,model=2", P("fsdp", "model")),
    ],
)
def test_strategies_by_name_choose_their_axes(axes, kernel):
    layout = lay(lambda: models.Mlp(512, 1024, rngs()), "fsdp+tensor", axes)
    assert layout["up.kernel"].spec == kernel and layout["down.bias"].spec == P()
    assert "; then strategy 'fsdp+tensor': fsdp(" in layout["up.kernel"].reason
    assert set(specs(lay(mlp, "dp", axes)).values()) == {P()}


@pytest.mark.parametrize(
    ("logical", "spec", "found"),
    [
        ({"embed": None, "mlp": ("data", "model")}, P(None, ("data", "model")), []),
        ({"embed": [], "mlp": ["model"]}, COLUMN, []),
        ({"embed": "model", "mlp": "model"}, P("model", "model"), ["SW102"]),  # maxtext#2369
        ({"embed": "data"}, P("data", "mlp"), ["SW109"]),  # maxtext#5007
    ],
    ids=["tuple", "lists", "one axis for two names", "one name forgotten"],
)
def test_logical_names(logical, spec, found):
    layout = lay(named, logical=logical)
    assert layout["kernel"].spec == spec
    assert [finding.code for finding in sw.check(layout).errors] == found


INPUTS = {"one": X, "tuple": (X,), "list": [X], "dict": {"x": X}, "array": jnp.ones((2, 16))}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("explicit", [False, True], ids=["Auto", "Explicit"])
def test_inputs_and_axis_types(inputs, explicit):
    mesh = sw.mesh("model=4", on="cpu:4", explicit=explicit)
    layout = sw.layout(mlp, mesh, "tensor", inputs=inputs)
    assert specs(layout) == PAIR
    placed = jax.tree.leaves(layout.shardings)
    assert placed == [NamedSharding(mesh, leaf.spec) for leaf in layout.leaves]


def attend(m, x):
    q, k, v = (t.reshape(*x.shape[:2], 4, 4) for t in jnp.split(m.qkv(x), 3, axis=-1))
    return m.out(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))


def interleave(m, x):
    h = m.up(x).reshape(*x.shape[:2], 8, 4).swapaxes(-1, -2)
    return m.down(h.reshape(*x.shape[:2], 32))


def table(*shape):
    return lambda: nnx.Param(jax.random.normal(jax.random.key(0), shape) / 4)


UP_DOWN = {"up": linear(16, 32), "down": linear(32, 16)}
INPUT = "it is a dim of the inputs"
NORM = "it is reduced over, as a norm or a softmax does"
STREAM = "it is contracted and produced again: the residual stream, or a layer used twice"
# fmt: off
# factory, inputs, and the reasons why leaves are left alone
LEFT_ALONE = {
    "fused qkv": (net(attend, qkv=linear(16, 48), out=linear(16, 16)), X, {"qkv.kernel": f"dim 0: {INPUT}; dim 1: it is split into parts", "qkv.bias": "dim 0: it is split into parts"}),
    "6 heads": (lambda: nnx.MultiHeadAttention(6, 12, decode=False, rngs=rngs()), jax.ShapeDtypeStruct((2, 5, 12), "float32"), {"value.kernel": f"dim 0: {INPUT}; dim 1: its size 6 cannot be split 4 ways; dim 2: its size 2 cannot be split 4 ways", "key.bias": "dim 0: its size 6 cannot be split 4 ways; dim 1: it is contracted between two activations"}),
    "30 wide": (lambda: models.Mlp(16, 30, rngs()), X, {"up.kernel": f"dim 0: {INPUT}; dim 1: its size 30 cannot be split 4 ways"}),
    "residual of inputs": (net(lambda m, x: x + m.layer(x), layer=linear(16, 16)), X, {"layer.kernel": f"dim 0: {STREAM}; dim 1: {STREAM}"}),
    "residual stream": (net(lambda m, x: m.head((h := m.embed(x)) + m.layer(h)), embed=lambda: nnx.Embed(64, 16, rngs=rngs()), layer=linear(16, 16), head=linear(16, 64)), TOKENS, {"layer.kernel": f"dim 0: {STREAM}; dim 1: {STREAM}", "layer.bias": f"dim 0: {STREAM}"}),
    "norm over the hidden width": (net(lambda m, x: m.down(m.norm(m.up(x))), norm=lambda: nnx.LayerNorm(32, rngs=rngs()), **UP_DOWN), X, {"up.kernel": f"dim 0: {INPUT}; dim 1: {NORM}", "up.bias": f"dim 0: {NORM}", "norm.scale": f"dim 0: {NORM}"}),
    "grouped": (net(lambda m, x: m.deep(m.up(x)), up=conv(8, 16), deep=conv(16, 16, feature_group_count=4)), jax.ShapeDtypeStruct((2, 9, 8), "float32"), {"up.kernel": f"dim 0: a convolution slides along it; dim 1: {INPUT}; dim 2: a convolution mixes it within groups", "deep.kernel": "dim 0: a convolution slides along it; dim 1: a convolution mixes it within groups; dim 2: a convolution mixes it within groups"}),
    "a product of leaves": (net(lambda m, x: x + x @ (m.a @ m.b), a=table(16, 8), b=table(8, 16)), X, {"a": f"dim 0: {STREAM}; dim 1: it is contracted between two leaves", "b": f"dim 0: it is contracted between two leaves; dim 1: {STREAM}"}),
    "a transform": (net(lambda m, x: m.down(jnp.fft.fft(m.up(x)).real), **UP_DOWN), X, {"up.kernel": f"dim 0: {INPUT}; dim 1: it goes through 'fft'"}),
    "interleaved heads": (net(interleave, **UP_DOWN), X, {"up.kernel": f"dim 0: {INPUT}; dim 1: it is not the outermost factor of dim 0 of down.kernel", "up.bias": "dim 0: it is not the outermost factor of dim 0 of down.kernel"}),
}
# fmt: on


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_tensor_leaves_alone(case):
    make, inputs, reasons = LEFT_ALONE[case]
    layout = lay(make, "tensor", inputs=inputs)
    assert {path: layout[path].spec for path in reasons} == dict.fromkeys(reasons, P())
    reasons_found = {path: layout[path].trail[-1].reason for path in reasons}
    assert reasons_found == {path: f"left alone; {why}" for path, why in reasons.items()}


@pytest.mark.parametrize("cell", [nnx.LSTMCell, nnx.GRUCell, nnx.OptimizedLSTMCell])
def test_tensor_leaves_recurrent_cells_alone(cell):
    layout = lay(lambda: nnx.RNN(cell(16, 8, rngs=rngs())), "tensor", inputs=X)
    assert set(specs(layout).values()) == {P()}
    assert all(leaf.trail[-1].reason.startswith("left alone") for leaf in layout.leaves)


def test_tensor_leaves_alone_what_an_earlier_rule_split():
    layout = lay(mlp, [{"up.kernel": P(None, "data")}, "tensor"], inputs=X)
    reason = f"left alone; dim 0: {INPUT}; dim 1: an earlier rule already splits up.kernel"
    assert layout["up.kernel"].trail[-1].reason == reason


squash = jax.custom_vjp(lambda x: jnp.tanh(x))
squash.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))
bend = jax.custom_jvp(lambda x: jnp.tanh(x))
bend.defjvp(lambda primals, tangents: (bend(*primals), tangents[0]))


def pure(function):
    def run(m, x):
        graphdef, state = nnx.split(m.mlp)
        return function(lambda state, x: nnx.merge(graphdef, state)(x), state, x)

    return run


def loop(call, state, x):
    _, x = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, call(state, c[1])), (0, x))
    return x


def log(m, x):
    h = m.mlp.up(x)
    jax.debug.print("{}", x.sum())
    jax.debug.callback(lambda h: None, h)
    return m.mlp.down(nnx.relu(h))


def route(m, x):
    weights, chosen = jax.lax.top_k(m.gate(x), 2)
    mixed = (jax.nn.one_hot(chosen, 4) * jax.nn.softmax(weights)[..., None]).sum(-2)
    h = nnx.silu(jnp.einsum("bsw,ewh->bseh", x, m.up[...]))
    return jnp.einsum("bseh,ehw,bse->bsw", h, m.down[...], mixed)


def decoder():
    attention = nnx.MultiHeadAttention(4, 16, decode=True, rngs=rngs())
    attention.init_cache((2, 6, 16))
    return attention


def ensemble():
    members = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: models.Mlp(16, 32, rngs)))
    return members(rngs())


# the calls of one pair of layers, and the all-reduces that each has, where that is sure
AROUND = {
    "custom_vjp": (lambda m, x: m.mlp.down(squash(m.mlp.up(x))), 1),
    "custom_jvp": (lambda m, x: m.mlp.down(bend(m.mlp.up(x))), 1),
    "nnx.remat": (lambda m, x: nnx.remat(models.Mlp.__call__)(m.mlp, x), 1),
    "jax.checkpoint": (pure(lambda call, state, x: jax.checkpoint(call)(state, x)), 1),
    "cond": (pure(lambda f, s, x: jax.lax.cond(x.sum() > 0, f, lambda s, x: 2 * x, s, x)), 1),
    "nnx.cond": (lambda m, x: nnx.cond(x.sum() < 0, lambda m: x, lambda m: m(x), m.mlp), 1),
    "while": (pure(loop), 1),
    "fori": (pure(lambda f, s, x: jax.lax.fori_loop(0, 3, lambda _, x: x + f(s, x), x)), 1),
    "jit in jit": (lambda m, x: nnx.jit(lambda m, x: jax.jit(jnp.sin)(m(x)))(m.mlp, x), 1),
    "vmap": (lambda m, x: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m.mlp, x), 1),
    "debug": (log, None),
}
HEADS = {f"attention.{part}.kernel": COLUMN for part in ("query", "key", "value")}
HEADS |= {"attention.out.kernel": ROW}
CACHE = {f"attention.cached_{part}": P(None, None, "model") for part in ("key", "value")}
STACKED = {"up.kernel": P(None, None, "model"), "up.bias": COLUMN, "down.kernel": COLUMN}
# fmt: off
# factory, inputs, specs, all-reduces
PAIRS = {
    **{case: (net(call, mlp=mlp), X, {f"mlp.{k}": v for k, v in PAIR.items()}, count) for case, (call, count) in AROUND.items()},
    "cache": (net(lambda m, x: m.mlp(m.attention(x)), attention=decoder, mlp=mlp), jax.ShapeDtypeStruct((2, 1, 16), "float32"), HEADS | CACHE | {"mlp.up.kernel": COLUMN}, 2),
    "experts": (net(route, gate=linear(16, 4), up=table(4, 16, 32), down=table(4, 32, 16)), X, {"gate.kernel": P(), "up": P(None, None, "model"), "down": COLUMN}, 1),
    "vmap over a stack": (net(lambda m, x: nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(m.many, x), many=ensemble), X, {f"many.{k}": v for k, v in STACKED.items()}, 1),
}
# fmt: on


def arguments(inputs, mesh):
    x = 10 * jax.random.normal(jax.random.key(1), inputs.shape)
    x = abs(x.astype(inputs.dtype)) if inputs.dtype == jnp.int32 else x / 10
    return x, jax.device_put(x, NamedSharding(mesh, P()))


def unsplit(make, x):
    """Returns the output of the model on one device; built and run by one program, not by dozens."""
    return jax.jit(lambda x: make()(x))(x)


@pytest.mark.parametrize("case", PAIRS)
def test_tensor_finds_pairs(case):
    make, inputs, wanted, all_reduces = PAIRS[case]
    mesh = sw.mesh("model=4", on="cpu:4")
    layout = sw.layout(make, mesh, "tensor", inputs=inputs)
    assert {path: layout[path].spec for path in wanted} == wanted
    assert not sw.check(layout)
    x, placed = arguments(inputs, mesh)
    out, found = forward.run(sw.init(make, layout), (placed,))
    np.testing.assert_allclose(out, unsplit(make, x), rtol=2e-4, atol=2e-5)
    if all_reduces is not None:
        assert found == {"all-reduce": all_reduces}


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "guessed"])
@pytest.mark.parametrize("model", [models.Transformer, models.Scanned])
def test_tensor_then_fsdp(model, traced):
    mesh = sw.mesh("data=2,model=4", on="cpu:8")
    rules = [sw.tensor("model"), sw.fsdp("data", min_bytes=0)]

    def make():
        return model(rngs())

    layout = sw.layout(make, mesh, rules, inputs=TOKENS if traced else None)
    assert not sw.check(layout)
    assert not [e for leaf in layout.leaves for e in leaf.spec if isinstance(e, tuple)]
    kernels = [leaf for leaf in layout.leaves if leaf.path.endswith("kernel")]
    assert {frozenset(leaf.spec) - {None} for leaf in kernels} == {frozenset(("data", "model"))}
    x, placed = arguments(TOKENS, mesh)
    out, _ = forward.run(sw.init(make, layout), (placed,))
    np.testing.assert_allclose(out, unsplit(make, x), rtol=2e-4, atol=2e-5)


def chain(*parts):
    return lambda: nnx.Sequential(*(make() for make in parts))


# fmt: off
# factory, specs of every leaf that is split
GUESSED = {
    "widths": (net(zeta=linear(16, 64), alpha=linear(64, 16), q=linear(16, 16)), {"zeta.kernel": COLUMN, "zeta.bias": ROW, "alpha.kernel": ROW}),
    "gated": (lambda: models.GatedMlp(16, 32, rngs()), {"gate.kernel": COLUMN, "up.kernel": COLUMN, "down.kernel": ROW}),
    "two ways down": (net(a=linear(16, 64), b=linear(64, 16), c=linear(64, 16)), {}),
    "attention": (net(attention=lambda: nnx.MultiHeadAttention(4, 16, use_bias=False, decode=False, rngs=rngs())), HEADS),
    "embedding and head": (net(embed=lambda: nnx.Embed(64, 16, rngs=rngs()), head=linear(16, 64)), {"embed.embedding": ROW, "head.kernel": COLUMN, "head.bias": ROW}),
    "chain": (chain(*[linear(16, 16)] * 3), {"layers.0.kernel": COLUMN, "layers.0.bias": ROW, "layers.1.kernel": ROW}),
    "chain with a norm": (chain(linear(16, 32), lambda: nnx.LayerNorm(32, rngs=rngs()), linear(32, 16)), {}),
    "convolutions": (chain(conv(3, 8), lambda: nnx.BatchNorm(8, rngs=rngs()), conv(8, 4)), {"layers.0.kernel": P(None, None, "model"), **{f"layers.{name}": ROW for name in ("0.bias", "1.bias", "1.mean", "1.scale", "1.var")}, "layers.2.kernel": COLUMN}),
    "a list": (net(parts=lambda: nnx.List([linear(16, 64)(), linear(64, 16)()])), {}),
    "stacked": (ensemble, STACKED),
    "square": (lambda: models.GroupedAttention(16, 4, 4, 4, rngs()), {}),
}
# fmt: on


@pytest.mark.parametrize("case", GUESSED)
def test_tensor_guesses(case):
    make, wanted = GUESSED[case]
    layout = lay(make, "tensor")
    assert {path: spec for path, spec in specs(layout).items() if spec != P()} == wanted
    reason = "guessed from module types and widths (pass inputs= to layout to trace it)"
    assert all(leaf.trail[-1].reason.endswith(reason) for leaf in layout.leaves)
    assert not sw.check(layout, allow=None if wanted else {"SW111": "model"})
