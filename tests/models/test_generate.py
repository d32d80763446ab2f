"""Generation with a cache: greedy tokens are those of transformers, on one device and on eight."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, FOLDER, expected_of, load_family
from flax import nnx

import shardwise as sw
from shardwise import models
from shardwise._compile.job import job_of
from shardwise.models._generate.sampling import Sampling

NEW = 12


def prompts_of(expected, copies=1):
    rows = [
        row[:n].tolist()
        for row, n in zip(expected["tokens"], expected["prompt_lengths"], strict=False)
    ]
    return rows * copies


def with_cache(config, family, batch=4, length=24):
    model = load_family(config, family)
    model.init_cache(batch, length)
    return model


def make(config, batch=4, length=24):
    def build():
        model = models.Decoder(config, rngs=nnx.Rngs(0))
        model.init_cache(batch, length)
        return model

    return build


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma3_vision"])
def test_greedy_tokens_are_those_of_transformers(family, scan):
    config, expected = models.config_from_hf(FOLDER / family, scan=scan), expected_of(family)
    model = with_cache(config, family)
    steps = list(models.generate(model, prompts_of(expected), tokens=NEW))
    assert np.stack(steps, axis=1).tolist() == expected["generated"].tolist()
    # All but the last token are in the cache, of which local layers keep their window.
    np.testing.assert_array_equal(model.cache.tokens[...], expected["prompt_lengths"] + NEW - 1)
    sizes = {pair.k.shape[-3] for pair in (*model.cache.blocks, *model.cache.rest)}
    local = {config.is_local(i) for i in range(config.layers)}
    assert sizes == {config.window if is_local else 24 for is_local in local}


STRATEGIES = {
    "dp": ("data=8", None),
    "fsdp": ("data=8", [sw.fsdp("data", min_bytes=0)]),
    "tensor": ("data=4,model=2", "tensor"),
    "fsdp+tensor": ("data=4,model=2", [sw.tensor("model"), sw.fsdp("data", min_bytes=0)]),
}
# Window and stack, caps, experts, and biases.
ON_A_MESH = {
    "dp": ("gemma3", True),
    "fsdp": ("mixtral", False),
    "tensor": ("gemma2", True),
    "fsdp+tensor": ("qwen2", False),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_greedy_tokens_on_a_mesh(strategy):
    (axes, rules), (family, scan) = STRATEGIES[strategy], ON_A_MESH[strategy]
    config, expected = models.config_from_hf(FOLDER / family, scan=scan), expected_of(family)
    token = jax.ShapeDtypeStruct((8,), "int32")
    layout = sw.layout(
        make(config, batch=8),
        sw.mesh(axes, on="cpu:8"),
        rules,
        logical={"batch": "data"},
        inputs=token,
        method="decode",
    )
    keys = [leaf for leaf in layout.leaves if leaf.path.startswith("cache.")]
    ways = 2 if "tensor" in strategy else 1
    assert all(leaf.copies == 1 for leaf in keys if leaf.path != "cache.tokens")
    model = sw.shard(with_cache(config, family, batch=8), layout)
    steps = models.generate(model, prompts_of(expected, 2), tokens=NEW, layout=layout)
    found = np.stack(list(steps), axis=1)
    assert found.tolist() == expected["generated"].tolist() * 2
    # What is left of the model is placed as planned, and has the planned bytes.
    assert not sw.audit(layout, model)
    k = model.cache.blocks[0].k[...]
    assert k.sharding.shard_shape(k.shape)[-2] == config.key_heads // ways


def test_a_step_updates_the_cache_in_place():
    config = models.config_from_hf(FOLDER / "llama2", scan=True)
    build = make(config, batch=8, length=2048)
    layout = sw.layout(build, sw.mesh("data=8", on="cpu:8"), logical={"batch": "data"})
    cached = sum(leaf.shard_bytes for leaf in layout.leaves if leaf.kind == "Cache")
    assert cached > sum(leaf.shard_bytes for leaf in layout.leaves) / 2
    tokens = jax.ShapeDtypeStruct((8,), "int32")
    compiled = sw.compile(build, layout, inputs=tokens, method="decode")
    memory = compiled.memory
    assert memory.arguments + memory.outputs > memory.peak  # they share the cache
    assert memory.peak < memory.arguments + cached
    assert not compiled.collectives
    job = job_of(build, layout, jax.ShapeDtypeStruct((8, 64), "int32"), "prefill")
    assert job.jitted.lower(*job.arguments).compile().memory_analysis().alias_size_in_bytes >= (
        cached - 32
    )


def test_a_prompt_of_several_lengths_and_padding():
    config, expected = models.config_from_hf(FOLDER / "gemma3"), expected_of("gemma3")
    model = with_cache(config, "gemma3", batch=8)
    lengths = np.array([11, 1, 2, 5, 8, 3, 4, 10], "int32")
    got = nnx.jit(lambda model, *inputs: model.prefill(*inputs))(
        model, expected["tokens"], jnp.asarray(lengths)
    )
    want = expected["logits"][np.arange(8), lengths - 1]
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())
    decode = nnx.jit(lambda model, tokens: model.decode(tokens))
    for _ in range(3):  # what is decoded next is the next token of the prompt, or the last again
        at = np.minimum(lengths, 10)
        got = decode(model, jnp.asarray(expected["tokens"][np.arange(8), at]))
        right = lengths < 11
        want = expected["logits"][np.arange(8), at]
        np.testing.assert_allclose(got[right], want[right], rtol=0, atol=3e-6 * np.abs(want).max())
        lengths = lengths + 1


# Sampling.

LOGITS = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
SAMPLED = {
    "plain": (Sampling(1.0), [0.4, 0.3, 0.2, 0.1]),
    "cold": (Sampling(0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    "nucleus": (Sampling(1.0, 0.6), [4 / 7, 3 / 7, 0, 0]),
    "first": (Sampling(1.0, 0.1), [1, 0, 0, 0]),
    "greedy": (Sampling(0.0), [1, 0, 0, 0]),
}


@pytest.mark.parametrize("case", SAMPLED)
def test_tokens_are_drawn_with_their_probabilities(case):
    sampling, want = SAMPLED[case]
    rows = jnp.broadcast_to(LOGITS, (20_000, 4))
    found = np.bincount(sampling.choose(rows, jax.random.key(0)), minlength=4) / 20_000
    np.testing.assert_allclose(found, want, atol=0.015)
    assert [share == 0 for share in found] == [share == 0 for share in want]


def test_a_seed_gives_the_same_tokens():
    config, expected = models.config_from_hf(FOLDER / "llama2"), expected_of("llama2")
    draw = functools.partial(
        models.generate,
        with_cache(config, "llama2"),
        prompts_of(expected),
        tokens=6,
        temperature=2.0,
        top_p=0.9,
    )
    one, again, other = (np.stack(list(draw(seed=seed))) for seed in (1, 1, 2))
    assert (one == again).all() and (one != other).any()


WRONG = {
    "no cache": ({}, None, "the decoder has no cache: call model.init_cache(batch, length)"),
    "batch": ({"prompts": [[1]]}, 2, "the cache is for 2 sequences, got 1 prompts"),
    "empty": ({"prompts": [[1], []]}, 2, "prompt 1 is empty"),
    "token": ({"prompts": [[1], [104]]}, 2, "prompt 1 has token 104, the vocabulary has 104"),
    "long": (
        {"tokens": 9},
        2,
        "prompt 0 has 2 tokens, and 9 more do not fit in a cache of length 10: make it 11 long",
    ),
    "none": ({"tokens": 0}, 2, "tokens must be a positive integer, got 0"),
    "cold": ({"temperature": -1.0}, 2, "temperature must not be negative, got -1.0"),
    "top_p": ({"top_p": 0.0}, 2, "top_p must be above 0 and at most 1, got 0.0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    changes, batch, words = WRONG[case]
    config = models.config_from_hf(FOLDER / "llama2")
    model = nnx.eval_shape(make(config, batch=batch or 2, length=10))
    if batch is None:
        del model.cache
    given = {"prompts": [[1, 2], [3]], "tokens": 4, **changes}
    with pytest.raises(ValueError, match=re.escape(words)):
        models.generate(model, given.pop("prompts"), **given)
