"""State in host memory: the same steps, and bytes counted where they are."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import shardwise as sw
from shardwise._compile import plan_of

WIDTH = 512


def make():
    return nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))


RECIPE = sw.Recipe(
    model=make,
    loss=lambda model, x: ((model(x) - x) ** 2).mean(),
    optimizer=optax.adamw(1e-2),
    batch=jax.ShapeDtypeStruct((8, WIDTH), "float32"),
    ema=0.9,
)
HOST = dataclasses.replace(RECIPE, offload="optimizer,ema")
BATCH = np.random.default_rng(0).normal(size=(8, WIDTH)).astype("float32")
# Of one of 8 devices: two moments and the average of the kernel are split, of the bias they are not.
HOST_BYTES = 3 * 4 * (WIDTH * WIDTH // 8 + WIDTH)


def layout_on(on):
    return sw.layout(make, sw.mesh("data=8", on=on), sw.fsdp("data", min_bytes=2**16))


def kinds(arrays):
    return {name: x.sharding.memory_kind for name, x in arrays.items()}


def test_a_step_is_the_same_and_its_state_stays_in_host_memory():
    layout, after = layout_on("cpu:8"), []
    for recipe in (RECIPE, HOST):
        state, step = sw.train_state(recipe, layout), sw.train_step(recipe, layout)
        for _ in range(2):
            state, _ = step(state, BATCH)
        after.append(state)
    jax.tree.map(np.testing.assert_array_equal, *after)
    found = {**kinds(after[1].optimizer), **{f"ema.{k}": v for k, v in kinds(after[1].ema).items()}}
    assert found.pop("0.count") == "device" and set(found.values()) == {"pinned_host"}
    assert set(kinds(after[1].model).values()) == {"device"}


def test_it_is_saved_and_restored(tmp_path):
    layout, checkpoints = layout_on("cpu:8"), sw.Checkpoints(tmp_path / "run")
    sw.fit(HOST, layout, [BATCH] * 2, steps=1, checkpoints=checkpoints, show=False)
    state = sw.fit(HOST, layout, [BATCH] * 2, steps=2, checkpoints=checkpoints, show=False)
    assert int(state.step) == 2 and kinds(state.ema) == dict.fromkeys(state.ema, "pinned_host")


@pytest.mark.parametrize("on", ["v5e:2x4", "h100:1x8"])
def test_compilers_count_it_apart(on):
    memory = sw.compile(HOST, layout_on(on)).memory
    before = sw.compile(RECIPE, layout_on(on)).memory
    assert memory.host_state == HOST_BYTES and before.host_state == 0
    assert memory.optimizer == 4 and before.optimizer == 4 + HOST_BYTES
    assert before.arguments - memory.arguments == pytest.approx(HOST_BYTES, rel=0.01)


def test_a_plan_shows_it_apart():
    plan = plan_of(HOST, layout_on("v5e:2x4"))
    assert plan.host_bytes == HOST_BYTES and plan.optimizer_bytes == 4
    assert "and 390.0 KiB in host memory" in plan.verdict
