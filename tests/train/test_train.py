"""Training: loss curves on eight devices, compared with plain Flax and JAX loops on one."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardwise as sw

STEPS, ROWS, WIDTH, LENGTH, VOCAB, CLASSES = 25, 16, 16, 8, 32, 8
# Float32 on eight devices sums in a different order than on one; relative, over 25 steps.
TOLERANCE = 2e-5


def waves(key, shape, dtype, out_sharding=None):
    """Other numbers for each key, which compile in a fraction of the time of random ones."""
    phase = jax.random.key_data(key)[..., -1] % 97
    return jnp.sin((jnp.arange(np.prod(shape)) + phase).astype(dtype) ** 2).reshape(shape) / 4


# How the layers are initialised: tests/place has what is random, and these steps start from it.
LAYER = {"kernel_init": waves, "use_bias": False}


class ConvNet(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(8, 8, (3, 3), **LAYER, rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, (3, 3), **LAYER, rngs=rngs)
        self.norm2 = nnx.BatchNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean((1, 2)))


class Block(nnx.Module):
    """Pre-norm attention and MLP; attention along `axis`, if given."""

    def __init__(self, rngs, rate=0.0, axis=None):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.LinearGeneral(WIDTH, (3, 8, 2), **LAYER, rngs=rngs)
        self.out = nnx.LinearGeneral((8, 2), WIDTH, axis=(-2, -1), **LAYER, rngs=rngs)
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 32, **LAYER, rngs=rngs)
        self.down = nnx.Linear(32, WIDTH, **LAYER, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None
        self.axis = axis

    def __call__(self, x):
        q, k, v = (self.qkv(self.norm1(x))[:, :, i] for i in range(3))
        if self.axis is None:
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = sw.sequence_parallel_attention(q, k, v, axis=self.axis, causal=True)
        x = x + self.out(mixed)
        hidden = nnx.gelu(self.up(self.norm2(x)))
        return x + self.down(hidden if self.dropout is None else self.dropout(hidden))


class Transformer(nnx.Module):
    def __init__(self, rngs, **how):
        self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=waves, rngs=rngs)
        self.block = Block(rngs, **how)
        self.head = nnx.Linear(WIDTH, VOCAB, kernel_init=waves, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.block(self.embed(tokens)))


def stack(make, layers, rngs):
    return nnx.split_rngs(splits=layers)(nnx.vmap(make, in_axes=(0,), out_axes=0))(rngs)


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def scan(x, block):
    return block(x)


class Scanned(nnx.Module):
    """A transformer with its layers stacked and scanned over."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=waves, rngs=rngs)
        self.blocks = stack(lambda rngs: Block(rngs, 0.2), 2, rngs)

    def __call__(self, tokens):
        return self.embed.attend(scan(self.embed(tokens), self.blocks))


