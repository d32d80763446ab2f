"""The commands that run: `train`, `checkpoints`, `launch` and `demo`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._cli_help import MODEL, OUTPUT
from ._cli_options import (
    Format,
    FormatOption,
    InputsOption,
    MeshOption,
    MinBytesOption,
    OnOption,
    RulesOption,
    StrategyOption,
    command,
    lay_out,
)
from ._terminal import tell, tell_json

if TYPE_CHECKING:
    from ._checkpoints import Checkpoints
    from ._layout import Layout
    from ._recipe import Recipe

_RECIPES = """TARGET is path/to/file.py:name or package.module:name, and names a Recipe."""

_RUN, _DATA, _PREFLIGHT = "The run", "The data", "The preflight"

RecipeTarget = Annotated[
    str, typer.Argument(metavar="TARGET", help="file.py:name or module:name of a Recipe.")
]


@command(
    help=f"""Train a recipe, and save checkpoints.

{_RECIPES} The data is --data, or what stands beside the recipe under the name data. Progress goes
to stderr; --format json prints a summary to stdout when it is done.

Examples:

\b
  shardwise train shardwise.examples.text:recipe --mesh data=8 --on cpu:8 --strategy fsdp \\
    --steps 2 --checkpoints runs/a

\b
  shardwise train train.py:recipe --mesh data=8 --on cpu:8 --strategy fsdp --steps 4 \\
    --data tokens.npy --length 128 --format json

On many processes: shardwise launch --help.

Exit status: 0 trained, 2 could not run, 143 or 130 stopped by SIGTERM or SIGINT after saving."""
)
def train(
    target: RecipeTarget,
    mesh: MeshOption,
    steps: Annotated[
        int,
        typer.Option(
            "--steps", metavar="N", help="How many steps in all.", min=1, rich_help_panel=_RUN
        ),
    ],
    on: OnOption = "here",
    strategy: StrategyOption = None,
    min_bytes: MinBytesOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="SOURCE",
            help="file.py:name or module:name of a sw.data or a function that returns one, or a "
            "file of tokens with --length.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            "--length",
            metavar="N",
            help="Tokens of one sample of a file.",
            min=1,
            rich_help_panel=_DATA,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="Dtype of a raw file of tokens.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option("--checkpoints", metavar="DIR", help="Where to save.", rich_help_panel=_RUN),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            "--every", metavar="N", help="Save after so many steps.", min=1, rich_help_panel=_RUN
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes", metavar="M", help="Save after so many minutes.", rich_help_panel=_RUN
        ),
    ] = None,
    keep: Annotated[
        int,
        typer.Option(
            "--keep", metavar="N", help="Checkpoints to keep.", min=1, rich_help_panel=_RUN
        ),
    ] = 3,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest checkpoint, if there is one.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    logs: Annotated[
        str | None,
        typer.Option(
            "--logs",
            metavar="DIR",
            help="For metrics.jsonl, TensorBoard and profiles.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Trains a recipe."""
    import jax

    from ._agree import agreed_steps, together
    from ._checkpoints import Checkpoints
    from ._distributed import distributed
    from ._fit import fit
    from ._peers import noting_failure
    from ._recipe import Recipe
    from ._stopping import Stopped

    began = time.perf_counter()
    if checkpoints is None and (every or minutes or resume):
        raise ValueError("--every, --minutes and --resume need --checkpoints DIR")
    distributed()
    with noting_failure():
        with together(f"loading {target} and the data"):
            recipe, made = lay_out(target, mesh, on, strategy, rules, inputs, min_bytes=min_bytes)
            if not isinstance(recipe, Recipe):
                raise ValueError(
                    f"target {target!r} is a {type(recipe).__name__}: train needs a Recipe, with "
                    f"its loss, optimizer and batch"
                )
            samples = _find_data(target, data, length, dtype)
            store = None
            if checkpoints is not None:
                store = Checkpoints(checkpoints, keep=keep, every=every, minutes=minutes)
        saved = agreed_steps(store) if store is not None else []
        if saved and not resume:
            raise ValueError(
                f"{checkpoints} has checkpoints up to step {saved[-1]}: give --resume to go on "
                f"from there, or another directory"
            )
        status, last = 0, steps
        try:
            state = fit(recipe, made, samples, steps=steps, checkpoints=store, logs=logs)
            last = int(state.step)
        except Stopped as stopped:
            status, last = stopped.status, stopped.step
    if format is Format.json and jax.process_index() == 0:  # once, however many processes run it
        first = saved[-1] if saved else 0
        counted = {"steps": steps, "first_step": first, "last_step": last, "status": status}
        seconds = time.perf_counter() - began
        tell_json({**counted, "seconds": seconds, **_summary(recipe, made, store, logs)})
    if status:
        raise typer.Exit(status)


