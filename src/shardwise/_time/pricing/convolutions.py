"""Prices convolutions on a GPU: what cuDNN runs for each, kernels and the copies around them.

Constants are those of 817 convolutions timed on an H200, each by its kernels (benchmarks/step_time).
They are shares of the rates of products and of the memory, so that they scale with both.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from ..._hlo import Instruction, Shape

# Convolutions of single pixels are products, but chosen among fewer kernels: how much slower, by
# whether elements have four bytes, forward or towards the input and towards the filter.
POINTWISE = ((1.14, 1.28), (1.0, 0.93))
# The memory for which times per element were measured.
_MEASURED_BANDWIDTH = 4.14e12


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """Kernels that compute a convolution as a product, in tiles over the cores.

    Attributes:
        shares: by `(rows, columns)` of a tile, the share of a product's rate that it reaches.
        depth: the contracted length that one tile's beginning and end are worth: of channels that
            are a multiple of 64, and of others. Of fewer than eight, it is 1.5 times as long.
        last: how much of the last wave's idle cores shows: 1 where all tiles end at once.
        chunk: the contracted channels (of a filter's gradient: its columns) of each place in the
            window come in multiples of so many.
        overlap: how much of the shorter of computing and streaming is not hidden by the other.
        split: seconds that it takes to sum the parts of a contracted dim that is split; 0 where
            it never is.
    """

    shares: Mapping[tuple[int, int], float]
    depth: tuple[float, float]
    last: float
    chunk: int
    overlap: float
    split: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Convolutions:
    """How fast convolutions of one dtype are.

    Attributes:
        towards_pixels: forward, and towards the input.
        towards_filter: gradients of filters.
        images: filters' gradients from fewer than eight channels: the share of a product's rate.
        whole: gradients written as a convolution whose window is another gradient: the size of
            their tiles, the share of the rate, and its share where the window is wider than 32 and
            channels are few.
        converted: how often those stream their arrays to lay them out anew.
        aligned: kernels take multiples of so many channels; others are copied to such first.
        laid_out: bytes per second, of those that the memory streams, at which arrays of three
            spatial dims are laid out anew.
        deep: flops per second of depthwise convolutions, forward and towards the filter.
        hidden: how much of the shorter of computing and streaming shows in those.
    """

    towards_pixels: Tiles
    towards_filter: Tiles
    images: float
    whole: tuple[tuple[int, int], float, float]
    converted: float
    aligned: int
    laid_out: float
    deep: tuple[float, float]
    hidden: tuple[float, float]


NARROW = Convolutions(
    Tiles(
        {(64, 128): 0.69, (128, 256): 0.868, (256, 64): 0.551, (128, 128): 0.746},
        depth=(175, 255),
        last=0.24,
        chunk=32,
        overlap=0.0,
    ),
    Tiles(
        {(64, 64): 0.454, (128, 64): 0.659, (128, 128): 0.78},
        depth=(35, 35),
        last=0.36,
        chunk=64,
        overlap=0.0,
        split=9.8e-6,
    ),
    images=0.185,
    whole=((64, 64), 0.25, 0.135),
    converted=0.0,
    aligned=8,
    laid_out=0.48,
    deep=(14.5e12, 14.5e12),
    hidden=(0.6, 1.0),
)
WIDE = Convolutions(
    Tiles(
        {
            (64, 128): 0.724,
            (128, 64): 0.372,
            (128, 128): 0.633,
            (128, 192): 0.767,
            (256, 32): 0.223,
            (256, 64): 0.51,
        },
        depth=(110, 110),
        last=1.0,
        chunk=32,
        overlap=0.48,
    ),
    Tiles(
        {(64, 64): 0.176, (128, 128): 0.304},
        depth=(145, 145),
        last=0.0,
        chunk=64,
        overlap=0.08,
        split=9.9e-6,
    ),
    images=0.1,
    whole=((128, 128), 0.364, 0.34),
    converted=3.0,
    aligned=4,
    laid_out=0.79,
    deep=(7.6e12, 7.6e12),
    hidden=(0.2, 0.2),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Convolution:
    """One convolution of a program.

    Attributes:
        towards: `output`, `input` or `filter`.
        wide: whether its elements have four bytes.
        given: pixels of the input, in all images.
        made: pixels of the output.
        channels: of the input.
        features: of the output.
        window: its size in each spatial dim.
        narrowest: the smallest spatial dim of the input.
        dilated: whether its window has holes.
        stride: the product of the strides.
        groups: of channels.
        fused: whether a bias is added.
        bytes: of the input, the filter and the output.
    """

    towards: str
    wide: bool
    given: int
    made: int
    channels: int
    features: int
    window: tuple[int, ...]
    narrowest: int
    dilated: bool
    stride: int
    groups: int
    fused: bool
    bytes: tuple[int, int, int]

    @property
    def taps(self) -> int:
        """How many places its window has."""
        return math.prod(self.window)

    @property
    def pointwise(self) -> bool:
        """Whether it is a plain product of matrices."""
        return self.taps == 1 and self.stride == 1 and self.groups == 1


def convolution_of(
    instruction: Instruction, shapes: Sequence[Shape], target: str
) -> Convolution | None:
    """Returns what an instruction convolves, or None if its dims are not labelled."""
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels"))
    out = instruction.shapes[0]
    if labels is None or len(shapes) < 2:
        return None
    towards = "output"
    given, kernel, made = shapes[0], shapes[1], out
    if "BackwardFilter" in target:
        towards, kernel, made = "filter", out, shapes[1]
    elif "BackwardInput" in target:
        towards, given, made = "input", out, shapes[0]
    arrays = (given, kernel, made)
    if any(len(a.dims) != len(n) for a, n in zip(arrays, labels.groups(), strict=True)):
        return None
    channels, features = given.dims[labels[1].index("f")], made.dims[labels[3].index("f")]
    stride = re.search(r"stride=([\dx]+)", instruction.attribute("window"))
    return Convolution(
        towards=towards,
        wide=given.nbytes >= 4 * given.size,
        given=given.size // max(1, channels),
        made=made.size // max(1, features),
        channels=channels,
        features=features,
        window=tuple(kernel.dims[i] for i, c in enumerate(labels[2]) if c.isdigit()),
        narrowest=min((given.dims[i] for i, c in enumerate(labels[1]) if c.isdigit()), default=1),
        dilated="rhs_dilate" in instruction.attribute("window"),
        stride=math.prod(int(n) for n in stride[1].split("x")) if stride else 1,
        # A device that has a part of the channels has a part of their groups.
        groups=min(int(instruction.attribute("feature_group_count") or 1), max(1, channels)),
        fused="Bias" in target,
        bytes=(given.nbytes, kernel.nbytes, made.nbytes),
    )


def convolved_seconds(
    found: Convolution, rate: float, cores: int, bandwidth: float, kernel: float
) -> float:
    """Returns the seconds of a convolution that is no plain product of matrices.

    Args:
        found: the convolution.
        rate: flops per second of one core in large products of its dtype.
        cores: how many there are.
        bandwidth: bytes per second of the memory.
        kernel: seconds that the smallest kernel takes.
    """
    machine = (rate, cores, bandwidth, kernel)
    if found.groups > 1:
        return _grouped(found, *machine)
    if found.fused and max(found.window) >= (32 if len(found.window) == 1 else 14):
        return kernel + _with_bias(found, rate * cores)
    if found.taps > max(128, 8 * found.stride):
        return _whole(found, *machine)
    return _dense(found, *machine)


def _dense(found: Convolution, rate: float, cores: int, bandwidth: float, kernel: float) -> float:
    own = WIDE if found.wide else NARROW
    inputs, filters, outputs = found.bytes
    taps, copied = float(found.taps), _copied(found, own, bandwidth)
    if found.towards == "filter":
        tiles, rows, channels = own.towards_filter, found.features, found.channels
        contracted = float(found.made)
        if found.channels < 8:
            return kernel + copied + _from_images(found, own, rate, cores, bandwidth)
        columns = int(taps) * _up(found.channels, tiles.chunk)
    else:
        tiles, rows, columns, channels = (
            own.towards_pixels,
            found.made,
            found.features,
            found.channels,
        )
        if found.towards == "input":
            # Each pixel is reached from one window in as many as the strides skip.
            rows, columns, channels = found.given, found.channels, found.features
            taps /= found.stride
            if taps < 1:
                copied += inputs / bandwidth  # zeros, where no window reaches
        elif found.stride > found.taps:
            inputs *= found.taps / found.stride  # pixels between the windows are not read
        chunk = tiles.chunk
        if channels < 8 and found.wide:
            chunk //= 2  # kernels of the GPU before this one, with shorter steps
        contracted = taps * _up(channels, chunk)
    if len(found.window) == 2 and max(found.window) >= 7:
        rate /= 1.4  # kernels of the GPU before this one
    elif found.fused and (found.dilated or len(found.window) == 2 and max(found.window) >= 5):
        # With a bias, those kernels come into play earlier.
        rate /= 1.6 if len(found.window) == 2 else 1.35
    elif found.wide and found.dilated:
        rate /= 1.9
    elif found.towards == "filter" and not found.wide and found.channels in range(33, 64):
        rate /= 1.5  # half-filled tiles, with a check for each element
    elif found.towards == "filter" and found.wide and len(found.window) > 2:
        rate /= 1.15
    elif found.towards != "filter" and not found.wide and channels % 32:
        rate /= 1.12
    computed = _tiled(tiles, rate, cores, bandwidth, (rows, columns, contracted), channels)
    streamed = (inputs + filters + outputs) / bandwidth
    shorter, longer = sorted((computed, streamed))
    return 4 * kernel + copied + longer + tiles.overlap * shorter


def _tiled(
    tiles: Tiles,
    rate: float,
    cores: int,
    bandwidth: float,
    sizes: tuple[int, int, float],
    channels: int,
) -> float:
    """Returns the seconds of a product of these rows, columns and contracted length."""
    rows, columns, contracted = sizes
    depth = tiles.depth[channels % 64 > 0] * (1.5 if channels < 8 and tiles.overlap == 0 else 1.0)
    best = math.inf
    for (m, n), share in tiles.shares.items():
        count = -(-rows // m) * -(-columns // n)
        for parts in (1, 2, 4, 8, 16, 32, 64, 128) if tiles.split else (1,):
            if parts > 1 and contracted < 256 * parts:
                break
            full, filled = -(-count * parts // cores), max(1.0, count * parts / cores)
            waves = tiles.last * full + (1 - tiles.last) * filled
            seconds = waves * 2 * m * n * (contracted / parts + depth) / (share * rate)
            if parts > 1:
                seconds += tiles.split + rows * columns * 4 * (parts + 0.5) / bandwidth
            best = min(best, seconds)
    return best


def _copied(found: Convolution, own: Convolutions, bandwidth: float) -> float:
    """Returns the seconds of what the library copies: padded channels, or another memory order."""
    inputs, _, outputs = found.bytes
    if len(found.window) > 2:
        padded = inputs * _up(found.channels, own.aligned) / found.channels
        passes = inputs + padded + 2 * outputs
        if found.fused and found.wide:
            passes += 2 * outputs
        return passes / (own.laid_out * bandwidth)
    return _padded(inputs, found.channels, own.aligned, bandwidth) + _padded(
        outputs, found.features, own.aligned, bandwidth
    )


def _padded(size: int, channels: int, aligned: int, bandwidth: float) -> float:
    """Returns the seconds in which an array is copied to channels that kernels take."""
    if channels % aligned == 0:
        return 0.0
    padded = size * _up(channels, aligned) / channels
    return 2e-6 + (size + padded) / (0.42 * bandwidth) + padded / bandwidth


def _from_images(
    found: Convolution, own: Convolutions, rate: float, cores: int, bandwidth: float
) -> float:
    """Returns the seconds of a filter's gradient from an image of few channels, without copies."""
    columns = _up(found.taps * own.aligned * -(-found.channels // own.aligned), 128)
    rows = _up(found.features, 64)
    flops = 2.0 * rows * columns * found.made
    seconds = flops / (own.images * rate * cores)
    if found.wide:
        # On tensor cores once the arrays are laid out anew.
        again = 2 * (found.bytes[0] * 4 / found.channels + found.bytes[2]) / (0.6 * bandwidth)
        seconds = min(seconds, seconds / 1.95 + again)
    if len(found.window) > 2:
        seconds *= 2  # kernels that gather each pixel by its index
    return 8e-6 + max(seconds, (found.bytes[0] + found.bytes[2]) / bandwidth)


def _whole(found: Convolution, rate: float, cores: int, bandwidth: float, kernel: float) -> float:
    """Returns the seconds of a gradient that is written as a convolution with another gradient.

    Nobody tunes for that: tiles have one size, and nothing is split, so that few cores are busy.
    """
    own = WIDE if found.wide else NARROW
    (m, n), share, wider = own.whole
    chunk = 16 if found.wide else 64 if found.channels > 32 else 32
    if len(found.window) == 1:
        share *= 0.63 if found.wide else 0.97
    elif max(found.window) > 32 and chunk < 64:
        share = wider
    elif not found.wide and chunk == 32:
        share *= 0.78
    if found.wide and found.channels < 16:
        share /= 1.35  # a step of the tile spans two places of the window
    contracted = found.taps * _up(found.channels, chunk)
    waves = -(-(-(-found.made // m) * -(-found.features // n)) // cores)
    seconds = waves * 2 * m * n * contracted / (share * rate)
    seconds += own.converted * sum(found.bytes) / bandwidth
    if not found.wide:
        for size in found.bytes[:2]:
            seconds += _padded(size, found.channels, own.aligned, bandwidth)
    return kernel + seconds


def _with_bias(found: Convolution, rate: float) -> float:
    """Returns the seconds of a large window to which a bias is added.

    In float32, the one kernel for that goes without shared memory; in bfloat16, one without tensor
    cores takes long windows of one dim, and one of the GPU before takes patches of images.
    """
    flops = 2.0 * found.made * found.taps
    if found.wide:
        return flops * found.features * max(10, found.channels) / (0.14 * rate)
    if len(found.window) == 1:
        return flops * _up(found.features, 128) * found.channels / (0.0207 * rate)
    return flops * found.features * found.channels / (0.0266 * rate)


def _grouped(found: Convolution, rate: float, cores: int, bandwidth: float, kernel: float) -> float:
    own = WIDE if found.wide else NARROW
    size = found.channels // found.groups
    elements = found.made * found.features
    streamed = sum(found.bytes) / bandwidth
    scale = _MEASURED_BANDWIDTH / bandwidth
    backward = found.towards == "filter"
    if size == 1 and found.features == found.groups:
        if len(found.window) != 2:
            # Kernels that read each element alone: picoseconds, at first and for each place.
            first, each = ((3.4, 1.83) if backward else (24.0, 2.8)) if found.wide else (
                (31.6, 1.0) if backward else (22.6, 1.8)
            )  # fmt: skip
            return kernel + 1.2 * (first + each * found.taps) * 1e-12 * elements * scale
        if not backward and found.narrowest < 12 and max(found.window) >= 5:
            return kernel + 4e-12 * found.taps * elements * scale  # images smaller than its tiles
        if backward and found.wide and max(found.window) >= 7:
            return kernel + 238e-12 * elements * scale  # no kernel of its own
        flops = own.deep[backward] / scale
        if found.wide and max(found.window) >= 7:
            flops *= 0.7
        elif backward and not found.wide and found.taps > 9:
            flops *= 1.4
        shorter, longer = sorted((2 * found.taps * elements / flops, streamed))
        start = 5 * kernel if backward else kernel
        return start + longer + own.hidden[backward] * shorter
    if size & (size - 1) == 0 and size >= 4:
        # Several groups fill a tile: each tile multiplies all of its channels.
        block = max(64, size)
        alike = dataclasses.replace(
            found, groups=1, channels=block, given=found.given * found.channels // block,
            features=block, made=found.made * found.features // block,
        )  # fmt: skip
        slower = 1.9 if backward and found.wide else 1.1
        return slower * _dense(alike, rate, cores, bandwidth, kernel)
    # One group after the other, each copied out and in.
    part = dataclasses.replace(
        found, groups=1, channels=size, features=found.features // found.groups,
        bytes=(found.bytes[0] // found.groups, found.bytes[1], found.bytes[2] // found.groups),
    )  # fmt: skip
    copies = 2 * (part.bytes[0] + part.bytes[2]) / (0.9 * bandwidth)
    return found.groups * (2 * kernel + copies + _dense(part, rate, cores, bandwidth, kernel))


def _up(count: int, to: int) -> int:
    return -(-count // to) * to
