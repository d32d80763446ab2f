"""What a run is with fewer processes: planned ahead, checked, and the same as what then runs."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._elastic import compile_ahead, scaled
from shardwise._mesh import free_axis
from shardwise._processes import Elastic


def make():
    return nnx.Linear(12, 48, use_bias=False, rngs=nnx.Rngs(0))


def recipe_of(batch, accumulate=1):
    return sw.Recipe(
        model=make,
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.adam(0.1),
        batch=jax.ShapeDtypeStruct((batch, 12), "float32"),
        accumulate=accumulate,
    )


def layout_on(axes, on="none", rules=None):
    return sw.layout(make, sw.mesh(axes, on=on), rules or sw.fsdp("data", min_bytes=0))


def test_the_rules_decide_anew_for_each_number():
    found = sw.elastic_plan(recipe_of(24), layout_on("data=4"), 4)
    assert [s.processes for s in found] == [3, 2, 1]
    assert [s.recipe.accumulate for s in found] == [2, 2, 4]
    assert [s.layout.mesh.shape["data"] for s in found] == [3, 2, 1]
    assert [s.layout["kernel"].shard_bytes for s in found] == [768, 1152, 2304]
    assert not found.findings
    for smaller in found:  # the parameters and two moments, two counts, and the step
        assert smaller.state_bytes == 3 * smaller.layout["kernel"].shard_bytes + 8


def test_the_planned_step_is_the_step_that_runs():
    smaller = sw.elastic_plan(recipe_of(24), layout_on("data=4"), 4)[0]
    real = layout_on("data=-1", on=jax.devices()[:3])
    assert real["kernel"].spec == smaller.layout["kernel"].spec
    assert scaled(recipe_of(24), real, 3, 4).accumulate == smaller.recipe.accumulate
    state = sw.train_state(smaller.recipe, real)
    held = sum(
        shard.data.nbytes
        for x in jax.tree.leaves(state)
        for shard in x.addressable_shards
        if shard.device == jax.devices()[0]
    )
    assert held == smaller.state_bytes


def test_accumulation_changes_no_loss():
    """The batch is the same, in more microbatches."""
    rows = np.random.default_rng(0).normal(size=(24, 12)).astype("float32")
    found = []
    for processes in (4, 2):
        layout = layout_on(f"data={processes}", on=f"cpu:{processes}")
        recipe = scaled(recipe_of(24), layout, processes, 4)
        step = sw.train_step(recipe, layout)
        found.append(step(sw.train_state(recipe, layout), rows)[1]["loss"])
    np.testing.assert_allclose(*map(float, found), rtol=1e-6)


@pytest.mark.parametrize(
    "axes, rules, batch, capacity, processes, text",
    [
        ("data=4", None, 32, None, 3, "dim 0 (size 32) cannot be split 3 ways over axis 'data'"),
        ("data=2,model=2", None, 24, None, 3, "3 devices are no multiple of 2 (model=2)"),
        (
            "data=4",
            {"kernel": P(None, ("data",))},
            20,
            None,
            3,
            "dim 0 (size 20) cannot be split 3 ways over axis 'data'",
        ),
        ("data=4", None, 24, 4000, 1, "each device of data=1 needs 6.8 KiB (exact, for the state"),
        ("data=4", None, 4, None, 2, None),
    ],
    ids=["batch", "other axes", "layout", "memory", "fits"],
)
def test_why_it_cannot_go_on(axes, rules, batch, capacity, processes, text):
    layout = layout_on(axes, rules=rules)
    plan = sw.elastic_plan(recipe_of(batch), layout, 4, sizes=[processes], capacity=capacity)
    if text is None:
        assert not plan.findings and plan.sizes == [processes, 4]
        return
    assert plan[0].problem.code == "SW701" and text in str(plan)
    for least in (processes, None):
        with pytest.raises(sw.LayoutError, match="SW701"):
            plan.require(least)


def test_a_batch_that_no_more_microbatches_divide():
    layout = layout_on("data=2")
    with pytest.raises(ValueError, match="a batch of 2 cannot be computed in at least 2 microbat"):
        scaled(recipe_of(2), layout, 2, 4)


def test_numbers_that_do_not_fit_are_left_out_unless_asked_for():
    found = sw.elastic_plan(recipe_of(32), layout_on("data=4"), 4)
    assert found.sizes == [1, 2, 4]
    found.require(None)
    found.require(2)
    with pytest.raises(sw.LayoutError, match="3 processes of 4"):
        found.require(3)


def test_on_chips_the_peak_is_modelled_and_compared():
    def wide():
        return nnx.Linear(16384, 327680, use_bias=False, rngs=nnx.Rngs(0))

    recipe = dataclasses.replace(
        recipe_of(96), model=wide, batch=jax.ShapeDtypeStruct((96, 16384), "float32")
    )
    layout = sw.layout(wide, sw.mesh("data=-1", on="h100:4x1"), "fsdp")
    found = sw.elastic_plan(recipe, layout, 4, sizes=[2, 1])
    assert found[0].problem is None and found[0].peak_bytes > found[0].state_bytes
    assert "(modelled), and has 79.2 GiB" in found[1].problem.message


def test_which_axis_is_free():
    assert free_axis(sw.mesh("data=-1,model=2", on="cpu:6")) == "data"
    assert free_axis(sw.mesh("data=2,model=3", on="cpu:6")) == ""
    fixed = sw.layout(make, sw.mesh("data=2,model=3", on="cpu:6"), "dp")
    with pytest.raises(ValueError, match="data=2,model=3 has fixed sizes: let one follow the num"):
        sw.elastic_plan(recipe_of(24), fixed, 2)
    with pytest.raises(ValueError, match="5 processes cannot have equal parts"):
        sw.elastic_plan(recipe_of(24), fixed, 5)


@pytest.mark.parametrize(
    "given, text",
    [
        ({"elastic": True}, "elastic=True needs a launcher that starts the processes again"),
        ({"elastic": 1}, "elastic must be True, or the number of processes when none is lost"),
        ({"elastic": 2.5}, "which is at least 2 here, got 2.5"),
        ({"elastic": 4, "checkpoints": None}, "an elastic run needs checkpoints"),
        ({"elastic": 4, "copies_every": 0}, "copies_every must be a positive integer or None"),
    ],
    ids=["no launcher", "one", "a fraction", "no checkpoints", "no steps"],
)
def test_wrong_inputs(given, text, tmp_path):
    arguments = {"checkpoints": sw.Checkpoints(tmp_path), "steps": 1, "show": False} | given
    rows = np.ones((24, 12), "float32")
    with pytest.raises(ValueError, match=text):
        sw.fit(recipe_of(24), layout_on("data=1", "cpu:1"), sw.data(rows), **arguments)


def wide():
    return nnx.Linear(8192, 49152, use_bias=False, rngs=nnx.Rngs(0))


def on_chips(on):
    recipe = dataclasses.replace(
        recipe_of(96), model=wide, batch=jax.ShapeDtypeStruct((96, 8192), "float32")
    )
    return recipe, sw.layout(wide, sw.mesh("data=-1", on=on), "fsdp")


@pytest.mark.once
def test_a_smaller_mesh_is_compiled_before_it_is_needed(tmp_path):
    """Its state alone would fit, and of a TPU no peak is modelled: only the compiler can tell."""
    recipe, layout = on_chips("v5p:2x2x1")
    planned = sw.elastic_plan(recipe, layout, 4, sizes=[2, 1], capacity=5 << 30)
    assert planned.sizes == [1, 2, 4] and planned[1].state_bytes < 5 << 30
    run, said = Elastic(tmp_path, 4, 1, 0), []
    run.plan(planned.sizes)
    assert compile_ahead(recipe, layout, planned, run, 5 << 30, said.append) == [2, 4]
    assert run.sizes() == [2, 4]  # what the launcher goes by
    (line,) = said  # no slice has two chips, so two are not compiled
    assert line.startswith("elastic: 1 of 4 cannot go on: each device of data=1 needs 6.")
    assert line.endswith("GiB (compiled), and has 5.0 GiB")
    (fits,) = sw.elastic_plan(recipe, layout, 4, sizes=[1], compiled=True)
    real = sw.compile(fits.recipe, fits.layout, show=False)
    assert fits.problem is None and fits.compiled_bytes == real.memory.peak
    assert "at most (compiled)" in str(fits) and real.chips == "v5p:1x1x1"
    with pytest.raises(sw.LayoutError, match="SW701"):
        sw.elastic_plan(
            recipe, layout, 4, sizes=[1], capacity=5 << 30, compiled=True
        ).require(1)  # fmt: skip


@pytest.mark.once
def test_fewer_hosts_of_gpus_are_compiled():
    recipe, layout = on_chips("h100:4x1")
    (found,) = sw.elastic_plan(recipe, layout, 4, sizes=[2], compiled=True)
    assert found.state_bytes < found.compiled_bytes < found.peak_bytes * 1.2
    assert str(found).endswith(" at most (compiled)")


def test_without_chips_there_is_nothing_to_compile_for():
    said = []
    layout = layout_on("data=-1", on="cpu:4")
    planned = sw.elastic_plan(recipe_of(24), layout, 4)
    assert compile_ahead(recipe_of(24), layout, planned, None, None, said.append) == [1, 2, 3, 4]
    assert not said
    with pytest.raises(
        ValueError, match="compiled=True needs chips to compile for, which the mesh"
    ):
        sw.elastic_plan(recipe_of(24), layout, 4, compiled=True)