def _summary(
    recipe: Recipe, made: Layout, store: Checkpoints | None, logs: str | None
) -> dict[str, Any]:
    """Returns what a run's end says of it, besides its steps."""
    from ._mesh import show_mesh

    optimizer = made.for_optimizer(recipe.optimizer, wrt=recipe.wrt)
    metrics = None
    if logs is not None:
        # Its last line is cut off where the disk was full.
        with contextlib.suppress(OSError, ValueError):
            lines = (Path(logs) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            metrics = json.loads(lines[-1]) if lines else None
    return {
        "axes": show_mesh(made.mesh),
        "devices": made.mesh.size,
        "bytes_per_device": made.bytes_per_device,
        "optimizer_bytes_per_device": optimizer.bytes_per_device,
        "checkpoints": str(store.directory) if store is not None else None,
        "saved_steps": store.steps() if store is not None else [],
        "metrics": metrics,
    }


@command(
    help=f"""List the checkpoints of a run, or check what restoring one would find.

{_RECIPES}

The preflight reads metadata alone: what is missing, extra or of another shape, which arrays would
be split otherwise, and how many bytes each process reads (exact).

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
        typer.Option(
            "--preflight",
            metavar="TARGET",
            help="A Recipe to restore with.",
            rich_help_panel=_PREFLIGHT,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            metavar="N",
            help="Show this step alone; or check it, the newest without.",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="AXES",
            help="The mesh to restore onto.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    on: OnOption = "none",
    strategy: StrategyOption = None,
    min_bytes: MinBytesOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Lists checkpoints, or checks one before a restore."""
    from ._checkpoints import Checkpoints
    from ._recipe import Recipe

    if step is not None and step < 0:
        raise ValueError(f"--step must be a non-negative integer, got {step}")
    store = Checkpoints(directory)
    if preflight is None:
        here = None if on == "none" else on
        options = {"--mesh": mesh, "--on": here, "--strategy": strategy, "--rules": rules}
        for name, value in {**options, "--inputs": inputs}.items():
            if value is not None:
                raise ValueError(
                    f"{name} is for a preflight: give --preflight TARGET too, the Recipe to "
                    f"restore with"
                )
        _list(store, format, step)
        return
    if mesh is None:
        raise ValueError("--preflight needs --mesh, the mesh to restore onto")
    recipe, made = lay_out(preflight, mesh, on, strategy, rules, inputs, min_bytes=min_bytes)
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"target {preflight!r} is a {type(recipe).__name__}: a preflight needs a Recipe"
        )
    found = store.preflight(recipe, made, step=step)
    if format is Format.json:
        rows = [finding.to_dict() for finding in found.findings]
        tell_json(
            {
                "step": found.step,
                "findings": rows,
                "read_bytes": {str(k): v for k, v in found.read_bytes.items()},
                "total_bytes": found.total_bytes,
            }
        )
    else:
        tell(str(found))
    raise typer.Exit(1 if found.findings.errors else 0)


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
    from ._launch import launch as launch_processes

    raise typer.Exit(launch_processes(command, processes, devices))


@command(
    help="""See it all at once: a small transformer on eight virtual CPU devices, in about a minute.

Lays it out, checks it, initialises it in its shards, trains, saves, restores onto another mesh,
and goes on.

Example:

\b
  shardwise demo --steps 4"""
)
def demo(
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", help="Steps to train.", rich_help_panel=_RUN)
    ] = 40,
    directory: Annotated[
        str | None,
        typer.Option(
            "--checkpoints",
            metavar="DIR",
            help="Where to save; a new folder without.",
            rich_help_panel=_RUN,
        ),
    ] = None,
) -> None:
    """Runs the demonstration."""
    from ._demo import run_demo

    run_demo(steps, Path(directory) if directory else None)


def _find_data(target: str, given: str | None, length: int | None, dtype: str | None) -> Any:
    from ._data import Data
    from ._data import data as make_data
    from ._target import load_name

    place = target.rpartition(":")[0]
    if given is not None and (length is not None or Path(given).is_file()):
        return make_data(given, length=length, dtype=dtype)
    if given is not None and ":" not in given:
        raise ValueError(
            f"--data {given!r} is not a file: name one of tokens, with --length, or a sw.data as "
            f"path/to/file.py:name"
        )
    name = given if given is not None else f"{place}:data"
    try:
        found = load_name(name)
    except ValueError as error:
        if given is None:
            raise ValueError(
                f"there is no data to train on: give --data, such as --data tokens.npy --length 128, "
                f"or define data in {place}, as shardwise.examples.text does"
            ) from error
        raise
    samples = found if isinstance(found, Data) or not callable(found) else found()
    if not isinstance(samples, Data | Iterable):
        raise ValueError(
            f"the data {name} is a {type(samples).__name__}: name a sw.data, or an iterable of batches"
        )
    return samples


def _list(store: Checkpoints, format: Format, step: int | None) -> None:
    from ._table import show_bytes, text_table
    from ._words import count

    steps = [each for each in store.steps() if step in (None, each)]
    if not steps:
        store.about(step)  # says what is there instead
    rows: list[dict[str, Any]] = []
    for step in steps:
        try:
            about = {k: v for k, v in store.about(step).items() if k != "arrays"}
            rows.append({**about, "damaged": None})
        except ValueError as error:
            rows.append({"step": step, "damaged": str(error)})
    if format is Format.json:
        tell_json(rows)
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
    caption = f"{count(len(rows), 'checkpoint')} in {store.directory}: {show_bytes(total)} (exact)"
    tell(text_table(header, cells, caption))
