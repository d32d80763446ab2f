"""What is known before anything runs: also that it cannot."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import shardwise as sw
from shardwise._compile import plan_of


def make():
    return nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))


def planned(samples, **more):
    recipe = sw.Recipe(
        model=make,
        loss=lambda model, x: model(x).mean(),
        optimizer=optax.adam(0.1),
        batch=jax.ShapeDtypeStruct((samples, 64), jnp.float32),
        **more,
    )
    return plan_of(recipe, sw.layout(make, sw.mesh("data=8", on="cpu:8"), "dp"))


def test_a_batch_that_the_mesh_does_not_divide_is_the_verdict():
    fine, wrong = planned(16), planned(12)
    assert fine.usable and not fine.problem and fine.batch_bytes == 2 * 64 * 4
    assert wrong.verdict.startswith(
        "cannot run: batch of shape (12, 64) cannot be split as P('data') on data=8: dim 0 "
    )
    assert not wrong.usable and wrong.optimizer_bytes == fine.optimizer_bytes


def test_so_is_a_recipe_that_trains_nothing():
    found = planned(16, wrt=nnx.BatchStat)
    assert found.verdict.startswith("cannot run: wrt=") and not found.usable
