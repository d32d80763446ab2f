"""A `Config` from a Hugging Face `config.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._base import public, read_json
from .._config import Config
from .families import ACTIVATIONS, FAMILIES, GLOBAL, LOCAL, ONLY, OUTER, SIZES, Family


@public
def config_from_hf(
    source: Mapping[str, Any] | str | os.PathLike[str], *, scan: bool = False
) -> Config:
    """Returns the configuration of a decoder, read from a Hugging Face `config.json`.

    The families are Llama 2 and 3, Qwen 2.5 and 3, Gemma 2 and 3, Mistral and Mixtral; of a Gemma 3
    with pictures, the text model. A key that is left out has the default of transformers. Old and
    new spellings are read (`rope_theta` and `rope_scaling`, or `rope_parameters`). The dtype of the
    checkpoint is not: `param_dtype` is float32.

    Args:
        source: the contents of the file, its path, or the folder that it is in.
        scan: whether the blocks are stacked and scanned, see `models.Config`.

    Raises:
        ValueError: the file cannot be read, its `model_type` is not one of these families, or it has
            settings that `models.Decoder` does not support: all of them, each with its key.

    Example:
        >>> from shardwise import models
        >>> config = models.config_from_hf({"model_type": "qwen2", "num_key_value_heads": 8})
        >>> config.qkv_bias, config.kv_heads, config.width
        (True, 8, 4096)
    """
    given = _read(source)
    kind = given.get("model_type")
    if kind in OUTER:
        inner = given.get("text_config") or {}
        if not isinstance(inner, Mapping):
            raise ValueError(f"text_config is {inner!r}: want an object")
        # What is said outside holds for the text model, unless that says otherwise.
        shared = {k: v for k, v in given.items() if k not in ("text_config", "vision_config")}
        given, kind = {**shared, **inner}, OUTER[kind]
    if kind not in FAMILIES:
        raise ValueError(
            f"model_type is {kind!r}: supported are {', '.join(sorted({*FAMILIES, *OUTER}))}"
        )
    return _Reader(kind, given).config(scan)


def _read(source: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        found = read_json(path, most=2**24)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} has {type(found).__name__}, not an object")
    return found


class _Reader:
    """One config.json, and what was found wrong with it."""

    def __init__(self, kind: str, given: Mapping[str, Any]):
        self.kind, self.family = kind, FAMILIES[kind]
        self.given: dict[str, Any] = {**self.family.defaults, **given}
        self.wrong: list[str] = []

    def config(self, scan: bool) -> Config:
        """Returns the configuration.

        Raises:
            ValueError: something is not supported.
        """
        family: Family = self.family
        for key, allowed in {**ONLY, **family.only}.items():
            if self.given.get(key) not in allowed:
                self.fault(key, self.given[key], _listed(allowed))
        fields: dict[str, Any] = {field: self.count(key) for key, field in SIZES.items()}
        fields |= family.fields
        fields |= self.head_sizes(fields["width"], fields["heads"])
        fields |= {"norm_eps": self.number("rms_norm_eps")}
        fields |= {"tied": self.given["tie_word_embeddings"] is True, "scan": scan}
        fields |= {"activation": self.activation()}
        if "query_pre_attn_scalar" in family.defaults:
            scalar = self.number("query_pre_attn_scalar")
            fields["query_scale"] = scalar**-0.5 if scalar else None
        for key, field in (
            ("attn_logit_softcapping", "attention_cap"),
            ("final_logit_softcapping", "logit_cap"),
        ):
            if family.fields.get("post_norms") and self.given.get(key) is not None:
                fields[field] = self.number(key)
        if "num_local_experts" in family.defaults:
            fields["experts"] = self.count("num_local_experts")
            fields["chosen"] = self.count("num_experts_per_tok")
        fields |= self.windows(fields["layers"] or 1)
        fields |= self.rope()
        if self.wrong:
            raise ValueError(
                "\n  ".join((f"a decoder of model_type {self.kind!r} cannot be read:", *self.wrong))
            )
        return Config(**fields)

    def fault(self, key: str, got: Any, supported: str) -> None:
        shown = json.dumps(got, default=repr)
        shown = shown if len(shown) <= 100 else f"{shown[:97]}…"
        self.wrong.append(f"{key}: got {shown}, supported: {supported}")

    def count(self, key: str, *, optional: bool = False) -> int | None:
        value = self.given.get(key)
        if value is None and optional:
            return None
        if type(value) is not int or value < 1:
            self.fault(key, value, "a positive integer")
            return None
        return value

    def number(self, key: str, within: Mapping[str, Any] | None = None, name: str = "") -> float:
        value = (self.given if within is None else within).get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self.fault(name + key, value, "a positive number")
            return 1.0
        return float(value)

    def head_sizes(self, width: int | None, heads: int | None) -> dict[str, Any]:
        """Returns `kv_heads` and `depth`."""
        kv_heads = self.count("num_key_value_heads", optional=True) or heads
        depth = self.count("head_dim", optional=True)
        if heads and kv_heads and heads % kv_heads:
            self.fault("num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
        if heads and width and depth is None:
            if width % heads:
                self.fault("hidden_size", width, f"a multiple of {heads} heads, without head_dim")
            depth = width // heads
        if depth is not None and depth % 2:
            self.fault("head_dim", depth, "an even number, as rotary embeddings need pairs")
        return {"kv_heads": kv_heads, "depth": depth}

    def activation(self) -> str:
        key = self.family.activation
        # Null means the default, as in the first files of Gemma.
        name = self.given.get(key) or self.family.defaults[key]
        if name not in ACTIVATIONS:
            self.fault(key, name, ", ".join(ACTIVATIONS))
        return ACTIVATIONS.get(name, "silu")

    def windows(self, layers: int) -> dict[str, Any]:
        """Returns `window` and `period`."""
        window = self.count("sliding_window", optional=True)
        locals_ = self.local_layers(layers, window)
        if not any(locals_):
            return {}
        if window is None:
            self.fault("sliding_window", None, "a positive integer, for local layers")
            return {}
        first = locals_.index(False) + 1 if False in locals_ else 1
        said = self.given.get("sliding_window_pattern")
        for period in (said, self.family.period, first):
            if type(period) is int and period >= 1:
                config = [(i + 1) % period != 0 or period == 1 for i in range(layers)]
                if config == locals_:
                    return {"window": window, "period": period}
        self.fault("layer_types", self.given.get("layer_types"), "every n-th layer is global")
        return {}

    def local_layers(self, layers: int, window: int | None) -> list[bool]:
        """Returns whether each layer is local."""
        types = self.given.get("layer_types")
        if "use_sliding_window" in self.family.defaults and not self.given["use_sliding_window"]:
            window = None
        if types is not None and self.kind not in ("mistral", "mixtral"):
            if (
                not isinstance(types, list)
                or len(types) != layers
                or not {*types} <= {LOCAL, GLOBAL}
            ):
                self.fault("layer_types", types, f"{layers} times {LOCAL} or {GLOBAL}")
                return []
            return [name == LOCAL for name in types]
        if window is None:
            return [False] * layers
        if "max_window_layers" in self.family.defaults:
            return [i >= self.given["max_window_layers"] for i in range(layers)]
        period = self.given.get("sliding_window_pattern") or self.family.period
        return [period == 1 or (i + 1) % period != 0 for i in range(layers)]

    def rope(self) -> dict[str, Any]:
        """Returns the fields of the rotary embeddings."""
        given = self.given.get("rope_parameters") or {}
        nested = isinstance(given.get(GLOBAL), Mapping)
        name = "rope_parameters." if given else "rope_scaling."
        inner = f"{name}{GLOBAL}." if nested else name
        wide = {**(given[GLOBAL] if nested else given or self.given.get("rope_scaling") or {})}
        wide.setdefault("rope_theta", self.given["rope_theta"])
        fields: dict[str, Any] = {}
        fields |= {"rope_theta": self.number("rope_theta", wide, inner if given else "")}
        kind = wide.get("rope_type", wide.get("type", "default"))
        if wide.get("partial_rotary_factor") not in (None, 1):
            self.fault(f"{inner}partial_rotary_factor", wide["partial_rotary_factor"], "1")
        if kind in ("linear", "llama3"):
            fields["rope_scale"] = self.number("factor", wide, inner)
        if kind == "llama3":
            length = wide.get("original_max_position_embeddings")
            wide["original_max_position_embeddings"] = length or self.given.get(
                "max_position_embeddings"
            )
            low = self.number("low_freq_factor", wide, inner)
            high = self.number("high_freq_factor", wide, inner)
            original = self.number("original_max_position_embeddings", wide, inner)
            fields["rope_bands"] = (low, high, int(original))
        elif kind not in ("default", "linear"):
            self.fault(f"{inner}rope_type", kind, "default, linear, llama3")
        if "rope_local_base_freq" in self.family.defaults:
            near = {**(given.get(LOCAL) or {})} if nested else {}
            if near.get("rope_type", "default") != "default":
                self.fault(f"{name}{LOCAL}.rope_type", near["rope_type"], "default")
            if "rope_theta" in near:
                fields["local_theta"] = self.number("rope_theta", near, f"{name}{LOCAL}.")
            else:
                fields["local_theta"] = self.number("rope_local_base_freq")
        return fields


def _listed(allowed: tuple[Any, ...]) -> str:
    return " or ".join(json.dumps(value) for value in allowed)
