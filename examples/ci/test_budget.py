"""Budgets in your own tests: a layout regression fails and names the line that caused it.

    pytest examples/ci/test_budget.py

Copy this next to your model. It compiles for eight H100s on any machine (`pip install
"shardwise[gpu]"`). With `on="cpu:8"` it needs no extra compiler, but counts the collectives that
the CPU compiler inserts, which are not always the same.
"""

import jax
import optax
import pytest
from flax import nnx

import shardwise as sw
from shardwise import models

CONFIG = models.Config(layers=2, width=512, hidden=1024, heads=8, vocab=1024)
BATCH = jax.ShapeDtypeStruct((16, 256), "int32")


def make():
    return models.Decoder(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def compiled():
    recipe = sw.Recipe(
        model=make, loss=models.next_token_loss, optimizer=optax.adamw(1e-3), batch=BATCH
    )
    mesh = sw.mesh("data=2,model=4", on="h100:1x8")
    return sw.compile(recipe, sw.layout(make, mesh, "tensor", inputs=BATCH))


def test_the_step_fits_with_room_to_spare(compiled):
    assert compiled.fits
    sw.assert_budget(compiled, peak_bytes=2**30)


def test_tensor_parallelism_sums_activations_and_nothing_else(compiled):
    """Two sums per layer, forward and backward, and those of embedding, head and loss."""
    sw.assert_budget(compiled, collectives={"model": {"all-reduce": 4 * CONFIG.layers + 6}})


def test_there_is_nothing_suspicious(compiled):
    assert not compiled.findings, str(compiled.findings)
