"""Memory of one device as a bar against what it can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.text import Text

from ._compiled import Memory
from ._layout import Layout
from ._table import show_bytes
from ._terminal import columns

_STYLES = {"█": "blue", "▓": "cyan", "▒": "magenta", "░": "yellow", "▚": "white"}
_FREE, _EDGE = "·", "▏"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One part of a device's memory.

    Attributes:
        name: what it is.
        bytes: how large.
        label: how that is known: `exact` or `compiled`.
        glyph: what it is drawn with, told apart without colours too.
    """

    name: str
    bytes: int
    label: str
    glyph: str


def layout_bar(layout: Layout, optimizer: Layout | None, capacity: int) -> Text:
    """Returns the bar of what a plan alone knows: parameters, and the optimizer of a recipe."""
    parts = [Part("parameters", layout.bytes_per_device, "exact", "█")]
    if optimizer is not None:
        parts.append(Part("optimizer", optimizer.bytes_per_device, "exact", "▓"))
    return bar(parts, capacity)


def memory_bar(memory: Memory) -> Text:
    """Returns the bar of a compiled step."""
    parts = [
        Part("parameters", memory.parameters, "exact", "█"),
        Part("optimizer", memory.optimizer, "exact", "▓"),
        Part("batch", memory.batch, "exact", "▒"),
        Part("temporaries", memory.temporaries, "compiled", "░"),
    ]
    # Outputs that take no argument's place, and the padding of small arrays on a TPU.
    rest = memory.peak - sum(part.bytes for part in parts)
    if rest > 0:
        parts.append(Part("outputs and padding", rest, "compiled", "▚"))
    return bar(parts, memory.capacity)


def bar(parts: Sequence[Part], capacity: int | None) -> Text:
    """Returns a stacked bar with its legend; where it does not fit, an edge marks the capacity."""
    used = sum(part.bytes for part in parts)
    scale = max(used, capacity or 0, 1)
    told = f"  {used / capacity:.1%} of {show_bytes(capacity)}" if capacity else ""
    width = max(10, min(72, columns() - 2 - len(told)))
    drawn, end = Text("  "), 0
    for part in parts:
        # By where a part ends, so that the parts together are as long as their sum.
        begin, end = end, end + part.bytes
        cells = round(end / scale * width) - round(begin / scale * width)
        drawn.append(part.glyph * cells, _STYLES[part.glyph])
    drawn.append(_FREE * (width - (len(drawn) - 2)), "dim")
    if capacity and used > capacity:
        at = 2 + min(width - 1, round(capacity / scale * width))
        drawn = Text.assemble(drawn[:at], (_EDGE, "bold red"), drawn[at + 1 :])
    drawn.append(told)
    return Text("\n").join([drawn, *_legend(parts, used, capacity)])


def _legend(parts: Sequence[Part], used: int, capacity: int | None) -> list[Text]:
    entries = []
    for part in parts:
        if part.bytes:
            mark = (part.glyph, _STYLES[part.glyph])
            told = (f" ({part.label})", "dim")
            entries.append(Text.assemble(mark, f" {part.name} {show_bytes(part.bytes)}", told))
    if capacity and used <= capacity:
        entries.append(Text.assemble((_FREE, "dim"), f" free {show_bytes(capacity - used)}"))
    elif capacity:
        over = f" capacity, {show_bytes(used - capacity)} too little"
        entries.append(Text.assemble((_EDGE, "bold red"), over))
    lines = [Text("  ")]
    for entry in entries:
        if len(lines[-1]) > 2 and len(lines[-1]) + 2 + len(entry) > max(columns(), 40):
            lines.append(Text("  "))
        lines[-1].append("  " if len(lines[-1]) > 2 else "")
        lines[-1].append_text(entry)
    return lines
