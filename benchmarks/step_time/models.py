"""Models for the step-time benchmark that are not decoders, in plain Flax NNX."""

import jax
import jax.numpy as jnp
from flax import nnx


class Mlp(nnx.Module):
    """Linear layers with an activation between them."""

    def __init__(self, sizes, rngs, activation=nnx.relu, dropout=0.0):
        self.layers = nnx.List(
            [nnx.Linear(a, b, rngs=rngs) for a, b in zip(sizes[:-1], sizes[1:], strict=True)]
        )
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.activation = activation

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = self.dropout(self.activation(layer(x)))
        return self.layers[-1](x)


class EncoderBlock(nnx.Module):
    """Pre-norm attention without a mask, and a GELU MLP."""

    def __init__(self, width, heads, hidden, rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Vit(nnx.Module):
    """A vision transformer: patches by a convolution, encoder blocks, mean pooling."""

    def __init__(self, size, patch, width, heads, layers, classes, rngs):
        self.patches = nnx.Conv(3, width, (patch, patch), strides=(patch, patch), rngs=rngs)
        self.place = nnx.Param(jnp.zeros((1, (size // patch) ** 2, width)))
        self.blocks = nnx.List([EncoderBlock(width, heads, 4 * width, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = x + self.place[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


class Encoder(nnx.Module):
    """A bidirectional text encoder with a classifier."""

    def __init__(self, vocab, width, heads, layers, classes, rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.blocks = nnx.List([EncoderBlock(width, heads, 4 * width, rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=1))


class ResidualBlock(nnx.Module):
    """A bottleneck of three convolutions with batch norms."""

    def __init__(self, features, inner, stride, rngs):
        conv = lambda a, b, k, s=1: nnx.Conv(  # noqa: E731
            a, b, (k, k), strides=(s, s), use_bias=False, rngs=rngs
        )
        out = 4 * inner
        self.conv1, self.norm1 = conv(features, inner, 1), nnx.BatchNorm(inner, rngs=rngs)
        self.conv2, self.norm2 = conv(inner, inner, 3, stride), nnx.BatchNorm(inner, rngs=rngs)
        self.conv3, self.norm3 = conv(inner, out, 1), nnx.BatchNorm(out, rngs=rngs)
        self.skip = conv(features, out, 1, stride) if (features, 1) != (out, stride) else None

    def __call__(self, x):
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = nnx.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return nnx.relu(y + (x if self.skip is None else self.skip(x)))


class ResNet(nnx.Module):
    """A residual network: a stem, stages of bottlenecks, mean pooling."""

    def __init__(self, stages, rngs, inner=64, classes=1000):
        self.stem = nnx.Conv(3, inner, (7, 7), strides=(2, 2), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(inner, rngs=rngs)
        blocks, features = [], inner
        for stage, count in enumerate(stages):
            for i in range(count):
                stride = 2 if stage and not i else 1
                blocks.append(ResidualBlock(features, inner * 2**stage, stride, rngs))
                features = 4 * inner * 2**stage
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(features, classes, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.norm(self.stem(images)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


class ConvNext(nnx.Module):
    """Depthwise convolutions and pointwise MLPs at one resolution."""

    def __init__(self, width, layers, classes, rngs):
        self.stem = nnx.Conv(3, width, (4, 4), strides=(4, 4), rngs=rngs)
        self.deep = nnx.List(
            [
                nnx.Conv(width, width, (7, 7), feature_group_count=width, rngs=rngs)
                for _ in range(layers)
            ]
        )
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(layers)])
        self.up = nnx.List([nnx.Linear(width, 4 * width, rngs=rngs) for _ in range(layers)])
        self.down = nnx.List([nnx.Linear(4 * width, width, rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, images):
        x = self.stem(images)
        for deep, norm, up, down in zip(self.deep, self.norms, self.up, self.down, strict=True):
            x = x + down(nnx.gelu(up(norm(deep(x)))))
        return self.head(x.mean(axis=(1, 2)))


class UNet(nnx.Module):
    """Two levels down and up again, with transposed convolutions and group norms."""

    def __init__(self, width, rngs):
        conv = lambda a, b: nnx.Conv(a, b, (3, 3), rngs=rngs)  # noqa: E731
        self.first, self.second, self.third = (
            conv(3, width),
            conv(width, 2 * width),
            conv(2 * width, 4 * width),
        )
        self.norms = nnx.List(
            [
                nnx.GroupNorm(f, num_groups=8, rngs=rngs)
                for f in (width, 2 * width, 4 * width, 2 * width, width)
            ]
        )
        self.up1 = nnx.ConvTranspose(4 * width, 2 * width, (2, 2), strides=(2, 2), rngs=rngs)
        self.up2 = nnx.ConvTranspose(2 * width, width, (2, 2), strides=(2, 2), rngs=rngs)
        self.mix1, self.mix2 = conv(4 * width, 2 * width), conv(2 * width, width)
        self.out = conv(width, 3)

    def __call__(self, x):
        pool = lambda y: nnx.avg_pool(y, (2, 2), strides=(2, 2))  # noqa: E731
        a = nnx.silu(self.norms[0](self.first(x)))
        b = nnx.silu(self.norms[1](self.second(pool(a))))
        c = nnx.silu(self.norms[2](self.third(pool(b))))
        d = self.mix1(jnp.concatenate([self.up1(c), b], axis=-1))
        d = nnx.silu(self.norms[3](d))
        e = self.mix2(jnp.concatenate([self.up2(d), a], axis=-1))
        return self.out(nnx.silu(self.norms[4](e)))


class Recurrent(nnx.Module):
    """A GRU, or another cell, over a sequence of embedded tokens, scanned over time."""

    def __init__(self, vocab, width, rngs, cell=nnx.GRUCell):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.rnn = nnx.RNN(cell(width, width, rngs=rngs))
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.rnn(self.embed(tokens)))


class Lookup(nnx.Module):
    """Large embedding tables with a small network on top, as in recommenders."""

    def __init__(self, tables, rows, width, rngs):
        self.tables = nnx.List([nnx.Embed(rows, width, rngs=rngs) for _ in range(tables)])
        self.mlp = Mlp((tables * width, 1024, 512, 1), rngs)

    def __call__(self, ids):
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.mlp(jnp.concatenate(found, axis=-1))[:, 0]


class Mixer(nnx.Module):
    """MLPs over tokens and over channels in turn."""

    def __init__(self, tokens, width, layers, rngs):
        self.over_tokens = nnx.List(
            [Mlp((tokens, 2 * tokens, tokens), rngs, nnx.gelu) for _ in range(layers)]
        )
        self.over_width = nnx.List(
            [Mlp((width, 4 * width, width), rngs, nnx.gelu) for _ in range(layers)]
        )
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2 * layers)])

    def __call__(self, x):
        for i, (across, along) in enumerate(zip(self.over_tokens, self.over_width, strict=True)):
            y = self.norms[2 * i](x).swapaxes(1, 2)
            x = x + across(y).swapaxes(1, 2)
            x = x + along(self.norms[2 * i + 1](x))
        return x


class StateSpace(nnx.Module):
    """A gated linear recurrence by an associative scan, with projections around it."""

    def __init__(self, width, layers, rngs):
        self.into = nnx.List([nnx.Linear(width, 3 * width, rngs=rngs) for _ in range(layers)])
        self.out = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(layers)])

    def __call__(self, x):
        for into, out in zip(self.into, self.out, strict=True):
            value, gate, decay = jnp.split(into(x), 3, axis=-1)
            decay = nnx.sigmoid(decay)
            combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])  # noqa: E731
            _, state = jax.lax.associative_scan(combine, (decay, (1 - decay) * value), axis=1)
            x = x + out(state * nnx.silu(gate))
        return x


class Vgg(nnx.Module):
    """Plain 3x3 convolutions with biases and no norms; pooling halves the image between stages."""

    def __init__(self, stages, rngs, classes=1000):
        convs, features = [], 3
        for width, count in stages:
            for _ in range(count):
                convs.append(nnx.Conv(features, width, (3, 3), rngs=rngs))
                features = width
        self.convs = nnx.List(convs)
        self.last = [sum(n for _, n in stages[: i + 1]) - 1 for i in range(len(stages))]
        self.head = Mlp((features, 2048, classes), rngs)

    def __call__(self, images):
        x = images
        for i, conv in enumerate(self.convs):
            x = nnx.relu(conv(x))
            if i in self.last:
                x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        return self.head(x.mean(axis=(1, 2)))


class Denoiser(nnx.Module):
    """A U-Net of residual blocks with group norms, which resizes images to make them larger."""

    def __init__(self, width, rngs):
        conv = lambda a, b: nnx.Conv(a, b, (3, 3), rngs=rngs)  # noqa: E731
        widths = (width, 2 * width, 4 * width, 2 * width, width)
        given = (width, width, 2 * width, 6 * width, 3 * width)
        self.first, self.out = conv(3, width), conv(width, 3)
        self.norms = nnx.List([nnx.GroupNorm(a, num_groups=8, rngs=rngs) for a in given])
        self.convs = nnx.List([conv(a, b) for a, b in zip(given, widths, strict=True)])
        self.again = nnx.List([conv(b, b) for b in widths])
        self.skips = nnx.List(
            [nnx.Conv(a, b, (1, 1), rngs=rngs) for a, b in zip(given, widths, strict=True)]
        )

    def block(self, i, x):
        y = self.again[i](nnx.silu(self.convs[i](nnx.silu(self.norms[i](x)))))
        return y + self.skips[i](x)

    def __call__(self, images):
        pool = lambda y: nnx.avg_pool(y, (2, 2), strides=(2, 2))  # noqa: E731
        grow = lambda y: y.repeat(2, axis=1).repeat(2, axis=2)  # noqa: E731
        a = self.block(0, self.first(images))
        b = self.block(1, pool(a))
        c = self.block(2, pool(b))
        d = self.block(3, jnp.concatenate([grow(c), b], axis=-1))
        e = self.block(4, jnp.concatenate([grow(d), a], axis=-1))
        return self.out(e)


class CrossBlock(nnx.Module):
    """A decoder block that attends to itself, causally, and to an encoder's output."""

    def __init__(self, width, heads, hidden, rngs, dropout):
        attention = lambda: nnx.MultiHeadAttention(  # noqa: E731
            heads, width, decode=False, use_bias=False, rngs=rngs
        )
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(3)])
        self.own, self.cross = attention(), attention()
        self.mlp = Mlp((width, hidden, width), rngs, dropout=dropout)

    def __call__(self, x, given, mask):
        y = self.norms[0](x)
        x = x + self.own(y, mask=mask)
        x = x + self.cross(self.norms[1](x), given)
        return x + self.mlp(self.norms[2](x))


class EncoderDecoder(nnx.Module):
    """An encoder and a causal decoder with cross attention, as in T5; one embedding for all."""

    def __init__(self, vocab, width, heads, layers, rngs, dropout=0.1):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.encoder = nnx.List(
            [EncoderBlock(width, heads, 4 * width, rngs) for _ in range(layers)]
        )
        self.decoder = nnx.List(
            [CrossBlock(width, heads, 4 * width, rngs, dropout) for _ in range(layers)]
        )
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, source, target):
        x, y = self.embed(source), self.embed(target)
        mask = nnx.make_causal_mask(target)
        for block in self.encoder:
            x = block(x)
        for block in self.decoder:
            y = block(y, x, mask)
        return self.embed.attend(self.norm(y))


class PlainBlock(nnx.Module):
    """Two 3x3 convolutions with batch norms that compute in `dtype`, around a shortcut."""

    def __init__(self, features, out, stride, rngs, dtype):
        options = {"use_bias": False, "dtype": dtype, "rngs": rngs}
        strides = (stride, stride)
        self.conv1 = nnx.Conv(features, out, (3, 3), strides=strides, **options)
        self.conv2 = nnx.Conv(out, out, (3, 3), **options)
        self.norm1 = nnx.BatchNorm(out, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.BatchNorm(out, dtype=dtype, rngs=rngs)
        changes = (features, 1) != (out, stride)
        self.skip = nnx.Conv(features, out, (1, 1), strides=strides, **options) if changes else None

    def __call__(self, x):
        y = self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x)))))
        return nnx.relu(y + (x if self.skip is None else self.skip(x)))


