"""The strategies `expert` and `sequence`, against arrays on virtual devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise import models

CONFIG = models.Config(layers=1, width=32, hidden=64, heads=4, vocab=64, experts=4, capacity=2.0)
RECIPE = sw.Recipe(
    model=lambda: models.Decoder(CONFIG, rngs=nnx.Rngs(0)),
    loss=models.next_token_loss,
    optimizer=optax.sgd(0.1),
    batch=jax.ShapeDtypeStruct((8, 16), "int32"),
)
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 16)).astype("int32")


def losses(axes, strategy):
    layout = sw.layout(RECIPE, sw.mesh(axes, on="cpu:8"), strategy)
    state, step = sw.train_state(RECIPE, layout), sw.train_step(RECIPE, layout)
    found = []
    for _ in range(2):
        state, metrics = step(state, TOKENS)
        found.append(float(metrics["loss"]))
    return found, layout, state


def test_experts_and_sequences_train_as_the_unsplit_model_does():
    plain, _, _ = losses("data=8", "dp")
    split, layout, state = losses("data=2,expert=4", "fsdp+expert")
    np.testing.assert_allclose(split, plain, rtol=1e-4)
    # One expert on each device, and its storage over the data axis besides.
    up = state.model["blocks.0.experts.up"]
    assert {shard.data.shape[0] for shard in up.addressable_shards} == {1}
    assert layout["blocks.0.experts.up"].copies == 1
    # What has no experts is stored over both axes.
    assert layout["head"].spec in (P(("data", "expert")), P(None, ("data", "expert")))
    long, layout, _ = losses("data=2,sequence=4", "fsdp+sequence")
    np.testing.assert_allclose(long, plain, rtol=1e-4)
    assert layout["head"].copies == 1


def test_a_sequence_axis_splits_the_second_dim_of_the_batch():
    layout = sw.layout(RECIPE, sw.mesh("data=2,sequence=4", on="cpu:8"), "dp+sequence")
    step = sw.train_step(RECIPE, layout)
    placed = jax.tree.leaves(step.blueprint.batch)[0]
    assert placed.sharding.shard_shape(placed.shape) == (4, 4)


def test_a_batch_without_room_for_the_sequence_axis_is_refused():
    labels = {
        "x": jax.ShapeDtypeStruct((8, 3), "float32"),
        "y": jax.ShapeDtypeStruct((8,), "int32"),
    }
    recipe = sw.Recipe(
        model=lambda: nnx.Linear(3, 4, rngs=nnx.Rngs(0)),
        loss=lambda model, batch: jnp.mean(model(batch["x"])),
        optimizer=optax.sgd(0.1),
        batch=labels,
    )
    layout = sw.layout(recipe, sw.mesh("data=2,sequence=4", on="cpu:8"), "dp+sequence")
    with pytest.raises(ValueError, match=r"batch\['x'\] of shape \(8, 3\) cannot be split"):
        sw.train_step(recipe, layout)


def test_a_model_without_experts_is_refused():
    make = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))  # noqa: E731
    with pytest.raises(ValueError, match="expert found no experts"):
        sw.layout(make, sw.mesh("expert=4", on="none"), "expert")
    with pytest.raises(ValueError, match="'sequence' needs an axis named 'sequence'"):
        sw.layout(make, sw.mesh("data=4", on="none"), "dp+sequence")
