"""Speeds that were measured on one's own devices, in place of the shipped ones."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from typing import Any

from .._base import read_json, require_form, write_atomically
from .pricing import GpuRates, gpu_rates

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was measured on the devices of a machine, relative to the shipped rates.

    Attributes:
        chip: the chip that it is for, as in `on="h200:1x8"`.
        device: JAX's name of the device that was measured.
        products: by dtype, the measured rate of large products over the shipped one.
        bandwidth: measured bytes per second of a copy; None if not measured.
        attention: the measured rate of attention over the shipped one; None if not measured.
        collectives: `[kind, devices, bytes, seconds]` of each collective that was measured.
    """

    chip: str
    device: str
    products: dict[str, float]
    bandwidth: float | None = None
    attention: float | None = None
    collectives: tuple[tuple[str, int, int, float], ...] = ()

    @property
    def rates(self) -> GpuRates:
        """The shipped rates of the chip, corrected by what was measured."""
        known = gpu_rates(self.chip)
        products = {
            dtype: p.scaled(self.products.get(dtype, 1.0)) for dtype, p in known.products.items()
        }
        factor = self.attention or 1.0
        return dataclasses.replace(
            known,
            label="measured",
            source=f"calibrated on {self.device}",
            products=products,
            bandwidth=self.bandwidth or known.bandwidth,
            attention={key: rate * factor for key, rate in known.attention.items()},
        )

    def collective(self, kind: str, devices: int, size: float) -> float | None:
        """Returns the seconds of a collective by what was measured; None if nothing was."""
        rows = sorted((b, t) for k, n, b, t in self.collectives if (k, n) == (kind, devices))
        if not rows:
            return None
        if size <= rows[0][0]:
            return rows[0][1]
        for (low, fast), (high, slow) in zip(rows, rows[1:], strict=False):
            if size <= high:
                share = math.log(size / low) / math.log(high / low)
                return math.exp(math.log(fast) + share * math.log(slow / fast))
        return rows[-1][1] * size / rows[-1][0]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file that `--calibration` reads."""
        found = {"format": FORMAT, **dataclasses.asdict(self)}
        write_atomically(path, json.dumps(found, indent=1) + "\n")


_FORM = {
    "chip": str,
    "device": str,
    "products": dict[str, float],
    "bandwidth?": float | None,
    "attention?": float | None,
    "collectives?": list[list],
}


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Returns the calibration that `shardwise chips measure` wrote.

    Raises:
        ValueError: the file cannot be read, or is not a calibration.
    """
    name = os.fspath(path)
    try:
        found: Any = read_json(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{name} is not a calibration: {why}") from error
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ValueError(f"{name} is not a calibration: `shardwise chips measure` writes one")
    try:
        require_form(found, _FORM)
        if any(list(map(type, row[:3])) != [str, int, int] or len(row) != 4
               or not isinstance(row[3], int | float) or not min(row[1:]) > 0
               for row in found.get("collectives", ())):  # fmt: skip
            raise ValueError("collectives has a row that is not [kind, devices, bytes, seconds]")
        found["collectives"] = tuple(tuple(row) for row in found.get("collectives", ()))
        made = Calibration(**found)
        numbers = [*made.products.values(), made.bandwidth, made.attention]
        if not all(n is None or (isinstance(n, int | float) and n > 0) for n in numbers):
            raise ValueError("a rate is not a positive number")
        gpu_rates(made.chip)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{name} is not a calibration: {error}") from error
    return made
