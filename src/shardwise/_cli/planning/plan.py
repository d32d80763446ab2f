"""The command `plan`: what every device holds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..._base import tell, tell_json
from ..help_text import OUTPUT
from ..options import (
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

if TYPE_CHECKING:
    from ..._check import Findings
    from ..._compile import Plan
    from ..._layout import Layout


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


def cite(findings: Findings) -> None:
    """Says where the page of the first finding is."""
    if findings:
        tell(f"shardwise explain {findings[0].code} says what it is about, and what to do")


def _show_plan(known: Plan, tree: bool) -> None:
    from ..bars import bar
    from ..tree import tree_text

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
        cite(findings)
    if compiled is not None:
        tell(f"\n{compiled.details}")


def _explain(made: Layout, path: str, format: Format) -> None:
    from ..._mesh import show_spec

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
    tell_json({**leaf.to_dict(), "considered": considered})


def _plan_json(known: Plan, compile: bool) -> dict[str, Any]:
    from ..._mesh import show_mesh

    made = known.layout
    assert made is not None
    alone = dataclasses.replace(known, compiled=None)
    plan = {
        "verdict": known.verdict,
        "fits": known.fits,
        "mesh": known.mesh,
        "axes": show_mesh(made.mesh),
        "chips": alone.chips or None,
        "capacity_bytes": alone.capacity,
        "total_bytes": made.total_bytes,
        "bytes_per_device": made.bytes_per_device,
        "optimizer_bytes_per_device": known.optimizer_bytes,
        "batch_bytes_per_device": known.batch_bytes,
        "leaves": [leaf.to_dict() for leaf in made.leaves],
        "findings": [finding.to_dict() for finding in known.findings],
    }
    if compile:
        plan["compiled"] = known.compiled.to_dict() if known.compiled is not None else None
    return plan
