"""The command `search`: which mesh, strategy, remat and accumulation to use."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..._base import claim_stdout, show_type, tell, tell_json, working
from ..complete import complete_devices
from ..help_text import MODEL, OUTPUT, STEP
from ..options import (
    AccumulateOption,
    BatchOption,
    CalibrationOption,
    Format,
    FormatOption,
    LossChunksOption,
    OffloadOption,
    RematOption,
    StrategyOption,
    Target,
    command,
    require_writable,
    save_to,
)
from .going_on import summary_of

if TYPE_CHECKING:
    from ..._nnx import Recipe

_SEARCH = "The search"


@command(
    help="""Find the fastest layout of a training step on some chips, which need not be present.

Arithmetic drops the layouts that cannot fit, estimates of the partitioned program rank the others,
and the chips' own compiler proves the best few. What you fix (--mesh, --strategy, --axis, --remat,
--accumulate, --loss-chunks, --offload) stays as it is; everything else is searched, chunks and
offloading where a step does not fit without. The global batch is never changed, unless
--batch-per-device leaves it open. Each new best goes to stderr; then come the table, the fastest, the smallest and, with --price, the
cheapest layout, and the commands to go on with. If nothing fits, the search looks for the least that
would.

TARGET is path/to/file.py:name or package.module:name of a Recipe, or a published shape (see shardwise
models).

Examples:

\b
  shardwise search shardwise.examples.text:recipe --on h100:1x2 --compile 0

\b
  shardwise search shardwise.examples.text:recipe --on h100:1x2 --on v5e:2x2 \\
    --strategy fsdp --compile 0 --price h100=2.99 --price v5e=1.20

\b
  shardwise search llama3-70b --on v5p:4x8x8 --batch 256x4096 --save layout.json --report page.html

\b
  shardwise search llama3-8b --on h100 --batch 64x4096 --strategy fsdp --compile 1

The last one asks how many chips it takes. Results of the compiler are cached. Ctrl-C and --limit
print what is known by then.

Exit status: 0 something fits, 1 nothing fits, 2 could not run, 130 interrupted.""",
)
def search(
    target: Target,
    on: Annotated[
        list[str],
        typer.Option(
            "--on",
            metavar="CHIPS",
            help="Chips, such as v5p:4x8x8 or h100:1x8; or a chip alone, such as v5p, to ask how "
            "many. May be repeated.",
            rich_help_panel=MODEL,
            autocompletion=complete_devices,
        ),
    ],
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="AXES",
            help="Only this mesh: sizes of pipe, data, fsdp, expert, sequence and model, such as "
            "fsdp=8,model=4.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    axis: Annotated[
        list[str] | None,
        typer.Option(
            "--axis",
            metavar="NAME=SIZE",
            help="Only meshes with this size of one axis, such as model=8. May be repeated.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    strategy: StrategyOption = None,
    batch: BatchOption = None,
    remat: RematOption = None,
    accumulate: AccumulateOption = None,
    loss_chunks: LossChunksOption = None,
    offload: OffloadOption = None,
    batch_per_device: Annotated[
        str | None,
        typer.Option(
            "--batch-per-device",
            metavar="N",
            help="Samples for each device, instead of the recipe's global batch; or free, for the "
            "number with the most samples per second that fits.",
            rich_help_panel=STEP,
        ),
    ] = None,
    compile: Annotated[
        int,
        typer.Option(
            "--compile",
            metavar="N",
            help="Prove this many of the best with the chips' compiler; 0 for estimates only.",
            min=0,
            rich_help_panel=_SEARCH,
        ),
    ] = 3,
    limit: Annotated[
        float | None,
        typer.Option(
            "--limit",
            metavar="SECONDS",
            help="Stop after this time, with what is known by then.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="CHIP=DOLLARS",
            help="The price of one chip for an hour, such as v5p=4.20. May be repeated.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    calibration: CalibrationOption = None,
    save: Annotated[
        str | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Write the best layout and its step as a lockfile, which train --layout takes.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Draw what was found as an HTML page.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Searches layouts and shows what was found."""
    from ..._search import search as search_layouts

    require_writable(save, inputs=(target, calibration))
    require_writable(report, "--report", inputs=(target, calibration))
    if limit is not None and not limit > 0:
        raise ValueError(f"--limit must be positive, got {limit:g}")
    chips = _chips(on)
    axes = {name: _integer(name, size) for name, size in _pairs(axis, "--axis", "model=8")}
    prices = prices_of(price)
    recipe = _recipe(target, chips, batch, remat)
    with _Progress() as progress, working(f"searching layouts of {target}"):
        found = search_layouts(
            recipe,
            chips,
            mesh=mesh,
            strategy=None if strategy == "best" else strategy,
            axes=axes,
            remat="free" if remat is None else None if remat == "none" else remat,
            accumulate=accumulate,
            loss_chunks=loss_chunks,
            offload="" if offload == "none" else offload,
            batch_per_device=_per_device(batch_per_device),
            compile=compile,
            limit=limit,
            prices=prices,
            calibration=calibration,
            progress=progress,
        )
    if not found.candidates:
        if found.stopped == "interrupted":
            raise KeyboardInterrupt
        raise ValueError(
            "; ".join(filter(None, ["nothing was priced", found.stopped, *found.notes]))
        )
    fits = any(candidate.fits for candidate in found.candidates)
    # Before anything is printed: the reader may close the pipe early.
    if fits:
        save_to(save, found.best)
    elif save is not None:
        typer.echo(f"{save} was not written: nothing fits", err=True)
    if report is not None:
        save_to(report, found.report(), "--report")
    if format is Format.json:
        tell_json(found.to_dict())
    else:
        tell(str(found))
        tell("\n".join(summary_of(found, target, batch, save)))
    raise typer.Exit(130 if progress.interrupted else 0 if fits else 1)


