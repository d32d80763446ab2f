"""Each family against Hugging Face transformers: the same logits from the same checkpoint."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, FOLDER, expected_of, load_family, tensors_of
from flax import nnx

import shardwise as sw
from shardwise import models
from shardwise._compile.job import job_of

pytestmark = pytest.mark.usefixtures("built_once")

# Float32 sums in another order: a few units in the last place of the largest logit.
ROUNDING = 2e-6


def make(config):
    return lambda: models.Decoder(config, rngs=nnx.Rngs(0))


def test_these_are_the_families():
    kinds = {
        json.loads((FOLDER / name / "config.json").read_text())["model_type"] for name in FAMILIES
    }
    assert kinds == {
        "llama",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "gemma3",
        "mistral",
        "mixtral",
    }


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, scan):
    config, expected = models.config_from_hf(FOLDER / family, scan=scan), expected_of(family)
    model, want = load_family(config, family), expected["logits"]
    run = nnx.jit(lambda model, tokens: model(tokens))
    got = np.asarray(run(model, expected["tokens"]))
    np.testing.assert_allclose(got, want, rtol=0, atol=ROUNDING * np.abs(want).max())
    if not scan:
        return
    rough = run(jax.tree.map(lambda x: x.astype(jnp.bfloat16), model), expected["tokens"])
    assert rough.dtype == jnp.bfloat16
    # transformers' own bfloat16 logits are this far from its float32 logits.
    error = np.abs(np.asarray(rough, "float32") - want).max()
    assert 0 < error <= 1.5 * expected["bfloat16_error"]


STRATEGIES = {
    "dp": ("data=8", "dp"),
    "fsdp": ("data=8", [sw.fsdp("data", min_bytes=0)]),
    "tensor": ("data=4,model=2", "tensor"),
    "fsdp+tensor": ("data=4,model=2", [sw.tensor("model"), sw.fsdp("data", min_bytes=0)]),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma3_vision"])
def test_logits_on_a_mesh(family, strategy):
    # Each family is scanned under two of the strategies, and unrolled under the others.
    turn = FAMILIES.index(family) + [*STRATEGIES].index(strategy)
    config = models.config_from_hf(FOLDER / family, scan=turn % 2 == 0)
    expected, (axes, rules) = expected_of(family), STRATEGIES[strategy]
    mesh = sw.mesh(axes, on="cpu:8")
    tokens = jax.ShapeDtypeStruct(expected["tokens"].shape, "int32")
    build = make(config)
    layout = sw.layout(build, mesh, rules, inputs=tokens)
    assert strategy == "dp" or any(not leaf.is_replicated for leaf in layout.leaves)
    job = job_of(build, layout, tokens)
    model = nnx.state(sw.shard(load_family(config, family), layout))
    arrays = dict(zip(job.arguments[0], jax.tree.leaves(model), strict=True))
    placed = jax.device_put(expected["tokens"], job.batch[0].sharding)
    got, want = np.asarray(job.jitted(arrays, [placed])), expected["logits"]
    np.testing.assert_allclose(got, want, rtol=0, atol=ROUNDING * np.abs(want).max())


def test_the_loss_of_capped_logits_in_chunks():
    config = models.config_from_hf(FOLDER / "gemma2")
    assert config.logit_cap == 4.0 and config.attention_cap == 2.0
    model, expected = load_family(config, "gemma2"), expected_of("gemma2")
    tokens, logits = expected["tokens"][:, :10], expected["logits"][:, :9]
    picked = np.take_along_axis(logits, tokens[:, 1:, None], axis=2)[..., 0]
    want = (np.log(np.exp(logits).sum(-1)) - picked).mean()
    for chunks in (1, 5):
        got = nnx.jit(models.next_token_loss, static_argnames="chunks")(
            model, tokens, chunks=chunks
        )
        np.testing.assert_allclose(got, want, rtol=1e-5)


# config.json.


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_is_the_same_after_a_round_trip(family):
    config = models.config_from_hf(str(FOLDER / family / "config.json"), scan=True)
    like = json.loads((FOLDER / family / "config.json").read_text())
    for written in (models.config_to_hf(config), models.config_to_hf(config, like=like)):
        assert models.config_from_hf(json.loads(json.dumps(written)), scan=True) == config
    assert written["initializer_range"] == 0.02 and "rope_parameters" not in written


@pytest.mark.parametrize("name", models.CONFIGS)
def test_published_configs_are_the_same_after_a_round_trip(name):
    config = models.CONFIGS[name]
    written = models.config_to_hf(config, dtype="bfloat16", length=8192)
    read = models.config_from_hf(written, scan=True)
    assert read == dataclasses.replace(config, depth=config.head_depth, kv_heads=config.key_heads)
    assert written["torch_dtype"] == "bfloat16" and written["max_position_embeddings"] == 8192


# As published, shortened to what matters: old spellings, and keys that are left out.
PUBLISHED = {
    "gemma3-4b": {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    },
    "gemma3-1b": {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "llama3-8b": {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-05,
        "sliding_window": None,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_the_published_configs(name):
    config = models.CONFIGS[name]
    want = dataclasses.replace(config, depth=config.head_depth, kv_heads=config.key_heads)
    assert models.config_from_hf(PUBLISHED[name], scan=True) == want


def read(**changes):
    return models.config_from_hf({**PUBLISHED["llama3-8b"], **changes})


def test_other_spellings():
    llama31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama31 |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}
    bands = {"rope_bands": (1.0, 4.0, 8192), "rope_scale": 8.0}
    assert read(rope_scaling=llama31) == dataclasses.replace(read(), **bands)
    del llama31["original_max_position_embeddings"]
    new = read(rope_parameters={**llama31, "rope_theta": 5e5}, max_position_embeddings=8192)
    assert new == read(rope_scaling=llama31, max_position_embeddings=8192)
    assert read(rope_scaling={"type": "linear", "factor": 2}).rope_scale == 2.0
    assert read(num_key_value_heads=None).kv_heads == 32
    window = {"model_type": "mistral", "sliding_window": 4096}
    assert [read(**window).is_local(i) for i in (0, 31)] == [True, True]
    qwen = {"model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 32}
    assert read(**qwen).window is None and read(**qwen, use_sliding_window=True).window is None
    assert read(**{**qwen, "max_window_layers": 0}, use_sliding_window=True).window == 4096


def test_everything_that_is_not_supported_is_named_at_once():
    wrong = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "attention_bias": True}
    wrong |= {"hidden_act": "relu", "num_hidden_layers": 0, "mlp_bias": True, "head_dim": 7}
    wrong |= {"num_key_value_heads": 5, "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(ValueError) as caught:
        read(**wrong)
    assert str(caught.value).splitlines() == [
        "a decoder of model_type 'llama' cannot be read:",
        '  quantization_config: got {"quant_method": "fp8"}, supported: null',
        "  attention_bias: got true, supported: false or null",
        "  mlp_bias: got true, supported: false or null",
        "  num_hidden_layers: got 0, supported: a positive integer",
        "  num_key_value_heads: got 5, supported: a divisor of 32 heads",
        "  head_dim: got 7, supported: an even number, as rotary embeddings need pairs",
        '  hidden_act: got "relu", supported: silu, swish, gelu_pytorch_tanh, gelu_new',
        '  rope_scaling.rope_type: got "yarn", supported: default, linear, llama3',
    ]


WRONG = {
    "type": ({"model_type": "gpt2"}, "model_type is 'gpt2': supported are gemma2, gemma3, gemma3_"),
    "none": ({"model_type": None}, "model_type is None: supported are gemma2, "),
    "uneven": ({"hidden_size": 4100}, "hidden_size: got 4100, supported: a multiple of 32 heads"),
    "theta": ({"rope_theta": "big"}, 'rope_theta: got "big", supported: a positive number'),
    "factor": (
        {"rope_parameters": {"rope_type": "llama3"}},
        "rope_parameters.factor: got null, supported: a positive number",
    ),
    "layers": (
        {"model_type": "gemma2", "num_hidden_layers": 3, "layer_types": ["full_attention"] * 2},
        "layer_types: got",
    ),
    "pattern": (
        {
            **{"model_type": "gemma2", "num_hidden_layers": 3},
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        "supported: every n-th layer is global",
    ),
    "windows": (
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 64},
        "layer_types: got null, supported: every n-th layer is global",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings(case):
    changes, words = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(words)):
        read(**changes)


FILES = {
    "missing": (None, "config.json cannot be read: No such file or directory"),
    "text": ("{", "config.json cannot be read: it is not JSON"),
    "list": ("[]", "config.json has list, not an object"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_not_a_config(case, tmp_path):
    text, words = FILES[case]
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)):
        models.config_from_hf(tmp_path if text is not None else tmp_path / "config.json")


def test_a_decoder_that_no_family_has():
    config = models.config_from_hf(FOLDER / "llama2")
    with pytest.raises(ValueError) as caught:
        models.config_to_hf(dataclasses.replace(config, logit_cap=3.0, scale_embed=True))
    assert str(caught.value).splitlines() == [
        "no config.json of 'llama' has this decoder:",
        "  logit_cap: got 3.0, llama has None",
        "  scale_embed: got True, llama has False",
    ]
    with pytest.raises(ValueError, match="model_type is 'gpt2': supported are gemma2, "):
        models.config_to_hf(config, model_type="gpt2")
    assert models.config_to_hf(config, model_type="mistral")["sliding_window"] is None


def test_names_know_older_checkpoints():
    names = models.weight_names(models.config_from_hf(FOLDER / "llama3"))
    old = "model.layers.1.self_attn.rotary_emb.inv_freq"
    assert [name for text, name in names.items() if re.fullmatch(text, old)] == [None]
    tied = [name for text, name in names.items() if re.fullmatch(text, "lm_head.weight")]
    assert tied == [{"path": "embed", "tie": True}]
    gemma = models.weight_names(models.config_from_hf(FOLDER / "gemma3_vision"))
    for prefix in ("model.language_model.", "language_model.model.", "model."):
        key = f"{prefix}layers.2.mlp.up_proj.weight"
        assert [name["path"] for text, name in gemma.items() if re.fullmatch(text, key)] == [
            r"blocks.\1.up"
        ]


def test_a_decoder_knows_its_names_and_its_config():
    config = models.config_from_hf(FOLDER / "llama3", scan=True)
    found = json.loads((FOLDER / "llama3" / "config.json").read_text())
    model = nnx.eval_shape(make(config))
    assert model.weight_names(found) == model.weight_names() == models.weight_names(config)
    assert model.weight_config() == models.config_to_hf(config)
    other = nnx.eval_shape(make(dataclasses.replace(config, rope_scale=8.0, norm_eps=1e-5)))
    with pytest.raises(ValueError) as caught:
        other.weight_names(found)
    assert str(caught.value).startswith(
        "config.json is of another decoder than the model (rope_scale: got 8.0, config.json has 4.0; "
        "norm_eps: got 1e-05, config.json has 1e-06): make the model with"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_load_and_save_weights(family, tmp_path):
    # Scanned blocks: layers, experts and gates of the file go to parts of stacked leaves.
    config = models.config_from_hf(FOLDER / family, scan=True)
    build = make(config)
    layout = sw.layout(build, sw.mesh("data=8", on="cpu:8"), sw.fsdp("data", min_bytes=0))
    model = sw.load(build, layout, FOLDER / family)
    assert not sw.audit(layout, model)
    want = nnx.to_flat_state(nnx.state(load_family(config, family)))
    for (path, got), (_, value) in zip(nnx.to_flat_state(nnx.state(model)), want, strict=True):
        np.testing.assert_array_equal(got[...], value[...], err_msg=str(path))
    sw.save_weights(model, tmp_path / "saved")
    saved, before = tensors_of(tmp_path / "saved"), tensors_of(family)
    text = {key.replace("language_model.model.", "model."): x for key, x in before.items()}
    text = {key: x for key, x in text.items() if key.startswith(("model.", "lm_head."))}
    assert set(saved) == set(text)
    for key, tensor in text.items():
        np.testing.assert_array_equal(saved[key], tensor, err_msg=key)
    assert models.config_from_hf(tmp_path / "saved", scan=True) == config
