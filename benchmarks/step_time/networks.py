"""Convolutional networks for the step-time benchmark, of styles that `models.py` does not have."""

import jax.numpy as jnp
from flax import nnx
from models import Mlp, WideResNet


class SqueezedBlock(nnx.Module):
    """An inverted bottleneck with batch norms and a gate for each channel, as in EfficientNet."""

    def __init__(self, features, out, window, stride, rngs, dtype, expansion=4):
        inner = expansion * features
        options = {"use_bias": False, "dtype": dtype, "rngs": rngs}
        self.expand = nnx.Conv(features, inner, (1, 1), **options)
        self.deep = nnx.Conv(
            inner, inner, (window, window), strides=(stride, stride), feature_group_count=inner,
            **options,
        )  # fmt: skip
        self.project = nnx.Conv(inner, out, (1, 1), **options)
        self.gate = Mlp((inner, features // 4, inner), rngs, nnx.silu)
        self.norms = nnx.List(
            [nnx.BatchNorm(n, dtype=dtype, rngs=rngs) for n in (inner, inner, out)]
        )

    def __call__(self, x):
        y = nnx.silu(self.norms[0](self.expand(x)))
        y = nnx.silu(self.norms[1](self.deep(y)))
        y = y * nnx.sigmoid(self.gate(y.mean(axis=(1, 2))))[:, None, None].astype(y.dtype)
        y = self.norms[2](self.project(y))
        return x + y if x.shape == y.shape else y


class Efficient(nnx.Module):
    """A strided stem and stages of squeezed bottlenecks."""

    def __init__(self, stages, rngs, dtype=jnp.bfloat16, classes=1000):
        features = stages[0][0]
        self.stem = nnx.Conv(3, features, (3, 3), strides=(2, 2), dtype=dtype, rngs=rngs)
        blocks = []
        for width, count, window, stride in stages:
            for i in range(count):
                step = 1 if i else stride
                blocks.append(SqueezedBlock(features, width, window, step, rngs, dtype))
                features = width
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(features, classes, rngs=rngs)

    def __call__(self, images):
        x = nnx.silu(self.stem(images))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


class Dense(nnx.Module):
    """Each convolution reads what all before it in its stage have written, as in DenseNet."""

    def __init__(self, first, growth, stages, rngs, classes=100):
        self.stem = nnx.Conv(3, first, (3, 3), rngs=rngs)
        features, layers, halves = first, [], []
        for count in stages:
            stage = []
            for _ in range(count):
                norm = nnx.GroupNorm(features, num_groups=4, rngs=rngs)
                narrow = nnx.Conv(features, 4 * growth, (1, 1), rngs=rngs)
                stage.append(
                    nnx.List([norm, narrow, nnx.Conv(4 * growth, growth, (3, 3), rngs=rngs)])
                )
                features += growth
            layers.append(nnx.List(stage))
            halves.append(nnx.Conv(features, features // 2, (1, 1), rngs=rngs))
            features //= 2
        self.layers, self.halves = nnx.List(layers), nnx.List(halves)
        self.head = nnx.Linear(features, classes, rngs=rngs)

    def __call__(self, images):
        x = self.stem(images)
        for stage, half in zip(self.layers, self.halves, strict=True):
            for norm, narrow, conv in stage:
                x = jnp.concatenate([x, conv(nnx.relu(narrow(nnx.relu(norm(x)))))], axis=-1)
            x = nnx.avg_pool(half(x), (2, 2), strides=(2, 2))
        return self.head(x.mean(axis=(1, 2)))


class Audio(nnx.Module):
    """Strided convolutions of a waveform, then residual ones whose windows have wider holes."""

    def __init__(self, widths, deep, rngs, classes=40):
        sizes = (1, *widths)
        pairs = list(zip(sizes[:-1], sizes[1:], strict=True))
        self.down = nnx.List([nnx.Conv(a, b, (8,), strides=(4,), rngs=rngs) for a, b in pairs])
        width = widths[-1]
        self.holes = nnx.List(
            [nnx.Conv(width, width, (3,), kernel_dilation=(2**i,), rngs=rngs) for i in range(deep)]
        )
        self.mix = nnx.List([nnx.Conv(width, width, (1,), rngs=rngs) for _ in range(deep)])
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x):
        for conv in self.down:
            x = nnx.gelu(conv(x))
        for hole, mix in zip(self.holes, self.mix, strict=True):
            x = x + mix(nnx.gelu(hole(x)))
        return self.head(x.mean(axis=1))


class Video(nnx.Module):
    """Three-dimensional convolutions with pooling, as in C3D."""

    def __init__(self, widths, rngs, classes=400):
        sizes = (3, *widths)
        self.convs = nnx.List(
            [nnx.Conv(a, b, (3, 3, 3), rngs=rngs) for a, b in zip(sizes[:-1], widths, strict=True)]
        )
        self.head = Mlp((widths[-1], 1024, classes), rngs)

    def __call__(self, x):
        for i, conv in enumerate(self.convs):
            step = (2 if i else 1, 2, 2)
            x = nnx.avg_pool(nnx.relu(conv(x)), step, strides=step)
        return self.head(x.mean(axis=(1, 2, 3)))


class NextStages(nnx.Module):
    """ConvNeXt with stages: depthwise convolutions, and strided ones that widen between stages."""

    def __init__(self, widths, layers, rngs, classes=1000):
        sizes = (3, *widths)
        windows = (4, *(2 for _ in widths[1:]))
        self.down = nnx.List(
            [
                nnx.Conv(a, b, (k, k), strides=(k, k), rngs=rngs)
                for a, b, k in zip(sizes[:-1], widths, windows, strict=True)
            ]
        )
        self.stages = nnx.List(
            [
                nnx.List([self.block(width, rngs) for _ in range(count)])
                for width, count in zip(widths, layers, strict=True)
            ]
        )
        self.head = nnx.Linear(widths[-1], classes, rngs=rngs)

    def block(self, width, rngs):
        deep = nnx.Conv(width, width, (7, 7), feature_group_count=width, rngs=rngs)
        norm, up = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, 4 * width, rngs=rngs)
        return nnx.List([deep, norm, up, nnx.Linear(4 * width, width, rngs=rngs)])

    def __call__(self, x):
        for down, stage in zip(self.down, self.stages, strict=True):
            x = down(x)
            for deep, norm, up, narrow in stage:
                x = x + narrow(nnx.gelu(up(norm(deep(x)))))
        return self.head(x.mean(axis=(1, 2)))


class Separable(nnx.Module):
    """Depthwise 3x3 convolutions, each followed by a pointwise one, as in MobileNet's first version."""

    def __init__(self, widths, rngs, classes=1000):
        self.stem = nnx.Conv(3, widths[0], (3, 3), strides=(2, 2), rngs=rngs)
        deep, point, norms = [], [], []
        for i, (a, b) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
            step = 2 if b > a and i else 1
            deep.append(
                nnx.Conv(a, a, (3, 3), strides=(step, step), feature_group_count=a, rngs=rngs)
            )
            point.append(nnx.Conv(a, b, (1, 1), rngs=rngs))
            norms.append(nnx.LayerNorm(b, rngs=rngs))
        self.deep, self.point, self.norms = nnx.List(deep), nnx.List(point), nnx.List(norms)
        self.head = nnx.Linear(widths[-1], classes, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.stem(x))
        for deep, point, norm in zip(self.deep, self.point, self.norms, strict=True):
            x = nnx.relu(norm(point(nnx.relu(deep(x)))))
        return self.head(x.mean(axis=(1, 2)))


class GroupedBlock(nnx.Module):
    """A bottleneck whose 3x3 convolution runs in groups, as in ResNeXt."""

    def __init__(self, features, inner, out, groups, stride, rngs, dtype):
        options = {"use_bias": False, "dtype": dtype, "rngs": rngs}
        step = (stride, stride)
        self.narrow = nnx.Conv(features, inner, (1, 1), **options)
        self.middle = nnx.Conv(
            inner, inner, (3, 3), strides=step, feature_group_count=groups, **options
        )
        self.wide = nnx.Conv(inner, out, (1, 1), **options)
        self.norms = nnx.List(
            [nnx.BatchNorm(n, dtype=dtype, rngs=rngs) for n in (inner, inner, out)]
        )
        changes = (features, 1) != (out, stride)
        self.skip = nnx.Conv(features, out, (1, 1), strides=step, **options) if changes else None

    def __call__(self, x):
        y = nnx.relu(self.norms[0](self.narrow(x)))
        y = nnx.relu(self.norms[1](self.middle(y)))
        y = self.norms[2](self.wide(y))
        return nnx.relu(y + (x if self.skip is None else self.skip(x)))


class Grouped(WideResNet):
    """A residual network of bottlenecks in groups."""

    def __init__(self, stages, groups, rngs, dtype=jnp.bfloat16, classes=100):
        self.stem = nnx.Conv(3, 32, (3, 3), dtype=dtype, rngs=rngs)
        blocks, features = [], 32
        for stage, (width, count) in enumerate(stages):
            for i in range(count):
                stride = 2 if stage and not i else 1
                blocks.append(GroupedBlock(features, width, 2 * width, groups, stride, rngs, dtype))
                features = 2 * width
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(features, classes, rngs=rngs)
