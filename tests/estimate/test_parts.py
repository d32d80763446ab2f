"""What compilers make of a partitioned step: products in parts, pipelines, scatters over some axes."""

import jax
import optax
import pytest
from flax import nnx

import shardwise as sw
from shardwise import models


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4096, 4096, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def mlp(compute_dtype: str | None = "bfloat16"):
    return sw.Recipe(
        model=lambda: Mlp(nnx.Rngs(0)),
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.adam(1e-3),
        batch=jax.ShapeDtypeStruct((8192, 4096), "float32"),
        compute_dtype=compute_dtype,
    )


# By mesh: bytes over `data` and `model`, and permutes, as the TPU compiler (libtpu of jax 0.12) made them.
COMPILED = {
    ("data=16", "fsdp"): ({"data": 272691207}, 85),
    ("data=4,model=4", "fsdp+tensor"): ({"data": 54556678, "model": 75497472}, 17),
    ("data=2,model=8", "fsdp+tensor"): ({"data": 16795652, "model": 176160768}, 0),
}


@pytest.mark.parametrize(("mesh", "strategy"), COMPILED)
def test_a_tpu_computes_products_in_parts_along_rings_of_four_and_more(mesh, strategy):
    recipe = mlp()
    inputs = recipe.batch if "tensor" in strategy else None
    layout = sw.layout(recipe.model, sw.mesh(mesh, on="v5p:2x2x4"), strategy, inputs=inputs)
    found = sw.estimate(recipe, layout)
    sent, permutes = COMPILED[mesh, strategy]
    mine = {axis: sum(b for _, b in kinds.values()) for axis, kinds in found.by_axis.items()}
    assert mine == pytest.approx(sent, rel=0.01)
    assert found.by_axis["data"].get("collective-permute", (0, 0))[0] == permutes


def test_a_tpu_sends_bfloat16_to_products_of_float32_and_computes_none_in_parts():
    """Bytes as the TPU compiler (libtpu of jax 0.12) made them."""
    recipe = mlp(compute_dtype=None)
    layout = sw.layout(
        recipe.model,
        sw.mesh("data=8,model=2", on="v5p:2x2x4"),
        "fsdp+tensor",
        inputs=recipe.batch,
    )
    found = sw.estimate(recipe, layout).by_axis
    assert sum(sent for _, sent in found["data"].values()) == 176246791
    assert sum(sent for _, sent in found["model"].values()) == 50331648
    assert "collective-permute" not in found["data"]


def test_a_pipeline_sends_about_what_the_compiled_one_sends():
    """With two stages, the compiler sends some of the rotated activations twice."""
    config = models.Config(
        layers=4, width=64, hidden=128, heads=4, vocab=256, scan=True, remat="nothing_saveable"
    )
    recipe = sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((16, 32), "int32"),
    )
    layout = sw.layout(
        recipe.model, sw.mesh("pipe=2,data=2", on="h100:1x4"), [sw.stages("pipe"), sw.fsdp("data", min_bytes=0)]
    )  # fmt: skip
    mine, theirs = (
        {axis: sum(b for _, b in kinds.values()) for axis, kinds in found.by_axis.items()}
        for found in (sw.estimate(recipe, layout), sw.compile(recipe, layout, show=False))
    )
    assert mine.keys() == theirs.keys()
    assert mine["pipe"] == pytest.approx(theirs["pipe"], rel=0.25)
    assert mine["data"] == pytest.approx(theirs["data"], rel=0.15)
