"""Facts about accelerators, and the names by which a mesh asks for them."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """What a datasheet says of one accelerator chip.

    Attributes:
        name: the name used in `on="v5p:4x8x8"`.
        platform: `tpu` or `gpu`.
        dims: how many numbers its topology has (TPU torus axes; 2 for hosts x GPUs).
        hbm_bytes: memory of one chip.
        hbm_bytes_per_second: bandwidth of that memory.
        bf16_flops_per_second: peak dense bfloat16 rate of one chip.
        link_bytes_per_second: one way, of one link (TPU) or of all NVLink egress (GPU).
        network_bytes_per_second: per chip, between hosts or slices.
        devices_per_chip: JAX devices on one chip.
        source: where the figures come from.
    """

    name: str
    platform: str
    dims: int
    hbm_bytes: float
    hbm_bytes_per_second: float
    bf16_flops_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    devices_per_chip: int
    source: str


_TPU_INFO = "jax tpu_info; the scaling book"
_NVIDIA = "NVIDIA datasheet"

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v4", "tpu", 3, 34.4e9, 1.23e12, 2.75e14, 4.5e10, 6.25e9, 1, _TPU_INFO),
        Chip("v5e", "tpu", 2, 17.2e9, 8.2e11, 1.97e14, 4.5e10, 3.125e9, 1, _TPU_INFO),
        Chip("v5p", "tpu", 3, 103e9, 2.765e12, 4.59e14, 9e10, 6.25e9, 1, "Cloud TPU v5p page"),
        Chip("v6e", "tpu", 2, 34.4e9, 1.64e12, 9.18e14, 9e10, 12.5e9, 1, _TPU_INFO),
        Chip("tpu7x", "tpu", 3, 206e9, 7.38e12, 2.307e15, 9e10, 12.5e9, 2, "Cloud TPU7x page"),
        Chip("a100", "gpu", 2, 80e9, 2.0e12, 3.12e14, 300e9, 25e9, 1, _NVIDIA),
        Chip("h100", "gpu", 2, 80e9, 3.35e12, 9.9e14, 450e9, 50e9, 1, _NVIDIA),
        Chip("h200", "gpu", 2, 141e9, 4.8e12, 9.9e14, 450e9, 50e9, 1, _NVIDIA),
        Chip("b200", "gpu", 2, 192e9, 8.0e12, 2.3e15, 900e9, 50e9, 1, _NVIDIA),
    )
}


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Chips that need not be here: a chip and how many of them, by topology."""

    chip: Chip
    topology: tuple[int, ...]

    @property
    def device_count(self) -> int:
        """How many JAX devices these chips are."""
        return math.prod(self.topology) * self.chip.devices_per_chip


def parse_target(text: str) -> Target:
    """Returns the target that `text` (`"v5p:4x8x8"`, `"h200:8x8"`) names.

    Raises:
        ValueError: the chip is unknown or the topology is not one of its kind.
    """
    name, colon, sizes = text.partition(":")
    chip = CHIPS.get(name.strip().lower())
    if chip is None:
        raise ValueError(
            f"on={text!r} names no chip that is known: use None (the devices that are here), "
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
