"""The command `launch`: several processes on this machine."""

from __future__ import annotations

import math
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

Examples:

\b
  shardwise launch -n 2 --devices 4 -- shardwise train train.py:recipe --mesh data=8 \\
    --strategy fsdp --data tokens.npy --length 16 --steps 2

\b
  shardwise launch -n 4 --elastic --min 2 -- shardwise train train.py:recipe --mesh data=-1 \\
    --strategy fsdp --data tokens.npy --length 16 --steps 2 --checkpoints runs/e --every 1

Exit status: 0, or the status of the first process that failed.""",
)
def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The command to run.")],
    processes: Annotated[
        int, typer.Option("-n", "--processes", metavar="N", help="Number of processes.", min=1)
    ],
    devices: Annotated[
        int | None,
        typer.Option("--devices", metavar="N", help="Virtual CPU devices per process.", min=1),
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic", help="Go on with fewer processes when some are lost, and grow again."
        ),
    ] = False,
    least: Annotated[
        int | None,
        typer.Option(
            "--min",
            metavar="N",
            help="With --elastic: refuse a run that could not go on with N processes, and go on "
            "with no fewer.",
            min=1,
        ),
    ] = None,
    back_after: Annotated[
        float | None,
        typer.Option(
            "--back-after",
            metavar="SECONDS",
            help="With --elastic: when a process may be started again in place of a lost one "
            "(60 by default).",
        ),
    ] = None,
    as_hosts: Annotated[
        bool,
        typer.Option(
            "--as-hosts",
            help="With --elastic: let each process stand for a host, whose memory is lost with it.",
        ),
    ] = False,
) -> None:
    """Starts several processes of a command."""
    from ..._processes import launch as launch_processes
    from ..._processes import launch_elastic

    if not elastic:
        if least is not None or back_after is not None or as_hosts:
            raise ValueError("--min, --back-after and --as-hosts need --elastic")
        raise typer.Exit(launch_processes(command, processes, devices))
    if least is not None and least > processes:
        raise ValueError(
            f"--min {least} is more than the {processes} processes of -n: give at most {processes}"
        )
    if back_after is not None and not (math.isfinite(back_after) and back_after >= 0):
        raise ValueError(
            f"--back-after must be a finite number of seconds, at least 0, got {back_after!r}"
        )
    back_seconds = 60.0 if back_after is None else back_after
    raise typer.Exit(
        launch_elastic(
            command,
            processes,
            devices,
            least=least,
            back_seconds=back_seconds,
            as_hosts=as_hosts,
        )
    )