class WideResNet(nnx.Module):
    """A residual network of plain blocks in which norms keep the dtype of the convolutions."""

    def __init__(self, stages, rngs, dtype=jnp.bfloat16, classes=100):
        self.stem = nnx.Conv(3, 32, (3, 3), dtype=dtype, rngs=rngs)
        blocks, features = [], 32
        for stage, (width, count) in enumerate(stages):
            for i in range(count):
                stride = 2 if stage and not i else 1
                blocks.append(PlainBlock(features, width, stride, rngs, dtype))
                features = width
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(features, classes, rngs=rngs)

    def __call__(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


class AutoEncoder(nnx.Module):
    """Strided 4x4 convolutions down, and transposed ones up again."""

    def __init__(self, widths, rngs):
        sizes = (3, *widths)
        pairs = list(zip(sizes[:-1], sizes[1:], strict=True))
        options = {"strides": (2, 2), "padding": "SAME", "rngs": rngs}
        self.down = nnx.List([nnx.Conv(a, b, (4, 4), **options) for a, b in pairs])
        self.up = nnx.List([nnx.ConvTranspose(b, a, (4, 4), **options) for a, b in pairs[::-1]])

    def __call__(self, x):
        for conv in self.down:
            x = nnx.leaky_relu(conv(x))
        for conv in self.up[:-1]:
            x = nnx.relu(conv(x))
        return self.up[-1](x)


class MobileNet(nnx.Module):
    """Inverted bottlenecks: pointwise, depthwise and pointwise convolutions, with group norms."""

    def __init__(self, stages, rngs, expansion=4, classes=1000):
        self.stem = nnx.Conv(3, stages[0][0], (3, 3), strides=(2, 2), rngs=rngs)
        blocks, features = [], stages[0][0]
        for width, count, stride in stages:
            for i in range(count):
                inner, step = expansion * features, stride if not i else 1
                deep = nnx.Conv(
                    inner, inner, (3, 3), strides=(step, step), feature_group_count=inner, rngs=rngs
                )
                expand = nnx.Conv(features, inner, (1, 1), rngs=rngs)
                project = nnx.Conv(inner, width, (1, 1), rngs=rngs)
                norm = nnx.GroupNorm(inner, num_groups=8, rngs=rngs)
                blocks.append(nnx.List([expand, deep, norm, project]))
                features = width
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(features, classes, rngs=rngs)

    def __call__(self, images):
        x = self.stem(images)
        for expand, deep, norm, project in self.blocks:
            y = project(nnx.silu(norm(deep(nnx.silu(expand(x))))))
            x = x + y if x.shape == y.shape else y
        return self.head(x.mean(axis=(1, 2)))


class Wide5(nnx.Module):
    """A small network of 5x5 convolutions, each followed by pooling."""

    def __init__(self, widths, rngs, classes=10):
        sizes = (3, *widths)
        self.convs = nnx.List(
            [nnx.Conv(a, b, (5, 5), rngs=rngs) for a, b in zip(sizes[:-1], widths, strict=True)]
        )
        self.head = Mlp((widths[-1], 512, classes), rngs)

    def __call__(self, images):
        x = images
        for conv in self.convs:
            x = nnx.avg_pool(nnx.relu(conv(x)), (2, 2), strides=(2, 2))
        return self.head(x.mean(axis=(1, 2)))


def translated(model, batch):
    """Returns the mean cross-entropy of each next token of the target."""
    source, target = batch
    logits = jax.nn.log_softmax(model(source, target[:, :-1]).astype(jnp.float32))
    return -jnp.take_along_axis(logits, target[:, 1:, None], axis=-1).mean()


def classified(model, batch):
    """Returns the mean cross-entropy of the labels."""
    inputs, labels = batch
    logits = jax.nn.log_softmax(model(inputs).astype(jnp.float32))
    return -jnp.take_along_axis(logits, labels[:, None], axis=-1).mean()


def squared(model, batch):
    """Returns the mean squared error."""
    inputs, targets = batch
    return jnp.mean((model(inputs).astype(jnp.float32) - targets.astype(jnp.float32)) ** 2)


def next_token(model, tokens):
    """Returns the mean cross-entropy of each next token."""
    logits = jax.nn.log_softmax(model(tokens[:, :-1]).astype(jnp.float32))
    return -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1).mean()
