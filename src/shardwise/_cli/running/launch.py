"""The command `launch`: several processes on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from ..options import (
    command,
)


@command(
    context_settings={"ignore_unknown_options": True},
    help="""Start several processes of a command on this machine, as one run of JAX.

Each finds its place by sw.distributed(). Their output is prefixed with their number, signals are
forwarded to all, and when one fails the others are ended.

Example:

\b
  shardwise launch -n 2 --devices 4 -- shardwise train train.py:recipe --mesh data=8 \\
    --strategy fsdp --data tokens.npy --length 16 --steps 2

Exit status: 0, or that of the first process that failed.""",
)
def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="What to run.")],
    processes: Annotated[
        int, typer.Option("-n", "--processes", metavar="N", help="How many processes.")
    ],
    devices: Annotated[
        int | None,
        typer.Option("--devices", metavar="N", help="Virtual CPU devices of each process."),
    ] = None,
) -> None:
    """Starts several processes of a command."""
    from ..._processes import launch as launch_processes

    raise typer.Exit(launch_processes(command, processes, devices))
