"""Placing: sw.init and sw.shard, compared with what JAX builds and where its arrays are."""

import collections
import functools
import gc
import os
import re

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src.monitoring import unregister_event_duration_listener
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._place import parts

MESHES = ("data=8", "model=8", "data=2,model=4")


class Scale(nnx.Variable):
    """A user-defined variable type."""


class Mixed(nnx.Module):
    """Batch statistics, dropout with its own rngs, and a user-defined variable type."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.scale = Scale(jax.random.normal(rngs.params(), (16,)))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        return self.dropout(self.norm(self.inner(x))) * self.scale


class Tied(nnx.Module):
    """Two layers that share one kernel, and an embedding that is its own head."""

    def __init__(self, rngs):
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.second = nnx.Linear(16, 16, rngs=rngs)
        self.second.kernel = self.first.kernel
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.head = self.embed


class Containers(nnx.Module):
    def __init__(self, rngs):
        self.by_name = nnx.Dict({k: nnx.Linear(8, 8, rngs=rngs) for k in ("a", "b.c", "1")})
        self.by_number = nnx.List([nnx.Linear(8, 16, rngs=rngs) for _ in range(3)])


class Wide(nnx.Module):
    """Leaves with thousands of elements: identical layers, and leaves computed from others."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(64, 128, rngs=rngs) for _ in range(3)])
        self.ema = nnx.Variable(self.layers[0].kernel[...] * 0.5)
        basis, rest = jnp.split(jax.random.normal(rngs.params(), (128, 128)), 2)
        self.basis, self.rest = nnx.Param(basis), nnx.Param(jnp.tanh(rest))
        self.table = nnx.Variable(jnp.sin(jnp.outer(jnp.arange(128.0), jnp.arange(64.0))))
        self.zeros = nnx.BatchStat(jnp.zeros((128, 64)))


def stacked():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs):
        return models.Mlp(8, 16, rngs)

    return stack(nnx.Rngs(0))


