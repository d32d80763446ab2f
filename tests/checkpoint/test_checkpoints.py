"""Checkpoints: saved in the background, restored bitwise on any mesh, checked before a restore."""

import functools
import gc
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._step.blueprint import make_blueprint

BATCH = jax.ShapeDtypeStruct((16, 8), "float32")
SAMPLES = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")


class Net(nnx.Module):
    """Batch statistics, dropout with its own keys, and layers that every strategy splits."""

    def __init__(self, hidden=16, dtype="float32", extra=False):
        rngs = nnx.Rngs(0, dropout=1)
        self.up = nnx.Linear(8, hidden, param_dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(hidden, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(hidden, 8, rngs=rngs)
        self.extra = nnx.Linear(8, 8, use_bias=False, rngs=rngs) if extra else None

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def loss(model, x):
    return ((model(x) - 1) ** 2).mean()


def recipe_of(make=Net, optimizer=None, **more):
    optimizer = optax.adamw(1e-2) if optimizer is None else optimizer
    return sw.Recipe(model=make, loss=loss, optimizer=optimizer, batch=BATCH, **more)


RECIPE = recipe_of(ema=0.9)


def fsdp(axis="data"):
    return sw.fsdp(axis, min_bytes=0)


TARGETS = {
    "the same": ("data=8", 8, fsdp(), {}),
    "tensor": ("data=2,model=4", 8, sw.tensor("model"), {}),
    "fsdp and tensor": ("data=2,model=4", 8, [sw.tensor("model"), fsdp()], {}),
    "dp": ("data=8", 8, "dp", {}),
    "fewer devices": ("data=2", 2, fsdp(), {}),
    "one device": ("data=1", 1, "dp", {}),
    "explicit": ("data=4,model=2", 8, fsdp(), {"explicit": True}),
    "explicit in part": ("data=4,model=2", 8, fsdp(), {"explicit": ("model",)}),
}


def layout_for(name, make=Net):
    axes, count, rules, more = TARGETS[name]
    return sw.layout(make, sw.mesh(axes, on=f"cpu:{count}", **more), rules)


@functools.cache
def stepper():
    return sw.train_step(RECIPE, layout_for("the same"))


def train(state, steps):
    for _ in range(steps):
        state, _ = stepper()(state, SAMPLES)
    return state


def words(array):
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def bits(state):
    """Returns a copy of every array, by path: dtype, shape and bytes."""
    keyed = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path): (str(x.dtype), x.shape, words(x).tobytes()) for path, x in keyed
    }


def assert_lies(state, recipe, layout):
    """Asserts that every array is placed as planned: nothing is replicated that should be split."""
    planned = jax.tree.leaves(make_blueprint(recipe, layout).abstract)
    for x, want in zip(jax.tree.leaves(state), planned, strict=True):
        assert x.sharding == want.sharding
        shard = want.sharding.shard_shape(want.shape)
        assert {s.data.shape for s in x.addressable_shards} == {shard}
        assert len(x.addressable_shards) == layout.mesh.size
    assert not sw.audit(layout, state.to_model(recipe.model))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of step 3, and the bits that were saved."""
    layout = layout_for("the same")
    state = train(sw.train_state(RECIPE, layout), 3)
    want = bits(state)
    checkpoints = sw.Checkpoints(tmp_path_factory.mktemp("saved"))
    checkpoints.save(3, state, position=48, layout=layout)
    # The state's buffers are donated before anything is written.
    train(state, 50)
    checkpoints.close()
    return checkpoints, want


@pytest.mark.bitwise
@pytest.mark.parametrize("target", TARGETS)
def test_restores_bitwise_onto_any_layout(saved, target):
    """orbax#648, orbax#2408: fewer devices, another split, Explicit axes."""
    checkpoints, want = saved
    layout = layout_for(target)
    state = checkpoints.restore(RECIPE, layout)
    assert bits(state) == want
    assert_lies(state, RECIPE, layout)
    if "explicit" in target:
        assert AxisType.Explicit in state.model["up.kernel"].sharding.mesh.axis_types


