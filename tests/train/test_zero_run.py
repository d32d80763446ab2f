"""ZeRO 1 and 2 in a run: losses are those of plain data parallelism, bytes are those of the plan."""

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

import shardwise as sw
from shardwise._compile import plan_of

WIDTH, HIDDEN, STEPS = 16, 64, 3
RULES = {
    "dp": "dp",
    "zero1": sw.zero1("data", min_bytes=0),
    "zero2": sw.zero2("data", min_bytes=0),
}
BATCHES = [
    {name: np.random.default_rng(i).normal(size=(32, WIDTH)).astype("float32") for name in "xy"}
    for i in range(STEPS)
]


def make():
    return models.Mlp(WIDTH, HIDDEN, nnx.Rngs(0))


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


RECIPE = sw.Recipe(model=make, loss=loss, optimizer=optax.adamw(1e-2, eps=1e-4), batch=BATCHES[0])
RECIPES = {
    "plain": RECIPE,
    "all": dataclasses.replace(RECIPE, clip=0.05, accumulate=4, ema=0.9, compute_dtype="float32"),
    "adafactor": dataclasses.replace(RECIPE, optimizer=optax.adafactor(1e-2, min_dim_size_to_factor=8)),
    "multi_steps": dataclasses.replace(RECIPE, optimizer=optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()),
    "line search": dataclasses.replace(RECIPE, optimizer=optax.lbfgs(memory_size=2, linesearch=optax.scale_by_backtracking_linesearch(3))),
    "offload": dataclasses.replace(RECIPE, ema=0.9, offload="optimizer,ema"),
}  # fmt: skip


@functools.cache
def laid_out(rules, axes="data=8", **more):
    return sw.layout(make, sw.mesh(axes, on="cpu:8", **more), RULES[rules])


@functools.cache
def run(name, rules):
    """Returns the metrics of some steps, the state after them, and the step."""
    recipe, layout = RECIPES[name], laid_out(rules)
    state, step = sw.train_state(recipe, layout), sw.train_step(recipe, layout)
    found = []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        found.append({key: float(value) for key, value in metrics.items()})
    return found, state, step


def live_bytes(*parts):
    return sum(x.addressable_shards[0].data.nbytes for part in parts for x in part.values())


@pytest.mark.parametrize("rules", ["zero1", "zero2"])
@pytest.mark.parametrize("name", RECIPES)
def test_steps_are_those_of_data_parallelism(name, rules):
    found, state, _ = run(name, rules)
    plain, want, _ = run(name, "dp")
    for got, wanted in zip(found, plain, strict=True):
        assert got.keys() == wanted.keys()
        np.testing.assert_allclose([*got.values()], [*wanted.values()], rtol=2e-5)
    for path, x in want.model.items():
        np.testing.assert_allclose(state.model[path], x, rtol=1e-4, atol=1e-5, err_msg=path)
        assert state.model[path].sharding.is_fully_replicated
    planned = plan_of(RECIPES[name], laid_out(rules))
    assert planned.optimizer_bytes + planned.host_bytes == live_bytes(state.optimizer, state.ema)
    assert live_bytes(state.optimizer, state.ema) < live_bytes(want.optimizer, want.ema)


def test_an_average_is_split_and_evaluated():
    _, state, step = run("all", "zero2")
    for path, x in state.ema.items():
        assert x.sharding.is_equivalent_to(state.optimizer[f"0.mu.{path}"].sharding, x.ndim)
    metrics = jax.jit(step.blueprint.evaluate)(state, BATCHES[0])
    want = loss(state.to_model(make, ema=True), BATCHES[0])
    np.testing.assert_allclose(metrics["loss"], want, rtol=2e-5)


@pytest.mark.parametrize("explicit", [True, ("data",)], ids=["all", "data"])
@pytest.mark.parametrize("rules", ["zero1", "zero2"])
def test_explicit_axes(rules, explicit):
    recipe = RECIPES["all"]
    layout = laid_out(rules, "data=4,model=2", explicit=explicit)
    state, step = sw.train_state(recipe, layout), sw.train_step(recipe, layout)
    for batch, want in zip(BATCHES, run("all", "dp")[0], strict=True):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(float(metrics["loss"]), want["loss"], rtol=2e-5)
    assert state.optimizer["0.mu.up.kernel"].sharding.shard_shape((WIDTH, HIDDEN)) == (16, 16)


def test_checkpoints_move_between_strategies_and_meshes(tmp_path):
    """Saved with zero1, restored as data parallelism, zero2 on another mesh, and FSDP."""
    recipe = RECIPES["all"]
    _, state, _ = run("all", "zero1")
    checkpoints = sw.Checkpoints(tmp_path)
    checkpoints.save(STEPS, state)
    checkpoints.wait()
    others = [
        laid_out("dp"),
        laid_out("zero2", "data=4,model=2"),
        sw.layout(make, sw.mesh("data=8", on="cpu:8"), sw.fsdp("data", min_bytes=0)),
    ]
    for layout in others:
        restored = checkpoints.restore(recipe, layout)
        jax.tree.map(np.testing.assert_array_equal, restored, state)
        planned = layout.for_optimizer(recipe.optimizer)
        assert live_bytes(restored.optimizer) == planned.bytes_per_device
    flight = checkpoints.preflight(recipe, others[0])
    assert not flight.findings.errors
    assert "saved as P(None, 'data') on data=8, restored as P() on data=8" in str(flight)


def test_a_layout_from_a_lockfile_trains_the_same(tmp_path):
    laid_out("zero2").save(tmp_path / "layout.json")
    layout = sw.load_layout(tmp_path / "layout.json", sw.mesh("data=8", on="cpu:8"))
    state, step = sw.train_state(RECIPE, layout), sw.train_step(RECIPE, layout)
    for batch, want in zip(BATCHES, run("plain", "zero2")[0], strict=True):
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == want["loss"]
    assert live_bytes(state.optimizer) == plan_of(RECIPE, laid_out("zero2")).optimizer_bytes


def test_a_mesh_that_no_longer_divides_is_refused_before_anything_is_placed():
    layout = laid_out("zero1").on(sw.mesh("data=5", on="cpu:5"))
    with pytest.raises(
        sw.LayoutError, match="its optimizer state: dim 0 .size 16. cannot be split 5 ways"
    ):
        sw.train_state(RECIPE, layout)


def test_accumulated_gradients_are_split():
    """The loop over microbatches carries a part of each gradient, as read from XLA's program."""
    shapes = {}
    for rules in ("dp", "zero2"):
        _, _, step = run("all", rules)
        text = step.jitted.lower(step.blueprint.abstract, step.blueprint.batch).compile().as_text()
        loops = [line for line in text.splitlines() if re.search(r"= \(.*\) while\(", line)]
        shapes[rules] = " ".join(loops)
    part = f"f32[{WIDTH},{HIDDEN // 8}]"
    assert part in shapes["zero2"] and part not in shapes["dp"]
