"""Models of the later rounds of the step-time benchmark, written as people write them who know nothing of it."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class CausalAttention(nnx.Module):
    """Attention by einsums: one projection for queries, keys and values, and a mask."""

    def __init__(self, width, heads, length, rngs, dropout=0.0):
        self.heads = heads
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        b, t, d = x.shape
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        q, k, v = (y.reshape(b, t, self.heads, -1) for y in (q, k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / (d // self.heads) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9)
        weights = self.drop(jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype))
        return self.out(jnp.einsum("bhts,bshd->bthd", weights, v).reshape(b, t, d))


class GptBlock(nnx.Module):
    def __init__(self, width, heads, length, rngs, dropout):
        self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.attention = CausalAttention(width, heads, length, rngs, dropout)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(nnx.gelu(self.up(self.norm2(x)))))


class Gpt(nnx.Module):
    """A small GPT with learned places, dropout and a tied head."""

    def __init__(self, vocab, width, heads, layers, length, rngs, dropout=0.1):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.place = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List(
            [GptBlock(width, heads, length, rngs, dropout) for _ in range(layers)]
        )
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def rotate(x, theta=10_000.0):
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / theta ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None].astype(x.dtype), jnp.cos(angles)[:, None].astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class RotaryBlock(nnx.Module):
    def __init__(self, width, heads, kv_heads, hidden, rngs):
        self.heads, self.kv_heads = heads, kv_heads
        depth = width // heads
        linear = lambda a, b: nnx.Linear(a, b, use_bias=False, rngs=rngs)  # noqa: E731
        self.norm1, self.norm2 = (nnx.RMSNorm(width, rngs=rngs) for _ in range(2))
        self.q, self.k, self.v = (linear(width, n * depth) for n in (heads, kv_heads, kv_heads))
        self.o = linear(width, width)
        self.gate, self.up, self.down = (
            linear(width, hidden), linear(width, hidden), linear(hidden, width)
        )  # fmt: skip

    def __call__(self, x):
        b, t, _ = x.shape
        y = self.norm1(x)
        q = rotate(self.q(y).reshape(b, t, self.heads, -1))
        k = rotate(self.k(y).reshape(b, t, self.kv_heads, -1))
        v = self.v(y).reshape(b, t, self.kv_heads, -1)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.reshape(b, t, -1))
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class ScannedRotary(nnx.Module):
    """Blocks stacked by `nnx.vmap`, run by `nnx.scan` under `nnx.remat`."""

    def __init__(self, vocab, width, heads, kv_heads, hidden, layers, rngs, policy=None):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs):
            return RotaryBlock(width, heads, kv_heads, hidden, rngs)

        self.policy = policy
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.blocks = stack(rngs)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return nnx.remat(lambda block, x: block(x), policy=self.policy)(block, x)

        return self.head(self.norm(run(self.embed(tokens), self.blocks)))


class PostNormBlock(nnx.Module):
    def __init__(self, width, heads, hidden, rngs, dropout):
        self.attention = nnx.MultiHeadAttention(
            heads, width, dropout_rate=dropout, deterministic=False, decode=False, rngs=rngs
        )
        self.up, self.down = (
            nnx.Linear(width, hidden, rngs=rngs),
            nnx.Linear(hidden, width, rngs=rngs),
        )
        self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.drop = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, mask):
        x = self.norm1(x + self.drop(self.attention(x, mask=mask)))
        return self.norm2(x + self.drop(self.down(nnx.gelu(self.up(x), approximate=False))))


class Bert(nnx.Module):
    """A masked language model with segments, a mask of the padding, and dropout."""

    def __init__(self, vocab, width, heads, layers, length, rngs, dropout=0.1):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.place = nnx.Param(jax.random.normal(rngs.params(), (length, width)) * 0.02)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.blocks = nnx.List(
            [PostNormBlock(width, heads, 4 * width, rngs, dropout) for _ in range(layers)]
        )
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens):
        mask = (tokens != 0)[:, None, None, :]
        x = self.norm(self.embed(tokens) + self.place[...])
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class ClassToken(nnx.Module):
    """A vision transformer with a class token, dropped paths left out."""

    def __init__(self, size, patch, width, heads, layers, rngs, dropout=0.1):
        self.patch = nnx.Conv(3, width, (patch, patch), strides=(patch, patch), rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, width)))
        self.place = nnx.Param(jnp.zeros((1, 1 + (size // patch) ** 2, width)))
        self.blocks = nnx.List(
            [GptBlockWithoutMask(width, heads, rngs, dropout) for _ in range(layers)]
        )
        self.head = nnx.Linear(width, 1000, rngs=rngs)

    def __call__(self, images):
        x = self.patch(images)
        x = x.reshape(len(x), -1, x.shape[-1])
        token = jnp.broadcast_to(self.token[...].astype(x.dtype), (len(x), 1, x.shape[-1]))
        x = jnp.concatenate([token, x], axis=1) + self.place[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class GptBlockWithoutMask(nnx.Module):
    def __init__(self, width, heads, rngs, dropout):
        self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(
            heads, width, dropout_rate=dropout, deterministic=False, decode=False, rngs=rngs
        )
        self.up, self.down = (
            nnx.Linear(width, 4 * width, rngs=rngs),
            nnx.Linear(4 * width, width, rngs=rngs),
        )
        self.drop = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(nnx.gelu(self.up(self.norm2(x)))))


class Windows(nnx.Module):
    """Attention within windows of an image, shifted in every other block, as in Swin."""

    def __init__(self, width, heads, window, layers, rngs):
        self.window = window
        self.patch = nnx.Conv(3, width, (4, 4), strides=(4, 4), rngs=rngs)
        self.blocks = nnx.List(
            [GptBlockWithoutMask(width, heads, rngs, 0.0) for _ in range(layers)]
        )
        self.head = nnx.Linear(width, 1000, rngs=rngs)

    def __call__(self, images):
        x, w = self.patch(images), self.window
        b, h, _, d = x.shape
        for i, block in enumerate(self.blocks):
            if i % 2:
                x = jnp.roll(x, (-(w // 2), -(w // 2)), axis=(1, 2))
            y = x.reshape(b, h // w, w, h // w, w, d).swapaxes(2, 3).reshape(-1, w * w, d)
            y = block(y).reshape(b, h // w, h // w, w, w, d).swapaxes(2, 3)
            x = y.reshape(b, h, h, d)
            if i % 2:
                x = jnp.roll(x, (w // 2, w // 2), axis=(1, 2))
        return self.head(x.mean(axis=(1, 2)))


class ModulatedBlock(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.norm = nnx.LayerNorm(width, use_bias=False, use_scale=False, rngs=rngs)
        self.modulate = nnx.Linear(width, 6 * width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(width, 4 * width, rngs=rngs),
            nnx.Linear(4 * width, width, rngs=rngs),
        )

    def __call__(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(
            self.modulate(nnx.silu(c))[:, None], 6, axis=-1
        )
        x = x + gate1 * self.attention(self.norm(x) * (1 + scale1) + shift1)
        return x + gate2 * self.down(nnx.gelu(self.up(self.norm(x) * (1 + scale2) + shift2)))


class DiffusionTransformer(nnx.Module):
    """Blocks whose norms are scaled and shifted by an embedding of time and class, as in DiT."""

    def __init__(self, tokens, inner, width, heads, layers, rngs):
        self.first = nnx.Linear(inner, width, rngs=rngs)
        self.classes = nnx.Embed(1000, width, rngs=rngs)
        self.time1, self.time2 = (
            nnx.Linear(256, width, rngs=rngs),
            nnx.Linear(width, width, rngs=rngs),
        )
        self.place = nnx.Param(jnp.zeros((1, tokens, width)))
        self.blocks = nnx.List([ModulatedBlock(width, heads, rngs) for _ in range(layers)])
        self.last = nnx.Linear(width, inner, rngs=rngs)

    def __call__(self, x, time, label):
        angles = time[:, None] * jnp.exp(-jnp.arange(128) / 14)
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(x.dtype)
        c = self.time2(nnx.silu(self.time1(waves))) + self.classes(label)
        x = self.first(x) + self.place[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x, c)
        return self.last(x)


class BasicBlock(nnx.Module):
    def __init__(self, a, b, stride, rngs):
        conv = lambda a, b, k, s: nnx.Conv(  # noqa: E731
            a, b, (k, k), strides=(s, s), use_bias=False, rngs=rngs
        )
        self.conv1, self.conv2 = conv(a, b, 3, stride), conv(b, b, 3, 1)
        self.norm1, self.norm2 = nnx.BatchNorm(b, rngs=rngs), nnx.BatchNorm(b, rngs=rngs)
        self.skip = conv(a, b, 1, stride) if (a, 1) != (b, stride) else None

    def __call__(self, x):
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return nnx.relu(y + (x if self.skip is None else self.skip(x)))


class BasicResNet(nnx.Module):
    """ResNet-18 and 34."""

    def __init__(self, stages, rngs, first=64):
        self.stem = nnx.Conv(3, first, (7, 7), strides=(2, 2), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(first, rngs=rngs)
        blocks, a = [], first
        for stage, count in enumerate(stages):
            for i in range(count):
                blocks.append(BasicBlock(a, first * 2**stage, 2 if stage and not i else 1, rngs))
                a = first * 2**stage
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(a, 1000, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.norm(self.stem(x))), (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


class SmallCnn(nnx.Module):
    """Two convolutions with pooling and two linear layers, as in Flax's first example."""

    def __init__(self, rngs, size=32, features=(32, 64), hidden=256):
        self.conv1 = nnx.Conv(3, features[0], (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(features[0], features[1], (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(features[0], rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.linear1 = nnx.Linear((size // 4) ** 2 * features[1], hidden, rngs=rngs)
        self.linear2 = nnx.Linear(hidden, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv1(x))), (2, 2), strides=(2, 2))
        x = nnx.avg_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
        return self.linear2(self.drop(nnx.relu(self.linear1(x.reshape(len(x), -1)))))


class GroupBlock(nnx.Module):
    def __init__(self, a, b, c, rngs):
        self.norm1, self.norm2 = nnx.GroupNorm(a, 32, rngs=rngs), nnx.GroupNorm(b, 32, rngs=rngs)
        self.conv1, self.conv2 = (
            nnx.Conv(a, b, (3, 3), rngs=rngs), nnx.Conv(b, b, (3, 3), rngs=rngs)
        )  # fmt: skip
        self.time = nnx.Linear(c, b, rngs=rngs)
        self.skip = nnx.Conv(a, b, (1, 1), rngs=rngs) if a != b else None

    def __call__(self, x, c):
        y = self.conv1(nnx.silu(self.norm1(x))) + self.time(c)[:, None, None]
        y = self.conv2(nnx.silu(self.norm2(y)))
        return y + (x if self.skip is None else self.skip(x))


class DiffusionUNet(nnx.Module):
    """Group norms, time embeddings, attention at the bottom, and skips between the halves."""

    def __init__(self, widths, rngs):
        c = 4 * widths[0]
        self.time = nnx.Linear(64, c, rngs=rngs)
        self.first = nnx.Conv(4, widths[0], (3, 3), rngs=rngs)
        downs, ups, shrink, a = [], [], [], widths[0]
        for b in widths:
            downs.append(GroupBlock(a, b, c, rngs))
            shrink.append(nnx.Conv(b, b, (3, 3), strides=(2, 2), rngs=rngs))
            a = b
        self.middle = GroupBlock(a, a, c, rngs)
        self.norm = nnx.GroupNorm(a, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(a // 64, a, decode=False, rngs=rngs)
        for b in reversed(widths):
            ups.append(GroupBlock(a + b, b, c, rngs))
            a = b
        self.downs, self.shrink, self.ups = nnx.List(downs), nnx.List(shrink), nnx.List(ups)
        self.last = nnx.Conv(a, 4, (3, 3), rngs=rngs)

    def __call__(self, x, time):
        c = nnx.silu(self.time(jnp.cos(time[:, None] * jnp.arange(64)).astype(x.dtype)))
        x, skips = self.first(x), []
        for down, shrink in zip(self.downs, self.shrink, strict=True):
            x = down(x, c)
            skips.append(x)
            x = shrink(x)
        x = self.middle(x, c)
        y = self.norm(x).reshape(len(x), -1, x.shape[-1])
        x = x + self.attention(y).reshape(x.shape)
        for up in self.ups:
            skip = skips.pop()
            x = jax.image.resize(x, (*skip.shape[:3], x.shape[-1]), "nearest")
            x = up(jnp.concatenate([x, skip], axis=-1), c)
        return self.last(nnx.silu(x))


class WaveNet(nnx.Module):
    """Causal convolutions with holes, gated, with residuals and skips."""

    def __init__(self, width, layers, rngs, vocab=256):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.holes = nnx.List(
            [
                nnx.Conv(
                    width,
                    2 * width,
                    (2,),
                    kernel_dilation=2 ** (i % 8),
                    padding="CAUSAL",
                    rngs=rngs,
                )
                for i in range(layers)
            ]
        )
        self.mix = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens):
        x, total = self.embed(tokens), 0.0
        for hole, mix in zip(self.holes, self.mix, strict=True):
            a, b = jnp.split(hole(x), 2, axis=-1)
            y = mix(jnp.tanh(a) * nnx.sigmoid(b))
            x, total = x + y, total + y
        return self.head(nnx.relu(total))


class Vae(nnx.Module):
    """Strided convolutions down, transposed ones up, and a drawn latent between them."""

    def __init__(self, widths, latent, size, rngs):
        sides = size // 2 ** len(widths)
        self.shape = (sides, sides, widths[-1])
        pairs = list(zip((3, *widths[:-1]), widths, strict=True))
        self.down = nnx.List([nnx.Conv(a, b, (4, 4), strides=(2, 2), rngs=rngs) for a, b in pairs])
        self.up = nnx.List(
            [nnx.ConvTranspose(b, a, (4, 4), strides=(2, 2), rngs=rngs) for a, b in pairs[::-1]]
        )
        self.code = nnx.Linear(sides * sides * widths[-1], 2 * latent, rngs=rngs)
        self.back = nnx.Linear(latent, sides * sides * widths[-1], rngs=rngs)
        self.draw = nnx.Rngs(draw=1)

    def __call__(self, x):
        for conv in self.down:
            x = nnx.relu(conv(x))
        mean, spread = jnp.split(self.code(x.reshape(len(x), -1)), 2, axis=-1)
        drawn = mean + jnp.exp(spread / 2) * jax.random.normal(
            self.draw.draw(), mean.shape, mean.dtype
        )
        x = self.back(drawn).reshape(len(x), *self.shape)
        for conv in self.up:
            x = conv(nnx.relu(x))
        return x


class ResidualMlp(nnx.Module):
    def __init__(self, inputs, width, layers, outputs, rngs):
        self.first = nnx.Linear(inputs, width, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(layers)])
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(layers)])
        self.last = nnx.Linear(width, outputs, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + nnx.relu(layer(norm(x)))
        return self.last(x)


class Recommender(nnx.Module):
    """Tables of categories, a tower for numbers, products of all pairs, and a tower on top."""

    def __init__(self, tables, rows, width, dense, rngs):
        self.tables = nnx.List([nnx.Embed(rows, width, rngs=rngs) for _ in range(tables)])
        self.bottom1, self.bottom2 = (
            nnx.Linear(dense, 512, rngs=rngs),
            nnx.Linear(512, width, rngs=rngs),
        )
        pairs = (tables + 1) * tables // 2
        sizes = (pairs + width, 1024, 512, 1)
        self.top = nnx.List(
            [nnx.Linear(a, b, rngs=rngs) for a, b in zip(sizes[:-1], sizes[1:], strict=True)]
        )

    def __call__(self, numbers, categories):
        low = nnx.relu(self.bottom2(nnx.relu(self.bottom1(numbers))))
        rows = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        all_rows = jnp.stack([low, *rows], axis=1)
        products = jnp.einsum("bif,bjf->bij", all_rows, all_rows)
        i, j = jnp.triu_indices(all_rows.shape[1], 1)
        x = jnp.concatenate([low, products[:, i, j]], axis=-1)
        for layer in self.top[:-1]:
            x = nnx.relu(layer(x))
        return self.top[-1](x)[:, 0]


class GraphNet(nnx.Module):
    """Messages along edges, summed at their nodes."""

    def __init__(self, features, width, rounds, rngs):
        self.first = nnx.Linear(features, width, rngs=rngs)
        self.message = nnx.List([nnx.Linear(2 * width, width, rngs=rngs) for _ in range(rounds)])
        self.update = nnx.List([nnx.Linear(2 * width, width, rngs=rngs) for _ in range(rounds)])
        self.last = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, nodes, sources, targets):
        x = self.first(nodes)
        for message, update in zip(self.message, self.update, strict=True):
            sent = nnx.relu(message(jnp.concatenate([x[sources], x[targets]], axis=-1)))
            summed = jax.ops.segment_sum(sent, targets, num_segments=len(x))
            x = x + nnx.relu(update(jnp.concatenate([x, summed], axis=-1)))
        return self.last(x)[:, 0]


class TwoTowers(nnx.Module):
    """Images and texts whose embeddings should agree, as in CLIP."""

    def __init__(self, image, text, width, out, rngs):
        self.image, self.text = image, text
        self.to_image, self.to_text = (
            nnx.Linear(1000, out, rngs=rngs),
            nnx.Linear(width, out, rngs=rngs),
        )

    def __call__(self, images, tokens):
        x = self.text.embed(tokens)
        for block in self.text.blocks:
            x = block(x)
        a, b = self.to_image(self.image(images)), self.to_text(x[:, -1])
        a, b = (y / jnp.linalg.norm(y.astype(jnp.float32), axis=-1, keepdims=True) for y in (a, b))
        return 10.0 * a @ b.T


def causal_loss(model, tokens):
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def masked_loss(model, batch):
    tokens, labels = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(tokens).astype(jnp.float32), labels
    )
    hidden = labels % 7 == 0
    return (losses * hidden).sum() / hidden.sum()


def diffusion_loss(model, batch):
    x, noise, time, *rest = batch
    share = time[:, None, None].astype(x.dtype)
    share = share.reshape(share.shape[0], *(1,) * (x.ndim - 1))
    return ((model((1 - share) * x + share * noise, time, *rest) - noise) ** 2).mean()


def reconstruction_loss(model, images):
    return ((model(images) - images) ** 2).mean()


def binary_loss(model, batch):
    *inputs, labels = batch
    logits = model(*inputs).astype(jnp.float32)
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def graph_loss(model, batch):
    *inputs, wanted = batch
    return ((model(*inputs) - wanted) ** 2).mean()


def contrastive_loss(model, batch):
    logits = model(*batch).astype(jnp.float32)
    labels = jnp.arange(len(logits))
    cross = optax.softmax_cross_entropy_with_integer_labels
    return (cross(logits, labels).mean() + cross(logits.T, labels).mean()) / 2
