"""The commands that need no devices: `plan` and `check`."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._cli_help import OUTPUT
from ._cli_options import (
    TARGETS,
    BatchOption,
    CompileOption,
    Format,
    FormatOption,
    InputsOption,
    MeshOption,
    MethodOption,
    MinBytesOption,
    OnOption,
    RematOption,
    RulesOption,
    StrategyOption,
    Target,
    command,
    lay_out,
    plan_target,
    require_devices,
    require_writable,
    save_to,
)
from ._terminal import tell, tell_json

if TYPE_CHECKING:
    from ._findings import Findings
    from ._layout import Layout
    from ._plan import Plan


class CheckFormat(enum.StrEnum):
    """How findings are printed."""

    text = "text"
    concise = "concise"
    json = "json"
    github = "github"


@command(
    help=f"""Lay a model out on a mesh and show what every device holds.

The verdict comes first, then, on chips with a name, a bar of their memory, then every leaf: its
spec, its shard, its bytes on each device (exact), in how many copies. Layers alike are one row.

{TARGETS}

Examples:

\b
  shardwise plan shardwise.examples.decoder:make --mesh data=2,model=4 --strategy fsdp+tensor

\b
  shardwise plan llama3-8b --mesh data=64 --on h100:8x8 --strategy fsdp --tree

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
    min_bytes: MinBytesOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    method: MethodOption = None,
    batch: BatchOption = None,
    remat: RematOption = None,
    compile: CompileOption = False,
    tree: Annotated[
        bool,
        typer.Option(
            "--tree",
            help="Show it as a tree of modules, with each one's share.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(
            "--explain",
            metavar="PATH",
            help="Say who decided this leaf's spec, instead.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    save: Annotated[
        str | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Write the layout as a lockfile.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Lays a model out and shows it."""
    require_writable(save, inputs=(target, rules))
    if compile:
        require_devices(on)
    found, made = lay_out(
        target, mesh, on, strategy, rules, inputs, batch, remat, method=method, min_bytes=min_bytes
    )
    known = plan_target(target, found, made, inputs, method, compile=compile)
    save_to(save, made)  # before anything is printed: whoever reads that may leave early
    if explain is not None:
        _explain(made, explain, format)
    elif format is Format.json:
        tell_json(_plan_json(known, compile))
    else:
        _show_plan(known, tree)
        if compile and known.compiled is None:
            tell("\nnot compiled: the layout has errors")
    raise typer.Exit(0 if known.usable else 1)


@command(
    help=f"""Check a layout: every problem at once, with its code, path, numbers and help.

The page of a code is printed by shardwise explain SW104.

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
    min_bytes: MinBytesOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    method: MethodOption = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="CODE:PATTERN",
            help="A finding that is intentional; may be given several times.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    format: Annotated[
        CheckFormat,
        typer.Option(
            "--format",
            help="How to print findings: in full, one line each, as JSON "
            "(docs/reference/json.md), or as annotations of GitHub Actions.",
            rich_help_panel=OUTPUT,
        ),
    ] = CheckFormat.text,
) -> None:
    """Checks a layout and prints its findings."""
    from ._check import check as check_layout

    allowed = _parse_allow(allow or [])
    _, made = lay_out(target, mesh, on, strategy, rules, inputs, method=method, min_bytes=min_bytes)
    findings = check_layout(made, allow=allowed)
    match format:
        case CheckFormat.json:
            tell(findings.to_json())
        case CheckFormat.concise:
            for finding in findings:
                tell(finding.concise)
        case CheckFormat.github:
            for finding in findings:
                tell(finding.github)
        case CheckFormat.text:
            tell(str(findings))
            _cite(findings)
    raise typer.Exit(1 if findings else 0)


def _cite(findings: Findings) -> None:
    if findings:
        tell(f"shardwise explain {findings[0].code} says what it is about, and what to do")


def _parse_allow(given: list[str]) -> dict[str, list[str]]:
    allowed: dict[str, list[str]] = {}
    for text in given:
        code, colon, pattern = text.partition(":")
        if not colon or not pattern:
            raise ValueError(f"--allow {text!r}: write CODE:PATTERN, such as SW105:embed.**")
        allowed.setdefault(code, []).append(pattern)
    return allowed


def _show_plan(known: Plan, tree: bool) -> None:
    from ._cli_bars import bar
    from ._cli_tree import tree_text

    made, findings, compiled = known.layout, known.findings, known.compiled
    assert made is not None
    tell(known.verdict)
    if compiled is not None:
        tell(dataclasses.replace(known, compiled=None).verdict)
    if known.capacity is not None and not findings.errors:
        tell(bar(known.parts, known.capacity))
    tell("")
    tell(tree_text(made) if tree else str(made))
    if findings:
        tell(f"\n{findings}")
        _cite(findings)
    if compiled is not None:
        tell(f"\n{compiled.details}")


def _explain(made: Layout, path: str, format: Format) -> None:
    from ._spec import show_spec

    try:
        leaf = made[path]
    except KeyError as error:
        hint = "" if ";" in error.args[0] else f"; it has {made.leaves[0].path}, for example"
        raise ValueError(f"{error.args[0]}{hint if made.leaves else ''}") from error
    if format is Format.text:
        tell(made.explain(path))
        return
    considered = [
        {
            "source": opinion.source,
            "spec": show_spec(opinion.spec) if opinion.spec is not None else None,
            "reason": opinion.reason,
        }
        for opinion in leaf.trail
    ]
    tell_json({**_leaf_json(leaf), "considered": considered})


def _leaf_json(leaf: Any) -> dict[str, Any]:
    from ._spec import show_spec

    return {
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


def _plan_json(known: Plan, compile: bool) -> dict[str, Any]:
    from ._mesh import show_mesh

    made = known.layout
    assert made is not None
    alone = dataclasses.replace(known, compiled=None)
    plan = {
        "verdict": known.verdict,
        "fits": known.fits,
        "mesh": known.mesh,
        "axes": show_mesh(made.mesh),
        "target": alone.target or None,
        "capacity_bytes": alone.capacity,
        "total_bytes": made.total_bytes,
        "bytes_per_device": made.bytes_per_device,
        "optimizer_bytes_per_device": known.optimizer_bytes,
        "batch_bytes_per_device": known.batch_bytes,
        "leaves": [_leaf_json(leaf) for leaf in made.leaves],
        "findings": [finding.to_dict() for finding in known.findings],
    }
    if compile:
        plan["compiled"] = known.compiled.to_dict() if known.compiled is not None else None
    return plan
