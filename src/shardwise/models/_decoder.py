"""A decoder: embedding, blocks of attention and a gated MLP or experts, and output head."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .._base import public
from .._jax import chosen_chunks, is_saving, parse_saving
from .._nnx import is_bypassed
from .._parallel import is_adapting, pipeline
from ._config import Config
from ._experts import Experts
from ._families import config_to_hf, require_same, weight_names
from ._generate import Attend, Cache, over_one, over_prompts
from ._head_loss import head_loss, mean_nll
from ._kernels import look_up
from ._layers import Attention, Norm, gated, into, kernel
from ._names import constrain, gather, named

# The leading dim of a stack has a name too.
_STACKED = {nnx.PARTITION_NAME: "layers"}


class Block(nnx.Module):
    """Attention and a gated MLP (or experts), each added to the residual stream."""

    def __init__(self, config: Config, *, local: bool = False, rngs: nnx.Rngs):
        """Makes the layers."""
        width, hidden = config.width, config.hidden
        self.norm1 = Norm(width, config)
        self.attention = Attention(config, local=local, rngs=rngs)
        self.post1 = Norm(width, config) if config.post_norms else None
        self.norm2 = Norm(width, config)
        self.post2 = Norm(width, config) if config.post_norms else None
        self.activation = config.activation
        self.experts = None if config.experts is None else Experts(config, rngs=rngs)
        if config.experts is None:
            # Gate and up in one kernel: one product, and a split of `hidden` splits both alike.
            self.up = named(into(rngs.params(), (width, 2, hidden)), "embed", None, "mlp")
            self.down = named(into(rngs.params(), (hidden, width)), "mlp", "embed")

    def __call__(self, x: jax.Array, mix: Attend | None = None) -> jax.Array:
        """Returns the residual stream after this block.

        Args:
            x: the residual stream.
            mix: how its attention is called, such as with a cache; by default without one.
        """
        x = checkpoint_name(x, "input")
        normed = self.norm1(x)
        mixed = self.attention(normed) if mix is None else mix(self.attention, normed)
        x = x + (mixed if self.post1 is None else self.post1(mixed))
        fed = checkpoint_name(self.feed(self.norm2(x)), "down")
        x = x + (fed if self.post2 is None else self.post2(fed))
        return constrain(x, "batch", "length", "embed")

    def feed(self, x: jax.Array) -> jax.Array:
        """Returns the output of the MLP, or of the experts, for `x`."""
        if self.experts is not None:
            return self.experts(x)
        both = jnp.einsum("bld,dgf->blgf", x, kernel(self.up))
        both = checkpoint_name(constrain(both, "batch", "length", None, "mlp"), "up")
        hidden = gated(both, self.activation)
        # An einsum: `@` is a jitted function, within which a library cannot add adapters.
        return jnp.einsum("blf,fd->bld", hidden, kernel(self.down))


@public
class Decoder(nnx.Module):
    """A decoder-only transformer, from tokens to logits.

    Unrolled, its blocks are `blocks.0`, `blocks.1`, …. Scanned, `blocks.0` to
    `blocks.{period - 1}` are stacks of every `period`-th block, and the blocks after the last full
    period are in `rest`. Scanned blocks are pipelined if the layout splits their stacks over an
    axis, as the strategy `"pipeline"` does. The dims of its parameters have names (`vocab`, `embed`, `heads`,
    `kv_heads`, `depth`, `mlp`, `experts`, `layers`), for `sw.layout(logical=…)`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from shardwise import models
        >>> config = models.Config(layers=2, width=64, hidden=128, heads=4, vocab=256)
        >>> model = nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0)))
        >>> nnx.eval_shape(lambda model, tokens: model(tokens), model, jnp.ones((1, 8), "int32")).shape
        (1, 8, 256)
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        """Makes the layers."""

        def blocks(layers: Iterable[int], rngs: nnx.Rngs) -> nnx.List[Block]:
            return nnx.List([Block(config, local=config.is_local(i), rngs=rngs) for i in layers])

        self.embed = named(into(rngs.params(), (config.vocab, config.width)), "vocab", "embed")
        self.scan = config.scan and config.layers >= config.period
        if self.scan:
            periods, left = divmod(config.layers, config.period)
            stack = nnx.vmap(
                lambda rngs: blocks(range(config.period), rngs), transform_metadata=_STACKED
            )
            self.blocks = nnx.split_rngs(splits=periods)(stack)(rngs)
            self.rest = blocks(range(left), rngs)
        else:
            self.blocks, self.rest = blocks(range(config.layers), rngs), nnx.List([])
        self.norm = Norm(config.width, config)
        shape = (config.width, config.vocab)
        self.head = None if config.tied else named(into(rngs.params(), shape), "embed", "vocab")
        self.gain = config.width**0.5 if config.scale_embed else None
        self.cap = config.logit_cap
        self.config, self.remat = config, config.remat
        self.microbatches, self.rounds = config.microbatches, config.rounds
        if config.param_dtype != "float32":
            made = nnx.state(self, nnx.Param)
            nnx.update(self, jax.tree.map(lambda x: x.astype(config.param_dtype), made))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits for every position."""
        return self.logits(self.features(tokens))

    def logits(self, features: jax.Array) -> jax.Array:
        """Returns the logits that the head makes of features."""
        logits = jnp.einsum("...d,dv->...v", features, self.head_kernel)
        if self.cap is not None:
            capped = self.cap * jnp.tanh(logits.astype(jnp.float32) / self.cap)
            logits = capped.astype(logits.dtype)
        return constrain(logits, "batch", "length", "vocab")

    @property
    def head_kernel(self) -> jax.Array:
        """The kernel that makes logits of features, `[width, vocab]`."""
        return self.embed[...].T if self.head is None else kernel(self.head)

    def features(self, tokens: jax.Array) -> jax.Array:
        """Returns what the head makes logits of: the last, normalised hidden states."""
        x = self.embedded(tokens)
        # Qwix adds adapters to modules as it runs them, which a backward pass's copy would not keep.
        adapting = is_adapting(self)
        remat = None if adapting else self.remat
        if self.scan:
            x = pipeline(
                _Period(self.blocks, remat),
                microbatches=self.microbatches,
                schedule="gpipe" if self.rounds == 1 else "circular",
                rounds=None if self.rounds == 1 else self.rounds,
            )(x)
        for block in self.rest if self.scan else self.blocks:
            if adapting:  # see adapt_stack
                block(x)
            x = _run(block, x, remat)
        return self.norm(x)

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """Returns the residual stream before the first block."""
        table = self.embed[...]
        x = look_up(gather(table, None, "embed"), tokens)
        # Constrained here: a lookup in a split table would otherwise lose the split of the batch.
        x = constrain(x, "batch", "length", "embed")
        return x if self.gain is None else x * jnp.asarray(self.gain, x.dtype)

    def init_cache(self, batch: int, length: int, dtype: Any = None) -> None:
        """Gives the decoder an empty cache, `cache`, for `prefill` and `decode`.

        Its leaves are of type `nnx.Cache`, with the dims `batch` and `kv_heads`: a layout places
        them as it does parameters. A local layer keeps only the positions of its window.

        Args:
            batch: the number of sequences.
            length: the most tokens that a sequence has, with its prompt.
            dtype: the dtype of keys and values; that of the embedding if None.
        """
        kind = self.embed.dtype if dtype is None else dtype
        self.cache = Cache(self.config, batch, length, kind)

    def prefill(self, tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """Returns the logits after each prompt, `[batch, vocab]`, and fills the cache.

        Args:
            tokens: the prompts, `[batch, length]`, each padded at its end to the same length.
            lengths: `[batch]`, the number of tokens of each prompt; `length` if None.
        """
        if lengths is None:
            lengths = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
        x = over_prompts(self, self.embedded(tokens), lengths)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
        return self.logits(self.norm(last))[:, 0]

    def decode(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits after one more token of each sequence, and extends the cache.

        Args:
            tokens: `[batch]`, the tokens.
        """
        x = over_one(self, self.embedded(tokens[:, None]))
        return self.logits(self.norm(x))[:, 0]

    def weight_names(self, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the names of a Hugging Face checkpoint, see `models.weight_names`; `sw.load` asks.

        Args:
            config: the `config.json` beside the checkpoint, if there is one.

        Raises:
            ValueError: the file describes another decoder; the message names what differs.
        """
        if config is not None:
            require_same(self.config, config)
        return weight_names(self.config)

    def weight_config(self) -> dict[str, Any]:
        """Returns the `config.json` of this decoder, see `models.config_to_hf`.

        Raises:
            ValueError: no family has such a decoder.
        """
        return config_to_hf(self.config, dtype=str(self.embed.dtype))


def _run(block: Block, x: jax.Array, remat: str | None, *, looped: bool = False) -> jax.Array:
    """Returns `block(x)`, keeping for the backward pass what the policy `remat` says."""
    if remat is None:
        return block(x)
    graphdef, state = nnx.split(block)
    saving = parse_saving(remat) if is_saving(remat) else None
    policy = saving.policy() if saving else getattr(jax.checkpoint_policies, remat)

    # JAX's remat rather than Flax's, which in a loop hands copies of weights to the backward pass.
    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=not looped)
    def run(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state)(x)

    return run(state, x)


class _Period(nnx.Module):
    """The blocks of one period, or of all of them, stacked: what a loop or a pipeline steps along."""

    def __init__(self, blocks: nnx.List[Block], remat: str | None):
        self.blocks, self.remat = blocks, remat

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = _run(block, x, self.remat, looped=True)
        return x


@public
def next_token_loss(model: Decoder, tokens: jax.Array, *, chunks: int | None = None) -> jax.Array:
    """Returns the mean cross-entropy of each next token.

    Args:
        model: a decoder, or any function from tokens to logits.
        tokens: `[batch, length]`, integers.
        chunks: in how many chunks a decoder's loss is computed with its head, see `models.head_loss`; a
            recipe's `loss_chunks` if None.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from shardwise import models
        >>> config = models.Config(layers=1, width=64, hidden=128, heads=4, vocab=256)
        >>> model = nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0)))
        >>> nnx.eval_shape(models.next_token_loss, model, jnp.ones((2, 8), "int32")).dtype
        dtype('float32')
    """
    # All positions go through the layers, so that a power-of-two length stays one. The last
    # position has no next token and does not count.
    targets = jnp.roll(tokens, -1, axis=1)
    counts = jnp.broadcast_to(jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1, tokens.shape)
    if isinstance(model, Decoder):
        chunks = chosen_chunks() if chunks is None else chunks
        if chunks != 1:
            if is_bypassed(model, "features"):
                raise ValueError(
                    "qwix adapted this decoder, and adapters apply only when it is called: compute "
                    "its loss in one chunk"
                )
            hidden, kernel = model.features(tokens), model.head_kernel
            return head_loss(
                hidden, kernel, targets, weights=counts, softcap=model.cap, chunks=chunks
            )
    elif chunks is not None:
        raise ValueError(
            f"chunks= needs a Decoder, got {type(model).__name__}: use models.head_loss"
        )
    return mean_nll(model(tokens), targets, counts)