@pytest.mark.bitwise
def test_restores_under_a_mesh_that_is_set(saved):
    """orbax#3164."""
    checkpoints, want = saved
    layout = layout_for("tensor")
    with jax.set_mesh(sw.mesh("other=4", on="cpu:4")):
        assert bits(checkpoints.restore(RECIPE, layout)) == want


@pytest.mark.bitwise
def test_from_layout_to_layout_and_back(saved, tmp_path):
    checkpoints, want = saved
    state = checkpoints.restore(RECIPE, layout_for("the same"))
    for number, target in enumerate(("tensor", "dp", "one device", "explicit", "the same")):
        passed_on = sw.Checkpoints(tmp_path / str(number))
        passed_on.save(3, state)
        passed_on.close()
        state = passed_on.restore(RECIPE, layout_for(target))
    assert bits(state) == want
    assert int(train(state, 1).step) == 4


@pytest.mark.bitwise
def test_a_restored_state_trains_as_the_saved_one(saved):
    checkpoints, want = saved
    layout = layout_for("the same")
    again = train(sw.train_state(RECIPE, layout), 3)
    assert bits(again) == want
    assert bits(train(checkpoints.restore(RECIPE, layout), 2)) == bits(train(again, 2))


def test_about_and_the_lockfile(saved):
    checkpoints, want = saved
    about = checkpoints.about()
    assert checkpoints.steps() == [3]
    noted = {key: about[key] for key in ("format", "step", "position", "mesh", "processes")}
    assert about["digest"] == "threefry2x32-20-sum64"
    assert noted == {"format": 2, "step": 3, "position": 48, "mesh": "data=8", "processes": 1}
    assert about["devices"] == "8 cpu" and about["jax"] == jax.__version__
    assert about["bytes"] == sum(len(data) for _, _, data in want.values())
    assert len(about["arrays"]) == len(want)
    loaded = sw.load_layout(checkpoints.directory / "3" / "about" / "layout.json")
    layout = layout_for("the same")
    assert not sw.diff(loaded, layout)
    assert {leaf.path: leaf.spec for leaf in loaded.leaves} == {
        leaf.path: leaf.spec for leaf in layout.leaves
    }


class Leaves(nnx.Module):
    """A leaf of each dtype, and one that is trained."""

    DTYPES = (
        *("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"),
        *("int4", "int8", "int16", "uint8", "uint32", "bool", "complex64"),
    )

    def __init__(self):
        values = jnp.linspace(-3, 3, 128).reshape(8, 16)
        self.w = nnx.Param(jnp.ones((8,)))
        self.leaves = nnx.Dict()
        for name in self.DTYPES:
            value = values + 1j * values[::-1] if name == "complex64" else values
            value = jnp.abs(value) if name.startswith("u") else value
            self.leaves[name] = nnx.Variable(value.astype(name))
        self.keys = nnx.Variable(jax.random.split(jax.random.key(3), 8))
        self.rbg = nnx.Variable(jax.random.key(3, impl="rbg"))
        self.old = nnx.Variable(jax.random.PRNGKey(5))

    def __call__(self, x):
        return x * self.w


def test_leaves_of_every_dtype(tmp_path):
    recipe = recipe_of(Leaves, optax.sgd(0.1))
    state = sw.train_state(recipe, layout_for("the same", Leaves))
    checkpoints = sw.Checkpoints(tmp_path)
    checkpoints.save(0, state, layout=layout_for("the same", Leaves))
    checkpoints.close()
    for target in ("fewer devices", "explicit"):
        layout = layout_for(target, Leaves)
        restored = checkpoints.restore(recipe, layout)
        assert bits(restored) == bits(state)
        assert_lies(restored, recipe, layout)
    assert not sw.diff(
        sw.load_layout(tmp_path / "0" / "about" / "layout.json"), layout_for("the same", Leaves)
    )