class Residual(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(WIDTH, WIDTH, kernel_init=waves, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.inner(x))


class Deep(nnx.Module):
    """Stacked layers that are scanned over, or run as a pipeline along `axis`."""

    def __init__(self, rngs, axis=None):
        self.blocks = stack(Residual, 4, rngs)
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.axis = axis

    def __call__(self, x):
        if self.axis is None:
            return self.head(scan(x, self.blocks))
        return self.head(sw.pipeline(self.blocks, axis=self.axis, microbatches=4)(x))


def squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def classes(model, batch):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def next_token(model, tokens):
    logits = model(tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def draw(*shape, classes=None, seed=0):
    rng = np.random.default_rng(seed)
    if classes:
        return rng.integers(0, classes, (STEPS, *shape), dtype="int32")
    return rng.normal(size=(STEPS, *shape)).astype("float32")


TOKENS = (draw(ROWS, 1, classes=VOCAB) + np.arange(LENGTH, dtype="int32")) % VOCAB
VECTORS = {"x": draw(ROWS, WIDTH), "y": draw(ROWS, WIDTH, seed=1)}
IMAGES = {"x": draw(ROWS, 6, 6, 8), "y": draw(ROWS, classes=CLASSES)}

# Each: the model, its loss, a batch for each step.
MODELS = {
    "mlp": (lambda: models.Mlp(WIDTH, 32, nnx.Rngs(0)), squares, VECTORS),
    "conv": (lambda: ConvNet(nnx.Rngs(0)), classes, IMAGES),
    "dropout": (lambda: Transformer(nnx.Rngs(0), rate=0.2), next_token, TOKENS),
    "scanned": (lambda: Scanned(nnx.Rngs(0)), next_token, TOKENS),
    "deep": (lambda: Deep(nnx.Rngs(0)), squares, VECTORS),
    "staged": (lambda: Deep(nnx.Rngs(0), "stage"), squares, VECTORS),
    "whole": (lambda: Transformer(nnx.Rngs(0)), next_token, TOKENS),
    "split": (lambda: Transformer(nnx.Rngs(0), axis="seq"), next_token, TOKENS),
}
FSDP = sw.fsdp("data", min_bytes=0)
ZERO1, ZERO2 = sw.zero1("data", min_bytes=0), sw.zero2("data", min_bytes=0)
# Each: the mesh, the rules, and the spec of the batch if it is not split over the data axes.
MESHES = {
    "one": ("data=1", "dp", None),
    "dp": ("data=8", "dp", None),
    "fsdp": ("data=8", [FSDP], None),
    "tensor": ("model=8", "tensor", None),
    "fsdp+tensor": ("data=2,model=4", [sw.tensor("model"), FSDP], None),
    "pipeline+fsdp": ("data=2,stage=4", [{"blocks.**": P("stage")}, FSDP], None),
    "sequence": ("data=2,seq=4", [FSDP], P("data", "seq")),
    "zero1": ("data=8", [ZERO1], None),
    "zero2": ("data=8", [ZERO2], None),
    "zero1+tensor": ("data=2,model=4", [sw.tensor("model"), ZERO1], None),
    "zero2+tensor": ("data=2,model=4", [sw.tensor("model"), ZERO2], None),
}


def optimizer():
    return optax.adamw(3e-3, eps=1e-5)


@functools.cache
def mesh(axes, **more):
    return sw.mesh(axes, on="cpu:1" if axes == "data=1" else "cpu:8", **more)


def one_batch(batches, step):
    return jax.tree.map(lambda x: x[step], batches)


@functools.cache
def recipe(name, batch_spec=None):
    make, loss, batches = MODELS[name]
    batch = one_batch(batches, 0)
    return sw.Recipe(
        model=make, loss=loss, optimizer=optimizer(), batch=batch, batch_spec=batch_spec
    )


@functools.cache
def reference(name):
    """Returns the losses and variables of a plain Flax loop, as in its guide, on one device."""
    make, loss, batches = MODELS[name]
    model = make()
    tx = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    @nnx.jit
    def step(model, tx, batch):
        value, grads = nnx.value_and_grad(loss)(model, batch)
        tx.update(model, grads)
        return value

    losses = [float(step(model, tx, one_batch(batches, i))) for i in range(STEPS)]
    return losses, flat(nnx.split(model)[1])


def flat(state):
    """Returns every variable of a state as NumPy, by dotted path."""
    found = {}
    for path, variable in nnx.to_flat_state(state):
        array = variable.get_value()
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        array = jax.random.key_data(array) if is_key else array
        found[".".join(map(str, path))] = np.asarray(array)
    return found


@functools.cache
def trained(name, where):
    """Returns the losses of all steps, and the last state, its layout and its step."""
    axes, rules, spec = MESHES[where]
    given = recipe(name, spec)
    layout = sw.layout(given.model, mesh(axes), rules)
    state, step = sw.train_state(given, layout), sw.train_step(given, layout)
    losses = []
    for i in range(STEPS):
        state, metrics = step(state, one_batch(MODELS[name][2], i))
        # Read each loss at once: steps queued on two cores starve each other's collectives, and
        # XLA aborts a process whose devices wait for each other for 40 seconds.
        losses.append(float(metrics["loss"]))
    return losses, state, layout, step


CASES = [
    ("mlp", "one", "mlp"),
    *((name, where, name) for name in ("mlp", "conv") for where in list(MESHES)[1:5]),
    *((name, where, name) for name in ("dropout", "scanned") for where in list(MESHES)[1:5]),
    ("staged", "pipeline+fsdp", "deep"),
    ("split", "sequence", "whole"),
    *(("mlp", where, "mlp") for where in list(MESHES)[-4:]),
    *((name, where, name) for name in ("conv", "scanned") for where in ("zero1", "zero2+tensor")),
    ("dropout", "zero2", "dropout"),
]


@pytest.mark.parametrize(("name", "where", "plain"), CASES, ids=["-".join(c[:2]) for c in CASES])
def test_loss_curves_are_those_of_one_device(name, where, plain):
    losses, state, layout, _ = trained(name, where)
    want, variables = reference(plain)
    np.testing.assert_allclose(losses, want, rtol=TOLERANCE)
    assert want[-1] < want[0] and int(state.step) == STEPS
    planned = layout if "zero" not in where else layout.for_optimizer(optimizer())
    assert where in ("one", "dp") or any(leaf.copies < 8 for leaf in planned.leaves)
    got = flat(nnx.split(state.to_model(recipe(name).model))[1])
    assert got.keys() == variables.keys() == state.model.keys()
    for path, value in variables.items():
        exact = np.issubdtype(value.dtype, np.integer)
        # An Adam step is as large for a gradient of rounding errors as for a large gradient.
        near = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-4}
        np.testing.assert_allclose(got[path], value, **near, err_msg=path)


def test_models_carry_variables_that_are_not_parameters():
    """Statistics have changed, and each layer's dropout has counted each call."""
    state = trained("conv", "fsdp")[1]
    assert np.abs(np.asarray(state.model["norm1.mean"])).max() > 1e-3
    for name, want in (("dropout", STEPS), ("scanned", [STEPS] * 2)):
        state = trained(name, "fsdp+tensor")[1]
        (path,) = (path for path in state.model if path.endswith("dropout.rngs.count"))
        np.testing.assert_array_equal(state.model[path], want)


def test_a_hand_written_step_has_the_same_losses():
    tx = optimizer()

    def loss(w, batch):
        hidden = jax.nn.gelu(batch["x"] @ w["up"]["kernel"] + w["up"]["bias"])
        out = hidden @ w["down"]["kernel"] + w["down"]["bias"]
        return jnp.mean((out - batch["y"]) ** 2)

    @jax.jit
    def step(w, opt, batch):
        value, grads = jax.value_and_grad(loss)(w, batch)
        updates, opt = tx.update(grads, opt, w)
        return optax.apply_updates(w, updates), opt, value

    w = nnx.to_pure_dict(nnx.state(MODELS["mlp"][0]()))
    opt, losses = tx.init(w), []
    for i in range(STEPS):
        w, opt, value = step(w, opt, one_batch(VECTORS, i))
        losses.append(float(value))
    for where in ("dp", "fsdp+tensor"):
        got, state, _, _ = trained("mlp", where)
        np.testing.assert_allclose(got, losses, rtol=TOLERANCE)
        for layer, name in (("up", "kernel"), ("down", "bias")):
            np.testing.assert_allclose(state.model[f"{layer}.{name}"], w[layer][name], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("mlp", "fsdp+tensor"),
        ("conv", "fsdp"),
        ("scanned", "fsdp+tensor"),
        ("mlp", "zero1"),
        ("scanned", "zero2+tensor"),
    ],
)
def test_the_state_is_placed_as_planned_and_compiles_once(name, where):
    _, state, layout, step = trained(name, where)
    # jax 0.10 writes the sharding of stacked keys as P(None): one more cache entry, same program.
    assert step.jitted._cache_size() <= 1 + (name == "scanned")
    assert not sw.audit(layout, state.to_model(recipe(name).model))
    moments = layout.for_optimizer(optimizer())
    assert [leaf.path for leaf in moments.leaves] == list(state.optimizer)
    for part, planned in ((state.model, layout), (state.optimizer, moments)):
        for leaf in planned.leaves:
            shards = part[leaf.path].addressable_shards
            assert {s.data.shape for s in shards} == {leaf.shard_shape}, leaf.path
            assert len({s.device for s in shards}) == 8
    assert_lies(state, step)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), step.blueprint.abstract
    )
    assert any(leaf.copies < 8 for leaf in moments.leaves)


