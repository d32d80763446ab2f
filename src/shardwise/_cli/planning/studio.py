"""The command `studio`: one local page to decide on a layout with."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..._base import claim_stdout, tell
from ..complete import complete_devices
from ..help_text import MODEL, OUTPUT, STEP
from ..options import (
    TARGETS,
    AccumulateOption,
    BatchOption,
    CalibrationOption,
    InputsOption,
    LossChunksOption,
    MethodOption,
    MicrobatchesOption,
    MinBytesOption,
    OffloadOption,
    OptimizerOption,
    RematOption,
    RulesOption,
    StrategyOption,
    Target,
    command,
)


@command(
    help=f"""Open a local page that shows what a layout takes, and answers "and if …?" at once.

Change chips, mesh, strategy, rules, batch, remat and optimizer: bytes and findings follow while a
slider moves (exact), seconds and collectives within a second or two (modelled), and the chips' own
compiler runs on request (compiled). A search draws its points while it runs. Every state is a link
and a command line. The page is served to browsers on this machine only, under an address with a
token, until Ctrl-C or until no page was open for a while. It needs "shardwise[studio]".

{TARGETS}

Examples:

\b
  shardwise studio llama3-8b --on h100:2x8

\b
  shardwise studio train.py:recipe --mesh data=4,model=2 --on h100:1x8 --strategy fsdp+tensor \\
    --no-open

Exit status: 0 no page was open for long, 2 could not run, 130 interrupted."""
)
def studio(
    target: Target,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="AXES",
            help="Axes and sizes to begin with, such as data=2,model=4; by default all devices on data.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            "--on",
            metavar="CHIPS",
            help="Chips to begin with, which need not be present, such as h100:2x8 or v5p:4x8x8; or "
            "none, for arithmetic only.",
            rich_help_panel=MODEL,
            autocompletion=complete_devices,
        ),
    ] = "h100:1x8",
    strategy: StrategyOption = None,
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
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="CHIP=DOLLARS",
            help="Dollars for an hour of one chip, such as h100=2.50: a search then shows the cost "
            "of a step; may be repeated.",
            rich_help_panel=STEP,
        ),
    ] = None,
    open_browser: Annotated[
        bool,
        typer.Option("--open/--no-open", help="Whether to open a browser.", rich_help_panel=OUTPUT),
    ] = True,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            metavar="N",
            help="The port; by default any that is free.",
            min=0,
            max=65535,
            rich_help_panel=OUTPUT,
        ),
    ] = 0,
    idle: Annotated[
        float,
        typer.Option(
            "--idle",
            metavar="MINUTES",
            help="Stop when no page was open for so long.",
            min=0.05,
            rich_help_panel=OUTPUT,
        ),
    ] = 30,
) -> None:
    """Opens the studio."""
    from ..._studio import open_studio

    source = _source(
        target, mesh, on, strategy, min_bytes, rules, inputs, method, calibration, price,
        batch=batch, remat=remat, accumulate=accumulate, loss_chunks=loss_chunks, offload=offload,
        microbatches=microbatches, optimizer=optimizer,
    )  # fmt: skip

    def announce(address: str) -> None:
        tell(address)
        typer.echo("for browsers on this machine; Ctrl-C stops it", err=True)

    why = open_studio(source, tell=announce, browse=open_browser, port=port, idle_minutes=idle)
    typer.echo(f"stopped: {why}", err=True)


def _source(
    target: str,
    mesh: str | None,
    on: str,
    strategy: str | None,
    min_bytes: str | None,
    rules: str | None,
    inputs: str | None,
    method: str | None,
    calibration: str | None,
    price: list[str] | None,
    **step: Any,
) -> Any:
    """Returns what the options say a studio is about; loads the target, once."""
    import jax

    from ..._mesh import show_spec
    from ..._studio import Source, State, first_mesh, parse_axes, parse_query
    from ...models import CONFIGS
    from ..published import StepOptions, is_named, load_step
    from ..rules_file import read_rules
    from ..target import load_target, parse_inputs
    from .search import prices_of

    if on == "here" or on.startswith("cpu"):
        raise ValueError(
            f"--on {on}: a studio moves between chips that need not be present: name some, such as "
            f"--on h100:1x8 or --on v5p:4x8x8, or none for arithmetic only"
        )
    claim_stdout()
    jax.config.update("jax_platforms", "cpu")
    file = read_rules(rules) if rules is not None else None
    loaded = None if is_named(target) else load_target(target)
    named = strategy or (file.strategy if file is not None else None)
    if file is not None and file.min_bytes is not None:
        min_bytes = min_bytes or str(file.min_bytes)
    start = State(
        target,
        on,
        parse_axes(mesh) if mesh is not None else first_mesh(on),
        # A model that is given nothing would be replicated: not what anybody asks about first.
        named or ("fsdp" if loaded is None and file is None else ""),
        tuple((p, show_spec(s)) for rule in (file.rules if file else ()) for p, s in rule.items()),
        min_bytes=min_bytes or "",
        **{name: value for name, value in step.items() if value is not None},
    )
    words = [("--inputs", inputs), ("--method", method)]

    def found(state: State) -> Any:
        names = (
            "batch",
            "remat",
            "accumulate",
            "loss_chunks",
            "offload",
            "microbatches",
            "optimizer",
        )
        given = StepOptions(**{name: getattr(state, name) or None for name in names})
        own = None if is_named(state.target) else loaded
        return load_step(state.target, given, devices=state.devices, loaded=own)

    others = [name for name in CONFIGS if name != target]
    source = Source(
        start,
        (target, *others),
        found,
        inputs=parse_inputs(inputs) if inputs is not None else None,
        method=method,
        logical=file.logical if file is not None else None,
        options=tuple(word for option, value in words if value for word in (option, value)),
        calibration=calibration,
        prices=prices_of(price),
    )
    # What does not exist is said before a page opens.
    parse_query(start.query)
    source.lay_out(start)
    return source
