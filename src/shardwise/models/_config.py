"""The configuration of a decoder."""

from __future__ import annotations

import dataclasses

from .._base import public

ACTIVATIONS = ("silu", "gelu")
PARAM_DTYPES = ("float32", "bfloat16", "float16")
# What a block gives names to; those of products are the names of their kernels.
ACTIVATION_NAMES = ("input", "q", "k", "v", "context", "out", "up", "down")


@public
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The sizes of a decoder, and the options in which model families differ.

    Attributes:
        layers: the number of blocks.
        width: the width of the residual stream.
        hidden: the hidden width of the MLP, or of each expert.
        heads: the number of query heads.
        vocab: the size of the vocabulary.
        kv_heads: the number of key and value heads; `heads` if None.
        depth: the depth of a head; `width // heads` if None.
        tied: whether the output head shares the embedding's weights.
        rope_theta: the base of the rotary wavelengths.
        rope_scale: the factor by which positions are divided, except in local layers that have a
            `local_theta`.
        rope_bands: which wavelengths `rope_scale` stretches, as Llama 3.1 does: `(low, high,
            length)` stretches those above `length / low` positions, leaves those below
            `length / high` unchanged, and interpolates between. None stretches all.
        window: how many positions a local layer attends to, including its own.
        period: every `period`-th layer is global; the layers between attend to their `window`.
            With 1, all layers are alike: local if there is a `window`, as in Mistral 7B.
        local_theta: the base of the rotary wavelengths of local layers; if None, they are rotated
            as global layers are.
        query_scale: the factor by which queries are multiplied; `depth ** -0.5` if None.
        qkv_bias: whether a bias is added to queries, keys and values.
        attention_cap: if given, attention scores become `cap * tanh(scores / cap)`. cuDNN's kernel
            has no caps, so a GPU computes the scores of all positions (XLA's attention).
        logit_cap: if given, the final logits become `cap * tanh(logits / cap)`.
        qk_norm: whether queries and keys are normalised, per head.
        post_norms: whether the outputs of attention and MLP are normalised too.
        offset_norms: whether a norm multiplies by `1 + scale` rather than by `scale`.
        norm_eps: the epsilon that a norm adds to the mean square.
        scale_embed: whether embeddings are multiplied by the square root of `width`.
        activation: the activation of the MLP's gate: `"silu"`, or `"gelu"` (the tanh
            approximation).
        experts: the number of experts of each block; None for a single MLP.
        chosen: how many experts each token is routed to.
        capacity: how many tokens of a sequence an expert takes, as a multiple of its even share;
            tokens beyond that skip the expert. None drops no tokens.
        scan: whether the blocks are stacked and scanned, so that 100 layers compile as fast as
            one. Unrolled blocks run faster on a GPU.
        remat: what the backward pass of each block recomputes: the name of a policy in
            `jax.checkpoint_policies`, such as `"nothing_saveable"`; or the activations that are
            saved, or offloaded to the host's memory, such as `"save:q,k,v+offload:input"`. Their
            names are `input` (the residual stream), `q`, `k`, `v`, `context` (what attention
            returns), `out`, `up` and `down` (the products with these kernels).
        param_dtype: the dtype of the parameters, `"float32"`, `"bfloat16"` or `"float16"`. Gradients
            and most optimizers' state have it too: in 16 bits a step needs half of the memory between
            steps, and loses updates that are small beside their parameter.
        microbatches: how many microbatches a pipeline splits the batch into, where the layout
            splits the scanned blocks over an axis of stages (the strategy `"pipeline"`); by
            default up to four for each stage.
        rounds: how often each microbatch goes through all stages of a pipeline: above 1, the
            schedule is the circular one. See `sw.pipeline`.

    Example:
        >>> from shardwise import models
        >>> models.Config(layers=2, width=64, hidden=128, heads=4, vocab=256).head_depth
        16
    """

    layers: int
    width: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int | None = None
    depth: int | None = None
    tied: bool = False
    rope_theta: float = 10_000.0
    rope_scale: float = 1.0
    rope_bands: tuple[float, float, int] | None = None
    window: int | None = None
    period: int = 1
    local_theta: float | None = None
    query_scale: float | None = None
    qkv_bias: bool = False
    attention_cap: float | None = None
    logit_cap: float | None = None
    qk_norm: bool = False
    post_norms: bool = False
    offset_norms: bool = False
    norm_eps: float = 1e-6
    scale_embed: bool = False
    activation: str = "silu"
    experts: int | None = None
    chosen: int = 2
    capacity: float | None = None
    scan: bool = False
    remat: str | None = None
    param_dtype: str = "float32"
    microbatches: int | None = None
    rounds: int = 1

    def __post_init__(self) -> None:
        """Rejects settings that do not make a decoder."""
        if self.depth is None and self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of heads {self.heads}: set depth="
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_depth % 2:
            raise ValueError(f"depth {self.head_depth} is odd: rotary embeddings need pairs")
        if self.period < 1 or (self.period > 1 and self.window is None):
            raise ValueError(
                f"period {self.period} and window {self.window} do not go together: a period must "
                f"be a positive integer, and above 1 it needs the window of its local layers"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be a positive integer, got {self.window}")
        if self.rope_bands is not None:
            low, high, length = self.rope_bands
            if not (0 < low < high and length > 0):
                raise ValueError(
                    f"rope_bands must be (low, high, length) with 0 < low < high and a positive "
                    f"length, got {self.rope_bands}"
                )
        for word in ("rope_theta", "rope_scale", "local_theta", "attention_cap", "logit_cap"):
            number = getattr(self, word)
            if number is not None and not number > 0:
                raise ValueError(f"{word} must be positive, got {number}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be {' or '.join(ACTIVATIONS)}, got {self.activation!r}"
            )
        if self.param_dtype not in PARAM_DTYPES:
            raise ValueError(
                f"param_dtype must be {', '.join(PARAM_DTYPES[:-1])} or {PARAM_DTYPES[-1]}, "
                f"got {self.param_dtype!r}"
            )
        if self.experts is not None and not 1 <= self.chosen <= self.experts:
            raise ValueError(
                f"chosen must be between 1 and the number of experts, {self.experts}, "
                f"got {self.chosen}"
            )
        if self.capacity is not None and (self.experts is None or self.capacity <= 0):
            raise ValueError(
                f"capacity is {self.capacity} and experts is {self.experts}: capacity needs "
                f"experts, and must be a positive multiple of an expert's even share"
            )
        for word in ("microbatches", "rounds"):
            count = getattr(self, word)
            if count is None or count == 1:
                continue
            if count < 1 or not self.scan:
                raise ValueError(
                    f"{word} is {count} and scan is {self.scan}: it must be a positive integer, and "
                    f"needs blocks that are scanned"
                )
        if self.scan and self.layers // self.period % self.rounds:
            word = "layers" if self.period == 1 else "periods of layers"
            raise ValueError(
                f"{self.layers // self.period} {word} cannot be folded into {self.rounds} rounds: "
                f"use a multiple of {self.rounds}"
            )
        if self.remat is not None:
            import jax  # only here: the configs load without JAX

            if ":" in self.remat:
                self._require_names(self.remat)
            elif not callable(getattr(jax.checkpoint_policies, self.remat, None)):
                raise ValueError(f"remat {self.remat!r} is not a policy in jax.checkpoint_policies")

    def _require_names(self, remat: str) -> None:
        from .._jax import parse_saving

        known = [name for name in ACTIVATION_NAMES if self.experts is None or name != "up"]
        unknown = [name for name in parse_saving(remat).names if name not in known]
        if unknown:
            raise ValueError(
                f"remat {remat!r} names {', '.join(unknown)}: the activations of a block are "
                f"{', '.join(known)}"
            )

    @property
    def head_depth(self) -> int:
        """The depth of a head."""
        return self.depth or self.width // self.heads

    @property
    def key_heads(self) -> int:
        """The number of key and value heads."""
        return self.kv_heads or self.heads

    def is_local(self, layer: int) -> bool:
        """Returns whether a block, counted from 0, attends only to its window."""
        if self.period == 1:
            return self.window is not None
        return (layer + 1) % self.period != 0
