"""What the commands share: the application, their options, and laying out a target.

JAX and Flax are imported inside functions: help and completion need neither.
"""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._base import claim_stdout, working
from .complete import complete_devices, complete_policy, complete_strategy, complete_target
from .help_text import ABOUT, ENDING, MODEL, OUTPUT, STEP, Command, Group

if TYPE_CHECKING:
    from .._compile import Compiled, Plan
    from .._estimate import Estimate
    from .._layout import Layout
    from .._report import Report
    from .._time import Timeline
    from .rules_file import RulesFile

app = typer.Typer(
    name="shardwise",
    cls=Group,
    context_settings={"max_content_width": 110},
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
command = functools.partial(app.command, cls=Command)

TARGETS = """TARGET is path/to/file.py:name or package.module:name, where name is an nnx.Module, a
function without arguments that returns one, or a Recipe; or it is a published shape (see shardwise
models)."""


class Format(enum.StrEnum):
    """How a result is printed."""

    text = "text"
    json = "json"


Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="file.py:name, module:name, or a published shape such as llama3-8b.",
        autocompletion=complete_target,
    ),
]
MeshOption = Annotated[
    str,
    typer.Option(
        "--mesh",
        metavar="AXES",
        help="Axes and sizes, such as data=2,model=4.",
        rich_help_panel=MODEL,
    ),
]
# Of commands that also take --layout, which has a mesh.
OwnMeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="AXES",
        help="Axes and sizes, such as data=2,model=4. Required without --layout.",
        rich_help_panel=MODEL,
    ),
]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="FILE",
        help="A layout that plan --save or search --save wrote, instead of a mesh and a strategy.",
        rich_help_panel=MODEL,
    ),
]
OnOption = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="DEVICES",
        help="none (arithmetic only), here (the devices present), cpu:8 (virtual CPU devices), "
        "or chips, which need not be present, such as v5p:4x8x8, 2xv5p:4x8x8 (two slices) or h200:8x8.",
        rich_help_panel=MODEL,
        autocompletion=complete_devices,
    ),
]
StrategyOption = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="NAME",
        help="dp, fsdp, tensor, pipeline, or several joined by +, such as fsdp+tensor; or best, the "
        "one with the fastest step (modelled) on these chips.",
        rich_help_panel=MODEL,
        autocompletion=complete_strategy,
    ),
]
MinBytesOption = Annotated[
    str | None,
    typer.Option(
        "--min-bytes",
        metavar="SIZE",
        help="fsdp splits leaves of at least this size, such as 64KiB; 0 splits all. By default it "
        "replicates the smallest, together under 1% of the model and 10% of what a device holds.",
        rich_help_panel=MODEL,
    ),
]
RulesOption = Annotated[
    str | None,
    typer.Option(
        "--rules",
        metavar="FILE",
        help="A TOML file with path patterns, logical names, strategy and min_bytes.",
        rich_help_panel=MODEL,
    ),
]
BatchOption = Annotated[
    str | None,
    typer.Option(
        "--batch",
        metavar="SIZES",
        help="The leading dims of the batch, such as 256 or 256x4096 (sequences x tokens). Published "
        "shapes default to 8 sequences of 2,048 tokens, or as many as the mesh has devices.",
        rich_help_panel=STEP,
    ),
]
RematOption = Annotated[
    str | None,
    typer.Option(
        "--remat",
        metavar="POLICY",
        help="What each block of the model keeps for the backward pass (or the whole loss, if it has "
        "no list of blocks): the name of a policy in jax.checkpoint_policies, or none for no "
        "rematerialisation. Published shapes default to nothing_saveable.",
        rich_help_panel=STEP,
        autocompletion=complete_policy,
    ),
]
AccumulateOption = Annotated[
    int | None,
    typer.Option(
        "--accumulate",
        metavar="N",
        help="Split the batch into N microbatches, whose gradients are averaged.",
        min=1,
        rich_help_panel=STEP,
    ),
]
InputsOption = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="SHAPES",
        help="The arguments of the model's call, such as int32[8,128]; several are joined by ;, "
        "named as in tokens=int32[8,128], or written as JSON if they are dicts, such as "
        '{"x": "float32[8,16]"}. The tensor strategy then traces the forward pass instead of '
        "guessing.",
        rich_help_panel=MODEL,
    ),
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="The method of the model that takes --inputs, if it is not __call__.",
        rich_help_panel=MODEL,
    ),
]
CompileOption = Annotated[
    bool,
    typer.Option("--compile", help="Also compile it; see shardwise compile.", rich_help_panel=STEP),
]
FormatOption = Annotated[
    Format,
    typer.Option(
        "--format",
        help="Output format; docs/reference/json.md describes the JSON.",
        rich_help_panel=OUTPUT,
    ),
]


