"""The command `weights`: checks, loads and saves checkpoints of `.safetensors` files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..._base import is_live, show_type, tell, tell_json
from ..laid_out import lay_out
from ..options import (
    TARGETS,
    Format,
    FormatOption,
    InputsOption,
    LayoutOption,
    MinBytesOption,
    OnOption,
    OwnMeshOption,
    RulesOption,
    StrategyOption,
    Target,
    command,
    parse_allow,
)

if TYPE_CHECKING:
    from ..._nnx import Recipe

_WEIGHTS = "The weights"


class Action(StrEnum):
    """What is done with weights."""

    check = "check"
    load = "load"
    save = "save"
    propose = "propose"


NamesOption = Annotated[
    str | None,
    typer.Option(
        "--names",
        metavar="FILE",
        help="A TOML file that maps keys to leaves; models that ship with the package know theirs.",
        rich_help_panel=_WEIGHTS,
    ),
]


@command(
    help=f"""Check, load or save weights: .safetensors files, or a folder of them from Hugging Face.

check compares the keys of a checkpoint with the leaves of a model, and says how many bytes each process
reads (exact). It reads headers only, and the chips need not be present. load reads the weights into
shards; with --checkpoints, it saves them as step 0 of a run, which train --resume continues. save
writes the weights of a run's checkpoint as a folder. propose prints a draft of --names for a model
that has none.

{TARGETS}

Examples:

\b
  shardwise weights check shardwise.examples.text:recipe weights --mesh data=64 --strategy fsdp

\b
  shardwise weights load shardwise.examples.text:recipe weights --mesh data=8 --on cpu:8 \\
    --strategy fsdp --checkpoints runs/b

\b
  shardwise weights save shardwise.examples.text:recipe exported --mesh data=8 --on cpu:8 \\
    --strategy fsdp --checkpoints runs/b

\b
  shardwise weights propose shardwise.examples.text:recipe weights

Exit status: 0 clean or done, 1 findings, 2 could not run."""
)
def weights(
    action: Annotated[
        Action, typer.Argument(metavar="ACTION", help="check, load, save or propose.")
    ],
    target: Target,
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A .safetensors file or a folder of them.")
    ],
    mesh: OwnMeshOption = None,
    on: OnOption = "none",
    strategy: StrategyOption = None,
    layout: LayoutOption = None,
    min_bytes: MinBytesOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    names: NamesOption = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="The dtype of floating-point weights; by default that of the model.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="CODE:PATTERN",
            help="A finding that is intentional; may be repeated.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            "--checkpoints",
            metavar="DIR",
            help="load: where to save step 0. save: where the checkpoint is.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            metavar="N",
            help="save: the step; the newest by default.",
            min=0,
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Checks, loads or saves weights."""
    from ..._processes import distributed, noting_failure, together

    if checkpoints is not None and action not in (Action.load, Action.save):
        raise ValueError(f"--checkpoints only applies to load and save, not to {action}")
    if step is not None and action is not Action.save:
        raise ValueError(f"--step only applies to save, not to {action}")
    if action is Action.save and checkpoints is None:
        raise ValueError("save needs --checkpoints DIR, the run whose weights are saved")
    if action is Action.save and allow:
        raise ValueError("--allow does not apply to save")
    if action is Action.propose:
        _propose(target, path, format)
        return
    allowed = parse_allow(allow or [])
    if action is not Action.check:
        distributed()
    with noting_failure():
        with together(f"laying out {target}"):
            found, laid_out = lay_out(
                target, mesh, on, strategy, rules, inputs, min_bytes=min_bytes, saved=layout
            )
        options: dict[str, Any] = {"names": names, "dtype": dtype}
        if action is Action.check:
            _check(found, laid_out, path, format, {**options, "allow": allowed})
        elif action is Action.load:
            _load(target, found, laid_out, path, checkpoints, format, {**options, "allow": allowed})
        else:
            recipe = _require_recipe(target, found, "saves the weights of its checkpoints")
            _save(recipe, laid_out, path, str(checkpoints), step, format, options)


