"""The command `launch`: several processes on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from ..options import (
    command,
)


@command(
    context_settings={"ignore_unknown_options": True},
    help="""Start several processes of a command on this machine, as one distributed JAX run.

Each process joins the run by calling sw.distributed(), as train does. Output is prefixed
with the number of the process, signals are forwarded to all processes, and when one fails the others
are terminated.

Example:

\b
  shardwise launch -n 2 --devices 4 -- shardwise train train.py:recipe --mesh data=8 \\
    --strategy fsdp --data tokens.npy --length 16 --steps 2

Exit status: 0, or the status of the first process that failed.""",
)
def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The command to run.")],
    processes: Annotated[
        int, typer.Option("-n", "--processes", metavar="N", help="Number of processes.")
    ],
    devices: Annotated[
        int | None,
        typer.Option("--devices", metavar="N", help="Virtual CPU devices per process."),
    ] = None,
) -> None:
    """Starts several processes of a command."""
    from ..._processes import launch as launch_processes

    raise typer.Exit(launch_processes(command, processes, devices))