def _show_version(asked: bool) -> None:
    if asked:
        import importlib.metadata

        typer.echo(f"shardwise {importlib.metadata.version('shardwise')}")
        raise typer.Exit()


@app.callback(help=ABOUT, epilog=ENDING)
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """Carries the help of the root command."""


def lay_out(
    target: str,
    mesh: str | None,
    on: str,
    strategy: str | None,
    rules: str | None,
    inputs: str | None,
    batch: str | None = None,
    remat: str | None = None,
    *,
    method: str | None = None,
    min_bytes: str | None = None,
    accumulate: int | None = None,
    saved: str | None = None,
) -> tuple[Any, Layout]:
    """Returns what the target names, and its layout."""
    if saved is not None:
        given = {
            "--mesh": mesh, "--strategy": strategy, "--rules": rules, "--min-bytes": min_bytes,
        }  # fmt: skip
        extra = next((name for name, value in given.items() if value is not None), None)
        if extra is not None:
            raise ValueError(f"{extra} conflicts with --layout {saved}, which has its own")
    elif mesh is None:
        raise ValueError("Missing option '--mesh': give axes and sizes, such as data=2,model=4")
    if method is not None and inputs is None:
        raise ValueError(f"--method {method} needs --inputs, the arguments of its call")
    with working(f"laying out {target}"):
        return _lay_out(
            target, mesh, on, strategy, rules, inputs, batch, remat, method, min_bytes, accumulate,
            saved,
        )  # fmt: skip


def _lay_out(
    target: str,
    mesh: str | None,
    on: str,
    strategy: str | None,
    rules: str | None,
    inputs: str | None,
    batch: str | None,
    remat: str | None,
    method: str | None,
    min_bytes: str | None,
    accumulate: int | None,
    saved: str | None,
) -> tuple[Any, Layout]:
    import jax

    from .._layout import layout, load_layout
    from .._mesh import show_mesh
    from .published import is_named, load_step
    from .rules_file import read_rules
    from .target import contained, parse_inputs

    # What the user's code prints must not mix with our output.
    claim_stdout()
    lock = load_layout(saved) if saved is not None else None
    # The mesh comes first: importing the target may start a backend with too few devices.
    if on != "here":
        # No accelerator is needed: without this, JAX looks for one and warns about it.
        jax.config.update("jax_platforms", "cpu")
    device_mesh = _make_mesh(show_mesh(lock.mesh) if lock is not None else mesh or "", on)
    shapes = parse_inputs(inputs) if inputs is not None else None
    file = read_rules(rules) if rules is not None else None
    best = strategy == "best"
    named = _strategy(file, None if best else strategy, min_bytes)
    if best and (named or file is not None):
        raise ValueError("--strategy best cannot be combined with --rules: name a strategy")
    all_rules = [*(file.rules if file is not None else []), *named]
    logical = file.logical if file is not None else None
    found = load_step(target, batch, remat, accumulate, devices=device_mesh.size)
    if lock is not None:
        with contained(f"making the model of {target}"):
            return found, _matched(target, found, lock.on(device_mesh), saved)
    if is_named(target):
        # Its model takes the batch unchanged, so it can always be traced.
        shapes = shapes or (found.batch,)
    with contained(f"making the model of {target}"):
        if best:
            return found, _best(target, found, device_mesh, inputs=shapes, method=method)
        # A recipe without --inputs is traced through its loss.
        planned = layout(
            found, device_mesh, all_rules, logical=logical, inputs=shapes, method=method
        )
    return found, planned


def _matched(target: str, found: Any, lock: Layout, saved: str | None) -> Layout:
    """Returns a saved layout as that of the target's model."""
    from .._check import LayoutError, matched
    from .._nnx import Recipe, abstract_model

    abstract = abstract_model(found.model if isinstance(found, Recipe) else found, lock.mesh)
    try:
        return matched(lock, abstract.state)
    except LayoutError as error:
        raise ValueError(
            f"--layout {saved} is not a layout of {target}: {error.findings[0].concise}"
        ) from error


