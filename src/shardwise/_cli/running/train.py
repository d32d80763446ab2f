"""The command `train`: trains a recipe, with checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..._base import parse_json, show_type, tell_json
from ..help_text import OUTPUT
from ..laid_out import lay_out
from ..options import (
    AccumulateOption,
    BatchOption,
    Format,
    FormatOption,
    InputsOption,
    LayoutOption,
    LossChunksOption,
    MicrobatchesOption,
    MinBytesOption,
    OffloadOption,
    OnOption,
    OwnMeshOption,
    RematOption,
    RulesOption,
    StrategyOption,
    command,
)
from .weights import NamesOption, load_model

if TYPE_CHECKING:
    from ..._checkpoint import Checkpoints
    from ..._layout import Layout
    from ..._nnx import Recipe

RECIPES = """TARGET is path/to/file.py:name or package.module:name of a Recipe."""


_RUN, _DATA = "The run", "The data"

RecipeTarget = Annotated[
    str, typer.Argument(metavar="TARGET", help="file.py:name or module:name of a Recipe.")
]


@command(
    help=f"""Train a recipe and save checkpoints.

{RECIPES} The data comes from --data, or from the name data in the same module. Progress goes to
stderr; --format json prints a summary to stdout at the end.

Examples:

\b
  shardwise train shardwise.examples.text:recipe --mesh data=8 --on cpu:8 --strategy fsdp \\
    --steps 2 --checkpoints runs/a

\b
  shardwise train train.py:recipe --mesh data=8 --on cpu:8 --strategy fsdp --steps 4 \\
    --data tokens.npy --length 128 --format json

To train with several processes, see shardwise launch --help. Under launch --elastic the run goes on
with those that are left: give --checkpoints, and a mesh with an axis of size -1.

Exit status: 0 trained, 2 could not run, 143 or 130 stopped by SIGTERM or SIGINT after saving."""
)
def train(
    target: RecipeTarget,
    steps: Annotated[
        int,
        typer.Option(
            "--steps", metavar="N", help="Total number of steps.", min=1, rich_help_panel=_RUN
        ),
    ],
    mesh: OwnMeshOption = None,
    on: OnOption = "here",
    strategy: StrategyOption = None,
    layout: LayoutOption = None,
    min_bytes: MinBytesOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    batch: BatchOption = None,
    remat: RematOption = None,
    accumulate: AccumulateOption = None,
    loss_chunks: LossChunksOption = None,
    offload: OffloadOption = None,
    microbatches: MicrobatchesOption = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="SOURCE",
            help="A file of tokens (with --length), or file.py:name or module:name of a sw.data or "
            "of a function that returns one.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            "--length",
            metavar="N",
            help="Tokens per sample, for a file of tokens.",
            min=1,
            rich_help_panel=_DATA,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="The dtype of a raw file of tokens.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            "--checkpoints", metavar="DIR", help="Where to save checkpoints.", rich_help_panel=_RUN
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            "--every", metavar="N", help="Save every N steps.", min=1, rich_help_panel=_RUN
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", metavar="M", help="Save every M minutes.", rich_help_panel=_RUN),
    ] = None,
    keep: Annotated[
        int,
        typer.Option(
            "--keep", metavar="N", help="How many checkpoints to keep.", min=1, rich_help_panel=_RUN
        ),
    ] = 3,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the newest checkpoint, if there is one.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    trained_only: Annotated[
        bool,
        typer.Option(
            "--trained-only",
            help="Leave parameters that are not trained out of checkpoints, such as the base of LoRA.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    copies_every: Annotated[
        int | None,
        typer.Option(
            "--copies-every",
            metavar="N",
            help="Under launch --elastic: copy the state to the memory of two hosts every N steps "
            "(50 by default); 0 makes no copies.",
            min=0,
            rich_help_panel=_RUN,
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            metavar="PATH",
            help="Begin with these weights: a .safetensors file, or a folder of them.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    names: NamesOption = None,
    logs: Annotated[
        str | None,
        typer.Option(
            "--logs",
            metavar="DIR",
            help="Where to write metrics.jsonl, TensorBoard events and profiles.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Trains a recipe."""
    import jax

    from ..._checkpoint import Checkpoints
    from ..._nnx import Recipe
    from ..._processes import agreed_steps, distributed, elastic_run, noting_failure, together
    from ..._train import Stopped, fit
    from ..._weights import load
    from ..published import StepOptions

    began = time.perf_counter()
    if checkpoints is None and (every or minutes or resume or trained_only):
        raise ValueError("--every, --minutes, --resume and --trained-only need --checkpoints DIR")
    step = StepOptions(batch, remat, accumulate, loss_chunks, offload, microbatches)
    if names is not None and weights is None:
        raise ValueError("--names needs --weights PATH, the weights that have these names")
    elastic = elastic_run()
    if copies_every is not None and elastic is None:
        raise ValueError("--copies-every needs shardwise launch --elastic")
    distributed()
    with noting_failure():
        with together(f"loading {target} and the data"):
            recipe, laid_out = lay_out(
                target, mesh, on, strategy, rules, inputs, step, min_bytes=min_bytes, saved=layout,
            )  # fmt: skip
            if not isinstance(recipe, Recipe):
                raise ValueError(
                    f"target {target!r} is {show_type(recipe)}: train needs a Recipe, which "
                    f"has a loss, an optimizer and a batch"
                )
            samples = _find_data(target, data, length, dtype)
            store = None
            if checkpoints is not None:
                store = Checkpoints(
                    checkpoints, keep=keep, every=every, minutes=minutes, trained_only=trained_only
                )
        saved = agreed_steps(store) if store is not None else []
        if saved and not resume and not (elastic and elastic.round):
            raise ValueError(
                f"{checkpoints} has checkpoints up to step {saved[-1]}: give --resume to continue "
                f"from there, or another directory"
            )
        model = None
        # A run that is resumed has its own, but those that it did not save.
        if weights is not None and (not saved or trained_only):
            model = load_model(load, recipe.model, laid_out, weights, names=names)
        status, last = 0, steps
        try:
            state = fit(
                recipe, laid_out, samples, steps=steps, checkpoints=store, logs=logs, model=model,
                donate=True, elastic=elastic is not None,
                copies_every=50 if copies_every is None else copies_every or None,
            )  # fmt: skip
            last = int(state.step)
        except Stopped as stopped:
            status, last = stopped.status, stopped.step
    if format is Format.json and jax.process_index() == 0:  # once, however many processes there are
        first = saved[-1] if saved else 0
        counted = {"steps": steps, "first_step": first, "last_step": last, "status": status}
        seconds = time.perf_counter() - began
        tell_json({**counted, "seconds": seconds, **_summary(recipe, laid_out, store, logs)})
    if status:
        raise typer.Exit(status)


