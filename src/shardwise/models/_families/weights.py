"""Under which names a Hugging Face checkpoint has the weights of a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..._base import public
from .._config import Config

# A checkpoint with pictures has the text model inside, under one of two prefixes.
_TEXT = r"(?:language_model\.)?model\.(?:language_model\.)?"
_PICTURES = r"(?:model\.)?(?:vision_tower|multi_modal_projector)\..*"


@public
def weight_names(config: Config) -> dict[str, Any]:
    r"""Returns which key of a Hugging Face checkpoint goes where in `models.Decoder(config)`.

    The form is `{pattern: name}`: a pattern is a regular expression of keys, and a name is a path,
    `(path, (permute, reshape))`, a dict with the fields of `sw.Name`, or None for keys that are not
    read. `stack` says which groups of the pattern are indices on the leaf's leading dims: scanned
    layers, experts. `at` is the place in the dims after those, as gate and up share one kernel.
    `sw.load` asks a decoder for them.

    Args:
        config: the configuration, such as `models.config_from_hf` reads.

    Example:
        >>> from shardwise import models
        >>> config = models.Config(layers=2, width=64, hidden=128, heads=4, vocab=256)
        >>> names = models.weight_names(config)
        >>> names[r"model\.layers\.(\d+)\.mlp\.down_proj\.weight"]
        {'path': 'blocks.\\1.down', 'permute': (1, 0)}
    """
    gemma3 = config.post_norms and config.qk_norm
    model = _TEXT if gemma3 else r"model\."
    found: dict[str, Any] = {rf"{model}embed_tokens\.weight": "embed"}
    rows = list(_rows(config))
    for layers, path, stack in _places(config):
        for key, leaf, how in rows:
            # Patterns without a group are of single layers.
            experts = "experts.(" in key.replace("\\", "")
            groups = ([stack] if stack else []) + ([2 if "(" in layers else 1] if experts else [])
            name = {"path": f"{path}.{leaf}", **how}
            name |= {"stack": groups[0] if len(groups) == 1 else tuple(groups)} if groups else {}
            found[rf"{model}layers\.{layers}\.{key}"] = name
    found[rf"{model}norm\.weight"] = "norm.scale"
    head = {"path": "embed", "tie": True} if config.tied else ("head", ((1, 0), None))
    found[rf"{_head(gemma3)}lm_head\.weight"] = head
    # Older checkpoints have tables that are computed here.
    found[rf"{model}layers\.\d+\.self_attn\.rotary_emb\.inv_freq"] = None
    if gemma3:
        found[_PICTURES] = None
    return found


def _head(gemma3: bool) -> str:
    return r"(?:language_model\.)?" if gemma3 else ""


def _places(config: Config) -> Iterator[tuple[str, str, int | str | None]]:
    """Yields patterns of layers' numbers, each with the path of their block and how they stack."""
    if not config.scan or config.layers < config.period:
        yield r"(\d+)", r"blocks.\1", None
        return
    periods, left = divmod(config.layers, config.period)
    if config.period == 1:
        yield r"(\d+)", "blocks.0", 1
        return
    for phase in range(config.period):
        numbers = range(phase, periods * config.period, config.period)
        yield f"({'|'.join(map(str, numbers))})", f"blocks.{phase}", f"1//{config.period}"
    for phase in range(left):
        yield str(periods * config.period + phase), f"rest.{phase}", None


def _rows(config: Config) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields each key of a layer with the leaf of its block, and what is done to the tensor."""
    width, depth = config.width, config.head_depth
    for letter, heads in (("q", config.heads), ("k", config.key_heads), ("v", config.key_heads)):
        shape = (width, heads, depth)
        how: dict[str, Any] = {
            "permute": (1, 0),
            "reshape": shape,
            "stored": (heads * depth, width),
        }
        yield rf"self_attn\.{letter}_proj\.weight", f"attention.{letter}", how
        if config.qkv_bias:
            bias: dict[str, Any] = {"reshape": (heads, depth), "stored": (heads * depth,)}
            yield rf"self_attn\.{letter}_proj\.bias", f"attention.{letter}_bias", bias
        if config.qk_norm and letter != "v":
            yield rf"self_attn\.{letter}_norm\.weight", f"attention.{letter}_norm.scale", {}
    out: dict[str, Any] = {"permute": (1, 0), "reshape": (config.heads, depth, width)}
    out |= {"stored": (width, config.heads * depth)}
    yield r"self_attn\.o_proj\.weight", "attention.out", out
    yield r"input_layernorm\.weight", "norm1.scale", {}
    if config.post_norms:
        yield r"post_attention_layernorm\.weight", "post1.scale", {}
        yield r"pre_feedforward_layernorm\.weight", "norm2.scale", {}
        yield r"post_feedforward_layernorm\.weight", "post2.scale", {}
    else:
        yield r"post_attention_layernorm\.weight", "norm2.scale", {}
    turn: dict[str, Any] = {"permute": (1, 0)}
    gate, up = ({**turn, "at": (None, half, None)} for half in (0, 1))
    if config.experts is None:
        yield r"mlp\.gate_proj\.weight", "up", gate
        yield r"mlp\.up_proj\.weight", "up", up
        yield r"mlp\.down_proj\.weight", "down", turn
    else:
        yield r"block_sparse_moe\.gate\.weight", "experts.router", turn
        inside = r"block_sparse_moe\.experts\.(\d+)"
        yield rf"{inside}\.w1\.weight", "experts.up", gate
        yield rf"{inside}\.w3\.weight", "experts.up", up
        yield rf"{inside}\.w2\.weight", "experts.down", turn