def _best(target: str, found: Any, mesh: Any, **options: Any) -> Layout:
    """Returns the layout of the strategy with the fastest step, and says which it is."""
    from .._base import show_seconds
    from .._nnx import Recipe
    from .._search import rank_strategies

    if not isinstance(found, Recipe):
        raise ValueError(
            f"--strategy best needs a recipe, and target {target!r} is not one: a model alone has "
            f"no step to time"
        )
    (name, layout, estimate), *others = rank_strategies(found, mesh, **options)
    over = f", of {len(others) + 1} strategies" if others else ""
    fits = "" if estimate.fits else "; it does not fit"
    typer.echo(
        f"note: the best strategy is {name}: {show_seconds(estimate.seconds)} per step "
        f"(modelled){over}{fits}",
        err=True,
    )
    return layout


def _strategy(file: RulesFile | None, strategy: str | None, min_bytes: str | None) -> list[Any]:
    """Returns the strategy named in the rules file or the options, as a list of one or none."""
    from .._base import parse_bytes
    from .._layout import Named

    if file is not None and file.strategy is not None and strategy is not None:
        raise ValueError(
            f"--strategy {strategy} conflicts with the rules file, which sets strategy = "
            f"{file.strategy!r}: give one of them"
        )
    if file is not None and file.min_bytes is not None and min_bytes is not None:
        raise ValueError(
            f"--min-bytes {min_bytes} conflicts with the rules file, which sets min_bytes: give one "
            f"of them"
        )
    name = strategy if strategy is not None else file.strategy if file is not None else None
    size = file.min_bytes if file is not None else None
    option = "min_bytes in the rules file"
    if min_bytes is not None:
        option = "--min-bytes"
        try:
            size = parse_bytes(min_bytes)
        except ValueError as error:
            raise ValueError(f"--min-bytes {error}") from error
    if size is not None and "fsdp" not in (name or ""):
        has = f"the strategy is {name}" if name is not None else "no strategy is given"
        raise ValueError(f"{option} applies only to the strategy fsdp, but {has}")
    return [Named(name, size)] if name is not None else []


def _make_mesh(mesh: str, on: str) -> Any:
    from .._compile import start_backends
    from .._mesh import mesh as make_mesh

    if on == "here":
        start_backends()
        return make_mesh(mesh)
    return make_mesh(mesh, on=on)


CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Price the step by the file that shardwise chips measure --save wrote.",
        rich_help_panel=STEP,
    ),
]


def require_calibration(calibration: str | None, layout: Layout) -> None:
    """Raises if a calibration cannot be read, or is not of the chips of a layout."""
    from .._compile import step_machine
    from .._time import load_calibration

    if calibration is not None:
        step_machine(layout.mesh, load_calibration(calibration))


def require_devices(on: str) -> None:
    """Raises if there are no devices to compile for."""
    if on == "none":
        raise ValueError(
            "--on none has no devices to compile for: name chips, such as --on v5p:4x8x8 or "
            "--on h100:8x8, or virtual devices, such as --on cpu:8"
        )


def compile_target(
    target: str,
    found: Any,
    layout: Layout,
    inputs: str | None,
    method: str | None = None,
    calibration: str | None = None,
    *,
    note: bool = True,
) -> Compiled:
    """Returns what `lay_out` returned, compiled.

    Args:
        target: the target.
        found: what it names.
        layout: its layout.
        inputs: the arguments of a model's call.
        method: the method to call with them.
        calibration: the file of measured rates.
        note: whether to say on stderr that `check` would find something, which a compilation does
            not show.

    Raises:
        ValueError: the layout has errors, or a model's inputs are missing.
    """
    from .._base import count
    from .._check import LayoutError, check
    from .._compile import compile as compile_step
    from .._mesh import chips_of
    from .._nnx import Recipe
    from .target import parse_inputs

    if not isinstance(found, Recipe) and inputs is None:
        raise ValueError(
            f"target {target!r} is a model: give the arguments of its call, such as "
            f"--inputs 'int32[8,128]', or name a Recipe to compile a training step"
        )
    # A recipe has its own batch: inputs only affect its layout.
    shapes = None if isinstance(found, Recipe) or inputs is None else parse_inputs(inputs)
    chips = chips_of(layout.mesh)
    where = f" for {chips}" if chips is not None else ""
    try:
        with working(f"compiling {target}{where}"):
            compiled = compile_step(
                found,
                layout,
                inputs=shapes,
                method=method if shapes else None,
                calibration=calibration,
                show=False,
            )
    except LayoutError as error:
        more = len(error.findings) - 1
        rest = f"; shardwise check shows {more} more" if more else ""
        raise ValueError(
            f"not compiled because the layout has errors: {error.findings[0].concise}{rest}"
        ) from error
    warnings = check(layout).warnings if note else ()
    if warnings:
        codes = ", ".join(dict.fromkeys(finding.code for finding in warnings))
        them = "it" if len(warnings) == 1 else "them"
        typer.echo(
            f"note: the layout has {count(len(warnings), 'warning')} ({codes}): shardwise check "
            f"shows {them}",
            err=True,
        )
    return compiled


