"""The command `chips`: what is known about each."""

from __future__ import annotations

import dataclasses

from ..._base import tell, tell_json
from ..._chips import CHIPS
from ..options import (
    Format,
    FormatOption,
    command,
)


@command(
    help="""List the chips that --on knows, with their memory, bandwidth and peak rates.

The figures come from the vendors' datasheets and from the compilers; the last column says which.
Memory is in GiB, as in all of shardwise; rates are decimal, as in the datasheets.

Example:

\b
  shardwise chips --format json"""
)
def chips(format: FormatOption = Format.text) -> None:
    """Prints the table of chips."""
    from ..._base import text_table

    if format is Format.json:
        tell_json([dataclasses.asdict(chip) for chip in CHIPS.values()])
        return
    header = (
        "chip", "device kind", "topology", "HBM (GiB)", "usable/device (GiB)", "HBM (TB/s)",
        "bf16 (Tflop/s)", "link (GB/s)", "network (GB/s)", "devices/chip", "source",
    )  # fmt: skip
    rows = [
        (
            chip.name,
            chip.kind,
            "hosts x GPUs" if chip.platform == "gpu" else "x".join("ABC"[: chip.dims]),
            f"{chip.hbm_bytes / 2**30:.1f}",
            f"{chip.capacity_bytes / 2**30:.1f}",
            f"{chip.hbm_bytes_per_second / 1e12:.2f}",
            f"{chip.bf16_flops_per_second / 1e12:.0f}",
            f"{chip.link_bytes_per_second / 1e9:.0f}",
            f"{chip.network_bytes_per_second / 1e9:.1f}",
            str(chip.devices_per_chip),
            chip.source,
        )
        for chip in CHIPS.values()
    ]
    tell(text_table(header, rows, right=range(3, 10)))
