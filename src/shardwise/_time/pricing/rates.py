"""How fast a chip does each kind of work: measured where there was one, scaled where there was not."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping

from ..._chips import CHIPS, Chip

MANY_TILES = tuple(
    (m, n)
    for m in (32, 64, 96, 128, 160, 192, 256, 320)
    for n in (32, 64, 96, 128, 160, 192, 256, 320)
    if 64 * 32 <= m * n <= 320 * 128
)
# Kernels of float32 come in fewer sizes, so that more of the last wave is idle.
_FEW_TILES = tuple((m, n) for m in (64, 128, 256) for n in (64, 128, 256) if m * n <= 128 * 256)


@dataclasses.dataclass(frozen=True, slots=True)
class Products:
    """A model of matrix products on a GPU: tiles in waves over its cores.

    Attributes:
        start: seconds before the first tile.
        rate: flops per second of one core on large tiles.
        depth: the contracted length that one tile's beginning and end are worth.
        small: how much smaller tiles cost: a tile of m x n reaches
            `1 / (1 + small * (128 / m + 128 / n) / 2)` of the rate.
        split: seconds that a product split along the contracted dim takes to be summed.
        layouts: the share of the rate by how the operands lie: whether the contracted dim is the
            contiguous one, of the first and of the second.
        tiles: the sizes of tiles that the library has kernels for.
        overlap: how much of the shorter of computing and streaming is not hidden by the other.
        added: how much of reading the array that the product is added to is not hidden.
        older: kernels of the GPU before this one. The library takes them where they are faster,
            and of float32 for operands that a fusion slices in place.
        single: kernels that load single elements, for rows that are no multiple of 16 bytes.
    """

    start: float
    rate: float
    depth: float
    small: float
    split: float
    layouts: Mapping[tuple[bool, bool], float]
    tiles: tuple[tuple[int, int], ...] = MANY_TILES
    overlap: float = 0.15
    added: float = 0.0
    older: Products | None = None
    single: tuple[Products, ...] = ()

    def scaled(self, factor: float) -> Products:
        """Returns the same kernels, this many times as fast."""
        older = self.older.scaled(factor) if self.older is not None else None
        single = tuple(kernel.scaled(factor) for kernel in self.single)
        return dataclasses.replace(self, rate=self.rate * factor, older=older, single=single)


@dataclasses.dataclass(frozen=True, slots=True)
class GpuRates:
    """The speeds of one GPU.

    Attributes:
        name: the chip.
        label: `measured`, or `scaled` from the measured GPU named in `source`.
        source: where the figures come from.
        cores: the streaming multiprocessors.
        products: by the dtype of the operands.
        bandwidth: bytes per second of kernels that stream through memory.
        cache: bytes of the cache that all cores share.
        scalar: scalar operations per second of all cores.
        kernel: seconds that the smallest kernel takes, with its launch.
        atomics: elements per second of a scatter that adds, by bytes of an element; by 0 of those
            that are added one by one.
        shared: the same for rows of 256 elements that many updates are added to.
        attention: flops per second of a long attention kernel by `(head depth, backward)`.
        attention_length: the length at which attention reaches half of that, at depth 128.
        power: the share of the product rate that is lost when a step does little else.
        iteration: seconds that each iteration of a loop adds.
        dispatch: seconds that one step takes at least to be launched.
    """

    name: str
    label: str
    source: str
    cores: int
    products: Mapping[str, Products]
    bandwidth: float
    cache: float
    scalar: float
    kernel: float
    atomics: Mapping[int, float]
    shared: float
    attention: Mapping[tuple[int, bool], float]
    attention_length: float
    power: float
    iteration: float
    dispatch: float

    def slowdown(self, share: float) -> float:
        """Returns the factor by which products slow down when they are this share of a step's work."""
        return 1.0 / (1.0 - self.power * min(1.0, max(0.0, (share - 0.4) / 0.4)))


_EVEN = {(True, True): 1.0, (True, False): 0.985, (False, False): 0.985, (False, True): 0.985}
# TF32 tensor cores want both contracted dims contiguous.
_TF32 = {(True, True): 1.0, (True, False): 0.83, (False, False): 0.56, (False, True): 1.0}
_TF32_AMPERE = {(True, True): 1.0, (True, False): 0.97, (False, False): 0.86, (False, True): 0.59}

