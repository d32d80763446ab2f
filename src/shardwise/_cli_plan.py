"""The commands that need no devices: `plan` and `check`."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Annotated, Any

import typer

from ._check import check as check_layout
from ._cli_options import (
    TARGETS,
    BatchOption,
    InputsOption,
    MeshOption,
    OnOption,
    RulesOption,
    StrategyOption,
    Target,
    app,
    compile_target,
    lay_out,
    require_devices,
    require_writable,
    save_to,
)
from ._findings import Findings
from ._layout import Layout
from ._mesh import show_mesh
from ._recipe import Recipe
from ._spec import show_spec
from ._table import show_bytes


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


@app.command(
    help=f"""Lay a model out on a mesh and show what every device holds.

{TARGETS}

Examples:

\b
  shardwise plan shardwise.examples.decoder:make --mesh data=2,model=4 --strategy fsdp+tensor

\b
  shardwise plan model.py:make --mesh data=64,model=4 --on v5p:4x8x8 --strategy fsdp+tensor \\
    --inputs "int32[64,2048]"

\b
  shardwise plan model.py:make --mesh data=8 --rules rules.toml --save layout.json

Exit status: 0 laid out, 1 the layout has errors or what was compiled does not fit, 2 could not run."""
)
def plan(
    target: Target,
    mesh: MeshOption,
    on: OnOption = "none",
    strategy: StrategyOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    batch: BatchOption = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile it too: see shardwise compile.")
    ] = False,
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
    if compile:
        require_devices(on)
        require_writable(save)
    found, made = lay_out(target, mesh, on, strategy, rules, inputs, batch)
    findings = check_layout(made)
    compiled = None
    if compile and not findings.errors:
        compiled = compile_target(target, found, made, inputs)
    optimizer = (
        made.for_optimizer(found.optimizer, wrt=found.wrt) if isinstance(found, Recipe) else None
    )
    if explain is not None:
        try:
            typer.echo(made.explain(explain))
        except KeyError as error:
            raise ValueError(error.args[0]) from error
    elif format is PlanFormat.json:
        plan_json = _plan_json(made, optimizer, findings)
        if compile:
            plan_json["compiled"] = compiled.to_dict() if compiled is not None else None
        typer.echo(json.dumps(plan_json, indent=2))
    else:
        typer.echo(str(made))
        if optimizer is not None:
            typer.echo(
                f"optimizer: {show_bytes(optimizer.bytes_per_device)} of "
                f"{show_bytes(optimizer.total_bytes)} on each device (exact)"
            )
        typer.echo(str(findings) if findings else findings.summary)
        if compiled is not None:
            typer.echo(f"\n{compiled}")
        elif compile:
            typer.echo("\nnot compiled: the layout has errors")
    save_to(save, made)
    unfit = compiled is not None and compiled.fits is False
    raise typer.Exit(1 if findings.errors or unfit else 0)


@app.command(
    help=f"""Check a layout: every problem at once, with its code, path, numbers and help.

{TARGETS}

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
    _, made = lay_out(target, mesh, on, strategy, rules, inputs)
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
