"""Layouts that a search finds: ranked, explained, and proved by the compiler."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise import models
from shardwise._layout import read_step
from shardwise._search.abilities import Abilities
from shardwise._search.space import Place, accumulations, beyond, divisors, orders, places

pytestmark = pytest.mark.usefixtures("built_once")


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


def test_a_model_is_built_once_however_many_layouts_are_priced():
    built = []

    def make():
        built.append(1)
        return Mlp(nnx.Rngs(0))

    how = {"compile": 0, "strategy": "fsdp", "remat": None}
    found = sw.search(dataclasses.replace(MLP, model=make), "h100:1x4", **how)
    assert found.candidates and len(built) == 1


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
    seen = [(frozenset(c.choice.axes), c.strategy, c.remat, c.accumulate) for c in found.candidates]
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
        ({"on": "h100:1x4", "mesh": "rows=4"}, "a search has the axes pipe, data"),
        ({"on": "h100:1x4", "mesh": "data"}, "not an axis with its size"),
        ({"on": "h100:1x4", "axes": {"rows": 2}}, "a search has the axes"),
        ({"on": "x100:1x4"}, "does not name a known chip"),
        ({"on": []}, "names no chips"),
        ({"on": "cpu:4"}, "has no step time to search for"),
        ({"on": "h100:1x4", "compile": -1}, "compile=-1 must be at least 0"),
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
    assert Place.of({"fsdp": 4, "model": 2}).axes == (("fsdp", 4), ("model", 2))
    assert Place.of({"pipe": 2, "expert": 4}).strategy == "dp+expert+pipeline"
    assert Place.of({}).axes == (("data", 1),)
    split = places(12, 24, {"model": 0})
    assert all(math.prod(place.sizes) == 12 for place in split)
    assert {place["model"] for place in split} == {1, 2, 3, 4, 6, 12}
    assert all(place.is_plain and place["model"] == 1 for place in places(12, 24, {}))
    assert not places(8, 3, {})
    assert accumulations(48, 4) == [1, 2, 4]
    assert list(orders((("a", 2), ("b", 3)))) == [(("a", 2), ("b", 3)), (("b", 3), ("a", 2))]


def test_an_axis_divides_what_it_splits():
    found = places(16, 16, {"expert": 4, "pipe": 6, "sequence": 64})
    assert {place["expert"] for place in found} == {1, 2, 4}
    assert {place["pipe"] for place in found} == {1, 2}
    # Sequences are split where there are no samples left to split.
    alone = places(16, 1, {"sequence": 64})
    assert [place.axes for place in alone] == [(("sequence", 16),)]


def test_neighbours_keep_the_number_of_devices():
    place = Place.of({"fsdp": 6, "model": 2})
    near = list(place.neighbours())
    assert near and all(math.prod(each.sizes) == 12 for each in near)
    assert (
        Place.of({"fsdp": 3, "model": 4}) in near and Place.of({"model": 2, "pipe": 6}) not in near
    )
    started = beyond(place, places(12, 12, {"model": 0, "pipe": 4}))
    assert started and all(each["pipe"] > 1 for each in started)


EXPERTS = dataclasses.replace(
    DECODER,
    model=lambda: models.Decoder(
        dataclasses.replace(CONFIG, experts=4, capacity=2.0), rngs=nnx.Rngs(0)
    ),
)


def test_axes_are_those_that_the_model_has_dims_for():
    can = Abilities(EXPERTS)
    limits, missing = can.limits
    assert limits == {"model": 0, "pipe": 2, "expert": 4, "sequence": 64} and not missing
    assert can.chunks and "input" in can.names and "up" not in can.names
    limits, missing = Abilities(MLP).limits
    assert limits == {"model": 0}
    assert all(word in missing for word in ("pipeline", "expert", "sequence"))


def test_a_stack_that_no_pipeline_runs_is_not_one():
    class Scanned(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.vmap(lambda rngs: nnx.Linear(256, 256, rngs=rngs))(rngs.split(4))

        def __call__(self, x):
            run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return run(x, self.blocks)

    assert (
        "pipe"
        not in Abilities(dataclasses.replace(MLP, model=lambda: Scanned(nnx.Rngs(0)))).limits[0]
    )


@pytest.mark.parametrize(
    ("axes", "strategy"),
    [
        ({"expert": 2}, "expert"),
        # The other two leave each pair of axes to one search.
        ({"sequence": 2, "expert": 1}, "sequence"),
        ({"pipe": 2, "expert": 1, "sequence": 1}, "pipeline"),
    ],
)
def test_a_fixed_axis_is_searched_and_trains(axes, strategy):
    found = sw.search(EXPERTS, "h100:1x4", compile=0, axes={**axes, "model": 1}, remat=None)
    best = found.best
    assert strategy in best.strategy and best.choice.sizes[next(iter(axes))] == 2
    here = best.layout.on(sw.mesh(best.mesh, on="cpu:4"))
    state, step = sw.train_state(best.recipe, here), sw.train_step(best.recipe, here)
    _, metrics = step(state, jnp.zeros((16, 64), "int32"))
    assert jnp.isfinite(metrics["loss"])


TALL = dataclasses.replace(
    DECODER,
    model=lambda: models.Decoder(
        models.Config(layers=2, width=1024, hidden=4096, heads=8, vocab=131072, scan=True),
        rngs=nnx.Rngs(0),
    ),
    batch=jax.ShapeDtypeStruct((32, 8192), "int32"),
    compute_dtype="bfloat16",
)


def test_what_does_not_fit_is_made_to_by_chunks_and_offloading():
    fixed = {"mesh": "fsdp=4", "accumulate": 1, "compile": 0}
    found = sw.search(TALL, "v5e:2x2", **fixed)
    plain = [c for c in found.candidates if c.loss_chunks == 1 and not c.offload]
    assert not any(c.fits for c in plain if c.remat in (None, "nothing_saveable"))
    best = found.best
    assert best.loss_chunks > 1 and best.recipe.loss_chunks == best.loss_chunks
    assert f"--loss-chunks {best.loss_chunks}" in best.command
    kept = sw.search(TALL, "v5e:2x2", **fixed, loss_chunks=1, offload="", remat="nothing_saveable")
    assert {(c.loss_chunks, c.offload) for c in kept.candidates} == {(1, "")}


def test_the_batch_is_searched_if_it_is_left_open():
    found = sw.search(
        MLP, "h100:1x2", compile=0, strategy="dp", remat=None, batch_per_device="free"
    )
    assert len({c.samples for c in found.candidates}) > 1
    best = found.best
    assert best.sample_seconds == min(c.sample_seconds for c in found.candidates)
    assert best.recipe.batch.shape == (best.samples, 256) and "batch" in str(found)
    fixed = sw.search(MLP, "h100:1x2", compile=0, strategy="dp", remat=None, batch_per_device=7)
    assert {c.samples for c in fixed.candidates} == {14}


def test_results_are_kept_between_searches(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    how = {"compile": 0, "strategy": "fsdp"}
    first = sw.search(MLP, "h100:1x4", **how)
    (entry,) = tmp_path.iterdir()
    asked = []
    monkeypatch.setattr(
        "shardwise._search.stages.pricing.partition_step", lambda *a, **k: asked.append(a) or 1 / 0
    )
    again = sw.search(MLP, "h100:1x4", **how, prices={"h100": 2.0})
    assert not asked
    assert [c.choice for c in again.candidates] == [c.choice for c in first.candidates]
    assert [c.estimate for c in again.candidates] == [c.estimate for c in first.candidates]
    assert again.best.layout.specs == first.best.layout.specs
    # Another program, and a damaged entry, are priced anew.
    with pytest.raises(ZeroDivisionError):
        sw.search(dataclasses.replace(MLP, clip=1.0), "h100:1x4", **how)
    entry.write_bytes(entry.read_bytes()[:-7])
    with pytest.raises(ZeroDivisionError):
        sw.search(MLP, "h100:1x4", **how)


def test_the_best_strategy_is_a_rule():
    mesh = sw.mesh("data=4", on="h100:1x4")
    layout = sw.layout(MLP, mesh, "best")
    seconds = {
        name: sw.estimate(MLP, sw.layout(MLP, mesh, name)).seconds for name in ("dp", "fsdp")
    }
    name = min(seconds, key=lambda name: seconds[name])
    assert f"strategies, {name} (" in layout["blocks.0.kernel"].reason
    assert layout.specs == sw.layout(MLP, mesh, name).specs
    with pytest.raises(ValueError, match="'best' needs a recipe"):
        sw.layout(MLP.model, mesh, "best")
    with pytest.raises(ValueError, match="only known for chips"):
        sw.layout(MLP, sw.mesh("data=4", on="none"), "best")
    with pytest.raises(ValueError, match="unknown strategy 'best'"):
        sw.layout(MLP, mesh, ["best", {"**.bias": P()}])


def test_a_candidate_saves_its_step_with_its_layout(found, tmp_path):
    best = found.best
    best.save(tmp_path / "layout.json")
    assert read_step(tmp_path / "layout.json") == best.step
    assert sw.load_layout(tmp_path / "layout.json").mesh.shape == best.layout.mesh.shape


class Annotated(nnx.Module):
    """Annotated for a mesh with the axes `fsdp` and `tp`, as the models of tunix are."""

    def __init__(self):
        def kernel(*names):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(64, 256, kernel_init=kernel("fsdp", "tp"), rngs=rngs)
        self.down = nnx.Linear(256, 64, kernel_init=kernel("tp", "embed"), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def test_names_that_are_no_axes_are_mapped_and_said(tmp_path):
    recipe = dataclasses.replace(
        MLP, model=Annotated, batch=jax.ShapeDtypeStruct((8, 64), "float32")
    )
    found = sw.search(recipe, "h100:1x4", compile=0)
    assert (
        "names in the model's annotations: 'tp' is taken as model, 'embed' is left to the strategy"
        in found.notes
    )
    with pytest.raises(ValueError, match="have names that are no axes of .*'embed', 'tp', so"):
        sw.layout(recipe, sw.mesh("data=2,fsdp=2", on="h100:1x4"), "best")
    split = next(c for c in found.candidates if c.choice.sizes == {"fsdp": 2, "model": 2})
    assert split.layout["up.kernel"].spec == P("fsdp", "model")
    assert split.layout["down.kernel"].spec == P("model", "fsdp")
    assert {"dp", "zero1", "fsdp", "dp+tensor"} <= {c.strategy for c in found.candidates}
    split.save(tmp_path / "layout.json")
    again = sw.load_layout(tmp_path / "layout.json", sw.mesh(split.mesh, on="cpu:4"))
    assert again["down.kernel"].spec == P("model", "fsdp")


def test_a_step_that_cannot_be_traced_is_explained_once():
    def loss(model, x):
        raise KeyError("no such table")

    with pytest.raises(
        ValueError, match="(?s)^the step cannot be traced:.*KeyError: 'no such table'"
    ):
        sw.search(dataclasses.replace(MLP, loss=loss), "h100:1x4", compile=0)


def test_what_the_model_itself_refuses_on_a_mesh_is_said():
    def loss(model, x):  # as models that name an axis of their own mesh
        return jnp.mean(model(jax.lax.with_sharding_constraint(x, P("data"))) ** 4)

    found = sw.search(dataclasses.replace(MLP, loss=loss), "h100:1x4", compile=0, remat=None)
    reason = "ValueError: Resource axis: data of P('data',) is not found in mesh: ('fsdp',)."
    assert f"fsdp=4 fsdp dropped: the step cannot be traced: {reason}" in found.notes
    assert "dp+tensor" in {c.strategy for c in found.candidates}


def test_a_strategy_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"^strategy='fdsp' is unknown: use dp, fsdp, zero1"):
        sw.search(MLP, "h100:1x4", compile=0, strategy="fdsp")


def test_a_batch_that_a_fixed_mesh_cannot_split_is_named():
    odd = dataclasses.replace(MLP, batch=jax.ShapeDtypeStruct((6, 256), "float32"))
    found = sw.search(odd, "h100:1x4", compile=0, mesh="fsdp=4", prices={"v5p": 4.2})
    assert not found.candidates
    assert "fsdp=4 fsdp dropped: a batch of 6 samples cannot be split over 4 devices" in found.notes
    assert "prices of v5p were not used: these chips are not searched" in found.notes