@pytest.mark.parametrize(
    ("optimizer", "count"),
    [
        (optax.sgd(0.1), 0),
        (optax.adafactor(0.1, min_dim_size_to_factor=8), None),
        (optax.chain(optax.clip(1.0), optax.lion(1e-3)), None),
    ],
    ids=["no state", "factored", "chain"],
)
def test_optimizers(tmp_path, optimizer, count):
    recipe = recipe_of(optimizer=optimizer)
    layout = layout_for("the same")
    state = sw.train_state(recipe, layout)
    assert count is None or len(state.optimizer) == count
    checkpoints = sw.Checkpoints(tmp_path)
    checkpoints.save(0, state)
    checkpoints.close()
    for target in ("the same", "tensor"):
        restored = checkpoints.restore(recipe, layout_for(target))
        assert bits(restored) == bits(state)
        assert_lies(restored, recipe, layout_for(target))


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [4]), (2, [3, 4]), (None, [0, 1, 2, 3, 4])], ids=str
)
def test_keeps_the_newest(saved, tmp_path, keep, left):
    state = saved[0].restore(RECIPE, layout_for("fewer devices"))
    checkpoints = sw.Checkpoints(tmp_path, keep=keep)
    for step in range(5):
        checkpoints.save(step, state)
    checkpoints.wait()
    assert checkpoints.steps() == left
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(step) for step in left]


def test_save_wait_and_close_again(saved, tmp_path):
    state = saved[0].restore(RECIPE, layout_for("fewer devices"))
    checkpoints = sw.Checkpoints(tmp_path / "made" / "when needed")
    checkpoints.wait()
    checkpoints.close()
    assert checkpoints.steps() == [] and not checkpoints.directory.exists()
    for step in (np.int64(1), 2):
        checkpoints.save(step, state)
        checkpoints.close()
        checkpoints.close()
    assert sw.Checkpoints(checkpoints.directory).steps() == [1, 2]
    message = f"{checkpoints.directory} already has step 2: each step can be saved only once"
    with pytest.raises(sw.CheckpointError) as caught:
        checkpoints.save(2, state)
    assert str(caught.value) == message
    with pytest.raises(sw.CheckpointError) as caught:
        checkpoints.restore(RECIPE, layout_for("dp"), step=7)
    assert str(caught.value) == f"{checkpoints.directory} has no step 7: it has 1, 2"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"keep": 0}, "keep must be a positive integer or None, got 0"),
        ({"every": 0}, "every must be a positive integer or None, got 0"),
        ({"minutes": 0}, "minutes must be positive, got 0"),
        ({"minutes": float("nan")}, "minutes must be positive, got nan"),
    ],
    ids=str,
)
def test_wrong_arguments(tmp_path, more, message):
    with pytest.raises(ValueError) as caught:
        sw.Checkpoints(tmp_path, **more)
    assert str(caught.value) == message


@pytest.mark.parametrize("step", [-1, 1.5, "3"], ids=repr)
def test_invalid_step_numbers_are_refused(saved, tmp_path, step):
    """A step saved under such a name would never be listed."""
    state = saved[0].restore(RECIPE, layout_for("fewer devices"))
    checkpoints = sw.Checkpoints(tmp_path)
    with pytest.raises(ValueError) as caught:
        checkpoints.save(step, state)
    assert str(caught.value) == f"step must be a non-negative integer, got {step!r}"
    assert not list(tmp_path.iterdir())


# --- before a byte is read ------------------------------------------------------------------------

HELP = "restore with the recipe that it was saved with, or restore another step"
OTHER = {
    "SW401": (
        recipe_of(lambda: Net(extra=True), optax.adamw(1e-2), ema=0.9),
        ["extra.kernel", "optimizer.0.mu.extra.kernel", "optimizer.0.nu.extra.kernel"]
        + ["ema.extra.kernel"],
        "the recipe has float32[8, 8], but the checkpoint of step 3 has no such array",
        HELP,
    ),
    "SW402": (
        recipe_of(),
        [f"ema.{layer}" for layer in ("down.bias", "down.kernel", "norm.bias", "norm.scale")]
        + ["ema.up.bias", "ema.up.kernel"],
        "the checkpoint has float32[8], but the recipe has no such array",
        HELP,
    ),
    "SW403": (
        recipe_of(lambda: Net(hidden=24), ema=0.9),
        None,
        "the checkpoint has shape (16, 8), the recipe has (24, 8)",
        HELP,
    ),
    "SW404": (
        recipe_of(lambda: Net(dtype="bfloat16"), ema=0.9),
        None,
        "the checkpoint has float32, the recipe has bfloat16",
        "restore with the saved dtype, then cast",
    ),
}