def _check(found: Any, layout: Any, path: str, format: Format, options: dict[str, Any]) -> None:
    from ..._weights import check_weights

    checked = check_weights(found, layout, path, **options)
    _say(checked, Action.check, None, None, format)
    raise typer.Exit(1 if checked.findings.errors else 0)


def _load(
    target: str,
    found: Any,
    layout: Any,
    path: str,
    checkpoints: str | None,
    format: Format,
    options: dict[str, Any],
) -> None:
    import jax

    from ..._checkpoint import Checkpoints
    from ..._nnx import Recipe
    from ..._train import train_state
    from ..._weights import check_weights, load

    store = recipe = None
    if checkpoints is not None:
        recipe = _require_recipe(target, found, "has the optimizer that a checkpoint needs")
        store = Checkpoints(checkpoints)
        if store.steps():
            raise ValueError(f"{checkpoints} has checkpoints already: name another directory")
    make = found.model if isinstance(found, Recipe) else found
    checked = check_weights(make, layout, path, **options)
    if checked.findings.errors:
        _say(checked, Action.load, None, None, format)
        raise typer.Exit(1)
    began = time.perf_counter()
    model = jax.block_until_ready(load_model(load, make, layout, path, **options))
    seconds = time.perf_counter() - began
    if store is not None and recipe is not None:
        store.save(0, train_state(recipe, layout, model=model, donate=True))
        store.close()
    if jax.process_index() == 0:
        _say(checked, Action.load, seconds, checkpoints, format)


def load_model(load: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Returns what `load` returns, with the bytes on the terminal while it reads."""
    from ..._base import show_bytes

    live = is_live(sys.stderr)

    def say(done: int, total: int) -> None:
        if live:
            typer.echo(
                f"\rreading weights: {show_bytes(done)} of {show_bytes(total)}   ",
                err=True,
                nl=False,
            )

    model = load(*arguments, **options, progress=say)
    if live:
        typer.echo(err=True)
    return model


def _save(
    recipe: Recipe,
    layout: Any,
    path: str,
    checkpoints: str,
    step: int | None,
    format: Format,
    options: dict[str, Any],
) -> None:
    import jax

    from ..._checkpoint import Checkpoints
    from ..._weights import check_weights, save_weights

    began = time.perf_counter()
    state = Checkpoints(checkpoints).restore(recipe, layout, step=step)
    model = state.to_model(recipe.model)
    save_weights(model, path, **options)
    if jax.process_index() == 0:
        seconds = time.perf_counter() - began
        checked = check_weights(recipe, layout, path, names=options["names"])
        _say(checked, Action.save, seconds, checkpoints, format)


def _say(
    checked: Any, action: Action, seconds: float | None, checkpoints: str | None, format: Format
) -> None:
    if format is Format.json:
        tell_json(
            {
                "action": str(action),
                "path": checked.path,
                "findings": [finding.to_dict() for finding in checked.findings],
                "tensors": checked.tensors,
                "total_bytes": checked.total_bytes,
                "read_bytes": {str(k): v for k, v in checked.read_bytes.items()},
                "in_flight_bytes": checked.in_flight_bytes,
                "initialised": list(checked.initialised),
                "seconds": seconds,
                "checkpoints": checkpoints,
            }
        )
        return
    if action is Action.save:
        tell(f"saved {checked.tensors} tensors to {checked.path}")
        return
    tell(str(checked))
    if seconds is not None:
        most = max(checked.read_bytes.values(), default=0)
        where = f"; saved as step 0 in {checkpoints}" if checkpoints else ""
        tell(f"loaded in {seconds:.1f} s, {most / 2**30 / seconds:.2f} GiB/s (measured){where}")


def _propose(target: str, path: str, format: Format) -> None:
    from ..._base import claim_stdout
    from ..._weights import propose_names
    from ..published import StepOptions, load_step

    if format is Format.json:
        raise ValueError("propose prints TOML: leave out --format json")
    claim_stdout()
    tell(str(propose_names(load_step(target, StepOptions()), path)))


def _require_recipe(target: str, found: Any, why: str) -> Recipe:
    from ..._nnx import Recipe

    if not isinstance(found, Recipe):
        raise ValueError(f"target {target!r} is {show_type(found)}: give a Recipe, which {why}")
    return found
