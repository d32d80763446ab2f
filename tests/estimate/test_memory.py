"""What a step keeps in the memory of the hosts is not in an estimate of the devices' memory."""

import dataclasses
import math

import jax
import optax
import pytest
from flax import nnx

import shardwise as sw
from shardwise import models

CONFIG = models.Config(layers=8, width=256, hidden=512, heads=4, vocab=512, scan=True)
RECIPE = sw.Recipe(
    model=lambda: models.Decoder(CONFIG, rngs=nnx.Rngs(0)),
    loss=models.next_token_loss,
    optimizer=optax.adam(1e-3),
    batch=jax.ShapeDtypeStruct((32, 1024), "int32"),
    compute_dtype="bfloat16",
)


def estimated(remat, **changes):
    config = dataclasses.replace(CONFIG, remat=remat)
    recipe = dataclasses.replace(
        RECIPE, model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)), **changes
    )
    layout = sw.layout(recipe, sw.mesh("fsdp=4", on="v5e:2x2"), "fsdp")
    return sw.estimate(recipe, layout), recipe, layout


def test_offloaded_activations_are_not_on_the_device():
    kept, recipe, layout = estimated("save:input")
    away, _, _ = estimated("offload:input")
    rows, length = recipe.batch.shape
    stack = CONFIG.layers * rows // 4 * length * CONFIG.width * 2
    assert kept.peak_bytes - away.peak_bytes > 0.9 * stack
    assert away.state_bytes == kept.state_bytes


def test_what_is_offloaded_keeps_its_layout():
    kept, *_ = estimated("save:q,up,down")
    away, *_ = estimated("offload:q,up,down")
    assert away.by_axis == kept.by_axis and "all-to-all" not in away.by_axis["fsdp"]


def test_offloaded_state_is_not_on_the_device():
    here, recipe, layout = estimated("nothing_saveable")
    away, offloaded, _ = estimated("nothing_saveable", offload="optimizer")
    # As JAX itself lays the state out, on virtual devices.
    real = layout.on(sw.mesh("fsdp=4", on="cpu:4"))
    state = sw.train_state(recipe, real)
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.ndim]
    size = sum(math.prod(x.addressable_shards[0].data.shape) * x.dtype.itemsize for x in moments)
    assert here.state_bytes - away.state_bytes == size
    assert away.peak_bytes < here.peak_bytes


@pytest.mark.parametrize(
    ("capacity", "fits", "said"),
    [(300, True, "fits: "), (299, None, "may fit: "), (200, None, "may fit: ")]
    + [(199, False, "does not fit: "), (100, False, "does not fit: ")],
)
def test_what_fits_by_the_estimate_alone_is_not_said_to_fit(capacity, fits, said):
    found, recipe, layout = estimated("nothing_saveable")
    found = dataclasses.replace(found, peak_bytes=200, peak_bound=300, capacity=capacity)
    assert found.fits is fits and found.to_dict()["fits"] is fits
    assert found.verdict.startswith(said)
    # A compiler that meets the limit finds other orders, so only twice as much is beyond doubt.
    assert ("compile to be sure" in found.verdict) == (100 < capacity < 300)
    candidate = next(iter(sw.search(recipe, "v5e:1x1", compile=0).candidates))
    candidate = dataclasses.replace(candidate, estimate=found)
    assert (candidate.fits, candidate.sure) == (fits is not False, fits is not None)
    assert str(candidate).endswith(said.removesuffix(": "))
