"""The command `plan`: what every device holds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..._base import tell, tell_json
from ..help_text import OUTPUT
from ..laid_out import estimate_target, lay_out, plan_target, require_calibration, require_devices
from ..options import (
    TARGETS,
    AccumulateOption,
    AllowOption,
    BatchOption,
    CalibrationOption,
    CompileOption,
    Format,
    FormatOption,
    InputsOption,
    LayoutOption,
    LossChunksOption,
    MethodOption,
    MicrobatchesOption,
    MinBytesOption,
    OffloadOption,
    OnOption,
    OptimizerOption,
    OwnMeshOption,
    RematOption,
    RulesOption,
    StrategyOption,
    Target,
    command,
    parse_allow,
    require_writable,
    save_to,
)

if TYPE_CHECKING:
    from ..._check import Findings
    from ..._compile import Plan
    from ..._estimate import Estimate
    from ..._layout import Layout


@command(
    help=f"""Lay a model out on a mesh and show what every device holds.

The verdict comes first, then, if --on names chips, a bar of their memory, then every leaf with its
spec, its shard, its bytes on each device (exact) and its number of copies. Identical layers share a
row.

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

Exit status: 0 laid out, 1 the layout has errors or the compiled step does not fit, 2 could not run."""
)
def plan(
    target: Target,
    mesh: OwnMeshOption = None,
    on: OnOption = "none",
    strategy: StrategyOption = None,
    layout: LayoutOption = None,
    min_bytes: MinBytesOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    method: MethodOption = None,
    batch: BatchOption = None,
    remat: RematOption = None,
    calibration: CalibrationOption = None,
    accumulate: AccumulateOption = None,
    loss_chunks: LossChunksOption = None,
    offload: OffloadOption = None,
    microbatches: MicrobatchesOption = None,
    optimizer: OptimizerOption = None,
    compile: CompileOption = False,
    tree: Annotated[
        bool,
        typer.Option(
            "--tree",
            help="Show a tree of modules, with the share of each.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(
            "--explain",
            metavar="PATH",
            help="Only explain what decided the spec of this leaf.",
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
    allow: AllowOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Lays out a model and shows the plan."""
    from ..published import StepOptions

    require_writable(save, inputs=(target, rules, layout))
    if compile:
        require_devices(on)
    allowed = parse_allow(allow or [])
    step = StepOptions(batch, remat, accumulate, loss_chunks, offload, microbatches, optimizer)
    found, laid_out = lay_out(
        target, mesh, on, strategy, rules, inputs, step, method=method, min_bytes=min_bytes,
        saved=layout,
    )  # fmt: skip
    require_calibration(calibration, laid_out)
    planned = plan_target(
        target, found, laid_out, inputs, method, calibration, compile=compile, allow=allowed
    )
    estimated, why = None, ""
    if explain is None and not compile and not planned.findings.errors:
        estimated, why = estimate_target(found, laid_out, inputs, method, calibration)
    save_to(save, laid_out)  # before anything is printed: the reader may close the pipe early
    if explain is not None:
        _explain(laid_out, explain, format)
    elif format is Format.json:
        fields = _plan_json(planned, compile)
        if estimated is not None:
            fields["estimate"] = estimated.to_dict()
        tell_json(fields)
    else:
        _show_plan(planned, tree, estimated)
        if why:
            tell(f"\nno estimate of a step: {why}")
        if compile and planned.compiled is None:
            tell("\nnot compiled because the layout has errors")
    raise typer.Exit(0 if planned.usable else 1)


def cite(findings: Findings) -> None:
    """Says how to print the page of the first finding."""
    if findings:
        tell(f"shardwise explain {findings[0].code} explains it, and what to do")


def _show_plan(plan: Plan, tree: bool, estimated: Estimate | None) -> None:
    from ..bars import bar
    from .tree import tree_text

    layout, findings, compiled = plan.layout, plan.findings, plan.compiled
    assert layout is not None
    tell(plan.verdict)
    if compiled is not None:
        tell(dataclasses.replace(plan, compiled=None).verdict)
    if estimated is not None and estimated.fits is not True and plan.fits is not False:
        tell(f"the step {estimated.verdict.splitlines()[0]}")
    if plan.capacity is not None and not findings.errors:
        tell(bar(plan.parts, plan.capacity))
    tell("")
    tell(tree_text(layout) if tree else str(layout))
    if findings:
        tell(f"\n{findings}")
        cite(findings)
    if compiled is not None:
        tell(f"\n{compiled.details}")
    if estimated is not None:
        tell(
            f"\none step, without compiling it (shardwise compile has the last word):\n{estimated}"
        )


def _explain(layout: Layout, path: str, format: Format) -> None:
    from ..._mesh import show_spec

    try:
        leaf = layout[path]
    except KeyError as error:
        hint = "" if ";" in error.args[0] else f"; it has {layout.leaves[0].path}, for example"
        raise ValueError(f"{error.args[0]}{hint if layout.leaves else ''}") from error
    if format is Format.text:
        tell(layout.explain(path))
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


def _plan_json(plan: Plan, compile: bool) -> dict[str, Any]:
    from ..._mesh import show_mesh

    layout = plan.layout
    assert layout is not None
    uncompiled = dataclasses.replace(plan, compiled=None)
    fields = {
        "verdict": plan.verdict,
        "fits": plan.fits,
        "mesh": plan.mesh,
        "axes": show_mesh(layout.mesh),
        "chips": uncompiled.chips or None,
        "capacity_bytes": uncompiled.capacity,
        "total_bytes": layout.total_bytes,
        "bytes_per_device": layout.bytes_per_device,
        "optimizer_bytes_per_device": plan.optimizer_bytes,
        "batch_bytes_per_device": plan.batch_bytes,
        "host_bytes_per_device": plan.host_bytes,
        "leaves": [leaf.to_dict() for leaf in layout.leaves],
        "findings": [finding.to_dict() for finding in plan.findings],
    }
    if compile:
        fields["compiled"] = plan.compiled.to_dict() if plan.compiled is not None else None
    return fields
