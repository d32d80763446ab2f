"""Work done once per run: the model is traced, and the layout checked and matched, only once."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import shardwise as sw
from shardwise._check import matching, planned

BATCH = {"x": jax.ShapeDtypeStruct((16, 8), "float32")}


@pytest.fixture
def counted(monkeypatch):
    """Counts the factory's calls, the passes of a check, and the matches of layout to model."""
    counts = {"traces": 0, "checks": 0, "matches": 0, "losses": 0}

    def counting(module, name, key):
        original = getattr(module, name)

        def call(*args, **kwargs):
            counts[key] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counting(planned, "_findings", "checks")
    counting(matching, "match_findings", "matches")
    return counts


def recipe_of(counts):
    def make():
        counts["traces"] += 1
        return nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def loss(model, batch):
        counts["losses"] += 1
        return (model(batch["x"]) ** 2).mean()

    return sw.Recipe(model=make, loss=loss, optimizer=optax.adam(1e-2), batch=BATCH)


def reset(counts):
    found = dict(counts)
    counts.update(dict.fromkeys(counts, 0))
    return found


def test_fit_traces_and_checks_once_and_so_does_a_run_that_resumes(counted, tmp_path):
    recipe = recipe_of(counted)
    layout = sw.layout(recipe.model, sw.mesh("data=8", on="cpu:8"), "fsdp")
    assert reset(counted)["traces"] == 1
    data = {"x": np.ones((64, 8), "float32")}
    for steps in (2, 4):
        store = sw.Checkpoints(tmp_path / "run", every=2)
        state = sw.fit(recipe, layout, sw.data(data), steps=steps, checkpoints=store, show=False)
        assert int(state.step) == steps
        assert reset(counted) == {"traces": 1, "checks": 1, "matches": 1, "losses": 1}


@pytest.mark.parametrize("call", [sw.train_state, sw.train_step, sw.compile])
def test_each_entry_traces_and_checks_once(counted, call):
    recipe = recipe_of(counted)
    layout = sw.layout(recipe.model, sw.mesh("data=8", on="cpu:8"), "fsdp")
    reset(counted)
    call(recipe, layout)
    found = reset(counted)
    assert (found["traces"], found["checks"], found["matches"]) == (1, 1, 1)


def test_init_traces_and_checks_once(counted):
    recipe = recipe_of(counted)
    layout = sw.layout(recipe.model, sw.mesh("data=8", on="cpu:8"), "fsdp")
    reset(counted)
    sw.init(recipe.model, layout)
    assert reset(counted) == {"traces": 1, "checks": 1, "matches": 1, "losses": 0}


def test_what_a_loss_raises_is_shown_with_the_users_line(counted):
    def loss(model, batch):
        return float(model(batch["x"]).mean())

    recipe = dataclasses.replace(recipe_of(counted), loss=loss)
    layout = sw.layout(recipe.model, sw.mesh("data=8", on="cpu:8"), "fsdp")
    with pytest.raises(ValueError, match="^the step cannot be traced:") as caught:
        sw.fit(recipe, layout, [{"x": np.ones((16, 8), "float32")}], steps=1, show=False)
    lines = str(caught.value).splitlines()
    assert "test_walk.py" in lines[1] and "float(" in lines[2]
    assert not any("site-packages" in line or "_step" in line for line in lines)
