"""Facts about accelerators, and the names by which a mesh asks for them."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any

GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """What a compiler must know of a GPU, beyond what `Chip` says.

    Attributes:
        capability: CUDA's compute capability, such as (9, 0).
        cores: streaming multiprocessors.
        clock_ghz: of the cores.
        fpus_per_core: float32 units of one core.
        l2_bytes: of the second-level cache.
        shared_bytes: shared memory of one core.
    """

    capability: tuple[int, int]
    cores: int
    clock_ghz: float
    fpus_per_core: int
    l2_bytes: int
    shared_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """What a datasheet, or the compiler, says of one accelerator chip.

    Attributes:
        name: the name used in `on="v5p:4x8x8"`.
        platform: `tpu` or `gpu`.
        kind: what JAX calls such a device.
        dims: how many numbers its topology has (TPU torus axes; 2 for hosts x GPUs).
        hbm_bytes: memory of one chip.
        capacity_bytes: what of it a program on one JAX device can use: what the TPU compiler
            exposes, or what the GPU's driver reports.
        hbm_bytes_per_second: bandwidth of that memory.
        bf16_flops_per_second: peak dense bfloat16 rate of one chip.
        link_bytes_per_second: one way, of one link (TPU) or of all NVLink egress (GPU).
        network_bytes_per_second: per chip, between hosts or slices.
        devices_per_chip: JAX devices on one chip.
        source: where the figures come from.
        gpu: more, for a GPU.
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
    told = "read off a real one" if name == "h200" else "what drivers leave of it, estimated"
    source = f"NVIDIA datasheet; capacity: {told}"
    return Chip(name, "gpu", kind, 2, hbm, capacity, *rates, 1, source, gpu)


_INFO = "jax tpu_info; the scaling book; capacity: libtpu's own limit"
_PAGE = "the Cloud TPU page; capacity: libtpu's own limit"
_HOPPER = Gpu((9, 0), 132, 1.98, 128, 52428800, 233472)

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
            80e9,
            85_094_825_984,
            (2.0e12, 3.12e14, 300e9, 25e9),
            Gpu((8, 0), 108, 1.41, 64, 41943040, 167936),
        ),
        _gpu("h100", 80e9, 85_029_158_912, (3.35e12, 9.9e14, 450e9, 50e9), _HOPPER),
        _gpu(
            "h200",
            141e9,
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
    )
}


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Chips that need not be here: a chip and how many of them, by topology.

    It is the `abstract_device` of the mesh that `sw.mesh` makes of it, so that it goes wherever
    the mesh goes, and JAX lowers for its platform.
    """

    chip: Chip
    topology: tuple[int, ...]

    @property
    def device_count(self) -> int:
        """How many JAX devices these chips are."""
        return math.prod(self.topology) * self.chip.devices_per_chip

    @property
    def device_kind(self) -> str:
        """What JAX calls such a device."""
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
        return f"{self.chip.name}:{'x'.join(map(str, self.topology))}"

    def __repr__(self) -> str:
        """Returns it as `sw.mesh(on=…)` reads it."""
        return str(self)

    def _repr(self) -> str:  # what JAX's AbstractMesh shows of its device
        return f"on={str(self)!r}"


def parse_target(text: str) -> Target:
    """Returns the target that `text` (`"v5p:4x8x8"`, `"h200:8x8"`) names.

    Raises:
        ValueError: the chip is unknown or the topology is not one of its kind.
    """
    name, colon, sizes = text.partition(":")
    chip = CHIPS.get(name.strip().lower())
    if chip is None:
        near = difflib.get_close_matches(name.strip().lower(), CHIPS, n=2, cutoff=0.6)
        hint = f" (near ones: {', '.join(near)})" if near else ""
        raise ValueError(
            f"on={text!r} names no chip that is known{hint}: use None (the devices that are here), "
            f"'cpu:N', 'none', or one of {', '.join(CHIPS)} with its topology, such as 'v5p:4x8x8'"
        )
    like = "x".join("8" if chip.platform == "gpu" else "4" for _ in range(chip.dims))
    parts = sizes.lower().split("x") if colon else []
    if not parts or not all(p.strip().isdecimal() and int(p) > 0 for p in parts):
        what = "hosts x GPUs" if chip.platform == "gpu" else f"{chip.dims} torus sizes"
        raise ValueError(
            f"on={text!r} does not say how many chips: "
            f"{chip.name} takes {what}, such as '{chip.name}:{like}'"
        )
    topology = tuple(int(p) for p in parts)
    if chip.platform == "gpu" and len(topology) == 1:
        topology = (1, *topology)
    if len(topology) != chip.dims:
        raise ValueError(
            f"on={text!r} has {len(topology)} sizes, but the topology of {chip.name} has "
            f"{chip.dims}, such as '{chip.name}:{like}'"
        )
    return Target(chip, topology)
