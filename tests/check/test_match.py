"""A layout that is not of the model: every way in refuses it with the same findings."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import shardwise as sw

INPUTS = jax.ShapeDtypeStruct((8, 16), "float32")


def make(width=32, dtype="float32", bias=True):
    return nnx.Linear(16, width, use_bias=bias, param_dtype=dtype, rngs=nnx.Rngs(0))


def recipe_of(factory):
    return sw.Recipe(
        model=factory, loss=lambda m, x: m(x).mean(), optimizer=optax.sgd(0.1), batch=INPUTS
    )


OTHERS = {
    "shape": (lambda: make(width=64), {"SW204"}),
    "dtype": (lambda: make(dtype="bfloat16"), {"SW204"}),
    "more": (lambda: make(bias=False), {"SW203"}),
    "fewer": (lambda: make(), {"SW202"}),
}
WAYS = {
    "init": lambda layout: sw.init(make, layout),
    "shard": lambda layout: sw.shard(make(), layout),
    "compile a model": lambda layout: sw.compile(make, layout, inputs=INPUTS),
    "compile a recipe": lambda layout: sw.compile(recipe_of(make), layout),
    "train_state": lambda layout: sw.train_state(recipe_of(make), layout),
    "train_step": lambda layout: sw.train_step(recipe_of(make), layout),
    "fit": lambda layout: sw.fit(recipe_of(make), layout, [np.ones((8, 16), "float32")], steps=1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("other", OTHERS)
def test_refused_alike(other, way):
    factory, codes = OTHERS[other]
    mesh = sw.mesh("data=8", on="cpu:8")
    if other == "fewer":
        layout = sw.layout(lambda: nnx.Sequential(make(), make()), mesh, "dp")
        codes = {"SW202", "SW203"}
    else:
        layout = sw.layout(factory, mesh, "dp")
    with pytest.raises(sw.LayoutError) as caught:
        WAYS[way](layout)
    assert {finding.code for finding in caught.value.findings} == codes


def test_another_model_is_refused_in_a_few_lines():
    mesh = sw.mesh("data=8", on="cpu:8")
    layout = sw.layout(lambda: nnx.Sequential(*(make(16 + i) for i in range(8))), mesh, "dp")
    with pytest.raises(sw.LayoutError) as caught:
        sw.init(lambda: nnx.List([make(16 + i) for i in range(9)]), layout)
    assert len(caught.value.findings) == 34 and len(str(caught.value).splitlines()) == 7
    assert "SW202] missing-leaf: layers.**\n  16 arrays, the first layers.0." in str(caught.value)
