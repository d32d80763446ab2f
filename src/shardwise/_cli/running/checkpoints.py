"""The command `checkpoints`: lists them, or checks one before a restore."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..._base import show_type, tell, tell_error, tell_json
from ..help_text import MODEL
from ..laid_out import lay_out
from ..options import (
    Format,
    FormatOption,
    InputsOption,
    MinBytesOption,
    OnOption,
    RulesOption,
    StrategyOption,
    command,
)
from .train import RECIPES

if TYPE_CHECKING:
    from ..._checkpoint import Checkpoints


_PREFLIGHT = "The preflight"


@command(
    help=f"""List the checkpoints of a run, or check what restoring one would find.

{RECIPES}

The preflight reads only metadata. It reports arrays that are missing, extra or of a different shape,
arrays that would be resharded, and how many bytes each process reads (exact).

Examples:

\b
  shardwise checkpoints runs/a

\b
  shardwise checkpoints runs/a --preflight shardwise.examples.text:recipe --mesh data=4,model=2 \\
    --on cpu:8 --strategy fsdp+tensor

Exit status: 0 listed or restorable, 1 not restorable into this layout, 2 could not run."""
)
def checkpoints(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where the checkpoints are.")],
    preflight: Annotated[
        str | None,
        typer.Option(
            "--preflight",
            metavar="TARGET",
            help="Check a restore with this Recipe.",
            rich_help_panel=_PREFLIGHT,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            metavar="N",
            help="Show only this step; with --preflight, check it instead of the newest.",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="AXES",
            help="The mesh to restore onto.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    on: OnOption = "none",
    strategy: StrategyOption = None,
    min_bytes: MinBytesOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Lists checkpoints, or checks one before a restore."""
    from ..._checkpoint import Checkpoints
    from ..._nnx import Recipe

    if step is not None and step < 0:
        raise ValueError(f"--step must be a non-negative integer, got {step}")
    store = Checkpoints(directory)
    if preflight is None:
        here = None if on == "none" else on
        options = {"--mesh": mesh, "--on": here, "--strategy": strategy, "--rules": rules}
        for name, value in {**options, "--inputs": inputs}.items():
            if value is not None:
                raise ValueError(
                    f"{name} only applies to a preflight: also give --preflight TARGET, the Recipe "
                    f"to restore with"
                )
        _list(store, format, step)
        return
    if mesh is None:
        raise ValueError("--preflight needs --mesh, the mesh to restore onto")
    recipe, layout = lay_out(preflight, mesh, on, strategy, rules, inputs, min_bytes=min_bytes)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"target {preflight!r} is {show_type(recipe)}: a preflight needs a Recipe")
    found = store.preflight(recipe, layout, step=step)
    if format is Format.json:
        rows = [finding.to_dict() for finding in found.findings]
        tell_json(
            {
                "step": found.step,
                "findings": rows,
                "read_bytes": {str(k): v for k, v in found.read_bytes.items()},
                "total_bytes": found.total_bytes,
            }
        )
    else:
        tell(str(found))
    raise typer.Exit(1 if found.findings.errors else 0)


def _list(store: Checkpoints, format: Format, step: int | None) -> None:
    from ..._base import count, show_bytes, text_table

    steps = [each for each in store.steps() if step in (None, each)]
    if not steps:
        store.about(step)  # raises, and names the steps there are
    rows: list[dict[str, Any]] = []
    for step in steps:
        try:
            about = {k: v for k, v in store.about(step).items() if k != "arrays"}
            rows.append({**about, "damaged": None})
        except ValueError as error:
            rows.append({"step": step, "damaged": str(error)})
    if format is Format.json:
        tell_json(rows)
        return
    cells = []
    for row in rows:
        if row["damaged"]:
            cells.append((str(row["step"]), "damaged", "", "", "", ""))
            tell_error(f"shardwise: {row['damaged']}")
            continue
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["saved_at"]))
        size = show_bytes(row["bytes"])
        cells.append(
            (
                str(row["step"]),
                size,
                row["mesh"],
                row["devices"],
                str(row["processes"]),
                when,
            )
        )
    header = ("step", "size", "mesh", "devices", "processes", "saved")
    total = sum(row.get("bytes", 0) for row in rows)
    caption = f"{count(len(rows), 'checkpoint')} in {store.directory}: {show_bytes(total)} (exact)"
    tell(text_table(header, cells, caption))
