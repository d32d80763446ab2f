"""The command `compile`: the real step, compiled by the real compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..._base import tell, tell_json, working
from ..help_text import OUTPUT
from ..laid_out import compile_target, lay_out, require_calibration, require_devices
from ..options import (
    TARGETS,
    AccumulateOption,
    BatchOption,
    CalibrationOption,
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
    require_writable,
    save_to,
)

if TYPE_CHECKING:
    from ..._layout import Layout


@command(
    name="compile",
    help=f"""Compile the training step with the real compiler of chips that need not be present.

The verdict comes first: whether it fits, how much memory is left, and how long a step takes. Then
come the memory of one device, drawn against its capacity, the collectives by axis with the lines that
caused them, the time by part, module and line, and the findings. For a model that is not a recipe, the forward pass is compiled, and --inputs gives its
arguments.

{TARGETS}

Examples:

\b
  shardwise compile shardwise.examples.decoder:make --mesh data=2,model=4 --on v5e:2x4 \\
    --strategy fsdp+tensor --inputs "int32[8,128]"

\b
  shardwise compile train.py:recipe --mesh data=4 --on h100:1x4 --strategy fsdp --batch 64 \\
    --save compiled.json

\b
  shardwise compile train.py:recipe --mesh data=8 --on cpu:8 --strategy fsdp --format json

Large models take longer: llama3-8b on 64 H100s half a minute, llama3-70b on 256 v5p chips a minute.
Results are cached, so the same command answers at once the next time.

Exit status: 0 fits, 1 does not fit, 2 could not run.""",
)
def compile_command(
    target: Target,
    mesh: OwnMeshOption = None,
    on: OnOption = "here",
    strategy: StrategyOption = None,
    layout: LayoutOption = None,
    min_bytes: MinBytesOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    method: MethodOption = None,
    batch: BatchOption = None,
    remat: RematOption = None,
    accumulate: AccumulateOption = None,
    loss_chunks: LossChunksOption = None,
    offload: OffloadOption = None,
    microbatches: MicrobatchesOption = None,
    optimizer: OptimizerOption = None,
    calibration: CalibrationOption = None,
    save: Annotated[
        str | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Write the result as JSON, to compare with later.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write a timeline of the step (modelled), which Perfetto opens.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Compiles a step and shows what it costs."""
    from ..._compile import step_machine
    from ..published import StepOptions

    require_devices(on)
    require_writable(save, inputs=(target, rules, layout))
    require_writable(trace, "--trace", inputs=(target, rules, layout))
    step = StepOptions(batch, remat, accumulate, loss_chunks, offload, microbatches, optimizer)
    found, laid_out = lay_out(
        target, mesh, on, strategy, rules, inputs, step, method=method, min_bytes=min_bytes,
        saved=layout,
    )  # fmt: skip
    if trace is not None and step_machine(laid_out.mesh) is None:
        raise ValueError(
            f"--trace needs chips whose step times are modelled, GPUs or TPUs, not {on!r}"
        )
    require_calibration(calibration, laid_out)
    compiled = compile_target(target, found, laid_out, inputs, method, calibration)
    save_to(save, compiled)  # before anything is printed: the reader may close the pipe early
    if trace is not None:
        save_to(trace, compiled.timeline(), "--trace")
    if format is Format.json:
        tell_json(compiled.to_dict())
    else:
        from ..bars import bar

        tell(compiled.verdict)
        if compiled.time is not None:
            tell(compiled.time.verdict)
        if compiled.fits is False and strategy is None and rules is None and layout is None:
            proposed = _propose_strategy(target, found, laid_out)
            if proposed:
                tell(proposed)
        if compiled.memory is not None:
            tell(bar(compiled.memory.parts, compiled.memory.capacity))
        tell(f"\n{compiled.details}")
    raise typer.Exit(1 if compiled.fits is False else 0)


def _propose_strategy(target: str, found: Any, layout: Layout) -> str:
    """Returns a line about the strategy that would fit on this mesh, or an empty text."""
    from ..._base import show_bytes
    from ..._mesh import chips_of
    from ..._nnx import Recipe
    from ..._search import rank_strategies

    if chips_of(layout.mesh) is None or not isinstance(found, Recipe):
        return ""
    try:
        with working("looking for a strategy that fits"):
            name, _, estimate = rank_strategies(found, layout.mesh)[0]
    except ValueError:
        return ""
    if estimate.fits is False:
        return (
            f"help: no strategy fits on this mesh; shardwise search {target} --on "
            f"{estimate.chips} also tries other meshes"
        )
    fits = "would fit" if estimate.fits else "may fit"
    return (
        f"help: no strategy was given, so everything is replicated; --strategy {name} {fits}: "
        f"about {show_bytes(estimate.peak_bytes)} of {show_bytes(estimate.capacity)} (modelled)"
    )