def estimate_target(
    found: Any,
    layout: Layout,
    inputs: str | None,
    method: str | None = None,
    calibration: str | None = None,
) -> tuple[Estimate | None, str]:
    """Returns the estimate of what `lay_out` returned, or None and why there is none.

    Both are empty where nobody expects one: without chips, or for a model without inputs.
    """
    from .._estimate import estimate
    from .._mesh import chips_of
    from .._nnx import Recipe
    from .target import parse_inputs

    if chips_of(layout.mesh) is None:
        return None, ""
    if not (isinstance(found, Recipe) or inputs):
        why = "--calibration prices the call of a model, whose arguments --inputs gives"
        return None, why if calibration is not None else ""
    shapes = None if isinstance(found, Recipe) or inputs is None else parse_inputs(inputs)
    try:
        with working("estimating a step"):
            estimated = estimate(
                found,
                layout,
                inputs=shapes,
                method=method if shapes else None,
                calibration=calibration,
            )
            return estimated, ""
    except ValueError as error:
        return None, str(error)


def plan_target(
    target: str,
    found: Any,
    layout: Layout,
    inputs: str | None,
    method: str | None = None,
    calibration: str | None = None,
    *,
    compile: bool,
) -> Plan:
    """Returns the plan of what `lay_out` returned, also compiled if asked and free of errors."""
    import dataclasses

    from .._compile import plan_of

    plan = plan_of(found, layout)
    if not compile or plan.findings.errors:
        return plan
    compiled = compile_target(target, found, layout, inputs, method, calibration, note=False)
    return dataclasses.replace(plan, compiled=compiled)


def require_writable(
    path: str | None, option: str = "--save", *, inputs: Iterable[str | None] = ()
) -> None:
    """Raises if a file cannot be written, before any work is done.

    Args:
        path: the file, if any.
        option: the option that names it.
        inputs: the targets and files that the command reads, which must not be overwritten.
    """
    if path is None:
        return
    if path in ("", "-"):
        raise ValueError(f"{option} {path!r} is not a file: name one, or /dev/stdout to print it")
    place = Path(path)
    if place.is_dir():
        raise ValueError(f"{option} {path} is a folder: name a file")
    parent = Path(os.path.realpath(place)).parent if place.is_symlink() else place.parent
    if not place.exists() and not parent.is_dir():
        raise ValueError(f"{option} {path} cannot be written: there is no folder {parent}")
    if not os.access(place if place.exists() else parent, os.W_OK):
        raise ValueError(f"{option} {path} cannot be written: permission denied")
    for given in inputs:
        if given is not None and any(_is_same(place, read) for read in _files_of(given)):
            raise ValueError(
                f"{option} {path} would overwrite {given}, which this command reads: name another "
                f"file"
            )


def _files_of(given: str) -> list[Path]:
    """Returns the files that a target or a file name may be read from."""
    place = given.rpartition(":")[0]
    return [Path(given), Path(place), Path(f"{place.replace('.', '/')}.py")]


def _is_same(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and one.samefile(other)


def save_to(
    path: str | None, result: Layout | Compiled | Timeline | Report, flag: str = "--save"
) -> None:
    """Writes the file of `--save` or another option, and says so on stderr."""
    if path is None:
        return
    try:
        result.save(path)
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written: {error.strerror}") from error
    typer.echo(f"saved {path}", err=True)