def without_arrays(checkpoints, tmp_path):
    """Returns the same checkpoints with zeros in every file that holds array data."""
    step = checkpoints.directory / "3"
    copy = sw.Checkpoints(tmp_path)
    for path in step.rglob("*"):
        if path.is_file():
            target = tmp_path / "3" / path.relative_to(step)
            target.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            target.write_bytes(bytes(len(data)) if path.parent.name == "d" else data)
    assert not any(path.read_bytes().strip(b"\0") for path in tmp_path.rglob("d/*"))
    return copy


@pytest.mark.parametrize("code", OTHER)
def test_mismatches_are_all_named_before_anything_is_read(saved, tmp_path, code):
    checkpoints = without_arrays(saved[0], tmp_path)
    recipe, paths, message, help_text = OTHER[code]
    layout = layout_for("dp", recipe.model)
    found = checkpoints.preflight(recipe, layout).findings
    assert {f.code for f in found.errors} == {code}
    assert (message, help_text) in [(f.message, f.help) for f in found]
    with pytest.raises(sw.LayoutError) as caught:
        checkpoints.restore(recipe, layout)
    assert caught.value.findings.items == found.errors
    if paths is None:
        about = checkpoints.about()["arrays"]
        planned = jax.tree.leaves(make_blueprint(recipe, layout).abstract)
        differ = sum(
            (list(x.shape), str(x.dtype)) != (row["shape"], row["dtype"])
            for x, row in zip(planned, about.values(), strict=True)
        )
        assert len(found.errors) == differ > 3
    else:
        assert sorted(f.path for f in found.errors) == sorted(paths)


def test_every_kind_of_mismatch_comes_at_once(saved):
    recipe = recipe_of(lambda: Net(hidden=24, dtype="bfloat16", extra=True))
    with pytest.raises(sw.LayoutError) as caught:
        saved[0].restore(recipe, layout_for("dp", recipe.model))
    codes = {f.code for f in caught.value.findings}
    assert codes == {"SW401", "SW402", "SW403"}
    allow = {code: "**" for code in codes}
    found = saved[0].preflight(recipe, layout_for("dp", recipe.model), allow=allow)
    assert not found.findings.errors


# Orbax drops its other reads when one has failed, and Python warns about each.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_sw405_reports_another_layout_and_is_silent_for_the_same(saved, tmp_path):
    checkpoints = without_arrays(saved[0], tmp_path)
    same = checkpoints.preflight(RECIPE, layout_for("the same"))
    assert not same.findings
    assert str(same) == "no findings\nstep 3: 5.0 KiB in total; one process reads 5.0 KiB (exact)"
    moved = checkpoints.preflight(RECIPE, layout_for("tensor"))
    assert {f.code for f in moved.findings} == {"SW405"}
    message = "saved as P('data') on data=8, restored as P('model') on data=2,model=4; likewise "
    (first,) = [f for f in moved.findings if f.message.startswith(message)]
    assert first.severity == "warning" and f"model.{first.path}" in checkpoints.about()["arrays"]
    assert (
        first.help == "nothing to do if this is intentional: each process reads the parts it needs"
    )
    allowed = checkpoints.preflight(RECIPE, layout_for("tensor"), allow={"SW405": "**"})
    assert not allowed.findings and len(allowed.findings.allowed) == len(moved.findings)
    with pytest.raises(sw.CheckpointError, match="^step 3 in .* could not be restored: "):
        checkpoints.restore(RECIPE, layout_for("tensor"))
    gc.collect()  # here rather than in another test


