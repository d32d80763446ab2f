"""Models of the seventh round: of families that no round before it had."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from others import RotaryBlock


class Rotary(nnx.Module):
    """Rotary blocks one after the other, with a final norm and a head of its own."""

    def __init__(self, vocab, width, heads, kv_heads, hidden, layers, rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.blocks = nnx.List(
            [RotaryBlock(width, heads, kv_heads, hidden, rngs) for _ in range(layers)]
        )
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class BiasedAttention(nnx.Module):
    """Attention with a learned bias for each distance, as in T5; `other` is what it looks at."""

    def __init__(self, width, heads, length, rngs, causal=False):
        self.heads, self.causal, self.length = heads, causal, length
        linear = lambda: nnx.Linear(width, width, use_bias=False, rngs=rngs)  # noqa: E731
        self.q, self.k, self.v, self.o = linear(), linear(), linear(), linear()
        self.bias = nnx.Embed(2 * length, heads, rngs=rngs)

    def __call__(self, x, other=None):
        b, t, d = x.shape
        other = x if other is None else other
        split = lambda y: y.reshape(b, y.shape[1], self.heads, -1)  # noqa: E731
        q, k, v = split(self.q(x)), split(self.k(other)), split(self.v(other))
        s = other.shape[1]
        apart = jnp.arange(s)[None] - jnp.arange(t)[:, None]
        scores = jnp.einsum("bthd,bshd->bhts", q, k)
        scores += self.bias(apart + self.length).transpose(2, 0, 1).astype(scores.dtype)
        if self.causal:
            scores = jnp.where(apart <= 0, scores, -1e9)
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
        return self.o(jnp.einsum("bhts,bshd->bthd", weights, v).reshape(b, t, d))


class SeqToSeq(nnx.Module):
    """An encoder and a decoder with biased attention and gated layers."""

    def __init__(self, vocab, width, heads, hidden, layers, length, rngs):
        norm = lambda: nnx.RMSNorm(width, rngs=rngs)  # noqa: E731
        linear = lambda a, b: nnx.Linear(a, b, use_bias=False, rngs=rngs)  # noqa: E731
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        attention = lambda **o: BiasedAttention(width, heads, length, rngs, **o)  # noqa: E731
        self.reads = nnx.List([attention() for _ in range(layers)])
        self.writes = nnx.List([attention(causal=True) for _ in range(layers)])
        self.looks = nnx.List([attention() for _ in range(layers)])
        self.gates = nnx.List([linear(width, hidden) for _ in range(2 * layers)])
        self.ups = nnx.List([linear(width, hidden) for _ in range(2 * layers)])
        self.downs = nnx.List([linear(hidden, width) for _ in range(2 * layers)])
        self.norms = nnx.List([norm() for _ in range(5 * layers + 2)])

    def __call__(self, source, target):
        norms, dense = iter(self.norms), zip(self.gates, self.ups, self.downs, strict=True)

        def widened(x):
            gate, up, down = next(dense)
            y = next(norms)(x)
            return x + down(nnx.gelu(gate(y)) * up(y))

        x = self.embed(source)
        for read in self.reads:
            x = widened(x + read(next(norms)(x)))
        memory, x = next(norms)(x), self.embed(target)
        for write, look in zip(self.writes, self.looks, strict=True):
            x = x + write(next(norms)(x))
            x = widened(x + look(next(norms)(x), memory))
        return self.embed.attend(next(norms)(x))


class ConformerBlock(nnx.Module):
    """Half a dense layer, attention, a convolution over time, and the other half."""

    def __init__(self, width, heads, window, rngs):
        linear = lambda a, b: nnx.Linear(a, b, rngs=rngs)  # noqa: E731
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(5)])
        self.up1, self.down1 = linear(width, 4 * width), linear(4 * width, width)
        self.up2, self.down2 = linear(width, 4 * width), linear(4 * width, width)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.into, self.out = linear(width, 2 * width), linear(width, width)
        self.over_time = nnx.Conv(width, width, (window,), feature_group_count=width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)

    def __call__(self, x):
        n = self.norms
        x = x + 0.5 * self.down1(nnx.silu(self.up1(n[0](x))))
        x = x + self.attention(n[1](x))
        y = nnx.glu(self.into(n[2](x)))
        x = x + self.out(nnx.silu(self.norm(self.over_time(y))))
        return n[4](x + 0.5 * self.down2(nnx.silu(self.up2(n[3](x)))))


class Conformer(nnx.Module):
    """Speech: strided convolutions over time and mel bands, then blocks."""

    def __init__(self, bands, width, heads, layers, window, classes, rngs):
        self.conv1 = nnx.Conv(1, width // 4, (3, 3), strides=(2, 2), rngs=rngs)
        self.conv2 = nnx.Conv(width // 4, width // 4, (3, 3), strides=(2, 2), rngs=rngs)
        self.first = nnx.Linear(bands // 4 * width // 4, width, rngs=rngs)
        self.blocks = nnx.List([ConformerBlock(width, heads, window, rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(x[..., None]))))
        x = self.first(x.reshape(*x.shape[:2], -1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Latents(nnx.Module):
    """A few latents that look at many inputs, and then at each other, as in Perceiver."""

    def __init__(self, inputs, count, width, heads, layers, outputs, rngs):
        attention = lambda: nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)  # noqa: E731
        self.first = nnx.Linear(inputs, width, rngs=rngs)
        self.latents = nnx.Param(jax.random.normal(rngs.params(), (1, count, width)) * 0.02)
        self.look = attention()
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2 * layers + 1)])
        self.attentions = nnx.List([attention() for _ in range(layers)])
        self.ups = nnx.List([nnx.Linear(width, 4 * width, rngs=rngs) for _ in range(layers)])
        self.downs = nnx.List([nnx.Linear(4 * width, width, rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, outputs, rngs=rngs)

    def __call__(self, x):
        x = self.norms[-1](self.first(x))
        z = jnp.broadcast_to(self.latents[...].astype(x.dtype), (len(x), *self.latents.shape[1:]))
        z = z + self.look(z, x)
        layers = zip(self.attentions, self.ups, self.downs, strict=True)
        for i, (attention, up, down) in enumerate(layers):
            z = z + attention(self.norms[2 * i](z))
            z = z + down(nnx.gelu(up(self.norms[2 * i + 1](z))))
        return self.head(z.mean(axis=1))


class Bottleneck(nnx.Module):
    """A narrow convolution between two of single pixels, with group norms."""

    def __init__(self, a, b, stride, rngs):
        conv = lambda a, b, k, s=1: nnx.Conv(  # noqa: E731
            a, b, (k, k), strides=(s, s), use_bias=False, rngs=rngs
        )
        self.conv1, self.conv2, self.conv3 = conv(a, b, 1), conv(b, b, 3, stride), conv(b, 4 * b, 1)
        self.norms = nnx.List([nnx.GroupNorm(n, 32, rngs=rngs) for n in (b, b, 4 * b)])
        self.skip = conv(a, 4 * b, 1, stride) if a != 4 * b or stride > 1 else None

    def __call__(self, x):
        y = nnx.relu(self.norms[0](self.conv1(x)))
        y = nnx.relu(self.norms[1](self.conv2(y)))
        return nnx.relu(self.norms[2](self.conv3(y)) + (x if self.skip is None else self.skip(x)))


class Bottlenecks(nnx.Module):
    def __init__(self, width, stages, rngs):
        self.stem = nnx.Conv(3, width, (7, 7), strides=(2, 2), use_bias=False, rngs=rngs)
        blocks, a = [], width
        for stage, count in enumerate(stages):
            for i in range(count):
                b = width * 2**stage
                blocks.append(Bottleneck(a, b, 2 if stage and not i else 1, rngs))
                a = 4 * b
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(a, 1000, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.stem(x)), (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


class SuperResolution(nnx.Module):
    """Residual convolutions at one size, then pixels out of channels."""

    def __init__(self, width, blocks, factor, rngs):
        conv = lambda a, b: nnx.Conv(a, b, (3, 3), rngs=rngs)  # noqa: E731
        self.factor = factor
        self.first, self.last = conv(3, width), conv(width, 3 * factor**2)
        self.ups = nnx.List([conv(width, width) for _ in range(blocks)])
        self.downs = nnx.List([conv(width, width) for _ in range(blocks)])

    def __call__(self, x):
        x = self.first(x)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + 0.1 * down(nnx.relu(up(x)))
        b, h, w, _ = (y := self.last(x)).shape
        f = self.factor
        y = y.reshape(b, h, w, f, f, 3).transpose(0, 1, 3, 2, 4, 5)
        return y.reshape(b, h * f, w * f, 3)


class TemporalNet(nnx.Module):
    """One-dimensional convolutions with growing holes and residuals."""

    def __init__(self, inputs, width, layers, outputs, rngs):
        conv = lambda a, hole: nnx.Conv(  # noqa: E731
            a, width, (5,), kernel_dilation=hole, padding="CAUSAL", rngs=rngs
        )
        self.convs = nnx.List([conv(width if i else inputs, 2 ** (i // 2)) for i in range(layers)])
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, outputs, rngs=rngs)

    def __call__(self, x):
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = nnx.relu(norm(conv(x)))
            x = x + y if i else y
        return self.head(x)


class Radiance(nnx.Module):
    """Waves of a place, eight layers with a skip, and a color."""

    def __init__(self, width, rngs):
        sizes = [60, *[width] * 8]
        self.layers = nnx.List(
            [
                nnx.Linear(a + (60 if i == 4 else 0), b, rngs=rngs)
                for i, (a, b) in enumerate(zip(sizes[:-1], sizes[1:], strict=True))
            ]
        )
        self.color = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, places):
        angles = places[..., None] * 2.0 ** jnp.arange(10)
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).reshape(len(places), -1)
        x = waves
        for i, layer in enumerate(self.layers):
            x = nnx.relu(layer(jnp.concatenate([x, waves], -1) if i == 4 else x))
        return self.color(x)


class Points(nnx.Module):
    """The same layers for each point of a cloud, and the largest of each feature."""

    def __init__(self, sizes, classes, rngs):
        pairs = list(zip((3, *sizes[:-1]), sizes, strict=True))
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairs])
        self.norms = nnx.List([nnx.BatchNorm(b, rngs=rngs) for b in sizes])
        self.hidden = nnx.Linear(sizes[-1], 512, rngs=rngs)
        self.head = nnx.Linear(512, classes, rngs=rngs)

    def __call__(self, clouds):
        x = clouds
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = nnx.relu(norm(layer(x)))
        return self.head(nnx.relu(self.hidden(x.max(axis=1))))


class LinearRecurrence(nnx.Module):
    """Gated linear recurrences by an associative scan, between dense layers."""

    def __init__(self, vocab, width, layers, rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        linear = lambda a, b: nnx.Linear(a, b, use_bias=False, rngs=rngs)  # noqa: E731
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2 * layers)])
        self.inputs = nnx.List([linear(width, 3 * width) for _ in range(layers)])
        self.outputs = nnx.List([linear(width, width) for _ in range(layers)])
        self.ups = nnx.List([linear(width, 4 * width) for _ in range(layers)])
        self.downs = nnx.List([linear(4 * width, width) for _ in range(layers)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        layers = zip(self.inputs, self.outputs, self.ups, self.downs, strict=True)
        for i, (into, out, up, down) in enumerate(layers):
            y, keep, gate = jnp.split(into(self.norms[2 * i](x)), 3, axis=-1)
            keep = nnx.sigmoid(keep)
            joined = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
            _, state = jax.lax.associative_scan(joined, (keep, (1 - keep) * y), axis=1)
            x = x + out(state * nnx.silu(gate))
            x = x + down(nnx.gelu(up(self.norms[2 * i + 1](x))))
        return self.embed.attend(x)


class Lstm(nnx.Module):
    """Two layers of LSTM cells over embedded words."""

    def __init__(self, vocab, width, rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.layers = nnx.List(
            [nnx.RNN(nnx.OptimizedLSTMCell(width, width, rngs=rngs)) for _ in range(2)]
        )
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Tabular(nnx.Module):
    """Dense layers with batch norms and dropout over the columns of a table."""

    def __init__(self, inputs, sizes, outputs, rngs):
        pairs = list(zip((inputs, *sizes[:-1]), sizes, strict=True))
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairs])
        self.norms = nnx.List([nnx.BatchNorm(b, rngs=rngs) for b in sizes])
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(sizes[-1], outputs, rngs=rngs)

    def __call__(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.drop(nnx.gelu(norm(layer(x))))
        return self.head(x)


def translated_loss(model, batch):
    source, target = batch
    logits = model(source, target[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, target[:, 1:]).mean()


def labelled_loss(model, batch):
    inputs, labels = batch
    logits = model(inputs).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def distance_loss(model, batch):
    inputs, wanted = batch
    return jnp.abs(model(inputs) - wanted).mean()