def assert_lies(state, step):
    """Asserts that every array of the state has the sharding of the step's plan."""
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(step.blueprint.shardings), strict=True)
    for array, sharding in pairs:
        assert array.sharding.is_equivalent_to(sharding, array.ndim), (array, sharding)


@functools.cache
def small(axes="data=2,model=4"):
    """Returns the recipe of the MLP, a layout that splits it, and its step, used by many tests."""
    given = recipe("mlp")
    layout = sw.layout(given.model, mesh(axes), "fsdp+tensor" if "model" in axes else "dp")
    return given, layout, sw.train_step(given, layout)


def test_the_given_state_is_donated(tmp_path):
    given, layout, step = small()
    batch = one_batch(VECTORS, 0)
    state = sw.train_state(given, layout)
    after, _ = step(state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))
    words = "this state was donated to a step.*use the state that the step returned"
    with pytest.raises(ValueError, match=words):
        state.to_model(given.model)
    with pytest.raises(ValueError, match=words):
        sw.Checkpoints(tmp_path).save(1, state)
    for _ in range(2):  # before and after JAX's own fast path
        with pytest.raises(ValueError, match=words):
            step(state, batch)
        after, _ = step(after, batch)


def test_batches_of_host_and_device_are_the_same_step():
    given, layout, _ = small()
    step = sw.train_step(given, layout)
    state = sw.train_state(given, layout)
    host = one_batch(VECTORS, 0)
    placed = jax.device_put(host, jax.tree.map(lambda x: x.sharding, step.blueprint.batch))
    for batch in (host, placed, jax.tree.map(jnp.asarray, host), host, placed):
        state, metrics = step(state, batch)
        assert metrics["loss"].sharding.is_fully_replicated
    assert step.jitted._cache_size() == 1
    assert not any(x.is_deleted() for x in jax.tree.leaves(placed))
    assert step.blueprint.batch["x"].sharding.spec == P(("data",))


