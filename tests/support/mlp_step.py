"""A small training step on eight absent GPUs: the program that prices and estimates are tried on."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import shardwise as sw


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(1024, 4096, rngs=rngs)
        self.down = nnx.Linear(4096, 1024, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


RECIPE = sw.Recipe(
    model=lambda: Model(nnx.Rngs(0)),
    loss=lambda model, x: jnp.mean(model(x) ** 2),
    optimizer=optax.adam(1e-3),
    batch=jax.ShapeDtypeStruct((2048, 1024), "float32"),
    compute_dtype="bfloat16",
)


@functools.cache
def compiled_step():
    """Returns the recipe, its layout, and both compiled."""
    layout = sw.layout(RECIPE.model, sw.mesh("data=8", on="h100:1x8"), "fsdp")
    return RECIPE, layout, sw.compile(RECIPE, layout, show=False)
