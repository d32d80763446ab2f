"""Facts about accelerators, and the names by which a mesh asks for them."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from typing import Any

from .._base import either, option

GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """What a compiler must know about a GPU, in addition to `Chip`.

    Attributes:
        capability: CUDA compute capability, such as (9, 0).
        cores: number of streaming multiprocessors.
        clock_ghz: clock rate of the cores.
        fpus_per_core: float32 units per core.
        l2_bytes: size of the L2 cache.
        shared_bytes: shared memory per core.
    """

    capability: tuple[int, int]
    cores: int
    clock_ghz: float
    fpus_per_core: int
    l2_bytes: int
    shared_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """Facts about one accelerator chip, from its datasheet or from the compiler.

    Attributes:
        name: the name used in `on="v5p:4x8x8"`.
        platform: `tpu` or `gpu`.
        kind: the device kind that JAX reports.
        dims: how many sizes its topology has (TPU torus axes; 2 for hosts x GPUs).
        hbm_bytes: memory of one chip.
        capacity_bytes: the memory that a program on one JAX device can use: what the TPU compiler
            exposes, or what the GPU's driver reports.
        hbm_bytes_per_second: bandwidth of that memory.
        bf16_flops_per_second: peak dense bfloat16 rate of one chip.
        link_bytes_per_second: one-way bandwidth, of one link (TPU) or of all NVLinks (GPU).
        network_bytes_per_second: bandwidth per chip between hosts or slices.
        devices_per_chip: JAX devices per chip.
        source: where the figures come from.
        gpu: further facts about a GPU.
    """

    name: str
    platform: str
    kind: str
    dims: int
    hbm_bytes: float
    capacity_bytes: int
    hbm_bytes_per_second: float
    bf16_flops_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    devices_per_chip: int
    source: str
    gpu: Gpu | None = None


def _tpu(name: str, kind: str, dims: int, hbm: float, exposed_gib: float, *rest: Any) -> Chip:
    return Chip(name, "tpu", kind, dims, hbm, int(exposed_gib * GIB), *rest)


def _gpu(
    name: str, hbm: float, capacity: int, rates: tuple[float, float, float, float], gpu: Gpu
) -> Chip:
    kind = f"NVIDIA {name.upper()}"
    capacity_source = "measured on a real one" if name == "h200" else "estimated, net of the driver"
    source = f"NVIDIA datasheet; capacity: {capacity_source}"
    return Chip(name, "gpu", kind, 2, hbm, capacity, *rates, 1, source, gpu)


_INFO = "jax tpu_info; the scaling book; capacity: libtpu's own limit"
_PAGE = "the Cloud TPU page; capacity: libtpu's own limit"
_HOPPER = Gpu((9, 0), 132, 1.98, 128, 52428800, 233472)

# The "80 GB" and "141 GB" of NVIDIA's datasheets are GiB: the driver reports more than 80e9 bytes.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _tpu("v4", "TPU v4", 3, 34.4e9, 30.75, 1.23e12, 2.75e14, 4.5e10, 6.25e9, 1, _INFO),
        _tpu("v5e", "TPU v5 lite", 2, 17.2e9, 15.75, 8.2e11, 1.97e14, 4.5e10, 3.125e9, 1, _INFO),
        _tpu("v5p", "TPU v5", 3, 103e9, 95.73, 2.765e12, 4.59e14, 9e10, 6.25e9, 1, _PAGE),
        _tpu("v6e", "TPU v6 lite", 2, 34.4e9, 31.24, 1.64e12, 9.18e14, 9e10, 12.5e9, 1, _INFO),
        _tpu("tpu7x", "TPU7x", 3, 206e9, 94.74, 7.38e12, 2.307e15, 9e10, 12.5e9, 2, _PAGE),
        _gpu(
            "a100",
            80 * GIB,
            85_094_825_984,
            (2.0e12, 3.12e14, 300e9, 25e9),
            Gpu((8, 0), 108, 1.41, 64, 41943040, 167936),
        ),
        _gpu("h100", 80 * GIB, 85_029_158_912, (3.35e12, 9.9e14, 450e9, 50e9), _HOPPER),
        _gpu(
            "h200",
            141 * GIB,
            150_109_880_320,
            (4.8e12, 9.9e14, 450e9, 50e9),
            dataclasses.replace(_HOPPER, l2_bytes=62914560),
        ),
        _gpu(
            "b200",
            192e9,
            191_509_823_488,
            (8.0e12, 2.3e15, 900e9, 50e9),
            Gpu((10, 0), 148, 1.965, 128, 132644864, 233472),
        ),
        _gpu(
            "gb200",
            186e9,
            184_000_000_000,
            (8.0e12, 2.5e15, 900e9, 50e9),
            Gpu((10, 0), 148, 1.965, 128, 132644864, 233472),
        ),
    )
}


@dataclasses.dataclass(frozen=True, slots=True)
class Chips:
    """A number of chips in a topology, which need not be present on this machine.

    It is the `abstract_device` of the mesh that `sw.mesh` makes from it, so it travels with the
    mesh, and JAX lowers for its platform.

    Attributes:
        chip: what each of them is.
        topology: torus sizes of a TPU slice, or hosts x GPUs.
        slices: how many TPU slices of this topology, joined by the data-center network.
    """

    chip: Chip
    topology: tuple[int, ...]
    slices: int = 1

    @property
    def device_count(self) -> int:
        """How many JAX devices these chips have."""
        return self.slices * math.prod(self.topology) * self.chip.devices_per_chip

    def slices_by_axis(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Returns how many slices each axis of a mesh is split over: the outermost axes first.

        Raises:
            ValueError: slices would begin or end in the middle of an axis.
        """
        left, found = self.slices, []
        for size in sizes:
            part = math.gcd(left, size)
            if part not in (left, size):
                raise ValueError(
                    f"{option('on', str(self))} has {self.slices} slices, which the outermost axes "
                    f"cannot be divided over: the first axis has size {sizes[0]}; make it "
                    f"{self.slices}, or a multiple or a divisor of that"
                )
            found.append(part)
            left //= part
        return tuple(found)

    @property
    def one_slice(self) -> Chips:
        """The chips of one slice."""
        return dataclasses.replace(self, slices=1)

    @property
    def device_kind(self) -> str:
        """The device kind that JAX reports."""
        return self.chip.kind

    @property
    def platform(self) -> str:
        """`tpu` or `gpu`."""
        return self.chip.platform

    @property
    def num_cores(self) -> int:
        """How many cores a device has, as JAX counts them."""
        if self.chip.gpu is not None:
            return self.chip.gpu.cores
        return 2 if self.chip.name in ("v4", "v5p") else 1

    def __str__(self) -> str:
        """Returns it as `sw.mesh(on=…)` reads it."""
        slices = f"{self.slices}x" if self.slices > 1 else ""
        return f"{slices}{self.chip.name}:{'x'.join(map(str, self.topology))}"

    def __repr__(self) -> str:
        """Returns it as `sw.mesh(on=…)` reads it."""
        return str(self)

    def _repr(self) -> str:  # what JAX's AbstractMesh shows of its device
        return f"on={str(self)!r}"


