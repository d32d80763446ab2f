"""A model of one's own, pipelined: trained, evaluated, checkpointed, and run by the command line."""

import json

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import shardwise as sw

ROWS, WIDTH = 16, 8
SAMPLES = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")


class Block(nnx.Module):
    def __init__(self, rngs, rate):
        self.up = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.down = nnx.Linear(16, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(nnx.gelu(self.up(x))))


class Net(nnx.Module):
    def __init__(self, rate=0.0, **how):
        self.blocks = nnx.vmap(lambda rngs: Block(rngs, rate))(nnx.Rngs(0).split(4))
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))
        self.how = how

    def __call__(self, x):
        return self.head(sw.pipeline(self.blocks, **self.how)(x))


def recipe_of(**how):
    return sw.Recipe(
        model=lambda: Net(**how),
        loss=lambda model, x: ((model(x) - 1) ** 2).mean(),
        optimizer=optax.adamw(1e-2),
        batch=jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"),
    )


CIRCULAR = {"schedule": "circular", "rounds": 2}


def layout_of(recipe, axes, rules):
    return sw.layout(recipe.model, sw.mesh(axes), rules)


@pytest.mark.bitwise
def test_checkpoints_restore_onto_meshes_with_and_without_stages(tmp_path):
    recipe = recipe_of(**CIRCULAR)
    split = layout_of(recipe, "pipe=2,data=4", [sw.stages("pipe"), sw.fsdp("data", min_bytes=0)])
    plain = layout_of(recipe, "data=8", "fsdp")
    step = sw.train_step(recipe, split)
    state, _ = step(sw.train_state(recipe, split), SAMPLES)
    assert state.model["blocks.up.kernel"].sharding.spec[0] == "pipe"
    want = {path: np.asarray(x) for path, x in state.model.items() if x.dtype == np.float32}
    for number, layout in enumerate((plain, split)):
        checkpoints = sw.Checkpoints(tmp_path / str(number))
        checkpoints.save(1, state)
        checkpoints.close()
        state = checkpoints.restore(recipe, layout)
        for path, array in want.items():
            np.testing.assert_array_equal(state.model[path], array)
    # What is stored is in the order of the layers: the unsplit model computes the same with it.
    apart = sw.Checkpoints(tmp_path / "1").restore(recipe, plain)
    _, want_metrics = sw.train_step(recipe, plain)(apart, SAMPLES)
    _, metrics = step(state, SAMPLES)
    np.testing.assert_allclose(metrics["loss"], want_metrics["loss"], rtol=1e-6)


def test_dropout_trains_and_its_counts_are_kept():
    recipe = recipe_of(rate=0.5, microbatches=4)
    layout = layout_of(recipe, "pipe=2,data=4", "dp+pipeline")
    state, step = sw.train_state(recipe, layout), sw.train_step(recipe, layout)
    for number in (1, 2):
        state, metrics = step(state, SAMPLES)
        np.testing.assert_array_equal(state.model["blocks.drop.rngs.count"], [number] * 4)
    assert np.isfinite(metrics["loss"])


FILES = {
    "net.py": """
import jax, numpy as np, optax
import shardwise as sw
from flax import nnx
from shardwise.models import Config, Decoder, next_token_loss

config = Config(layers=4, width=16, hidden=32, heads=2, vocab=32, scan=True)
recipe = sw.Recipe(
    model=lambda: Decoder(config, rngs=nnx.Rngs(0)), loss=next_token_loss,
    optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((16, 8), "int32"),
)
data = sw.data(np.arange(2000, dtype="int32") % 32, length=8)
"""
}


@pytest.mark.usefixtures("folder")
def test_the_command_line(run):
    how = ("net.py:recipe", "--mesh", "pipe=2,data=4", "--strategy", "fsdp+pipeline")
    status, out, err = run("plan", *how, "--format", "json")
    assert (status or 0) == 0, err
    specs = {leaf["path"]: leaf["spec"] for leaf in json.loads(out)["leaves"]}
    assert specs["blocks.0.up"].startswith("P('pipe'")
    status, out, err = run("train", *how, "--on", "cpu:8", "--steps", "2")
    assert (status or 0) == 0, err
    assert "step 2/2  loss " in err
    status, out, err = run("check", "net.py:recipe", "--mesh", "pipe=8", "--strategy", "pipeline")
    assert status == 1
    assert "it is a stack of layers: use 8 of them, or pipe of size 2 or 4" in out
