"""A Hugging Face `config.json` from a `Config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..._base import public
from .._config import Config
from .families import FAMILIES, OUTER, SIZES
from .reading import config_from_hf

# How a decoder runs, which config.json does not say.
_RUNNING = ("scan", "remat", "microbatches", "rounds", "capacity", "param_dtype")
# Spelled otherwise by newer versions of transformers, which read the older spelling too.
_SPELLED_ANEW = ("rope_parameters", "dtype", "layer_types", "text_config", "vision_config")


@public
def config_to_hf(
    config: Config,
    *,
    model_type: str | None = None,
    dtype: str | None = None,
    length: int | None = None,
    like: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the contents of a Hugging Face `config.json` for a decoder.

    `models.config_from_hf` reads the same configuration from it, and transformers reads it from
    version 4.51 on. How a decoder runs (`scan`, `remat`, `microbatches`, `rounds`, `capacity`) is
    not saved.

    Args:
        config: the configuration.
        model_type: the family; by default the one whose options the configuration has.
        dtype: the dtype of the saved weights; `param_dtype` of the configuration if None.
        length: the longest sequence (`max_position_embeddings`).
        like: the contents of another `config.json`, whose further keys are kept: the ids of special
            tokens, say.

    Raises:
        ValueError: the family has no such models; the message names the fields.

    Example:
        >>> from shardwise import models
        >>> config = models.Config(layers=2, width=64, hidden=128, heads=4, vocab=256, qkv_bias=True)
        >>> models.config_to_hf(config)["model_type"]
        'qwen2'
    """
    kind = _kind_of(config) if model_type is None else OUTER.get(model_type, model_type)
    if kind not in FAMILIES:
        raise ValueError(f"model_type is {kind!r}: supported are {', '.join(sorted(FAMILIES))}")
    kept = dict(like or {})
    kept = {**kept, **kept.get("text_config", {})}
    kept = {key: value for key, value in kept.items() if key not in _SPELLED_ANEW}
    found = {**kept, **_keys(config, kind), "torch_dtype": dtype or config.param_dtype}
    if length is not None:
        found["max_position_embeddings"] = length
    wrong = _differences(config, config_from_hf(found), f"{kind} has")
    if wrong:
        raise ValueError("\n  ".join((f"no config.json of {kind!r} has this decoder:", *wrong)))
    return found


def _kind_of(config: Config) -> str:
    if config.experts is not None:
        return "mixtral"
    if config.post_norms:
        return "gemma3_text" if config.qk_norm else "gemma2"
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias:
        return "qwen2"
    return "llama" if config.window is None else "mistral"


def _keys(config: Config, kind: str) -> dict[str, Any]:
    family = FAMILIES[kind]
    found: dict[str, Any] = {"architectures": [family.architecture], "model_type": kind}
    found |= {key: getattr(config, field) for key, field in SIZES.items()}
    found |= {"num_key_value_heads": config.key_heads, "head_dim": config.head_depth}
    gelu = config.activation == "gelu"
    found |= {family.activation: "gelu_pytorch_tanh" if gelu else "silu"}
    found |= {"rms_norm_eps": config.norm_eps, "tie_word_embeddings": config.tied}
    found |= {"rope_theta": config.rope_theta, "rope_scaling": _rope(config)}
    if config.experts is not None:
        found |= {"num_local_experts": config.experts, "num_experts_per_tok": config.chosen}
    if "use_sliding_window" in family.defaults:
        found |= {"use_sliding_window": config.window is not None, "max_window_layers": 0}
    if "query_pre_attn_scalar" in family.defaults:
        found |= {"query_pre_attn_scalar": _scalar(config)}
        found |= {"attn_logit_softcapping": config.attention_cap}
        found |= {"final_logit_softcapping": config.logit_cap}
    if "rope_local_base_freq" in family.defaults:
        found |= {"rope_local_base_freq": config.local_theta or config.rope_theta}
        found |= {"sliding_window_pattern": config.period}
    found |= {"sliding_window": config.window}
    if family.period > 1:
        types = ("full_attention", "sliding_attention")
        found |= {"layer_types": [types[config.is_local(i)] for i in range(config.layers)]}
    return found


def _rope(config: Config) -> dict[str, Any] | None:
    if config.rope_bands is not None:
        low, high, length = config.rope_bands
        return {
            "rope_type": "llama3",
            "factor": config.rope_scale,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": length,
        }
    return {"rope_type": "linear", "factor": config.rope_scale} if config.rope_scale != 1 else None


def _scalar(config: Config) -> float:
    """Returns the number whose root divides the queries: an integer where it is one."""
    if config.query_scale is None:
        return config.head_depth
    exact = config.query_scale**-2
    return round(exact) if round(exact) ** -0.5 == config.query_scale else exact


def require_same(config: Config, found: Mapping[str, Any]) -> None:
    """Checks that a `config.json` describes this decoder.

    Raises:
        ValueError: it does not; the message names all that differs.
    """
    wrong = _differences(config, config_from_hf(found), "config.json has")
    if wrong:
        raise ValueError(
            f"config.json is of another decoder than the model ({'; '.join(wrong)}): make the model "
            f"with models.config_from_hf, or give names=models.weight_names(config) if the difference "
            f"is intentional"
        )


def _differences(config: Config, other: Config, says: str) -> list[str]:
    wrong = []
    for field in dataclasses.fields(Config):
        if field.name in _RUNNING:
            continue
        want, got = (_resolved(c, field.name) for c in (config, other))
        if want != got:
            mine, theirs = (getattr(c, field.name) for c in (config, other))
            wrong.append(f"{field.name}: got {mine!r}, {says} {theirs!r}")
    return wrong


def _resolved(config: Config, name: str) -> Any:
    """Returns the value of a field, with what None stands for."""
    match name:
        case "kv_heads":
            return config.key_heads
        case "depth":
            return config.head_depth
        case "query_scale":
            return config.query_scale or config.head_depth**-0.5
        case "local_theta" if not any(map(config.is_local, range(config.layers))):
            return None
        case "chosen" if config.experts is None:
            return None
        case "period":
            return [config.is_local(i) for i in range(config.layers)]
    return getattr(config, name)
