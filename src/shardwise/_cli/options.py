"""What the commands share: the application, their options, and the files that they write.

JAX and Flax are imported inside functions: help and completion need neither.
"""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .complete import (
    complete_devices,
    complete_optimizer,
    complete_policy,
    complete_strategy,
    complete_target,
)
from .help_text import ABOUT, ENDING, MODEL, OUTPUT, STEP, Command, Group

if TYPE_CHECKING:
    from .._compile import Compiled
    from .._layout import Layout
    from .._report import Report
    from .._search import Candidate
    from .._time import Timeline

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
        help="dp, fsdp, zero1 (optimizer state split, weights not), zero2 (gradients too), expert, "
        "sequence, tensor, pipeline, or several joined by +, such as fsdp+tensor; or best, the one "
        "with the fastest step (modelled) on these chips.",
        rich_help_panel=MODEL,
        autocompletion=complete_strategy,
    ),
]
MinBytesOption = Annotated[
    str | None,
    typer.Option(
        "--min-bytes",
        metavar="SIZE",
        help="fsdp, zero1 and zero2 split leaves of at least this size, such as 64KiB; 0 splits all. "
        "By default the strategy replicates the smallest, together under 1% of the model and 10% of what a device holds.",
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
        "no list of blocks): the name of a policy in jax.checkpoint_policies, save:q,k,v or "
        "offload:input to save or offload named activations, or none for no rematerialisation. "
        "Published shapes default to nothing_saveable.",
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
LossChunksOption = Annotated[
    int | None,
    typer.Option(
        "--loss-chunks",
        metavar="N",
        help="Compute the loss with the output head in N chunks, so that the logits never exist all "
        "at once.",
        min=1,
        rich_help_panel=STEP,
    ),
]
OffloadOption = Annotated[
    str | None,
    typer.Option(
        "--offload",
        metavar="PARTS",
        help="What is kept in the memory of the hosts between steps: optimizer, ema, both joined by "
        "a comma, or none.",
        rich_help_panel=STEP,
    ),
]
MicrobatchesOption = Annotated[
    int | None,
    typer.Option(
        "--microbatches",
        metavar="N",
        help="Into how many parts the pipeline of a Decoder splits the batch.",
        min=1,
        rich_help_panel=STEP,
    ),
]
OptimizerOption = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        help="Replace the recipe's optimizer by adamw, adam, adafactor, lion or sgd, to see what its "
        "state would take.",
        rich_help_panel=STEP,
        autocompletion=complete_optimizer,
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
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Price the step by the file that shardwise chips measure --save wrote.",
        rich_help_panel=STEP,
    ),
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="CODE:PATTERN",
        help="A finding that is intentional; may be repeated.",
        rich_help_panel=OUTPUT,
    ),
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
    path: str | None,
    result: Layout | Compiled | Timeline | Report | Candidate,
    flag: str = "--save",
) -> None:
    """Writes the file of `--save` or another option, and says so on stderr."""
    if path is None:
        return
    try:
        result.save(path)
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written: {error.strerror}") from error
    typer.echo(f"saved {path}", err=True)


def parse_allow(given: list[str]) -> dict[str, list[str]]:
    """Returns the path patterns of each code in `--allow` options."""
    allowed: dict[str, list[str]] = {}
    for text in given:
        code, colon, pattern = text.partition(":")
        if not colon or not pattern:
            raise ValueError(f"--allow {text!r}: write CODE:PATTERN, such as SW105:embed.**")
        allowed.setdefault(code, []).append(pattern)
    return allowed