class _Progress:
    """Prints each new best to stderr, and ends the search after a SIGINT; a second one ends all.

    Between candidates, since JAX swallows an exception that is raised inside its callbacks. A
    compiler is a process, which is waited for: that can be interrupted.
    """

    def __init__(self) -> None:
        self.last, self.interrupted, self.compiling = "", False, False
        self.before: Any = signal.getsignal(signal.SIGINT)

    def __call__(self, line: str) -> None:
        self.compiling = line.startswith("compiling ")
        best = line if self.compiling else line.partition(": ")[2]
        if best != self.last:
            typer.echo(line, err=True)
        self.last = best
        if self.interrupted:
            raise KeyboardInterrupt

    def __enter__(self) -> _Progress:
        if self.before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        # After an interrupt it stays: a thread that still has to look at the signal would end us.
        if not self.interrupted and self.before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self.before)

    def _stop(self, number: int, frame: Any) -> None:
        if self.interrupted and callable(self.before):
            self.before(number, frame)
        self.interrupted = True
        if self.compiling:
            raise KeyboardInterrupt


def _chips(given: list[str]) -> list[str]:
    """Returns the chips as they are given, if a search can price them."""
    for on in given:
        if on in ("here", "none") or on.startswith("cpu"):
            raise ValueError(
                f"--on {on} has no known speed: name chips, such as --on v5p:4x8x8 or --on h100:1x8"
            )
    return given


def _recipe(target: str, chips: list[str], batch: str | None, remat: str | None) -> Recipe:
    """Returns the recipe that a target names; its remat is left to the search."""
    import dataclasses

    import jax

    from ..._chips import parse_chips
    from ..._nnx import Recipe
    from ..published import StepOptions, is_named, load_step

    claim_stdout()
    jax.config.update("jax_platforms", "cpu")
    devices = [parse_chips(on).device_count for on in chips if ":" in on]
    if is_named(target) and batch is None and len(devices) < len(chips):
        raise ValueError(
            f"--on {next(on for on in chips if ':' not in on)} asks how many chips {target} takes, "
            f"which depends on the batch: give one, such as --batch 256x4096"
        )
    found = load_step(target, StepOptions(batch, remat), devices=max(devices, default=1))
    if not isinstance(found, Recipe):
        raise ValueError(
            f"target {target!r} is {show_type(found)}: a search needs a Recipe, which has a loss, "
            f"an optimizer and a batch, or a published shape such as llama3-8b"
        )
    if remat is not None and not is_named(target):
        # What the option says replaces what the recipe says.
        found = dataclasses.replace(found, remat=None)
    return found


def _per_device(given: str | None) -> Any:
    if given in (None, "free"):
        return given
    if not given.isdecimal() or not 0 < int(given[:7]) < 10**6:
        raise ValueError(f"--batch-per-device {given!r}: give a number of samples, or free")
    return int(given)


def _pairs(given: list[str] | None, option: str, example: str) -> list[tuple[str, str]]:
    found = []
    for text in given or []:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ValueError(f"{option} {text!r}: write {example}")
        found.append((name.strip(), value.strip()))
    if len({name for name, _ in found}) < len(found):
        raise ValueError(f"{option} is given twice for one name: give it once")
    return found


def _integer(name: str, size: str) -> int:
    if not size.isdecimal() or not 0 < len(size) < 7 or int(size) < 1:
        raise ValueError(f"--axis {name}={size}: the size must be a positive integer")
    return int(size)


def prices_of(given: list[str] | None) -> dict[str, float]:
    """Returns the dollars in `--price` options, by the name of a chip."""
    return {name: _dollars(name, cost) for name, cost in _pairs(given, "--price", "v5p=4.20")}


def _dollars(name: str, cost: str) -> float:
    try:
        found = float(cost)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1e6:
        raise ValueError(
            f"--price {name}={cost}: give dollars for an hour of one chip, such as 4.20"
        )
    return found
