"""The commands that run: `train`, `checkpoints`, `launch` and `demo`."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ._checkpoints import Checkpoints
from ._cli_options import (
    InputsOption,
    MeshOption,
    OnOption,
    RulesOption,
    StrategyOption,
    app,
    lay_out,
)
from ._data import Data
from ._data import data as make_data
from ._demo import run_demo
from ._distributed import distributed
from ._fit import fit
from ._launch import launch as launch_processes
from ._recipe import Recipe
from ._stopping import Stopped
from ._table import show_bytes, text_table
from ._target import load_name

_RECIPES = """TARGET is path/to/file.py:name or package.module:name, and names a Recipe."""

RecipeTarget = Annotated[
    str, typer.Argument(metavar="TARGET", help="file.py:name or module:name of a Recipe.")
]


class ListFormat(enum.StrEnum):
    """How checkpoints are listed."""

    text = "text"
    json = "json"


@app.command(
    help=f"""Train a recipe, and save checkpoints.

{_RECIPES} The data is --data, or what stands beside the recipe under the name data.

Examples:

\b
  shardwise train shardwise.examples.text:recipe --mesh data=2,model=4 --on cpu:8 \\
    --strategy fsdp+tensor --steps 50 --checkpoints runs/a --every 20

\b
  shardwise launch -n 2 --devices 4 -- shardwise train train.py:recipe --mesh data=8 \\
    --strategy fsdp --data tokens.npy --length 128 --steps 1000 --checkpoints runs/b --resume

Exit status: 0 trained, 2 could not run, 143 or 130 stopped by SIGTERM or SIGINT after saving."""
)
def train(
    target: RecipeTarget,
    mesh: MeshOption,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="How many steps in all.")],
    on: OnOption = "here",
    strategy: StrategyOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="SOURCE",
            help="file.py:name or module:name of a sw.data or a function that returns one, or a "
            "file of tokens with --length.",
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option("--length", metavar="N", help="Tokens of one sample of a file.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAME", help="Dtype of a raw file of tokens.")
    ] = None,
    checkpoints: Annotated[
        str | None, typer.Option("--checkpoints", metavar="DIR", help="Where to save.")
    ] = None,
    every: Annotated[
        int | None, typer.Option("--every", metavar="N", help="Save after so many steps.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", metavar="M", help="Save after so many minutes.")
    ] = None,
    keep: Annotated[int, typer.Option("--keep", metavar="N", help="Checkpoints to keep.")] = 3,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    logs: Annotated[
        str | None,
        typer.Option("--logs", metavar="DIR", help="For metrics.jsonl, TensorBoard and profiles."),
    ] = None,
) -> None:
    """Trains a recipe."""
    distributed()
    recipe, made = lay_out(target, mesh, on, strategy, rules, inputs)
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"target {target!r} is a {type(recipe).__name__}: train needs a Recipe, with its "
            f"loss, optimizer and batch"
        )
    store = None
    if checkpoints is not None:
        store = Checkpoints(checkpoints, keep=keep, every=every, minutes=minutes)
        if store.steps() and not resume:
            raise ValueError(
                f"{checkpoints} has checkpoints up to step {store.steps()[-1]}: give --resume to "
                f"go on from there, or another directory"
            )
    elif every or minutes or resume:
        raise ValueError("--every, --minutes and --resume need --checkpoints DIR")
    samples = _find_data(target, data, length, dtype)
    try:
        fit(recipe, made, samples, steps=steps, checkpoints=store, logs=logs)
    except Stopped as stopped:
        raise typer.Exit(stopped.status) from stopped


@app.command(
    help=f"""List the checkpoints of a run, or say what restoring one would find.

{_RECIPES}

Examples:

\b
  shardwise checkpoints runs/a

\b
  shardwise checkpoints runs/a --preflight shardwise.examples.text:recipe --mesh data=4,model=2 \\
    --on cpu:8 --strategy fsdp+tensor