def _summary(
    recipe: Recipe, layout: Layout, store: Checkpoints | None, logs: str | None
) -> dict[str, Any]:
    """Returns the summary of a run, apart from its steps."""
    from ..._mesh import show_mesh

    optimizer = layout.for_optimizer(recipe.optimizer, wrt=recipe.wrt)
    metrics = None
    if logs is not None:
        # The last line is cut off if the disk was full.
        with contextlib.suppress(OSError, ValueError):
            lines = (Path(logs) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            metrics = parse_json(lines[-1]) if lines else None
    return {
        "axes": show_mesh(layout.mesh),
        "devices": layout.mesh.size,
        "bytes_per_device": layout.bytes_per_device,
        "optimizer_bytes_per_device": optimizer.bytes_per_device,
        "checkpoints": str(store.directory) if store is not None else None,
        "saved_steps": store.steps() if store is not None else [],
        "metrics": metrics,
    }


def _find_data(target: str, given: str | None, length: int | None, dtype: str | None) -> Any:
    from ..._train import Data
    from ..._train import data as make_data
    from ..target import load_name

    place = target.rpartition(":")[0]
    if given is not None and (length is not None or Path(given).is_file()):
        return make_data(given, length=length, dtype=dtype)
    if given is not None and ":" not in given:
        raise ValueError(
            f"--data {given!r} is not a file: give a file of tokens with --length, or a sw.data as "
            f"path/to/file.py:name"
        )
    name = given if given is not None else f"{place}:data"
    try:
        found = load_name(name)
    except ValueError as error:
        if given is None:
            raise ValueError(
                f"there is no training data: give --data, such as --data tokens.npy --length 128, "
                f"or define data in {place}, as shardwise.examples.text does"
            ) from error
        raise
    samples = found if isinstance(found, Data) or not callable(found) else found()
    if not isinstance(samples, Data | Iterable):
        raise ValueError(
            f"the data {name} is {show_type(samples)}: name a sw.data, or an iterable of batches"
        )
    return samples