def test_the_state_before_the_first_step():
    given, layout, _ = small()
    state = sw.train_state(given, layout)
    variables = flat(nnx.split(given.model())[1])
    for path, array in state.model.items():
        np.testing.assert_allclose(array, variables[path], rtol=1e-6, err_msg=path)
    want = optimizer().init(nnx.state(given.model(), nnx.Param))
    assert len(jax.tree.leaves(want)) == len(state.optimizer) and int(state.step) == 0
    assert not any(np.asarray(x).any() for x in state.optimizer.values()) and state.ema == {}
    other = lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0))  # noqa: E731
    with pytest.raises(
        ValueError, match="belongs to another model: it has 4 variables, this model has 2"
    ):
        state.to_model(other)


BATCHES = {
    "shape": ({"x": (8, WIDTH)}, "batch['x'] is float32[8, 16], wanted float32[16, 16]"),
    "rank": ({"y": (ROWS,)}, "batch['y'] is float32[16], wanted float32[16, 16]"),
    "dtype": (
        {"x": ((ROWS, WIDTH), "float64")},
        "batch['x'] is float64[16, 16], wanted float32[16, 16] (cast it: .astype('float32'))",
    ),
    "both": (
        {"x": ((8, WIDTH), "int32"), "y": (ROWS, 4)},
        "the batch does not match the recipe: batch['x'] is int32[8, 16], wanted float32[16, 16] (cast "
        "it: .astype('float32')); batch['y'] is float32[16, 4], wanted float32[16, 16]",
    ),
    "no-array": ({"y": "text"}, "batch['y'] has type str, wanted float32[16, 16]"),
    "missing": ({"y": None}, "got batch['x'], wanted batch['x'], batch['y']"),
    "extra": ({"z": (1,)}, "got batch['x'], batch['y'], batch['z'], wanted batch['x'], batch['y']"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_another_batch_is_refused_before_anything_is_compiled(case):
    changes, words = BATCHES[case]
    given, layout, _ = small()
    step, state = sw.train_step(given, layout), sw.train_state(given, layout)
    batch = dict(one_batch(VECTORS, 0))
    for key, change in changes.items():
        shape, dtype = change if change and isinstance(change[0], tuple) else (change, "float32")
        batch[key] = np.zeros(shape, dtype) if isinstance(shape, tuple) else shape
    with pytest.raises(ValueError, match=re.escape(words)):
        step(state, batch)
    assert step.jitted._cache_size() == 0
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def state_of(make=None, tx=None, rules="fsdp+tensor", axes="data=2,model=4", **more):
    given = sw.Recipe(
        model=make or recipe("mlp").model,
        loss=squares,
        optimizer=tx or optimizer(),
        batch=one_batch(VECTORS, 0),
        **more,
    )
    return sw.train_state(given, sw.layout(given.model, mesh(axes), rules))


STATES = {
    "optimizer": (
        lambda: state_of(tx=optax.sgd(0.1)),
        "optimizer.0.count is missing; optimizer.0.mu.down.bias is missing; "
        "optimizer.0.mu.down.kernel is missing; and 6 more",
    ),
    "ema": (lambda: state_of(ema=0.9), "ema.down.bias is not in the recipe"),
    "model": (lambda: state_of(lambda: ConvNet(nnx.Rngs(0))), "down.bias is missing"),
    "width": (
        lambda: state_of(lambda: models.Mlp(WIDTH, 64, nnx.Rngs(0))),
        "down.kernel is float32[64, 16], wanted float32[32, 16]",
    ),
    "layout": (lambda: state_of(rules={"**.kernel": P("data")}), "down.kernel"),
    "mesh": (lambda: state_of(axes="data=8", rules="dp"), "down.kernel"),
    "dict": (dict, "the state has type dict: create one with sw.train_state"),
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_of_another_recipe_is_refused(case):
    make, words = STATES[case]
    state = make()
    with pytest.raises(ValueError, match=re.escape(words)):
        small()[2](state, one_batch(VECTORS, 0))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_layouts_that_cannot_train_are_refused():
    given, layout, _ = small()
    wrong = sw.layout(
        given.model, mesh("data=8"), {"up.kernel": P("dta"), "down.kernel": P(None, None, "data")}
    )
    other = sw.layout(lambda: models.Mlp(WIDTH, 64, nnx.Rngs(0)), mesh("data=8"))
    nowhere = sw.layout(given.model, sw.mesh("data=8", on="none"))
    before = len(jax.live_arrays())
    for make in (sw.train_step, sw.train_state):
        with pytest.raises(sw.LayoutError) as caught:
            make(given, wrong)
        assert {f.path for f in caught.value.findings} == {"up.kernel", "down.kernel"}
        with pytest.raises(sw.LayoutError, match=r"the layout has float32\[64, 16\], the model"):
            make(given, other)
        with pytest.raises(ValueError, match=r"data=8 has no devices.*layout.on\(sw.mesh"):
            make(given, nowhere)
        with pytest.raises(ValueError, match="the recipe has type Layout: give a sw.Recipe"):
            make(layout, given)
        with pytest.raises(ValueError, match="the layout is of type Mesh: make one with sw.layout"):
            make(given, layout.mesh)
    assert len(jax.live_arrays()) == before


def test_layouts_from_a_lockfile_train_too(tmp_path):
    (axes, rules, _), name = MESHES["fsdp+tensor"], "mlp"
    given = recipe(name)
    sw.layout(given.model, sw.mesh(axes, on="none"), rules).save(tmp_path / "layout.json")
    layout = sw.load_layout(tmp_path / "layout.json", mesh(axes))
    state, step = sw.train_state(given, layout), sw.train_step(given, layout)
    losses = []
    for i in range(3):
        state, metrics = step(state, one_batch(MODELS[name][2], i))
        losses.append(float(metrics["loss"]))
    assert losses == trained(name, "fsdp+tensor")[0][:3]
    assert not sw.audit(layout, state.to_model(given.model))


@pytest.mark.parametrize("explicit", [True, ("data",)], ids=["all", "data"])
def test_explicit_meshes(explicit):
    given = recipe("mlp")
    rules = "dp" if explicit is True else "tensor"
    layout = sw.layout(given.model, mesh("data=2,model=4", explicit=explicit), rules)
    assert AxisType.Explicit in layout.mesh.axis_types
    state, step = sw.train_state(given, layout), sw.train_step(given, layout)
    for i in range(5):
        state, metrics = step(state, one_batch(VECTORS, i))
        np.testing.assert_allclose(metrics["loss"], reference("mlp")[0][i], rtol=TOLERANCE)
    assert_lies(state, step)


@pytest.mark.parametrize("axes", ["data=2,model=4", "data=8", "x=2"])
def test_the_callers_mesh_does_not_interfere(axes):
    """orbax#3164, flax#4791: jax.set_mesh around everything, or around a later step only."""
    given, layout, step = small()
    with jax.set_mesh(sw.mesh(axes, on="cpu:8" if axes != "x=2" else "cpu:2")):
        inner = sw.layout(given.model, layout.mesh, "fsdp+tensor")
        state = sw.train_state(given, inner)
        for i in range(2):
            state, metrics = step(state, one_batch(VECTORS, i))
            np.testing.assert_allclose(metrics["loss"], reference("mlp")[0][i], rtol=TOLERANCE)
    state, metrics = step(state, one_batch(VECTORS, 2))
    np.testing.assert_allclose(metrics["loss"], reference("mlp")[0][2], rtol=TOLERANCE)
    assert_lies(state, step)


# --- weights that exist ---------------------------------------------------------------------------


class Small(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.drop(self.up(x)))


def small_recipe(**more):
    return sw.Recipe(
        model=Small,
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.adam(1e-2),
        batch=jax.ShapeDtypeStruct((16, 16), "float32"),
        **more,
    )


GIVEN = {
    "model": lambda model: model,
    "state": lambda model: nnx.split(model)[1],
    "arrays": lambda model: {
        ".".join(map(str, path)): x[...] if isinstance(x, nnx.Variable) else x
        for path, x in nnx.to_flat_state(nnx.split(model)[1])
    },
    "sharded": lambda model: sw.shard(model, small_layout()),
}


def small_layout():
    return sw.layout(Small, sw.mesh("data=8", on="cpu:8"), sw.fsdp("data", min_bytes=0))


@pytest.mark.parametrize("kind", GIVEN)
def test_a_state_starts_from_given_weights(kind):
    model = Small(7)
    given = GIVEN[kind](model)
    recipe, layout = small_recipe(ema=0.9), small_layout()
    state = sw.train_state(recipe, layout, model=given)
    assert not sw.audit(layout, state.to_model(Small)).errors
    np.testing.assert_array_equal(state.model["up.kernel"], model.up.kernel[...])
    np.testing.assert_array_equal(state.ema["up.kernel"], model.up.kernel[...])
    assert int(state.step) == 0 and not np.asarray(state.optimizer["0.mu.up.kernel"]).any()
    key = jax.random.key_data(state.model["drop.rngs.key"])
    np.testing.assert_array_equal(key, jax.random.key_data(model.drop.rngs.key[...]))
    # The step donates its state, but not the given weights.
    step = sw.train_step(recipe, layout)
    for _ in range(2):
        state, _ = step(state, np.ones((16, 16), "float32"))
    for x in jax.tree.leaves(given if kind != "model" else nnx.split(given)[1]):
        assert not x.is_deleted()


def test_donated_weights_become_those_of_the_state():
    recipe, layout = small_recipe(), small_layout()
    step = sw.train_step(recipe, layout)
    batch = np.ones((16, 16), "float32")
    placed, single = GIVEN["arrays"](sw.shard(Small(7), layout)), GIVEN["arrays"](Small(7))
    # One leaf is on one device, and two share their memory.
    shared = {"norm.scale": placed["up.bias"], "up.bias": placed["up.bias"]}
    given = {**placed, **shared, "up.kernel": single["up.kernel"]}
    state = sw.train_state(recipe, layout, model=given, donate=True)
    assert state.model["norm.mean"] is given["norm.mean"]
    assert given["up.kernel"].is_deleted() and not given["up.bias"].is_deleted()
    state, _ = step(state, batch)
    assert given["norm.mean"].is_deleted()
    again = {**GIVEN["arrays"](Small(7)), "norm.scale": single["up.bias"]}
    other, _ = step(sw.train_state(recipe, layout, model=again), batch)
    for path in ("up.kernel", "up.bias", "norm.scale", "norm.mean"):
        np.testing.assert_array_equal(state.model[path], other.model[path])


def test_given_weights_of_another_model_are_refused():
    recipe, layout = small_recipe(), small_layout()
    arrays = sw.train_state(recipe, layout).model
    some = {path: x for path, x in arrays.items() if path.startswith("up.")}
    with pytest.raises(sw.LayoutError) as caught:
        sw.train_state(recipe, layout, model=some)
    assert "SW202" in str(caught.value) and "norm" in str(caught.value)
    state = sw.train_state(recipe, layout, model={**arrays, **some})
    assert state.model.keys() == arrays.keys()
    with pytest.raises(sw.LayoutError, match="SW204"):
        sw.train_state(recipe, layout, model={**arrays, "up.bias": np.zeros(3, "float32")})
    with pytest.raises(sw.LayoutError, match="SW203"):
        sw.train_state(recipe, layout, model={**arrays, "down.bias": np.zeros(3, "float32")})
    with pytest.raises(ValueError, match="^up.bias of the given model has type ShapeDtypeStruct"):
        sw.train_state(
            recipe, layout, model={**arrays, "up.bias": jax.ShapeDtypeStruct((32,), "float32")}
        )
    with pytest.raises(ValueError, match="^model has type list: give a model with arrays"):
        sw.train_state(recipe, layout, model=[1])


def test_fit_starts_from_given_weights_unless_it_resumes(tmp_path, capsys):
    recipe, layout = small_recipe(), small_layout()
    data = [np.ones((16, 16), "float32")] * 4
    frozen = dataclasses.replace(recipe, optimizer=optax.sgd(0.0))
    state = sw.fit(frozen, layout, data, steps=1, show=False, model=Small(7))
    np.testing.assert_array_equal(state.model["up.kernel"], Small(7).up.kernel[...])
    place = sw.Checkpoints(tmp_path)
    sw.fit(frozen, layout, data, steps=1, show=False, checkpoints=place)
    state = sw.fit(frozen, layout, data, steps=2, checkpoints=place, model=Small(7))
    np.testing.assert_array_equal(state.model["up.kernel"], Small(0).up.kernel[...])
    assert f"resumed from step 1 in {tmp_path}; model= is ignored" in capsys.readouterr().err


def test_given_weights_may_be_nested_and_help_mentions_them():
    make = lambda: nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))  # noqa: E731
    recipe = sw.Recipe(
        model=make,
        loss=lambda model, x: model(x).mean(),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((8, 16), "float32"),
    )
    layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), "dp")
    ones = {"kernel": np.ones((16, 16), "float32"), "bias": np.ones(16, "float32")}
    state = sw.train_state(recipe, layout, model={"layers": {0: ones}})
    assert float(state.model["layers.0.kernel"][0, 0]) == 1
    del ones["bias"]
    with pytest.raises(sw.LayoutError, match=r"give every array of the recipe's model; \{\*\*sw"):
        sw.train_state(recipe, layout, model={"layers": {0: ones}})


