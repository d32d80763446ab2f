"""Fine-tuning adapters: base weights from a folder, a run that trains adapters alone, and back."""

import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise import models

qwix = pytest.importorskip("qwix")
pytestmark = pytest.mark.usefixtures("built_once")

CONFIG = models.Config(layers=2, width=16, hidden=32, heads=4, kv_heads=2, vocab=64, scan=True)
TOKENS = np.random.default_rng(0).integers(0, 64, (32, 8)).astype("int32")
BATCH = jax.ShapeDtypeStruct((8, 8), "int32")


def plain(seed=0):
    return models.Decoder(CONFIG, rngs=nnx.Rngs(seed))


def make(**options):
    provider = qwix.LoraProvider(module_path="blocks/.*", rank=4, alpha=8.0, **options)
    tokens = jnp.ones((1, 4), "int32")
    return qwix.apply_lora_to_model(plain(), provider, tokens, rngs=nnx.Rngs(1))


def recipe(**options):
    return sw.Recipe(
        model=functools.partial(make, **options),
        loss=models.next_token_loss,
        optimizer=optax.adam(1e-2),
        batch=BATCH,
        wrt=nnx.LoRAParam,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "base"
    sw.save_weights(plain(seed=7), path)
    return path


def on(axes):
    return sw.mesh(axes, on=f"cpu:{8 if '2' in axes else 1}")


def run(given, folder, axes, tmp_path, steps=3, **options):
    layout = sw.layout(given, on(axes), "fsdp+tensor" if "model" in axes else "dp")
    model = sw.load(given.model, layout, folder)
    state = sw.fit(
        given, layout, sw.data(TOKENS), steps=steps, model=model, show=False,
        logs=tmp_path / f"logs-{axes}", log_every=1, **options,
    )  # fmt: skip
    lines = (tmp_path / f"logs-{axes}" / "metrics.jsonl").read_text().splitlines()
    return layout, model, state, [row["loss"] for row in map(json.loads, lines) if "loss" in row]


QUANTISED = {"float": {}, "int4": {"weight_qtype": "int4", "tile_size": 4}}


@pytest.mark.parametrize("kind", QUANTISED)
def test_from_a_folder_to_a_folder(kind, folder, tmp_path):
    given = recipe(**QUANTISED[kind])
    _, _, _, wanted = run(given, folder, "data=1", tmp_path)
    store = sw.Checkpoints(tmp_path / "run", trained_only=True)
    layout, loaded, state, losses = run(
        given, folder, "data=2,model=4", tmp_path, checkpoints=store
    )
    np.testing.assert_allclose(losses, wanted, rtol=2e-6)
    assert losses[-1] != losses[0]
    # Only adapters have optimizer state, and only they are in the checkpoint.
    adapters = {leaf.path for leaf in layout.leaves if leaf.kind == "LoRAParam"}
    assert {path.removeprefix("0.mu.") for path in state.optimizer if ".mu." in path} == adapters
    size = sum(layout[path].bytes for path in adapters)
    assert store.about()["bytes"] == 3 * size + 8  # with two moments, and two counts
    stored = (tmp_path / "run" / "3" / "state" / "_METADATA").read_text()
    assert "blocks.0.attention.q_lora_a" in stored and "blocks.0.norm1" not in stored
    # A resumed run needs the base again, and says so if it is another.
    again = sw.Checkpoints(tmp_path / "run").restore(given, layout, model=loaded)
    for path, array in state.model.items():
        assert np.array_equal(np.asarray(array), np.asarray(again.model[path])), path
    with pytest.raises(sw.CheckpointError, match="was trained with other values of blocks.0"):
        sw.Checkpoints(tmp_path / "run").restore(given, layout)
    # Merged: the plain model, in the shards of its base, that gives the same logits.
    tuned = state.to_model(given.model)
    merged = sw.merge_adapters(tuned, plain)
    np.testing.assert_allclose(tuned(TOKENS[:2]), merged(TOKENS[:2]), atol=2e-6)
    base = sw.layout(plain, on("data=2,model=4"), "fsdp+tensor", inputs=jnp.ones((1, 4), "int32"))
    assert merged.blocks[0].attention.q.sharding.shard_shape((2, 16, 4, 4)) == (
        base["blocks.0.attention.q"].shard_shape
    )
    sw.save_weights(merged, tmp_path / "tuned")
    assert sorted(os.listdir(tmp_path / "tuned")) == sorted(os.listdir(folder))
    back = sw.load(plain, base, tmp_path / "tuned")
    for one, other in zip(*(jax.tree.leaves(nnx.state(m)) for m in (merged, back)), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


def test_quantised_while_it_is_loaded_as_qwix_does_it(folder):
    options = QUANTISED["int4"]
    layout = sw.layout(functools.partial(make, **options), on("data=2,model=4"), "fsdp+tensor")
    found = sw.load(functools.partial(make, **options), layout, folder)
    assert not sw.audit(layout, found)
    whole = nnx.state(sw.load(plain, sw.layout(plain, on("data=1"), "dp"), folder))
    values = jax.tree.map(np.asarray, whole)

    def eager():  # what qwix itself makes of a model with these weights
        provider = qwix.LoraProvider(module_path="blocks/.*", rank=4, alpha=8.0, **options)
        model = plain()
        nnx.update(model, jax.tree.map(jnp.asarray, values))
        return qwix.apply_lora_to_model(
            model, provider, jnp.ones((1, 4), "int32"), rngs=nnx.Rngs(1)
        )

    wanted = sw.init(eager, sw.layout(eager, on("data=1"), "dp"))
    wanted = dict(nnx.to_flat_state(nnx.state(wanted)))
    for path, value in nnx.to_flat_state(nnx.state(found)):
        if "lora" not in path[-1]:
            assert np.array_equal(np.asarray(value[...]), np.asarray(wanted[path][...])), path


def test_a_preflight_lists_adapters_as_initialised(folder):
    layout = sw.layout(make, sw.mesh("data=8", on="none"), "fsdp")
    found = sw.check_weights(make, layout, folder)
    assert not found.findings and len(found.initialised) == 12
    assert all("_lora_" in path for path in found.initialised)


class Wrapped(nnx.Module):
    def __init__(self):
        base = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        self.up = nnx.LoRA(16, 4, 32, base_module=base, rngs=nnx.Rngs(1))
        self.up.lora_b[...] = jnp.ones((4, 32))

    def __call__(self, x):
        return self.up(x)


class Bare(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(16, 32, rngs=nnx.Rngs(3))

    def __call__(self, x):
        return self.up(x)


def test_adapters_of_flax_are_loaded_over_and_merged(tmp_path):
    sw.save_weights(Bare(), tmp_path / "bare.safetensors")
    layout = sw.layout(Wrapped, on("data=2,model=4"), {"up.base_module.kernel": P(None, "model")})
    model = sw.load(Wrapped, layout, tmp_path / "bare.safetensors")
    x = jnp.ones((2, 16))
    np.testing.assert_allclose(sw.merge_adapters(model, Bare)(x), model(x), rtol=1e-5)


WRONG = {
    "adapters": (
        lambda: sw.merge_adapters(Wrapped(), Wrapped),
        "make returns a model with adapters",
    ),
    "model": (
        lambda: sw.merge_adapters(Wrapped(), lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0))),
        "another model than the one that was adapted: bias has no counterpart, and 3 more differences",
    ),
    "scale": (
        lambda: sw.merge_adapters(Wrapped(), Bare, scale=float("nan")),
        r"the scale of up.lora_a must be a number, got nan",
    ),
    "save": (
        lambda: sw.save_weights(nnx.eval_shape(make), "/tmp/never"),
        r"k_lora_a is an adapter, for which the names have no key: save the plain model",
    ),
    "generate": (
        lambda: models.generate(nnx.eval_shape(make), [[1]], tokens=1),
        "adapters apply only when it is called",
    ),
    "chunks": (
        lambda: models.next_token_loss(nnx.eval_shape(make), jnp.ones((1, 4), "int32"), chunks=2),
        "compute its loss in one chunk",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong(case):
    call, message = WRONG[case]
    with nnx.use_eager_sharding(False), pytest.raises(ValueError, match=message):
        call()
