"""The command line: parse, call, print."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import sys
from typing import Annotated, Any

import typer

from ._check import check as check_layout
from ._findings import Findings
from ._layout import Layout, layout
from ._mesh import mesh as make_mesh
from ._mesh import show_mesh
from ._recipe import Recipe
from ._rules_file import read_rules
from ._spec import show_spec
from ._table import show_bytes
from ._target import last_frame, load_target, parse_inputs

app = typer.Typer(
    name="shardwise",
    context_settings={"max_content_width": 110},
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_TARGETS = """TARGET is path/to/file.py:name or package.module:name: a function of no arguments
that returns an nnx.Module, such a module, or a Recipe."""


class PlanFormat(enum.StrEnum):
    """How a plan is printed."""

    text = "text"
    json = "json"


class CheckFormat(enum.StrEnum):
    """How findings are printed."""

    text = "text"
    concise = "concise"
    json = "json"
    github = "github"


Target = Annotated[str, typer.Argument(metavar="TARGET", help="file.py:name or module:name.")]
MeshOption = Annotated[
    str, typer.Option("--mesh", metavar="AXES", help="Axes and sizes, such as data=2,model=4.")
]
OnOption = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="DEVICES",
        help="none (arithmetic only), here (the devices present), cpu:8 (virtual CPU devices), "
        "or chips that are not here, such as v5p:4x8x8 or h200:8x8.",
    ),
]
StrategyOption = Annotated[
    str | None,
    typer.Option(
        "--strategy", metavar="NAME", help="dp, fsdp, tensor, or joined by +: fsdp+tensor."
    ),
]
RulesOption = Annotated[
    str | None,
    typer.Option(
        "--rules", metavar="FILE", help="A TOML file of path patterns, logical names and strategy."
    ),
]
InputsOption = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="SHAPES",
        help="What the model is called with, such as int32[8,128], several joined by ; "
        "the tensor strategy then traces the forward pass instead of guessing.",
    ),
]


@app.callback(
    help="""Plan and check the sharding of Flax NNX models on JAX, before renting a chip.

Start with the decoder that ships with the package:

\b
  shardwise plan shardwise.examples.decoder:make --mesh data=2,model=4 --strategy fsdp+tensor"""
)
def _root() -> None:
    """Holds the help of the command itself."""


@app.command(
    help=f"""Lay a model out on a mesh and show what every device holds.

{_TARGETS}

Examples:

\b
  shardwise plan shardwise.examples.decoder:make --mesh data=2,model=4 --strategy fsdp+tensor

\b
  shardwise plan model.py:make --mesh data=64,model=4 --on v5p:4x8x8 --strategy fsdp+tensor \\
    --inputs "int32[64,2048]"

\b
  shardwise plan model.py:make --mesh data=8 --rules rules.toml --save layout.json

Exit status: 0 laid out, 1 the layout has errors, 2 could not run."""
)
def plan(
    target: Target,
    mesh: MeshOption,
    on: OnOption = "none",
    strategy: StrategyOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    save: Annotated[
        str | None, typer.Option("--save", metavar="FILE", help="Write the layout as a lockfile.")
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option("--explain", metavar="PATH", help="Say who decided this leaf's spec."),
    ] = None,
    format: Annotated[
        PlanFormat, typer.Option("--format", help="How to print it.")
    ] = PlanFormat.text,
) -> None:
    """Lays a model out and shows it."""
    found, made = _lay_out(target, mesh, on, strategy, rules, inputs)
    findings = check_layout(made)
    optimizer = made.for_optimizer(found.optimizer) if isinstance(found, Recipe) else None
    if explain is not None:
        try:
            typer.echo(made.explain(explain))
        except KeyError as error:
            raise ValueError(error.args[0]) from error
    elif format is PlanFormat.json:
        typer.echo(json.dumps(_plan_json(made, optimizer, findings), indent=2))
    else:
        typer.echo(str(made))
        if optimizer is not None:
            typer.echo(
                f"optimizer: {show_bytes(optimizer.bytes_per_device)} of "
                f"{show_bytes(optimizer.total_bytes)} on each device (exact)"
            )
        typer.echo(str(findings) if findings else findings.summary)
    if save is not None:
        made.save(save)
        typer.echo(f"saved {save}", err=True)
    raise typer.Exit(1 if findings.errors else 0)


@app.command(
    help=f"""Check a layout: every problem at once, with its code, path, numbers and help.