def test_the_norm_of_float16_gradients_does_not_overflow():
    def make():
        return nnx.Linear(
            4, 4, use_bias=False, param_dtype="float16", dtype="float16", rngs=nnx.Rngs(0)
        )

    recipe = sw.Recipe(
        model=make,
        loss=lambda model, x: (model.kernel[...].astype("float32") * 1e4).sum() + 0 * x.sum(),
        optimizer=optax.sgd(1.0),
        batch=jax.ShapeDtypeStruct((8, 4), "float32"),
        clip=4.0,
        ema=np.float64(0.5),
    )
    layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), "dp")
    state, step = sw.train_state(recipe, layout), sw.train_step(recipe, layout)
    before = np.asarray(state.model["kernel"], "float32")
    state, metrics = step(state, np.zeros((8, 4), "float32"))
    np.testing.assert_allclose(metrics["grad_norm"], 4e4, rtol=1e-3)
    after = np.asarray(state.model["kernel"], "float32")
    np.testing.assert_allclose(before - after, 1.0, rtol=2e-3)
    assert state.ema["kernel"].dtype == "float16"
    np.testing.assert_allclose(state.ema["kernel"], (before + after) / 2, atol=2e-3)


def test_integers_that_do_not_fit_are_refused_beside_arrays_on_devices_too():
    def make():
        return nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    recipe = sw.Recipe(
        model=make,
        loss=lambda model, batch: (model(batch["x"]) * batch["n"][:, None]).mean(),
        optimizer=optax.sgd(0.1),
        batch={
            "x": jax.ShapeDtypeStruct((8, 4), "float32"),
            "n": jax.ShapeDtypeStruct((8,), "int64"),
        },
    )
    layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), "dp")
    state, step = sw.train_state(recipe, layout), sw.train_step(recipe, layout)
    numbers = np.arange(8) + 2**40
    with pytest.raises(ValueError, match=r"batch\['n'\] has 1099511627776 in sample 0, which does"):
        step(state, {"x": jnp.ones((8, 4)), "n": numbers})
    step(state, {"x": jnp.ones((8, 4)), "n": np.arange(8)})
