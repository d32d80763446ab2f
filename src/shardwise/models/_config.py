"""The sizes and choices of a decoder."""

from __future__ import annotations

import dataclasses

from .._base import public

ACTIVATIONS = ("silu", "gelu")


@public
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The sizes of a decoder, and what its family does differently from others.

    Attributes:
        layers: how many blocks.
        width: of the residual stream.
        hidden: of the MLP, or of each expert.
        heads: of queries.
        vocab: how many tokens there are.
        kv_heads: of keys and values; as many as of queries if None.
        depth: of a head; `width // heads` if None.
        tied: whether the head is the embedding.
        rope_theta: the base of the rotary wavelengths.
        rope_scale: what positions are divided by, in layers that see everything.
        window: how many positions a local layer sees, its own included.
        period: every `period`-th layer sees everything; those between see their `window`.
        local_theta: the base of the rotary wavelengths of local layers; `rope_theta` if None.
        query_scale: what queries are multiplied with; `depth ** -0.5` if None.
        qk_norm: whether queries and keys are normalised, head by head.
        post_norms: whether what attention and MLP return is normalised too.
        offset_norms: whether a norm multiplies with `1 + scale` rather than with `scale`.
        norm_eps: what a norm adds to the mean square.
        scale_embed: whether embeddings are multiplied with the square root of `width`.
        activation: of the MLP's gate: `"silu"`, or `"gelu"`, which is approximated by tanh.
        experts: how many MLPs a block has to choose from; None for one MLP and no choice.
        chosen: how many experts each token goes to.
        capacity: how many tokens of a sequence an expert takes, as a multiple of its even share;
            tokens beyond it pass by. None drops no token.
        scan: whether the blocks are stacked and scanned over, so that compiling takes as long for
            100 layers as for one. Unrolled is faster on a GPU.
        remat: what the backward pass of each block computes again: a policy of
            `jax.checkpoint_policies` by name, such as `"nothing_saveable"`.

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
    window: int | None = None
    period: int = 1
    local_theta: float | None = None
    query_scale: float | None = None
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

    def __post_init__(self) -> None:
        """Refuses what makes no decoder."""
        if self.depth is None and self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of heads {self.heads}: give depth="
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_depth % 2:
            raise ValueError(f"depth {self.head_depth} is odd: rotary positions turn pairs")
        if self.period < 1 or (self.period > 1) != (self.window is not None):
            raise ValueError(
                f"period {self.period} and window {self.window} do not go together: local layers "
                f"need a window and a period above 1, a decoder without them neither"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window} lets a position not even see itself")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation {self.activation!r} is not known: use {' or '.join(ACTIVATIONS)}"
            )
        if self.experts is not None and not 1 <= self.chosen <= self.experts:
            raise ValueError(f"chosen {self.chosen} of {self.experts} experts: choose 1 to all")
        if self.capacity is not None and (self.experts is None or self.capacity <= 0):
            raise ValueError(
                f"capacity {self.capacity} with experts {self.experts}: it is a positive multiple "
                f"of an expert's even share"
            )
        if self.remat is not None:
            import jax  # here alone: the sizes are known without it

            if not callable(getattr(jax.checkpoint_policies, self.remat, None)):
                raise ValueError(f"remat {self.remat!r} is no policy of jax.checkpoint_policies")

    @property
    def head_depth(self) -> int:
        """The depth of a head."""
        return self.depth or self.width // self.heads

    @property
    def key_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.kv_heads or self.heads

    def is_local(self, layer: int) -> bool:
        """Returns whether a block, counted from 0, sees its window only."""
        return (layer + 1) % self.period != 0