{_TARGETS}

Examples:

\b
  shardwise check shardwise.examples.decoder:make --mesh data=2,model=4 --strategy fsdp+tensor

\b
  shardwise check model.py:make --mesh data=8,model=4 --rules rules.toml --format github

\b
  shardwise check model.py:make --mesh data=8 --allow "SW105:embed.**"

Exit status: 0 clean, 1 findings, 2 could not run."""
)
def check(
    target: Target,
    mesh: MeshOption,
    on: OnOption = "none",
    strategy: StrategyOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", metavar="CODE:PATTERN", help="A finding that is meant."),
    ] = None,
    format: Annotated[
        CheckFormat, typer.Option("--format", help="How to print findings.")
    ] = CheckFormat.text,
) -> None:
    """Checks a layout and prints its findings."""
    allowed = _parse_allow(allow or [])
    _, made = _lay_out(target, mesh, on, strategy, rules, inputs)
    findings = check_layout(made, allow=allowed)
    match format:
        case CheckFormat.json:
            typer.echo(findings.to_json())
        case CheckFormat.concise:
            for finding in findings:
                typer.echo(finding.concise)
        case CheckFormat.github:
            for finding in findings:
                typer.echo(finding.github)
        case CheckFormat.text:
            typer.echo(str(findings))
    raise typer.Exit(1 if findings else 0)


def main() -> None:
    """Runs the command line; every failure is one sentence on stderr and exit status 2."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        status = app(standalone_mode=False)
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        # Typer's own errors (a wrong option, a missing argument) carry a ready message.
        ready = getattr(error, "format_message", None)
        text = str(ready() if callable(ready) else error)
        if ready is None:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            text = f"{kind}{text}{last_frame(error)}"
        print(f"shardwise: {' '.join(text.split())}", file=sys.stderr)
        status = 2
    sys.exit(status)


def _lay_out(
    target: str,
    mesh: str,
    on: str,
    strategy: str | None,
    rules: str | None,
    inputs: str | None,
) -> tuple[Any, Layout]:
    # The mesh comes first: importing the target may start a backend with too few devices.
    made_mesh = make_mesh(mesh, on=None if on == "here" else on)
    shapes = parse_inputs(inputs) if inputs is not None else None
    file = read_rules(rules) if rules is not None else None
    given: list[Any] = list(file.rules) if file is not None else []
    names = [name for name in (file.strategy if file else None, strategy) if name is not None]
    if len(names) == 2:
        raise ValueError(f"--strategy {strategy} and the rules' strategy {names[0]!r}: give one")
    logical = file.logical if file is not None else None
    # What the user's own code prints must not stand in our output.
    with contextlib.redirect_stdout(sys.stderr):
        found = load_target(target)
        model = found.model if isinstance(found, Recipe) else found
        try:
            made = layout(model, made_mesh, [*given, *names], logical=logical, inputs=shapes)
        except SystemExit as error:
            raise ValueError(f"target {target!r} ended the process: {error.code!r}") from error
    return found, made


def _parse_allow(given: list[str]) -> dict[str, list[str]]:
    allowed: dict[str, list[str]] = {}
    for text in given:
        code, colon, pattern = text.partition(":")
        if not colon or not pattern:
            raise ValueError(f"--allow {text!r}: write CODE:PATTERN, such as SW105:embed.**")
        allowed.setdefault(code, []).append(pattern)
    return allowed


def _plan_json(made: Layout, optimizer: Layout | None, findings: Findings) -> dict[str, Any]:
    return {
        "mesh": dict(made.mesh.shape),
        "axes": show_mesh(made.mesh),
        "total_bytes": made.total_bytes,
        "bytes_per_device": made.bytes_per_device,
        "optimizer_bytes_per_device": optimizer.bytes_per_device if optimizer else None,
        "leaves": [
            {
                "path": leaf.path,
                "kind": leaf.kind,
                "shape": list(leaf.shape),
                "dtype": str(leaf.dtype),
                "spec": show_spec(leaf.spec),
                "shard_shape": None if leaf.faults else list(leaf.shard_shape),
                "shard_bytes": None if leaf.faults else leaf.shard_bytes,
                "copies": None if leaf.faults else leaf.copies,
                "reason": leaf.reason,
            }
            for leaf in made.leaves
        ],
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