Exit status: 0 listed or restorable, 1 not restorable so, 2 could not run."""
)
def checkpoints(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where the checkpoints are.")],
    preflight: Annotated[
        str | None,
        typer.Option("--preflight", metavar="TARGET", help="A Recipe to restore with."),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option("--mesh", metavar="AXES", help="The mesh to restore onto.")
    ] = None,
    on: OnOption = "none",
    strategy: StrategyOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="The step; the newest without.")
    ] = None,
    format: Annotated[
        ListFormat, typer.Option("--format", help="How to print it.")
    ] = ListFormat.text,
) -> None:
    """Lists checkpoints, or checks one before a restore."""
    store = Checkpoints(directory)
    if preflight is None:
        _list(store, format)
        return
    if mesh is None:
        raise ValueError("--preflight needs --mesh, the mesh to restore onto")
    recipe, made = lay_out(preflight, mesh, on, strategy, rules, inputs)
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"target {preflight!r} is a {type(recipe).__name__}: a preflight needs a Recipe"
        )
    found = store.preflight(recipe, made, step=step)
    if format is ListFormat.json:
        rows = [dataclasses.asdict(finding) for finding in found.findings]
        typer.echo(
            json.dumps(
                {
                    "step": found.step,
                    "findings": rows,
                    "read_bytes": {str(k): v for k, v in found.read_bytes.items()},
                    "total_bytes": found.total_bytes,
                },
                indent=2,
            )
        )
    else:
        typer.echo(str(found))
    raise typer.Exit(1 if found.findings.errors else 0)


@app.command(
    context_settings={"ignore_unknown_options": True},
    help="""Start several processes of a command on this machine, as one run of JAX.

Each finds its place by sw.distributed(). Their output is prefixed with their number, signals are
forwarded to all, and when one fails the others are ended.

Example:

\b
  shardwise launch -n 2 --devices 4 -- python train.py

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
    raise typer.Exit(launch_processes(command, processes, devices))


@app.command(
    help="""See it all at once: a small transformer on eight virtual CPU devices, in about a minute.

Lays it out, checks it, initialises it in its shards, trains, saves, restores onto another mesh,
and goes on.

Example:

\b
  shardwise demo"""
)
def demo(
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Steps to train.")] = 40,
    directory: Annotated[
        str | None,
        typer.Option("--checkpoints", metavar="DIR", help="Where to save; a new folder without."),
    ] = None,
) -> None:
    """Runs the demonstration."""
    run_demo(steps, Path(directory) if directory else None)


def _find_data(target: str, given: str | None, length: int | None, dtype: str | None) -> Any:
    place = target.rpartition(":")[0]
    if given is not None and (length is not None or Path(given).is_file()):
        return make_data(given, length=length, dtype=dtype)
    name = given if given is not None else f"{place}:data"
    try:
        found = load_name(name)
    except ValueError as error:
        if given is None:
            raise ValueError(
                f"there is no data to train on: name it with --data, or have a name data in {place}"
            ) from error
        raise
    return found if isinstance(found, Data) or not callable(found) else found()


def _list(store: Checkpoints, format: ListFormat) -> None:
    steps = store.steps()
    if not steps:
        store.about()  # says what is there instead
    rows: list[dict[str, Any]] = []
    for step in steps:
        try:
            about = {k: v for k, v in store.about(step).items() if k != "arrays"}
            rows.append({**about, "damaged": None})
        except ValueError as error:
            rows.append({"step": step, "damaged": str(error)})
    if format is ListFormat.json:
        typer.echo(json.dumps(rows, indent=2))
        return
    cells = []
    for row in rows:
        if row["damaged"]:
            cells.append((str(row["step"]), "damaged", "", "", "", ""))
            print(f"shardwise: {row['damaged']}", file=sys.stderr)
            continue
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["saved_at"]))
        size = show_bytes(row["bytes"])
        cells.append(
            (
                str(row["step"]),
                size,
                row["mesh"],
                row["devices"],
                str(row["processes"]),
                when,
            )
        )
    header = ("step", "size", "mesh", "devices", "processes", "saved")
    total = sum(row.get("bytes", 0) for row in rows)
    caption = f"{len(rows)} checkpoints in {store.directory}: {show_bytes(total)} (exact)"
    typer.echo(text_table(header, cells, caption))
