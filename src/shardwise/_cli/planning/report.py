"""The command `report`: a plan as an HTML page."""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..._base import read_json, tell, working
from ..complete import complete_devices, complete_strategy, complete_target
from ..help_text import MODEL, OUTPUT
from ..laid_out import lay_out, plan_target, require_calibration, require_devices
from ..options import (
    AccumulateOption,
    BatchOption,
    CalibrationOption,
    CompileOption,
    InputsOption,
    MethodOption,
    MinBytesOption,
    OnOption,
    RematOption,
    RulesOption,
    StrategyOption,
    command,
    require_writable,
)

if TYPE_CHECKING:
    from ..._compile import Plan

_AGAINST = "The one to compare with"


@command(
    help="""Draw a layout, or its compilation, as one HTML page that any browser opens from disk.

The page shows whether it fits, how fast it is, what is wrong and what to do; the memory of a device
against its capacity, the model as a tree and by size, how each leaf is split over the mesh, what
each device holds and, with --compile, every collective with its line of code and, for GPUs and
TPUs, how long a step takes, with a timeline. TARGET is as in shardwise plan, or a file written by
plan --save or compile --save. With --against, or any option that begins with it, two are compared:
the differences first, then each.

Examples:

\b
  shardwise report shardwise.examples.decoder:make --mesh data=2,model=4 --strategy fsdp+tensor \\
    -o report.html

\b
  shardwise report shardwise.examples.text:recipe --mesh data=8 --on cpu:8 --strategy fsdp \\
    --compile -o report.html

\b
  shardwise report shardwise.examples.decoder:make --mesh data=2,model=4 --strategy fsdp+tensor \\
    --against-mesh data=8 --against-strategy fsdp -o two.html

Exit status: 0 drawn, 1 drawn but the layout has errors or does not fit, 2 could not run.""",
)
def report(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="file.py:name, module:name, a published shape such as llama3-8b, or a saved file.",
            autocompletion=complete_target,
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The page to write.", rich_help_panel=OUTPUT
        ),
    ],
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="AXES",
            help="Axes and sizes, such as data=2,model=4; a saved file has its own.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    on: OnOption = "none",
    strategy: StrategyOption = None,
    min_bytes: MinBytesOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    method: MethodOption = None,
    batch: BatchOption = None,
    remat: RematOption = None,
    calibration: CalibrationOption = None,
    accumulate: AccumulateOption = None,
    compile: CompileOption = False,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="TARGET",
            help="Another target or saved file; the same target if only its options differ.",
            rich_help_panel=_AGAINST,
            autocompletion=complete_target,
        ),
    ] = None,
    against_mesh: Annotated[
        str | None,
        typer.Option("--against-mesh", metavar="AXES", help="Its mesh.", rich_help_panel=_AGAINST),
    ] = None,
    against_on: Annotated[
        str | None,
        typer.Option(
            "--against-on",
            metavar="DEVICES",
            help="Its devices.",
            rich_help_panel=_AGAINST,
            autocompletion=complete_devices,
        ),
    ] = None,
    against_strategy: Annotated[
        str | None,
        typer.Option(
            "--against-strategy",
            metavar="NAME",
            help="Its strategy.",
            rich_help_panel=_AGAINST,
            autocompletion=complete_strategy,
        ),
    ] = None,
    against_min_bytes: Annotated[
        str | None,
        typer.Option(
            "--against-min-bytes",
            metavar="SIZE",
            help="Its --min-bytes.",
            rich_help_panel=_AGAINST,
        ),
    ] = None,
    against_rules: Annotated[
        str | None,
        typer.Option(
            "--against-rules", metavar="FILE", help="Its rules.", rich_help_panel=_AGAINST
        ),
    ] = None,
) -> None:
    """Draws a page."""
    require_writable(output, "--output", inputs=(target, against, rules, against_rules))
    _require_own(
        target,
        {
            "--mesh": mesh,
            "--on": None if on == "none" else on,
            "--strategy": strategy,
            "--min-bytes": min_bytes,
            "--rules": rules,
            "--inputs": inputs,
            "--method": method,
            "--batch": batch,
            "--remat": remat,
            "--calibration": calibration,
            "--accumulate": None if accumulate is None else str(accumulate),
            "--compile": "yes" if compile else None,
        },
    )
    _require_own(
        against or "",
        {
            "--against-mesh": against_mesh,
            "--against-on": against_on,
            "--against-strategy": against_strategy,
            "--against-min-bytes": against_min_bytes,
            "--against-rules": against_rules,
        },
    )
    if calibration is not None and not compile:
        raise ValueError("--calibration prices a compiled step: add --compile")
    step = {
        "inputs": inputs, "method": method, "batch": batch, "remat": remat,
        "calibration": calibration, "accumulate": accumulate, "compile": compile,
    }  # fmt: skip
    how = {
        "mesh": mesh, "on": on, "strategy": strategy, "min_bytes": min_bytes, "rules": rules,
    }  # fmt: skip
    other = {
        "mesh": against_mesh, "on": against_on, "strategy": against_strategy,
        "min_bytes": against_min_bytes, "rules": against_rules,
    }  # fmt: skip
    _reserve_devices(on, against_on)
    plans = [_plan(target, **how, **step)]
    asks = [_asking(target, plans[0][1], output, **how, **step)]
    if against is not None or any(value is not None for value in other.values()):
        # The second takes its missing options from the first; rules and strategy only as a pair.
        if against_strategy is not None or against_rules is not None:
            how |= {"strategy": None, "min_bytes": None, "rules": None}
        how |= {name: value for name, value in other.items() if value is not None}
        plans.append(_plan(against or target, **how, **step))
        asks.append(_asking(against or target, plans[1][1], output, **how, **step))
    from ..._report import report_of_plans

    with working(f"drawing {target}"):
        page = report_of_plans(plans, asks)
        try:
            page.save(output)
        except OSError as error:
            raise ValueError(f"--output {output} cannot be written: {error.strerror}") from error
    for name, plan in plans:
        tell(f"{name}: {plan.verdict}" if len(plans) > 1 else plan.verdict)
    tell(f"wrote {output} ({len(page.html.encode()) / 1024:.0f} KiB): open it in a browser")
    raise typer.Exit(0 if all(plan.usable for _, plan in plans) else 1)


