"""A zoo of small NNX models, each of the shapes that the strategies must get right."""

import jax
import jax.numpy as jnp
from flax import nnx


class Mlp(nnx.Module):
    def __init__(self, width, hidden, rngs):
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class GatedMlp(nnx.Module):
    def __init__(self, width, hidden, rngs):
        self.gate = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class GroupedAttention(nnx.Module):
    """Separate flat projections; KV heads are repeated or queries are grouped."""

    def __init__(self, width, heads, kv_heads, depth, rngs, repeat=True):
        self.q = nnx.Linear(width, heads * depth, use_bias=False, rngs=rngs)
        self.k = nnx.Linear(width, kv_heads * depth, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(width, kv_heads * depth, use_bias=False, rngs=rngs)
        self.o = nnx.Linear(heads * depth, width, use_bias=False, rngs=rngs)
        self.heads, self.kv_heads, self.depth, self.repeat = heads, kv_heads, depth, repeat

    def __call__(self, x):
        batch, length, _ = x.shape
        q = _rotate(self.q(x).reshape(batch, length, self.heads, self.depth))
        k = _rotate(self.k(x).reshape(batch, length, self.kv_heads, self.depth))
        v = self.v(x).reshape(batch, length, self.kv_heads, self.depth)
        groups = self.heads // self.kv_heads
        mask = jnp.tril(jnp.ones((length, length), bool))
        if self.repeat:
            k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / self.depth**0.5
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        else:
            q = q.reshape(batch, length, self.kv_heads, groups, self.depth)
            scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) / self.depth**0.5
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
            mixed = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v)
        return self.o(mixed.reshape(batch, length, self.heads * self.depth))


