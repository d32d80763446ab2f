"""What decides an estimate's peak: the compilers' own figures for steps that show each rule."""

import jax
import optax
import pytest
from flax import nnx

import shardwise as sw
from shardwise import models
from shardwise._estimate.kernels.tpu.lanes import filled

pytestmark = pytest.mark.usefixtures("built_once")


class Gelu(nnx.Module):
    """Layers whose activation is dear to compute twice."""

    def __init__(self, rngs):
        self.up = nnx.List([nnx.Linear(512, 2048, rngs=rngs) for _ in range(2)])
        self.down = nnx.List([nnx.Linear(2048, 512, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nnx.gelu(up(x)))
        return x


def peaks(recipe, on):
    """Returns the estimated and the compiled peak of a step on four chips."""
    layout = sw.layout(recipe.model, sw.mesh("data=4", on=on), "fsdp")
    compiled = sw.compile(recipe, layout, show=False)
    return sw.estimate(recipe, layout).peak_bytes, compiled.memory.peak


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_the_gradient_of_a_softmax_is_beside_what_it_is_computed_from(kv_heads):
    config = models.Config(
        layers=2, width=512, hidden=1024, vocab=512, heads=8, kv_heads=kv_heads, scan=True,
        remat="nothing_saveable",
    )  # fmt: skip
    recipe = sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adam(1e-3),
        batch=jax.ShapeDtypeStruct((16, 2048), "int32"),
        compute_dtype="bfloat16",
    )
    estimated, compiled = peaks(recipe, "h100:1x4")
    assert estimated == pytest.approx(compiled, rel=0.06)


def test_what_is_dear_to_compute_again_is_kept_by_gpus():
    recipe = sw.Recipe(
        model=lambda: Gelu(nnx.Rngs(0)),
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.adam(1e-3),
        batch=jax.ShapeDtypeStruct((65536, 512), "float32"),
        compute_dtype="bfloat16",
    )
    estimated, compiled = peaks(recipe, "h100:1x4")
    assert estimated == pytest.approx(compiled, rel=0.1)


@pytest.mark.parametrize(
    ("dims", "times"),
    [((16, 196, 196), 256 / 196), ((8, 196, 1024), 1.0), ((1, 1), 1.0), ((4, 100), 1.28)],
)
def test_rows_fill_registers_in_the_best_order(dims, times):
    assert filled(dims) == pytest.approx(times)


def test_small_arrays_stay_beside_a_tpu_s_cores():
    config = models.Config(
        layers=2, width=512, hidden=1408, vocab=2048, heads=4, scan=True, remat="nothing_saveable"
    )
    recipe = sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adam(1e-3),
        batch=jax.ShapeDtypeStruct((32, 1024), "int32"),
        compute_dtype="bfloat16",
    )
    layout = sw.layout(recipe.model, sw.mesh("data=8", on="v5e:2x4"), "fsdp")
    compiled, estimated = sw.compile(recipe, layout, show=False), sw.estimate(recipe, layout)
    # Through main memory it would take 1.6 times as long.
    assert estimated.seconds == pytest.approx(compiled.time.seconds, rel=0.2)
    assert estimated.peak_bound > compiled.memory.peak