def _reserve_devices(*given: str | None) -> None:
    """Requests enough virtual CPU devices for the larger of the two, before JAX starts them."""
    import jax

    counts = [on.strip().lower().partition("cpu:")[2] for on in given if on is not None]
    wanted = [int(count) for count in counts if count.isdecimal() and len(count) < 5]
    if len(wanted) > 1:
        with contextlib.suppress(RuntimeError):  # the backend has already started
            jax.config.update("jax_num_cpu_devices", max(wanted))


def _require_own(target: str, options: dict[str, str | None]) -> None:
    given = next((name for name, value in options.items() if value is not None), None)
    if target.endswith(".json") and given is not None:
        raise ValueError(f"{given} does not apply to {target}: a saved file is drawn as it is")


def _plan(
    target: str,
    *,
    mesh: str | None,
    on: str,
    strategy: str | None,
    min_bytes: str | None,
    rules: str | None,
    inputs: str | None,
    method: str | None,
    batch: str | None,
    remat: str | None,
    calibration: str | None,
    accumulate: int | None,
    compile: bool,
) -> tuple[str, Plan]:
    from ..published import StepOptions

    if target.endswith(".json"):
        return target, _saved(target)
    if mesh is None:
        raise ValueError("--mesh is missing: give axes and sizes, such as --mesh data=2,model=4")
    if compile:
        require_devices(on)
    found, layout = lay_out(
        target, mesh, on, strategy, rules, inputs, StepOptions(batch, remat, accumulate),
        method=method, min_bytes=min_bytes,
    )  # fmt: skip
    require_calibration(calibration, layout)
    least = f"min-bytes={min_bytes}" if min_bytes is not None else None
    parts = (target, mesh, strategy, least, rules, on if on != "none" else None)
    name = " ".join(part for part in parts if part)
    return name, plan_target(target, found, layout, inputs, method, calibration, compile=compile)


def _asking(target: str, plan: Plan, output: str, *, compile: bool, on: str, **options: Any) -> str:
    """Returns the command that draws the same, compiled.

    What only the reader knows is in capitals: the chips, and the inputs of a model without a recipe.
    """
    if target.endswith(".json"):
        return f"shardwise compile TARGET --layout {shlex.quote(target)} --on {on if on != 'none' else 'CHIPS'}"
    given = {"on": on if on != "none" else None, **options}
    words = ["shardwise", "report", shlex.quote(target)]
    for name, value in given.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", shlex.quote(str(value))]
    if on == "none":
        words += ["--on", "CHIPS"]
    if plan.optimizer_bytes is None and options["inputs"] is None:
        words += ["--inputs", "SHAPES"]
    return " ".join([*words, "--compile", "-o", shlex.quote(output)])


def _saved(path: str) -> Plan:
    from ..._compile import Plan, load_compiled
    from ..._layout import load_layout

    content: Any = None
    with contextlib.suppress(OSError, ValueError):
        content = read_json(path)
    # Only a compilation names its devices.
    if isinstance(content, dict) and {"chips", "target"} & content.keys():
        return Plan(None, load_compiled(path))
    if content is not None and not (isinstance(content, dict) and "format" in content):
        raise ValueError(
            f"{path} was not written by shardwise: plan --save writes layouts, compile --save "
            f"compilations"
        )
    return Plan(load_layout(path))