def parse_chips(text: str) -> Chips:
    """Returns the chips that `text` (`"v5p:4x8x8"`, `"2xv5p:4x8x8"`, `"h200:8x8"`) names.

    Raises:
        ValueError: the chip is unknown, or does not come in this topology.
    """
    name, colon, sizes = text.partition(":")
    many = re.fullmatch(r"(\d+)\s*x\s*([a-z]\w*)", name.strip().lower(), re.ASCII)
    name = many[2] if many else name
    chip = CHIPS.get(name.strip().lower())
    if chip is None:
        near = difflib.get_close_matches(name.strip().lower(), CHIPS, n=2, cutoff=0.6)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ValueError(
            f"{option('on', text)} does not name a known chip{hint}: use "
            f"{either('None', 'here')} (the devices of this machine), 'cpu:N', 'none', or one of "
            f"{', '.join(CHIPS)} with its topology, such as 'v5p:4x8x8'"
        )
    like = "x".join("8" if chip.platform == "gpu" else "4" for _ in range(chip.dims))
    parts = [part.strip() for part in sizes.lower().split("x")] if colon else []
    if not parts or not all(p.isdecimal() and p.isascii() and int(p[:20]) > 0 for p in parts):
        what = "hosts x GPUs" if chip.platform == "gpu" else f"{chip.dims} torus sizes"
        raise ValueError(
            f"{option('on', text)} does not say how many chips: "
            f"{chip.name} takes {what}, such as '{chip.name}:{like}'"
        )
    if any(len(part) > 9 for part in parts):
        raise ValueError(
            f"{option('on', text)} names more devices than the limit of {MOST_DEVICES:,}"
        )
    topology = tuple(int(p) for p in parts)
    if chip.platform == "gpu" and len(topology) == 1:
        topology = (1, *topology)
    if len(topology) != chip.dims:
        raise ValueError(
            f"{option('on', text)} has {len(topology)} sizes, but the topology of {chip.name} has "
            f"{chip.dims}, such as '{chip.name}:{like}'"
        )
    _require_topology(chip, topology, text)
    return Chips(chip, topology, _slices(chip, topology, many[1], text) if many else 1)