@pytest.mark.parametrize("on", ["none", "cpu:8"])
def test_preflight_needs_no_devices(saved, on):
    layout = sw.layout(Net, sw.mesh("data=8", on=on), fsdp())
    found = saved[0].preflight(RECIPE, layout)
    total = sum(len(data) for _, _, data in saved[1].values())
    assert (found.step, found.total_bytes) == (3, total)
    assert dict(found.read_bytes) == {0: total}


def test_every_array_has_a_digest_that_no_mesh_changes(saved, tmp_path):
    checkpoints, _ = saved
    rows = {name: row["digest"] for name, row in checkpoints.about()["arrays"].items()}
    assert len(set(rows.values())) > len(rows) / 2
    for number, target in enumerate(TARGETS):
        other = sw.Checkpoints(tmp_path / str(number))
        other.save(3, checkpoints.restore(RECIPE, layout_for(target)))
        other.close()
        text = (other.directory / "3" / "about" / "about.json").read_text()
        found = {name: row["digest"] for name, row in json.loads(text)["arrays"].items()}
        assert found == rows, target


def test_specs_may_cut_one_dim_over_two_axes(saved):
    rules = {"up.kernel": P(None, ("data", "model")), "down.kernel": P(("model", "data"))}
    layout = sw.layout(Net, sw.mesh("data=2,model=4", on="cpu:8"), rules)
    state = saved[0].restore(RECIPE, layout)
    assert bits(state) == saved[1]
    assert_lies(state, RECIPE, layout)


def test_a_save_that_is_refused_leaves_no_thread_writing(tmp_path):
    # Large enough that writing takes longer than finding out that it must not be kept.
    shape, zeros = (2**11, 2**12), nnx.initializers.zeros
    make = lambda: nnx.Linear(*shape, use_bias=False, kernel_init=zeros, rngs=nnx.Rngs(0))  # noqa: E731
    batch = jax.ShapeDtypeStruct((8, 2**11), "float32")
    recipe = sw.Recipe(model=make, loss=loss, optimizer=optax.sgd(0.1), batch=batch)
    state = sw.train_state(recipe, sw.layout(make, sw.mesh("data=8"), "dp"))
    kernel = np.random.default_rng(0).random(shape, "float32")  # zeros are compressed to nothing
    kernel[0, 0] = np.nan
    state.model["kernel"] = jax.device_put(kernel, state.model["kernel"].sharding)
    checkpoints = sw.Checkpoints(tmp_path)
    checkpoints.save(1, state, finite=["kernel"])
    with pytest.raises(sw.NotFinite, match="kernel is not finite after step 1"):
        checkpoints.wait()
    left = [thread for thread in threading.enumerate() if "Signaling" in type(thread).__name__]
    assert not left
    checkpoints.close()
    assert not list(tmp_path.iterdir())


def test_another_optimizer_is_reported_briefly(saved):
    """Every array of the optimizer is missing, and they are listed by subtree."""
    recipe = recipe_of(optimizer=optax.lion(1e-2), ema=0.9)
    with pytest.raises(sw.LayoutError) as caught:
        saved[0].restore(recipe, layout_for("dp"))
    message = caught.value.format_message()
    assert message.startswith(f"{len(caught.value.findings)} findings: optimizer.0.nu.down.** (")
    assert message.count("; ") <= 4 and message.endswith("start a new run from the restored model)")
    assert str(caught.value).count("error[SW402]") <= 3


def test_a_step_under_another_number_is_refused(tmp_path):
    make = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))  # noqa: E731
    recipe = sw.Recipe(
        model=make,
        loss=lambda model, x: model(x).mean(),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((8, 8), "float32"),
    )
    layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), "dp")
    checkpoints = sw.Checkpoints(tmp_path)
    checkpoints.save(4, sw.train_state(recipe, layout))
    checkpoints.close()
    (tmp_path / "4").rename(tmp_path / "9")
    with pytest.raises(
        sw.CheckpointError, match="step 9 in .* is damaged: its directory is named 9, but"
    ):
        checkpoints.restore(recipe, layout)
