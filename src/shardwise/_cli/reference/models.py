"""The command `models`: the published shapes."""

from __future__ import annotations

from typing import Any

from ..._base import tell, tell_json, working
from ..options import (
    Format,
    FormatOption,
    command,
)


@command(
    help="""List the published model shapes that can be named as TARGET.

Example:

\b
  shardwise models --format json"""
)
def models(format: FormatOption = Format.text) -> None:
    """Prints the table of models."""
    with working("counting the parameters of each model"):
        rows = _models()
    if format is Format.json:
        tell_json(rows)
        return
    from ..._base import text_table

    cells = [
        (row["name"], f"{row['parameters'] / 1e9:.3f} B", str(row["layers"]), str(row["width"]))
        for row in rows
    ]
    tell(text_table(("model", "parameters", "layers", "width"), cells, right=(1, 2, 3)))


def _models() -> list[dict[str, Any]]:
    from ..._layout import layout
    from ..._mesh import mesh
    from ...models import CONFIGS
    from ..published import make_named

    rows = []
    for name, config in CONFIGS.items():
        planned = layout(make_named(name), mesh("data=1", on="none"))
        sizes = {key: getattr(config, key) for key in ("layers", "width", "hidden", "heads")}
        count = sum(leaf.size for leaf in planned.leaves)
        rest = {"kv_heads": config.key_heads, "vocab": config.vocab, "experts": config.experts}
        rows.append({"name": name, "parameters": count, **sizes, **rest})
    return rows
