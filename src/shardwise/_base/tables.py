"""Numbers with units, and tables as text and as HTML."""

from __future__ import annotations

import html
import io
from collections.abc import Container, Iterable, Sequence

from .text import visible

Row = tuple[str, ...]


def show_bytes(count: float) -> str:
    """Returns a byte count in binary units: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def show_seconds(seconds: float) -> str:
    """Returns a duration in the unit that suits it: `350 µs`, `824 ms`, `11.2 s`, `3 min 20 s`."""
    if seconds >= 100:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    if seconds >= 0.9995:
        return f"{_digits(seconds)} s"
    if seconds >= 0.9995e-3:
        return f"{_digits(seconds * 1e3)} ms"
    return f"{_digits(seconds * 1e6)} µs"


def show_flops(count: float) -> str:
    """Returns an amount of arithmetic in decimal units: `261 TFLOP`."""
    return f"{_scaled(count, ' ')}FLOP"


def show_count(count: float) -> str:
    """Returns a count or a rate with three digits: `9.17k`, `1.5M`."""
    return _scaled(count, "").rstrip()


def _scaled(count: float, space: str) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(count) < 999.5:
            return f"{_digits(count)}{space}{prefix}"
        count /= 1000
    return f"{_digits(count)}{space}E"


def _digits(number: float) -> str:
    """Returns three significant digits, without an exponent or trailing zeros."""
    if abs(number) >= 99.95:
        return f"{number:.0f}"
    text = f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"
    return text.rstrip("0").rstrip(".")


def show_devices(count: int) -> str:
    """Returns how many devices something is on: `each of 8 devices`, `1 device`."""
    return "1 device" if count == 1 else f"each of {count} devices"


def fold_numbers(numbers: Sequence[int]) -> str:
    """Returns sorted numbers as one step of a path: `{0..79}`, or `*` if some are missing."""
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return "*"


def text_table(
    header: Row,
    rows: Iterable[Row],
    caption: str = "",
    width: int | None = None,
    *,
    right: Container[int] = range(4, 100),
) -> str:
    """Returns rows as aligned plain text, wide enough that no cell is cut.

    Args:
        header: the titles of the columns; if all are empty, there is no header line.
        rows: the cells.
        caption: the last line.
        width: the width of the text; by default, as wide as it needs to be.
        right: the indices of the columns that are right-aligned.
    """
    from rich.console import Console  # slow to import, and most commands print no table
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_edge=False, show_header=any(header))
    for i, title in enumerate(header):
        table.add_column(title, justify="right" if i in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(_cell, row))
    out = io.StringIO()
    Console(
        file=out,
        width=width or 10_000,
        markup=False,
        highlight=False,
        color_system=None,
        force_jupyter=False,
        emoji=False,
    ).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join([*lines, *([caption] if caption else [])])


def _cell(text: str) -> str:
    """Returns a cell's text on one line, without control characters: it may be a name in a file."""
    return visible(text) if text.isprintable() else visible(text.replace("\n", "\\n"))


def html_table(header: Row, rows: Iterable[Row], caption: str) -> str:
    """Returns rows as an HTML table that inherits the page's colours."""
    head = "".join(f'<th style="text-align:left">{html.escape(c)}</th>' for c in header)
    body = "".join(
        "<tr>"
        + "".join(f'<td style="text-align:left">{html.escape(_cell(c))}</td>' for c in row)
        + "</tr>"
        for row in rows
    )
    return (
        f"<table><caption>{html.escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )
