"""The command `demo`: everything at once, on virtual devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import command

_RUN = "The run"


@command(
    help="""See it all in about a minute, with a small transformer on eight virtual CPU devices.

Lays out the model, checks the layout, initialises the model directly into its shards, trains, saves,
restores onto another mesh, and continues training.

Example:

\b
  shardwise demo --steps 4"""
)
def demo(
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", help="Training steps.", rich_help_panel=_RUN)
    ] = 40,
    directory: Annotated[
        str | None,
        typer.Option(
            "--checkpoints",
            metavar="DIR",
            help="Where to save checkpoints; a new temporary folder by default.",
            rich_help_panel=_RUN,
        ),
    ] = None,
) -> None:
    """Runs the demonstration."""
    from .tour import run_tour

    run_tour(steps, Path(directory) if directory else None)
