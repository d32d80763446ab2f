"""A decoder whose blocks are pipelined: losses and gradients against the unsplit decoder's."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import shardwise as sw
from shardwise import models

pytestmark = pytest.mark.usefixtures("built_once")

BASE = models.Config(layers=4, width=16, hidden=32, heads=2, vocab=32, scan=True)
LENGTH, ROWS = 8, 16
TOKENS = np.random.default_rng(0).integers(0, 32, (2, ROWS, LENGTH)).astype("int32")


def recipe_of(config, **more):
    return sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.sgd(1.0),  # so that the parameters after a step show the gradients
        batch=jax.ShapeDtypeStruct((ROWS, LENGTH), "int32"),
        **more,
    )


def train(config, mesh, rules, *, logical=None, **more):
    recipe = recipe_of(config, **more)
    layout = sw.layout(recipe, mesh, rules, logical=logical)
    assert not sw.check(layout).errors
    state, step = sw.train_state(recipe, layout), sw.train_step(recipe, layout)
    losses = []
    for tokens in TOKENS:
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
    return losses, {path: np.asarray(x) for path, x in state.model.items()}, layout


@functools.cache
def unsplit(config):
    losses, arrays, _ = train(config, sw.mesh("data=1", on="cpu:1"), "dp")
    return losses, arrays


EXPERTS = dataclasses.replace(BASE, experts=4, chosen=2)
# Two periods of a local and a global layer, and one layer after them.
LOCAL = dataclasses.replace(BASE, layers=5, window=4, period=2)
CASES = {
    "data": (BASE, "pipe=2,data=4", "dp+pipeline", {}),
    "fsdp and remat": (
        dataclasses.replace(BASE, remat="nothing_saveable"),
        "data=2,pipe=4",
        [sw.stages("pipe"), sw.fsdp("data", min_bytes=0)],
        {},
    ),
    "fsdp and tensor": (BASE, "data=2,pipe=2,model=2", "fsdp+tensor+pipeline", {}),
    "circular": (
        dataclasses.replace(BASE, rounds=2, microbatches=4),
        "stage=2,data=4",
        [sw.stages("stage"), sw.fsdp("data", min_bytes=0)],
        {},
    ),
    "accumulated": (BASE, "pipe=2,data=2", "dp+pipeline", {"accumulate": 2}),
    "periods": (LOCAL, "pipe=2,data=2", "pipeline", {}),
    "experts": (EXPERTS, "pipe=2,data=2,expert=2", "pipeline", {"logical": {"experts": "expert"}}),
    "names": (BASE, "data=4,pipe=2", None, {"logical": {"layers": "pipe"}}),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_unsplit_model(name):
    config, axes, rules, more = CASES[name]
    size = int(np.prod([int(part.split("=")[1]) for part in axes.split(",")]))
    plain = dataclasses.replace(config, rounds=1, microbatches=None, remat=None)
    want_losses, want = unsplit(plain)
    losses, found, layout = train(config, sw.mesh(axes, on=f"cpu:{size}"), rules, **more)
    np.testing.assert_allclose(losses, want_losses, rtol=2e-6)
    for path, array in found.items():
        np.testing.assert_allclose(array, want[path], rtol=2e-4, atol=2e-5, err_msg=path)
    up = layout["blocks.0.experts.up" if config.experts else "blocks.0.up"]
    assert up.spec[0] in ("pipe", "stage") and up.stacked == (0,)


def test_the_stages_share_the_batch_and_microbatches_move_along_the_axis():
    recipe = recipe_of(dataclasses.replace(BASE, microbatches=4))
    layout = sw.layout(recipe, sw.mesh("pipe=2,data=4", on="cpu:8"), "dp+pipeline")
    compiled = sw.compile(recipe, layout)
    permutes = [row for row in compiled.collectives if row.kind == "collective-permute"]
    assert "collective-permute" in compiled.by_axis["pipe"]
    assert permutes and all(row.axes == ("pipe",) for row in permutes)
    # One tick passes a microbatch on, of one sequence on each device, 4 + 2 - 1 times.
    assert {row.times for row in permutes} >= {5}
    assert not [f for f in compiled.findings if f.code == "SW304"]
    # The logits are split over the stages too.
    logits = ROWS * LENGTH * BASE.vocab * BASE.width * 2 * 3 / 8
    assert compiled.flops < 2 * logits + 6 * 5 / 4 * _block_flops() / 8


def _block_flops():
    kernels = BASE.layers * (4 * BASE.width**2 + 3 * BASE.width * BASE.hidden)
    scores = BASE.layers * 4 * LENGTH * BASE.width
    return ROWS * LENGTH * 3 * (2 * kernels + scores)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scan": False, "rounds": 2}, "rounds is 2 and scan is False"),
        ({"microbatches": 0}, "microbatches is 0 and scan is True: it must be a positive integer"),
        ({"rounds": 3}, "4 layers cannot be folded into 3 rounds: use a multiple of 3"),
    ],
)
def test_configs_that_make_no_pipeline(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **change)


def test_microbatches_that_do_not_divide_are_refused_with_the_numbers():
    recipe = recipe_of(dataclasses.replace(BASE, microbatches=8))
    layout = sw.layout(recipe, sw.mesh("pipe=2,data=4", on="cpu:8"), "dp+pipeline")
    with pytest.raises(
        ValueError, match="8 microbatches of 2 rows cannot be split 4 ways over data"
    ):
        sw.train_step(recipe, layout)(sw.train_state(recipe, layout), TOKENS[0])