USUAL_FLAGS = os.environ.get("SHARDWISE_TESTS_XLA_FLAGS") == "usual"
MODELS = {
    "mlp": lambda: models.Mlp(16, 32, nnx.Rngs(0)),
    "mixed": lambda: Mixed(nnx.Rngs(0, dropout=1)),
    "tied": lambda: Tied(nnx.Rngs(0)),
    "sequential": lambda: nnx.Sequential(
        nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(16, 8, rngs=nnx.Rngs(1))
    ),
    "lora": lambda: nnx.LoRALinear(16, 32, lora_rank=8, rngs=nnx.Rngs(0)),
    "containers": lambda: Containers(nnx.Rngs(0)),
    "stacked": stacked,
    "wide": lambda: Wide(nnx.Rngs(0)),
    "bfloat16": lambda: nnx.Linear(16, 32, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
}


@functools.cache
def mesh(axes, **more):
    return sw.mesh(axes, on="cpu:8", **more)


def split_all(axes):
    """Returns rules that split each leaf over every mesh axis that divides it."""
    return [sw.fsdp(axis.partition("=")[0], min_bytes=0) for axis in axes.split(",")]


@functools.cache
def unsharded(name):
    """Returns the leaves of the model's state as a plain jit builds it."""
    state = jax.jit(lambda: nnx.split(MODELS[name]())[1])()
    return [words(x) for x in jax.tree.leaves(state)]


@functools.cache
def placed(name, axes):
    """Returns a layout that splits every leaf, and the model that sw.init builds with it."""
    layout = sw.layout(MODELS[name], mesh(axes), split_all(axes))
    return layout, sw.init(MODELS[name], layout)


def words(array):
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def leaves(model):
    return jax.tree.leaves(nnx.split(model)[1] if isinstance(model, nnx.Module) else model)


def assert_lies(layout, model):
    """Asserts that every array is on the layout's mesh, sharded as planned."""
    assert not sw.audit(layout, model)
    for leaf, array in zip(layout.leaves, leaves(model), strict=True):
        assert array.sharding.mesh == layout.mesh, leaf.path
        assert {s.data.shape for s in array.addressable_shards} == {leaf.shard_shape}, leaf.path
        assert len(array.addressable_shards) == layout.mesh.size


@pytest.mark.bitwise
@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_init_gives_the_same_values_in_shards(name, axes):
    """flax#3701, flax#5127, jax#40232: no full copies, correct shardings, identical values."""
    layout, model = placed(name, axes)
    assert_lies(layout, model)
    for leaf in layout.leaves:
        assert leaf.copies < 8 or not any(size % 8 == 0 for size in leaf.shape), leaf.path
    for leaf, array, want in zip(layout.leaves, leaves(model), unsharded(name), strict=True):
        # With its usual flags XLA fuses and vectorises each program in its own way, and rounds
        # with it. Without, as most tests compile, the values are the same to the bit.
        got = words(array)
        if USUAL_FLAGS and jnp.issubdtype(array.dtype, jnp.floating):
            near = 2 * float(jnp.finfo(array.dtype).eps)
            got, want = got.astype("float64"), want.astype("float64")
            np.testing.assert_allclose(got, want, rtol=near, atol=near, err_msg=leaf.path)
        else:
            np.testing.assert_array_equal(got, want, err_msg=leaf.path)


@pytest.mark.parametrize("layers", [1, 6], ids=["at once", "in parts"])
def test_the_same_model_is_compiled_once_in_a_process(layers, monkeypatch):
    """Whoever calls `train_state` and then `fit` waits for the compiler once."""
    monkeypatch.setattr(parts, "_PROGRAMS", collections.OrderedDict())
    lowered = []

    def listen(event, seconds, **about):
        lowered.extend([about] * event.endswith("jaxpr_to_mlir_module_duration"))

    def make():
        return nnx.List([nnx.Linear(8, 24, rngs=nnx.Rngs(i)) for i in range(layers)])

    layout, counts = sw.layout(make, mesh("data=8"), split_all("data=8")), []
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(2):
            model, count = sw.init(make, layout), len(lowered)
            counts.append(count)
        sw.init(make, sw.layout(make, mesh("data=8"), "dp"))
    finally:
        unregister_event_duration_listener(listen)
    assert 0 < counts[0] == counts[1] < len(lowered)
    want = jax.jit(lambda: nnx.split(make())[1])()
    for got, right in zip(leaves(model), leaves(want), strict=True):
        np.testing.assert_array_equal(words(got), words(right))


def test_models_that_differ_in_a_constant_alone_are_different_programs():
    class Constant(nnx.Module):
        def __init__(self, value):
            self.table = nnx.Variable(jnp.asarray(np.full((8, 16), value, "float32")) * 2)

    for value in (1.0, 2.0, 3.0):
        make = functools.partial(Constant, value)
        model = sw.init(make, sw.layout(make, mesh("data=8"), split_all("data=8")))
        np.testing.assert_array_equal(model.table[...], np.full((8, 16), 2 * value))
        del model
        gc.collect()


@pytest.mark.parametrize("name", MODELS)
def test_trees_are_those_of_the_model(name):
    """flax#4129, flax#5110: shardings with the structure of the user's model state."""
    layout, model = placed(name, "data=8")
    plain = MODELS[name]()
    graphdef, state = nnx.split(plain)
    for tree in (layout.abstract, layout.shardings, layout.specs):
        assert jax.tree.structure(tree) == jax.tree.structure(state)
    for planned, array in zip(leaves(layout.abstract), leaves(state), strict=True):
        assert (planned.shape, planned.dtype) == (array.shape, array.dtype)
        assert isinstance(planned.sharding, NamedSharding)
    assert nnx.split(model)[0] == graphdef
    assert nnx.split(sw.shard(plain, layout))[0] == graphdef


@pytest.mark.bitwise
def test_shardings_serve_the_users_own_jit():
    """flax#4129: out_shardings for a hand-written initialisation without full copies."""
    layout, model = placed("mlp", "data=8")
    built = jax.jit(lambda: nnx.split(MODELS["mlp"]())[1], out_shardings=layout.shardings)()
    assert_lies(layout, built)
    for a, b in zip(leaves(built), leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("place", [sw.init, lambda make, layout: sw.shard(make(), layout)])
def test_shared_variables_stay_shared(place):
    layout = sw.layout(MODELS["tied"], mesh("data=8"), split_all("data=8"))
    model = place(MODELS["tied"], layout)
    assert model.first.kernel is model.second.kernel
    assert model.embed is model.head
    assert [leaf.path for leaf in layout.leaves].count("second.kernel") == 0


def test_placed_models_run():
    layout = sw.layout(MODELS["mixed"], mesh("data=8"), split_all("data=8"))
    model, plain = sw.init(MODELS["mixed"], layout), MODELS["mixed"]()
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    np.testing.assert_allclose(model(x), plain(x), rtol=1e-5, atol=1e-5)
    assert type(model.scale) is Scale
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("explicit", [True, ("model",), ("data",)], ids=str)
@pytest.mark.parametrize("name", ["mlp", "mixed", "stacked"])
def test_explicit_meshes(name, explicit):
    """tpu-inference#1917, equinox#1175: Explicit axes do not break these models."""
    make, axes = MODELS[name], "data=2,model=4"
    layout = sw.layout(make, mesh(axes, explicit=explicit), split_all(axes))
    assert AxisType.Explicit in layout.mesh.axis_types
    for model in (sw.init(make, layout), sw.shard(make(), layout)):
        assert_lies(layout, model)
        for array, want in zip(leaves(model), unsharded(name), strict=True):
            assert jax.typeof(array).sharding.mesh.axis_types == layout.mesh.axis_types
            np.testing.assert_allclose(words(array), want, rtol=1e-6)


class Counted:
    """A factory that counts how often it is called."""

    def __init__(self, make):
        self.make, self.calls = make, 0

    def __call__(self):
        self.calls += 1
        return self.make()


def test_errors_are_refused_before_anything_is_built():
    make = Counted(MODELS["mlp"])
    rules = {
        "up.kernel": P("dta"),
        "down.kernel": P(None, ("data", "model")),
        "**.bias": P("data", "x"),
    }
    layout = sw.layout(make, mesh("data=2,model=4"), rules)
    model = make()
    make.calls = 0
    before = len(jax.live_arrays())
    for place in (lambda: sw.init(make, layout), lambda: sw.shard(model, layout)):
        with pytest.raises(sw.LayoutError) as caught:
            place()
        assert {f.path for f in caught.value.findings} == {"up.kernel", "up.bias", "down.bias"}
        assert "did you mean 'data'?" in str(caught.value)
    assert make.calls == 0
    assert len(jax.live_arrays()) == before


def test_a_mesh_without_devices_is_refused():
    make = Counted(MODELS["mlp"])
    layout = sw.layout(make, sw.mesh("data=2,model=4", on="none"))
    make.calls = 0
    words = "layout's mesh data=2,model=4 has no devices.*layout.on(sw.mesh('data=2,model=4'))"
    for place in (lambda: sw.init(make, layout), lambda: sw.shard(make.make(), layout)):
        with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(")", r"\)")):
            place()
    assert make.calls == 0
    assert_lies(layout.on(mesh("data=2,model=4")), sw.init(make, layout.on(mesh("data=2,model=4"))))


def test_a_layout_of_another_model_is_refused():
    class Other(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(16, 64, rngs=nnx.Rngs(0))
            self.extra = nnx.Param(jnp.zeros(3))
            self.down = nnx.Linear(32, 16, use_bias=False, rngs=nnx.Rngs(0))

    layout = sw.layout(MODELS["mlp"], mesh("data=8"), split_all("data=8"))
    model = Other()
    before = len(jax.live_arrays())
    for place in (lambda: sw.init(Other, layout), lambda: sw.shard(model, layout)):
        with pytest.raises(sw.LayoutError) as caught:
            place()
        assert {(f.code, f.path) for f in caught.value.findings} == {
            ("SW202", "down.bias"),
            ("SW203", "extra"),
            ("SW204", "up.kernel"),
            ("SW204", "up.bias"),
        }
        assert "the layout has float32[16, 32], the model has float32[16, 64]" in str(caught.value)
    assert len(jax.live_arrays()) == before


REFUSED = {
    "needs-arguments": (
        lambda width: models.Mlp(width, 32, nnx.Rngs(0)),
        "needs the argument 'width'",
    ),
    "a-model": (
        models.Mlp(16, 32, nnx.Rngs(0)),
        "use sw.shard for a model that already has arrays",
    ),
    "no-model": (lambda: {"kernel": jnp.zeros(3)}, "returned a dict: it must return an nnx.Module"),
    "not-callable": (None, "builds the model, got NoneType"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_init_cannot_build_is_refused(case):
    make, words = REFUSED[case]
    layout = sw.layout(MODELS["mlp"], mesh("data=8"))
    with pytest.raises(ValueError, match=re.escape(words)):
        sw.init(make, layout)


def test_an_abstract_model_cannot_be_sharded():
    layout = sw.layout(MODELS["mlp"], mesh("data=8"))
    with pytest.raises(ValueError, match="down.bias is abstract.*use sw.init"):
        sw.shard(nnx.eval_shape(MODELS["mlp"]), layout)


class Annotated(nnx.Module):
    def __init__(self, spelling, names, rngs):
        init = nnx.with_metadata(nnx.initializers.lecun_normal(), **{spelling: names})
        self.up = nnx.Linear(16, 32, kernel_init=init, rngs=rngs)


LOGICAL = {"embed": "data", "mlp": "model"}


@pytest.mark.parametrize("other", [None, "data=8", "x=8"], ids=["no-mesh", "same-name", "other"])
@pytest.mark.parametrize("names", [("data", "model"), ("embed", "mlp")], ids=["axes", "logical"])
@pytest.mark.parametrize("spelling", ["sharding", "sharding_names", "out_sharding"])
def test_annotated_models_need_no_context(spelling, names, other):
    """sglang-jax#253, maxdiffusion#265, flax#5248: set_mesh is not needed, and does not interfere."""

    def make():
        return Annotated(spelling, names, nnx.Rngs(0))

    def place():
        layout = sw.layout(make, mesh("data=2,model=4"), logical=LOGICAL)
        assert layout["up.kernel"].spec == P("data", "model")
        return layout, sw.init(make, layout)

    if other is None:
        layout, model = place()
    else:
        with jax.set_mesh(mesh(other)):
            layout, model = place()
    assert_lies(layout, model)
    plain = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(model.up.kernel[...], jax.jit(lambda: plain.kernel[...])())
    moved = layout.on(mesh("data=4,model=2"))
    assert_lies(moved, sw.shard(model, moved))


@pytest.mark.bitwise
def test_shard_moves_from_mesh_to_mesh():
    """orbax#648 and flax#5110 without a checkpoint: same values on another mesh and layout."""
    make = MODELS["mixed"]
    model = make()
    for axes in ("data=8", "data=2,model=4", "model=8"):
        layout = sw.layout(make, mesh(axes), split_all(axes))
        model = sw.shard(model, layout)
        assert_lies(layout, model)
    small = sw.layout(make, sw.mesh("data=2", on="cpu:2"), split_all("data=2"))
    model = sw.shard(model, small)
    assert_lies(small, model)
    for array, want in zip(leaves(model), leaves(make()), strict=True):
        np.testing.assert_array_equal(words(array), words(want))


def test_shard_takes_numpy_and_states():
    make = MODELS["mlp"]
    layout = sw.layout(make, mesh("data=8"), split_all("data=8"))
    graphdef, state = nnx.split(make())
    host = jax.tree.map(np.asarray, state)
    for given in (host, nnx.merge(graphdef, host), state):
        placed = sw.shard(given, layout)
        assert type(placed) is type(given)
        assert_lies(layout, placed)
        for array, want in zip(leaves(placed), leaves(state), strict=True):
            np.testing.assert_array_equal(array, want)


def test_shard_moves_an_optimizers_state():
    make, tx = MODELS["mlp"], optax.adamw(1e-3)
    layout = sw.layout(make, mesh("data=2,model=4"), split_all("data=2,model=4"))
    opt = layout.for_optimizer(tx)
    state = tx.init(nnx.state(make(), nnx.Param))
    placed = sw.shard(state, opt)
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    assert_lies(opt, placed)
    with pytest.raises(sw.LayoutError, match="SW203"):
        sw.shard(state, layout)


@pytest.mark.parametrize("name", ["mlp", "mixed", "containers", "stacked"])
def test_init_by_a_lockfile(name, tmp_path):
    make, axes = MODELS[name], "data=2,model=4"
    layout = sw.layout(make, sw.mesh(axes, on="none"), split_all(axes))
    layout.save(tmp_path / "layout.json")
    loaded = sw.load_layout(tmp_path / "layout.json", mesh(axes))
    for model in (sw.init(make, loaded), sw.shard(make(), loaded)):
        assert_lies(layout.on(mesh(axes)), model)
        assert nnx.split(model)[0] == nnx.split(make())[0]


@pytest.mark.parametrize("axes", MESHES)
def test_optimizer_steps_keep_the_shardings(axes):
    """flax#5172, flax#5105: nnx.Optimizer on a placed model leaves it where it is."""
    layout = sw.layout(MODELS["mlp"], mesh(axes), split_all(axes))
    model = sw.init(MODELS["mlp"], layout)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    before = [np.asarray(x) for x in leaves(model)]

    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda m: (m(x) ** 2).mean())(model))

    step(model, optimizer, jnp.ones((8, 16)))
    assert_lies(layout, model)
    moments = layout.for_optimizer(optax.adamw(1e-2))
    for leaf, live in zip(moments.leaves, leaves(nnx.state(optimizer)["opt_state"]), strict=True):
        if leaf.ndim:
            assert live.sharding.is_equivalent_to(NamedSharding(layout.mesh, leaf.spec), leaf.ndim)
    assert any((a != np.asarray(b)).any() for a, b in zip(before, leaves(model), strict=True))
