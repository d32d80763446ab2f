"""The command `chips`: what is known about each."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Annotated

import typer

from ..._base import tell, tell_json
from ..._chips import CHIPS
from ..options import (
    Format,
    FormatOption,
    command,
    require_writable,
)


class Action(StrEnum):
    """What `chips` can do besides listing them."""

    measure = "measure"


@command(
    help="""List the chips that --on knows, with their memory, bandwidth and peak rates.

The figures come from the vendors' datasheets and from the compilers; the last column says which.
Memory is in GiB, as in all of shardwise; rates are decimal, as in the datasheets.

Example:

\b
  shardwise chips --format json

`shardwise chips measure` measures the devices of this machine instead: products, copies, attention
and collectives, beside the figures that step times are modelled with. With --save FILE, the option
--calibration FILE of plan, compile and report uses what was measured."""
)
def chips(
    action: Annotated[
        Action | None, typer.Argument(help="Measure the devices of this machine.")
    ] = None,
    save: Annotated[
        str | None,
        typer.Option("--save", metavar="FILE", help="Write what was measured, for --calibration."),
    ] = None,
    limit: Annotated[
        float,
        typer.Option("--limit", metavar="SECONDS", help="Begin nothing more after this.", min=1),
    ] = 120.0,
    format: FormatOption = Format.text,
) -> None:
    """Prints the table of chips, or measures the devices that are present."""
    from ..._base import text_table

    if action is Action.measure:
        _measure(save, limit, format)
        return
    if save is not None:
        raise ValueError("--save needs something to write: shardwise chips measure --save FILE")
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


def _measure(save: str | None, limit: float, format: Format) -> None:
    from ..._base import text_table
    from ..._compile import start_backends
    from ..._measure import measure

    require_writable(save)
    start_backends()  # which otherwise print what each compiler without its device lacks
    found, rows = measure(limit, lambda text: typer.echo(f"measuring {text}", err=True))
    if save is not None:
        found.save(save)
        typer.echo(f"saved {save}", err=True)
    if format is Format.json:
        tell_json([dataclasses.asdict(found)])
        return
    shown = [
        (name, f"{value:.4g}", f"{shipped:.4g}" if shipped else "", unit,
         f"{value / shipped - 1:+.0%}" if shipped else "")
        for name, unit, value, shipped in rows
    ]  # fmt: skip
    head = (f"{found.device}, {found.chip}", "measured", "shipped", "", "")
    tell(text_table(head, shown, right=(1, 2, 4)))