def _rotate(x):
    length, half = x.shape[1], x.shape[-1] // 2
    angle = jnp.arange(length)[:, None] / (100.0 ** (jnp.arange(half) / half))
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Block(nnx.Module):
    def __init__(self, width, hidden, heads, rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.mlp = GatedMlp(width, hidden, rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nnx.Module):
    """A decoder: unrolled, with a tied or an untied head."""

    def __init__(self, rngs, *, vocab=64, width=16, hidden=32, heads=4, layers=2, tied=True):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, hidden, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = None if tied else nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.embed.attend(x) if self.head is None else self.head(x)


class Scanned(nnx.Module):
    """The same decoder with its layers stacked and scanned over."""

    def __init__(self, rngs, *, vocab=64, width=16, hidden=32, heads=4, layers=3):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)

        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs):
            return Block(width, hidden, heads, rngs)

        self.blocks = stack(rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return block(x)

        return self.embed.attend(run(self.embed(tokens), self.blocks))


class ConvNet(nnx.Module):
    """Convolutions with batch norms between them."""

    def __init__(self, rngs, channels=8):
        self.conv1 = nnx.Conv(3, channels, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(channels, use_running_average=True, rngs=rngs)
        self.conv2 = nnx.Conv(channels, 2 * channels, (3, 3), rngs=rngs)
        self.conv3 = nnx.Conv(2 * channels, 2 * channels, (3, 3), rngs=rngs)
        self.conv4 = nnx.Conv(2 * channels, channels, (3, 3), rngs=rngs)
        self.head = nnx.Linear(channels, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.relu(self.conv2(x))
        x = nnx.max_pool(x, (2, 2), (2, 2))
        x = self.conv4(nnx.relu(self.conv3(x)))
        return self.head(x.mean((1, 2)))


class Einsums(nnx.Module):
    """Attention and a fused gated MLP written with nnx.Einsum."""

    def __init__(self, rngs, width=16, heads=4, depth=8, hidden=32):
        self.qkv = nnx.Einsum("bsw,cwhd->cbshd", (3, width, heads, depth), rngs=rngs)
        self.out = nnx.Einsum("bshd,hdw->bsw", (heads, depth, width), (width,), rngs=rngs)
        self.up = nnx.Einsum("bsw,cwm->cbsm", (2, width, hidden), rngs=rngs)
        self.down = nnx.Einsum("bsm,mw->bsw", (hidden, width), rngs=rngs)

    def __call__(self, x):
        q, k, v = self.qkv(x)
        x = x + self.out(jax.nn.dot_product_attention(q, k, v))
        gate, up = self.up(x)
        return x + self.down(nnx.silu(gate) * up)


class CachedAttention(nnx.Module):
    """Attention over a KV cache: the caller's, as an input, or its own, as variables."""

    def __init__(self, width, heads, kv_heads, depth, rngs, *, write="slice", own=None):
        init = nnx.initializers.lecun_normal()
        self.q = nnx.Param(init(rngs.params(), (width, heads, depth)))
        self.k = nnx.Param(init(rngs.params(), (width, kv_heads, depth)))
        self.v = nnx.Param(init(rngs.params(), (width, kv_heads, depth)))
        self.o = nnx.Param(init(rngs.params(), (heads, depth, width)))
        self.write = write
        if own is not None:
            self.keys = nnx.Cache(jnp.zeros((*own, kv_heads, depth)))
            self.values = nnx.Cache(jnp.zeros((*own, kv_heads, depth)))

    def __call__(self, x, cache=None):
        place = 2 if cache is None else cache["index"]
        keys = self.keys[...] if cache is None else cache["keys"]
        values = self.values[...] if cache is None else cache["values"]
        batch, length, _ = x.shape
        keys = self._written(keys, jnp.einsum("btw,wkd->btkd", x, self.k[...]), place)
        values = self._written(values, jnp.einsum("btw,wkd->btkd", x, self.v[...]), place)
        q = jnp.einsum("btw,whd->bthd", x, self.q[...])
        q = q.reshape(batch, length, keys.shape[2], -1, q.shape[-1])
        scores = jnp.einsum("btkgd,bskd->bkgts", q, keys)
        seen = jnp.arange(keys.shape[1]) < place + length
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        mixed = jnp.einsum("bkgts,bskd->btkgd", weights, values)
        mixed = mixed.reshape(batch, length, -1, q.shape[-1])
        out = x + jnp.einsum("bthd,hdw->btw", mixed, self.o[...])
        if cache is None:
            self.keys[...], self.values[...] = keys, values
            return out
        return out, {"keys": keys, "values": values, "index": place + length}

    def _written(self, cache, new, place):
        if self.write == "slice":
            return jax.lax.dynamic_update_slice(cache, new, (0, place, 0, 0))
        if self.write == "at":
            return cache.at[:, place + jnp.arange(new.shape[1])].set(new)
        each = jax.vmap(lambda row, part: jax.lax.dynamic_update_slice(row, part, (place, 0, 0)))
        return each(cache, new)


class CrossAttention(nnx.Module):
    """Queries attend to keys and values that come in, computed elsewhere."""

    def __init__(self, width, heads, depth, rngs):
        self.q = nnx.Linear(width, heads * depth, use_bias=False, rngs=rngs)
        self.o = nnx.Linear(heads * depth, width, use_bias=False, rngs=rngs)

    def __call__(self, x, keys, values):
        q = self.q(x).reshape(*x.shape[:2], *keys.shape[2:])
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, keys))
        mixed = jnp.einsum("bhts,bshd->bthd", weights, values)
        return x + self.o(mixed.reshape(*x.shape[:2], -1))


class Separable(nnx.Module):
    """An inverted residual: 1x1 up, something that keeps channels or their groups apart, 1x1 down."""

    def __init__(self, rngs, between, *, width=8, hidden=16):
        norm = nnx.BatchNorm(hidden, use_running_average=True, rngs=rngs)
        self.up = nnx.Conv(width, hidden, (1, 1), rngs=rngs)
        self.norm = norm
        self.middle = between(hidden, rngs)
        self.down = nnx.Conv(hidden, width, (1, 1), rngs=rngs)

    def __call__(self, x):
        return self.down(self.middle(nnx.relu(self.norm(self.up(x)))))


class BodyAndHead(nnx.Module):
    """A decoder whose call returns what its head is given elsewhere, in the loss."""

    def __init__(self, rngs, *, vocab=64, width=16):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.block = Block(width, 32, 4, rngs)
        self.head = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        return self.block(self.embed(tokens))

    def logits(self, tokens):
        return self.head(self(tokens))


class Resharded(nnx.Module):
    """Names the axis `model` itself, which only an axis of type Explicit allows."""

    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        hidden = self.up(x, out_sharding=jax.P(None, None, "model"))
        return self.down(nnx.gelu(hidden), out_sharding=jax.P())


class Dropouts(nnx.Module):
    """Layers alike with dropout between them: random keys and counts among the leaves."""

    def __init__(self, rngs, width=16, layers=2):
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(layers)])
        self.drops = nnx.List([nnx.Dropout(0.1, rngs=rngs) for _ in range(layers)])

    def __call__(self, x):
        for layer, drop in zip(self.layers, self.drops, strict=True):
            x = drop(nnx.tanh(layer(x)))
        return x


