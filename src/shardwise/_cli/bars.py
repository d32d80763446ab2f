"""The memory of one device as a bar against its capacity."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from .._base import columns, show_bytes
from .._compile import Part

# Distinguishable without colours too.
_GLYPHS = {
    "parameters": ("█", "blue"),
    "optimizer": ("▓", "cyan"),
    "batch": ("▒", "magenta"),
    "temporaries": ("░", "yellow"),
    "outputs and padding": ("▚", "white"),
}
_FREE, _EDGE = "·", "▏"


def bar(parts: Sequence[Part], capacity: int | None) -> Text:
    """Returns a stacked bar with its legend; if it does not fit, an edge marks the capacity."""
    used = sum(part.bytes for part in parts)
    scale = max(used, capacity or 0, 1)
    share = f"  {used / capacity:.1%} of {show_bytes(capacity)}" if capacity else ""
    width = max(10, min(72, columns() - 2 - len(share)))
    drawn, end = Text("  "), 0
    for part in parts:
        # Rounding where parts end, not their lengths, keeps the total length exact.
        begin, end = end, end + part.bytes
        cells = round(end / scale * width) - round(begin / scale * width)
        glyph, style = _GLYPHS[part.name]
        drawn.append(glyph * cells, style)
    drawn.append(_FREE * (width - (len(drawn) - 2)), "dim")
    if capacity and used > capacity:
        at = 2 + min(width - 1, round(capacity / scale * width))
        drawn = Text.assemble(drawn[:at], (_EDGE, "bold red"), drawn[at + 1 :])
    drawn.append(share)
    return Text("\n").join([drawn, *_legend(parts, used, capacity)])


def _legend(parts: Sequence[Part], used: int, capacity: int | None) -> list[Text]:
    entries = []
    for part in parts:
        if part.bytes:
            mark = _GLYPHS[part.name]
            label = (f" ({part.label})", "dim")
            entries.append(Text.assemble(mark, f" {part.name} {show_bytes(part.bytes)}", label))
    if capacity and used <= capacity:
        entries.append(Text.assemble((_FREE, "dim"), f" {show_bytes(capacity - used)} to spare"))
    elif capacity:
        over = f" capacity, {show_bytes(used - capacity)} too much"
        entries.append(Text.assemble((_EDGE, "bold red"), over))
    lines = [Text("  ")]
    for entry in entries:
        if len(lines[-1]) > 2 and len(lines[-1]) + 2 + len(entry) > max(columns(), 40):
            lines.append(Text("  "))
        lines[-1].append("  " if len(lines[-1]) > 2 else "")
        lines[-1].append_text(entry)
    return lines
