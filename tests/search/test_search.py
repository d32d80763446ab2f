"""Layouts that a search finds: ranked, explained, and proved by the compiler."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardwise as sw
from shardwise import models
from shardwise._search.space import accumulations, axes_of, divisors, meshes, orders


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(256, 256, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.relu(block(x))
        return x


MLP = sw.Recipe(
    model=lambda: Mlp(nnx.Rngs(0)),
    loss=lambda model, x: jnp.mean(model(x) ** 2),
    optimizer=optax.adam(1e-3),
    batch=jax.ShapeDtypeStruct((64, 256), "float32"),
)
CONFIG = models.Config(layers=2, width=128, hidden=256, heads=4, vocab=256, scan=True)
DECODER = sw.Recipe(
    model=lambda: models.Decoder(CONFIG, rngs=nnx.Rngs(0)),
    loss=models.next_token_loss,
    optimizer=optax.adamw(1e-4),
    batch=jax.ShapeDtypeStruct((16, 64), "int32"),
)


@pytest.fixture(scope="module")
def found():
    return sw.search(MLP, "h100:1x4", compile=0)


def test_every_mesh_of_a_few_devices_is_priced(found):
    seen = {tuple(sorted(c.choice.sizes.items())) for c in found.candidates}
    assert (("data", 4),) in seen and (("fsdp", 4),) in seen
    assert (("data", 2), ("fsdp", 2)) in seen
    assert all(c.devices == 4 for c in found.candidates)


def test_candidates_are_ranked_by_time_and_those_that_fit_come_first(found):
    keys = [(not c.fits, c.seconds) for c in found.candidates]
    assert keys == sorted(keys)
    assert found.best.seconds == min(c.seconds for c in found.candidates if c.fits)
    assert found.smallest.peak_bytes == min(c.peak_bytes for c in found.candidates)


def test_no_candidate_beats_one_of_the_front_in_time_and_memory(found):
    for point in found.front:
        assert not [
            c
            for c in found.candidates
            if c.fits and c.seconds < point.seconds and c.peak_bytes < point.peak_bytes
        ]


def test_the_estimate_is_the_one_of_the_layout_that_is_handed_back(found):
    best = found.best
    assert sw.estimate(best.recipe, best.layout).seconds == pytest.approx(best.seconds)


def test_the_best_trains_as_it_is(found):
    best = found.best
    here = best.layout.on(sw.mesh(best.mesh, on="cpu:4"))
    state = sw.train_state(best.recipe, here)
    step = sw.train_step(best.recipe, here)
    _, metrics = step(state, jnp.ones((64, 256)))
    assert jnp.isfinite(metrics["loss"])


def test_an_explanation_names_bytes_and_milliseconds(found):
    text = found.explain(found.candidates[0], found.candidates[-1])
    assert "faster than" in text and "peak memory" in text and "(modelled)" in text
    assert found.explain(found.candidates[-1], found.candidates[0]).count("B is") == 1


def test_a_search_is_the_same_twice(found):
    again = sw.search(MLP, "h100:1x4", compile=0)
    assert [c.choice for c in again.candidates] == [c.choice for c in found.candidates]


def test_the_global_batch_is_never_changed(found):
    assert all(c.recipe.batch == MLP.batch for c in found.candidates)


def test_fixed_parts_stay(found):
    one = sw.search(MLP, "h100:1x4", mesh="data=2,fsdp=2", compile=0, remat=None, accumulate=2)
    assert {c.choice.accumulate for c in one.candidates} == {2}
    assert {c.remat for c in one.candidates} == {None}
    assert {frozenset(c.choice.axes) for c in one.candidates} == {
        frozenset({("data", 2), ("fsdp", 2)})
    }
    only = sw.search(MLP, "h100:1x4", strategy="fsdp", compile=0)
    assert {c.strategy for c in only.candidates} == {"fsdp"}


def test_remat_of_blocks_reaches_the_recipe(found):
    kinds = {str(c.recipe.remat) for c in found.candidates}
    assert "None" in kinds and "{'blocks.*': 'nothing_saveable'}" in kinds


def test_a_decoder_takes_remat_without_a_pattern():
    found = sw.search(DECODER, "h100:1x2", compile=0, strategy="fsdp")
    assert {c.remat for c in found.candidates} >= {None, "nothing_saveable"}
    assert all(c.recipe.remat is None for c in found.candidates)


def test_what_cannot_be_split_is_said_once():
    plain = dataclasses.replace(
        MLP,
        model=lambda: nnx.Linear(255, 255, rngs=nnx.Rngs(0)),
        batch=jax.ShapeDtypeStruct((8, 255), "float32"),
    )
    found = sw.search(plain, "h100:1x2", compile=0)
    assert sum("tensor" in note for note in found.notes) == 1
    assert sum("remat" in note for note in found.notes) == 1
    assert all("tensor" not in c.strategy for c in found.candidates)


def test_a_tensor_axis_that_splits_nothing_is_dropped():
    found = sw.search(MLP, "h100:1x3", compile=0)
    assert not found.candidates
    assert any("no pair of dims is divisible by 3" in note for note in found.notes)


def test_another_order_of_the_axes_is_listed_if_it_is_faster(found):
    seen = [(frozenset(c.choice.axes), c.remat, c.accumulate) for c in found.candidates]
    seconds = {}
    for key, c in zip(seen, found.candidates, strict=True):
        assert c.seconds < 0.996 * seconds.get(key, 1.0) or key not in seconds
        seconds[key] = c.seconds


def test_prices_give_a_cheapest(found):
    assert found.cheapest is None
    priced = sw.search(MLP, "h100:1x4", compile=0, prices={"h100": 3.6})
    best = priced.cheapest
    assert best.cost == pytest.approx(3.6 * 4 * best.seconds / 3600)
    assert "$/step" in str(priced)


def test_the_compiler_has_the_last_word():
    found = sw.search(DECODER, "h100:1x2", compile=1, strategy="fsdp")
    best = found.best
    assert best.label == "compiled" and best.fits
    assert best.seconds == best.compiled.time.seconds


def test_a_time_limit_returns_what_is_known():
    found = sw.search(DECODER, "h100:1x8", compile=0, limit=0.0)
    assert found.candidates == () and "time limit" in found.stopped
    with pytest.raises(ValueError, match="nothing was priced"):
        _ = found.best


def test_an_interrupt_returns_what_is_known():
    def interrupt(line):
        raise KeyboardInterrupt

    found = sw.search(MLP, "h100:1x4", compile=0, progress=interrupt)
    assert found.stopped == "interrupted"


def test_when_nothing_fits_more_chips_are_proposed():
    huge = dataclasses.replace(
        MLP,
        model=lambda: nnx.Linear(65536, 65536, use_bias=False, rngs=nnx.Rngs(0)),
        batch=jax.ShapeDtypeStruct((64, 65536), "float32"),
    )
    found = sw.search(huge, "v5e:1x1", compile=0)
    assert not any(c.fits for c in found.candidates)
    assert found.remedies[0].fits and found.remedies[0].chips == "v5e:2x2" or found.remedies
    with pytest.raises(ValueError, match="nothing fits on v5e:1x1"):
        _ = found.best
    assert "what would fit" in str(found)


def test_how_many_chips():
    found = sw.search(MLP, "h100", compile=0, remat=None, strategy="dp")
    assert {c.chips for c in found.candidates} >= {"h100:1x1", "h100:1x2", "h100:1x4"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on": "h100:1x4", "mesh": "data=3"}, "mesh= has 3 devices, but h100:1x4 has 4"),
        ({"on": "h100:1x4", "mesh": "rows=4"}, "a search has data, fsdp and model"),
        ({"on": "h100:1x4", "mesh": "data"}, "not an axis with its size"),
        ({"on": "h100:1x4", "axes": {"expert": 2}}, "a search has the axes"),
        ({"on": "x100:1x4"}, "does not name a known chip"),
        ({"on": []}, "names no chips"),
        ({"on": "h100:1x4", "accumulate": 0}, "not a number of microbatches"),
        ({"on": "h100:1x4", "prices": {"x1": 1.0}}, "does not name a known chip"),
    ],
)
def test_wrong_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        sw.search(MLP, **{"compile": 0, **options})


def test_a_model_alone_is_refused():
    with pytest.raises(ValueError, match=r"takes a sw\.Recipe"):
        sw.search(MLP.model, "h100:1x4")


def test_the_plain_data_points_at_its_candidates(found):
    data = found.to_dict()
    assert data["candidates"][data["best"]]["fits"]
    assert [data["candidates"][i]["seconds"] for i in data["front"]] == sorted(
        data["candidates"][i]["seconds"] for i in data["front"]
    )


def test_the_space():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert axes_of(1, 4, 2) == ((("fsdp", 4), ("model", 2)), "fsdp+tensor")
    assert axes_of(1, 1, 1) == ((("data", 1),), "dp")
    assert all(a * b * c == 12 for a, b, c in meshes(12, 24, tensor=True))
    assert not [m for m in meshes(12, 24, tensor=False) if m[2] > 1]
    assert not list(meshes(8, 3, tensor=False))
    assert accumulations(48, 4) == [1, 2, 4]
    assert list(orders((("a", 2), ("b", 3)))) == [(("a", 2), ("b", 3)), (("b", 3), ("a", 2))]