class Normed(nnx.Module):
    """Convolutions and batch norms whose statistics are updated."""

    def __init__(self, rngs, channels=8):
        self.conv = nnx.Conv(3, channels, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(channels, rngs=rngs)
        self.head = nnx.Linear(channels, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


class Attending(nnx.Module):
    """Attention with dropout."""

    def __init__(self, rngs, width=16):
        self.attention = nnx.MultiHeadAttention(
            4, width, dropout_rate=0.1, deterministic=False, decode=False, rngs=rngs
        )

    def __call__(self, x):
        return self.attention(x)


class Stacked(nnx.Module):
    """Layers with dropout, stacked by vmap and scanned over: keys of one dim."""

    def __init__(self, rngs, width=16, layers=3):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs):
            return Dropouts(rngs, width, layers=1)

        self.stack = stack(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        return run(x, self.stack)


class Table:
    """No module: its array is a constant of the model that holds it."""

    def __init__(self, size):
        self.sin = jnp.sin(jnp.arange(size) * 1.0)


class Helped(nnx.Module):
    """A helper object with an array beside the layers."""

    def __init__(self, rngs, width=16):
        self.table = Table(width)
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return self.linear(x + self.table.sin)


class Oddments(nnx.Module):
    """Odd sizes, its own Rngs, counters of small dtypes, a scalar, a weak type, an empty leaf."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 7, rngs=rngs)
        self.back = nnx.Linear(7, 16, rngs=rngs)
        self.rngs = rngs.fork()
        self.calls = nnx.Variable(jnp.zeros((), "uint32"))
        self.flags = nnx.Variable(jnp.arange(5, dtype="uint8"))
        self.on = nnx.Variable(jnp.ones((3,), bool))
        self.scale = nnx.Param(jnp.asarray(1.0))
        self.none = nnx.Variable(jnp.zeros((0, 4)))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + jnp.uint32(1)
        noise = jax.random.normal(self.rngs.noise(), x.shape) * 0.01
        return self.back(self.linear(x + noise)) * self.scale[...]


def squares(model, batch):
    """A loss for models of numbers to numbers."""
    return (model(batch) ** 2).mean()


def cross_entropy(model, batch):
    """A loss for models of tokens to logits."""
    logits = jax.nn.log_softmax(model(batch[:, :-1]))
    return -jnp.take_along_axis(logits, batch[:, 1:, None], axis=-1).mean()


_TOKENS = jax.ShapeDtypeStruct((16, 9), "int32")
_ROWS = jax.ShapeDtypeStruct((16, 16), "float32")
_SEQUENCES = jax.ShapeDtypeStruct((16, 8, 16), "float32")
_IMAGES = jax.ShapeDtypeStruct((16, 8, 8, 3), "float32")

ZOO = {
    "mlp": (lambda: Mlp(16, 32, nnx.Rngs(0)), squares, _ROWS),
    "gated": (lambda: GatedMlp(16, 32, nnx.Rngs(0)), squares, _ROWS),
    "grouped": (lambda: GroupedAttention(16, 4, 2, 8, nnx.Rngs(0)), squares, _SEQUENCES),
    "tied": (lambda: Transformer(nnx.Rngs(0), layers=1), cross_entropy, _TOKENS),
    "untied": (lambda: Transformer(nnx.Rngs(0), layers=1, tied=False), cross_entropy, _TOKENS),
    "scanned": (lambda: Scanned(nnx.Rngs(0), layers=2), cross_entropy, _TOKENS),
    "convolutions": (lambda: ConvNet(nnx.Rngs(0)), squares, _IMAGES),
    "einsums": (lambda: Einsums(nnx.Rngs(0)), squares, _SEQUENCES),
    "dropout": (lambda: Dropouts(nnx.Rngs(0)), squares, _ROWS),
    "batch norm": (lambda: Normed(nnx.Rngs(0)), squares, _IMAGES),
    "attention with dropout": (lambda: Attending(nnx.Rngs(0)), squares, _SEQUENCES),
    "stacked with dropout": (lambda: Stacked(nnx.Rngs(0)), squares, _ROWS),
    "helper": (lambda: Helped(nnx.Rngs(0)), squares, _ROWS),
    "oddments": (lambda: Oddments(nnx.Rngs(0)), squares, _ROWS),
}
"""Each model of the zoo with a loss and a batch, ready to be trained."""
