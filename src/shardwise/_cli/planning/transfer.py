"""The command `transfer`: what moving a model from one layout to another sends and needs."""

from __future__ import annotations

from typing import Annotated

import typer

from ..._base import parse_bytes, tell, tell_json
from ..options import Format, FormatOption, command


@command(
    help="""Plan a move between two layouts of one model: the bytes that devices send each other,
over which axes, and the memory that it needs meanwhile.

OLD and NEW are layouts, as plan and search save them with --save. They may be on different
meshes; devices are taken to be the same, in the order of the mesh. In Python,
sw.shard(model, layout, limit=..., donate=True) moves a model as planned.

Examples:

\b
  shardwise transfer trainer.json sampler.json
  shardwise transfer trainer.json sampler.json --limit 60GiB --format json

Exit status: 0 planned, 1 needs more than the limit, 2 could not run."""
)
def transfer(
    old: Annotated[str, typer.Argument(metavar="OLD", help="The layout that the model has.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The layout that it is to have.")],
    limit: Annotated[
        str | None,
        typer.Option(
            "--limit", metavar="BYTES", help="What a device may hold at most, such as 60GiB."
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="The old arrays stay, as the trainer's do.")
    ] = False,
    format: FormatOption = Format.text,
) -> None:
    """Prints the plan."""
    from ..._layout import load_layout
    from ..._place import TransferTooLarge, transfer

    try:
        most = parse_bytes(limit) if limit is not None else None
    except ValueError as error:
        raise ValueError(f"--limit: {error}") from None
    try:
        plan = transfer(load_layout(old), load_layout(new), limit=most, keep=keep)
    except TransferTooLarge as error:
        tell(f"does not fit: {error}")
        raise typer.Exit(1) from error
    if format is Format.json:
        tell_json(plan.to_dict())
    else:
        tell(str(plan))