def _slices(chip: Chip, topology: tuple[int, ...], count: str, text: str) -> int:
    slices = int(count[:10])
    if chip.platform == "gpu":
        hosts, gpus = topology
        raise ValueError(
            f"{option('on', text)} counts slices, but {chip.name} has hosts: write all of them, "
            f"'{chip.name}:{max(1, slices) * hosts}x{gpus}'"
        )
    if not slices:
        two = f"2x{text.strip().lower().partition('x')[2]}"
        raise ValueError(f"{option('on', text)} has no slices: write {two} for two")
    if slices * math.prod(topology) * chip.devices_per_chip > MOST_DEVICES:
        raise ValueError(
            f"{option('on', text)} names more devices than the limit of {MOST_DEVICES:,}"
        )
    return slices


def gpu_of_kind(kind: str) -> Chip | None:
    """Returns the GPU that JAX reports as this device kind, such as `NVIDIA H100 80GB HBM3`."""
    return next((c for c in CHIPS.values() if c.gpu is not None and c.kind in kind), None)


MOST_DEVICES = 2**31
_GPUS_PER_HOST = 8
# A rack of GB200s is one NVLink domain, and counts as one host.
_GPUS_PER_DOMAIN = {"gb200": 72}
# The slices that Cloud TPU documents: these, and for a 3D torus every A <= B <= C of multiples of
# 4, up to the largest number of chips that one job can have.
_SLICES_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SLICES_3D = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_MOST_CHIPS = {"v4": 4096, "v5e": 256, "v5p": 6144, "v6e": 256, "tpu7x": 9216}


def _require_topology(chip: Chip, topology: tuple[int, ...], text: str) -> None:
    """Raises a ValueError if no machine has this topology."""
    if chip.platform == "gpu":
        hosts, gpus = topology
        most = _GPUS_PER_DOMAIN.get(chip.name, _GPUS_PER_HOST)
        if gpus > most:
            more = -(-hosts * gpus // most)
            raise ValueError(
                f"{option('on', text)} has {gpus} GPUs per host, but a host of {chip.name} has at most "
                f"{most}: write hosts x GPUs, such as '{chip.name}:{more}x{most}'"
            )
        if hosts * gpus > MOST_DEVICES:
            raise ValueError(
                f"{option('on', text)} names more devices than the limit of {MOST_DEVICES:,}"
            )
        return
    slices, most = tpu_slices(chip.name), _MOST_CHIPS[chip.name]
    if topology in slices:
        return
    chips = math.prod(topology)
    near = sorted(slices, key=lambda s: (_distance(s, topology), -math.prod(s)))[:3]
    shown = ", ".join(f"'{chip.name}:{'x'.join(map(str, s))}'" for s in sorted(near, key=math.prod))
    if chips > most:
        raise ValueError(
            f"{option('on', text)} has {chips:,} chips, but one slice of {chip.name} has at most {most:,}: "
            f"the nearest are {shown}; '4x{chip.name}:{'x'.join(map(str, near[0]))}' is four slices"
        )
    raise ValueError(
        f"{option('on', text)} is not a slice that {chip.name} comes in: the nearest are {shown}"
    )


@functools.cache
def tpu_slices(name: str) -> tuple[tuple[int, ...], ...]:
    """Returns every topology that a TPU comes in, smallest first."""
    if CHIPS[name].dims == 2:
        return _SLICES_2D
    most = _MOST_CHIPS[name]
    cubes = [
        (a, b, c)
        for a in range(4, most // 16 + 1, 4)
        for b in range(a, most // (4 * a) + 1, 4)
        for c in range(b, most // (a * b) + 1, 4)
    ]
    return tuple(sorted([*_SLICES_3D, *cubes], key=lambda s: (math.prod(s), s)))


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Returns how far apart two topologies are, regardless of the order of their sizes."""
    pairs = zip(sorted(one), sorted(other), strict=True)
    return sum(abs(math.log(a / b)) for a, b in pairs)
