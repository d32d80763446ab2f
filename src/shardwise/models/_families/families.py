"""What distinguishes the model families of Hugging Face transformers, by `model_type`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# The keys of config.json that are sizes, with the fields of `Config`.
SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "intermediate_size": "hidden",
    "num_attention_heads": "heads",
    "vocab_size": "vocab",
}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    Attributes:
        architecture: the class of transformers, for `architectures`.
        defaults: what transformers assumes of keys that config.json leaves out.
        fields: the fields of `Config` that all its models share.
        activation: the key of the activation.
        period: every how many layers one is global, where config.json does not say.
        only: keys of which only these values are supported.
    """

    architecture: str
    defaults: Mapping[str, Any]
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    activation: str = "hidden_act"
    period: int = 1
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


def _defaults(sizes: tuple[int, int, int, int, int], kv_heads: int | None, **more: Any) -> Any:
    layers, width, hidden, heads, vocab = sizes
    found = dict(zip(SIZES, (layers, width, hidden, heads, vocab), strict=True))
    common = {"head_dim": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    rest = {"rope_theta": 10_000.0, "hidden_act": "silu", "sliding_window": None}
    return {**found, **common, **rest, "num_key_value_heads": kv_heads, **more}


# Settings of every family that would change what a model computes.
ONLY: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
_NO_BIAS = {"attention_bias": (False, None)}
_QWEN_WINDOW = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
_GEMMA = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA_FIELDS = {"post_norms": True, "offset_norms": True, "scale_embed": True}
_GEMMA_ONLY = {**_NO_BIAS, "use_bidirectional_attention": (False, None)}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        _defaults((32, 4096, 11_008, 32, 32_000), None),
        only={**_NO_BIAS, "mlp_bias": (False, None)},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _defaults((32, 4096, 14_336, 32, 32_000), 8, sliding_window=4096),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _defaults(
            (32, 4096, 14_336, 32, 32_000),
            8,
            rms_norm_eps=1e-5,
            rope_theta=1_000_000.0,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        only={"router_jitter_noise": (0, None)},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _defaults((32, 4096, 22_016, 32, 151_936), 32, **_QWEN_WINDOW),
        {"qkv_bias": True},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _defaults((32, 4096, 22_016, 32, 151_936), 32, head_dim=128, **_QWEN_WINDOW),
        {"qk_norm": True},
        only=_NO_BIAS,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _defaults(
            (26, 2304, 9216, 8, 256_000),
            4,
            **_GEMMA,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
        ),
        _GEMMA_FIELDS,
        "hidden_activation",
        2,
        only=_GEMMA_ONLY,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _defaults(
            (26, 2304, 9216, 8, 262_208),
            4,
            **_GEMMA,
            rope_theta=1_000_000.0,
            rope_local_base_freq=10_000.0,
        ),
        {**_GEMMA_FIELDS, "qk_norm": True},
        "hidden_activation",
        6,
        only=_GEMMA_ONLY,
    ),
}
# With pictures too: their text model is in `text_config`.
OUTER = {"gemma3": "gemma3_text"}