_AMPERE = Products(
    1.1e-6, 5.0e12, 139, 2.02, 3.8e-6, _TF32_AMPERE, _FEW_TILES, overlap=0.45, added=0.92
)

H200 = GpuRates(
    name="h200",
    label="measured",
    source="kernels of 206 recipes on one H200 (benchmarks/step_time)",
    cores=132,
    products={
        "bf16": Products(
            3.0e-6,
            7.96e12,
            57,
            0.256,
            2.8e-6,
            _EVEN,
            single=(Products(1.1e-6, 7.3e12, 139, 2.02, 3.8e-6, _EVEN, ((64, 64),)),),
        ),
        "f32": Products(
            3.8e-6,
            4.67e12,
            60,
            0.267,
            3.8e-6,
            _TF32,
            _FEW_TILES,
            overlap=0.45,
            added=0.92,
            older=_AMPERE,
            single=(
                dataclasses.replace(_AMPERE, rate=3.1e12),
                # Without tensor cores: small tiles, for many small products.
                Products(1.1e-6, 0.28e12, 34, 0.0, 3.8e-6, _EVEN, ((32, 32), (32, 64), (64, 64))),
            ),
        ),
    },
    bandwidth=4.14e12,
    cache=50e6,
    scalar=33e12,
    kernel=1.5e-6,
    atomics={0: 0.067e12, 2: 0.14e12, 4: 0.35e12},
    shared=0.052e12,
    attention={(128, False): 655e12, (128, True): 515e12, (64, False): 455e12, (64, True): 355e12},
    attention_length=1150,
    power=0.132,
    iteration=2.0e-6,
    dispatch=120e-6,
)


# What large products of bfloat16 reach of the H200's rate scaled by the datasheets, where they were
# measured: 1670 TFLOP/s for four products of 4096 on a B200 (XLA's table of measured products). On
# A100s, 244 measured steps of GPT want products 5% to 9% slower than that scale, which is 250
# TFLOP/s at 8192 instead of 273 (benchmarks/search/a100.md).
_REACHED = {"a100": 0.92, "b200": 0.84, "gb200": 0.84}


def _scaled(chip: Chip) -> GpuRates:
    """Returns the H200's rates, scaled by what the datasheets say."""
    gpu, known = chip.gpu, CHIPS["h200"]
    assert gpu is not None and known.gpu is not None
    peak = chip.bf16_flops_per_second / known.bf16_flops_per_second
    memory = chip.hbm_bytes_per_second / known.hbm_bytes_per_second
    each = _REACHED.get(chip.name, 1.0) * peak * known.gpu.cores / gpu.cores
    scalar = gpu.cores * gpu.fpus_per_core * gpu.clock_ghz
    hopper = chip.bf16_flops_per_second > 5e14
    scalar /= known.gpu.cores * known.gpu.fpus_per_core * known.gpu.clock_ghz
    return dataclasses.replace(
        H200,
        name=chip.name,
        label="scaled",
        source="the measured H200, scaled by the datasheets",
        cores=gpu.cores,
        products={
            # What Hopper's library takes from Ampere has no counterpart on Ampere itself.
            dtype: dataclasses.replace(
                rates,
                older=rates.older if hopper else None,
                single=rates.single if hopper else (),
            ).scaled(each)
            for dtype, rates in H200.products.items()
        },
        bandwidth=H200.bandwidth * memory,
        cache=gpu.l2_bytes,
        scalar=H200.scalar * scalar,
        atomics={size: rate * memory for size, rate in H200.atomics.items()},
        shared=H200.shared * memory,
        attention={key: rate * peak for key, rate in H200.attention.items()},
        # The older chips reach their rates without meeting their power limits.
        power=H200.power if hopper else 0.0,
    )


def gpu_rates(name: str) -> GpuRates:
    """Returns the rates of a GPU.

    Raises:
        ValueError: there is no table for it; the nearest one is named.
    """
    chip = CHIPS.get(name)
    if name == "h200":
        return H200
    if chip is None or chip.gpu is None:
        known = [chip.name for chip in CHIPS.values() if chip.gpu is not None]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ValueError(
            f"there are no measured rates for {name!r}: the nearest chip that has them is "
            f"{near[0]}; `shardwise chips measure` measures the devices of this machine"
        )
    return _scaled(chip)
