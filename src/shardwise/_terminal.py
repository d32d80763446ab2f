"""Printing: coloured on a terminal, plain when piped, complete in any encoding."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

# What is coloured of a text that stands on its own without colours.
_STYLES = (
    (r"^error\[SW\d+\] [\w-]+", "bold red"),
    (r"^warning\[SW\d+\] [\w-]+", "bold yellow"),
    (r"^ +help:", "cyan"),
    (r"^(fits|no findings)\b", "bold green"),
    (r"^(does not fit|cannot run)\b", "bold red"),
    (r"^0 errors, [1-9]\d* warnings?\b", "bold yellow"),
    (r"\bwhole on (each|every)( of \d+)?( device)?", "bold yellow"),
    (r"(?<=  )P\(\)(?=  )", "yellow"),
    (r"\((exact|compiled|measured|modelled)\)", "dim"),
    (r"(?<=  )(exact|compiled)$", "dim"),
    (r"^(path|bytes/device|model|memory of one device|largest temporaries) .*$", "bold"),
)
_PLAIN = str.maketrans(
    {
        **{"×": "x", "…": "...", "−": "-", "█": "#", "▓": "=", "▒": "~", "░": "+", "▚": "%"},
        **{"→": "->", "·": ".", "│": "|", "├": "+", "└": "`", "─": "-", "▏": "|"},
    }
)


def tell(text: str | Text) -> None:
    """Prints a text to stdout: with colours on a terminal, else as it is."""
    if not is_live(sys.stdout):
        print(_encodable(str(text), sys.stdout), flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    if isinstance(text, str):
        text = Text(text)
        for pattern, style in _STYLES:
            text.highlight_regex(f"(?m){pattern}", style)
    text.plain = _encodable(text.plain, sys.stdout)
    # The terminal breaks a line that is longer than it is wide: nothing is cut off.
    Console(highlight=False, markup=False, emoji=False).print(text, soft_wrap=True)


def tell_json(data: Any) -> None:
    """Prints plain data to stdout as JSON: never coloured, and ASCII alone."""
    print(json.dumps(data, indent=2), flush=True)


def is_live(stream: Any) -> bool:
    """Says whether a stream is a terminal that shows colours, and may be drawn on."""
    return (
        stream.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    )


def columns() -> int:
    """Returns how wide a picture may be: as the terminal, or 100 when piped."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stdout.fileno()).columns or 100
    return 100


@contextlib.contextmanager
def working(what: str, *, show: bool = True) -> Iterator[None]:
    """Says on stderr what takes long, and for how long, until it is done; nothing when piped."""
    if not show or not is_live(sys.stderr):
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    encoding = sys.stderr.encoding or "ascii"
    # A way of its own to the terminal: what compilers print to stderr is caught meanwhile.
    with os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding=encoding) as own:
        spinner = "dots" if encoding.lower().startswith("utf") else "line"
        bar = Progress(
            SpinnerColumn(spinner),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=Console(file=own, force_terminal=True),
            transient=True,
            # Loggers that are made meanwhile keep the stream that they find.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with bar:
            bar.add_task(what, total=None)
            yield


def _encodable(text: str, stream: Any) -> str:
    encoding = stream.encoding or "ascii"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_PLAIN)
        return text.encode(encoding, errors="backslashreplace").decode(encoding)
    return text
