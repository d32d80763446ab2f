"""Printing: coloured on a terminal, plain when piped, complete in any encoding."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from .ending import undone

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
    (r"\breplicated( on all \d+ devices)?", "bold yellow"),
    (r"(?<=  )P\(\)(?=  )", "yellow"),
    (r"\((exact|compiled|measured|modelled)\)", "dim"),
    (r"(?<=  )(exact|compiled)$", "dim"),
    (r"^(path|bytes/device|model|memory of one device|largest temporaries) .*$", "bold"),
)
_PLAIN = str.maketrans(
    {
        **{"×": "x", "…": "...", "−": "-", "█": "#", "▓": "=", "▒": "~", "░": "+", "▚": "%"},
        **{"→": "->", "µ": "u", "·": ".", "│": "|", "├": "+", "└": "`", "─": "-", "▏": "|"},
    }
)


class UnwritableError(Exception):
    """A result could not be printed: stdout is a full device, for example."""


# Where results are printed, once all else that writes to stdout has been sent to stderr.
_own: TextIO | None = None


def stdout() -> TextIO:
    """Returns the stream that results are printed to."""
    return _own if _own is not None else sys.stdout


def claim_stdout() -> None:
    """Keeps stdout for results: all that the user's code prints from now on goes to stderr.

    That is so to the end, and for the file descriptor too: code of a target may print from threads,
    from C++ and from processes that it starts, at any time.
    """
    global _own
    if _own is not None:
        return
    before = sys.stdout
    before.flush()
    _own = before
    with contextlib.suppress(OSError, ValueError):  # a stream that is not a file
        if before.fileno() == 1:
            encoding = before.encoding or "utf-8"
            _own = os.fdopen(os.dup(1), "w", encoding=encoding, errors=before.errors)
            os.dup2(2, 1)
    sys.stdout = sys.stderr


@contextlib.contextmanager
def released_stdout() -> Iterator[None]:
    """Gives stdout back at the end, to a process that goes on."""
    global _own
    before = sys.stdout
    try:
        yield
    finally:
        if _own is not None and _own is not before:
            _own.flush()
            os.dup2(_own.fileno(), 1)
            _own.close()
        _own, sys.stdout = None, before


def tell(text: str | Text) -> None:
    """Prints a text to stdout: with colours on a terminal, else as it is.

    Raises:
        UnwritableError: it cannot be written.
    """
    out = stdout()
    if not is_live(out):
        _print(_encodable(str(text), out))
        return
    from rich.console import Console
    from rich.text import Text

    if isinstance(text, str):
        text = Text(text)
        for pattern, style in _STYLES:
            text.highlight_regex(f"(?m){pattern}", style)
    text.plain = _encodable(text.plain, out)
    # The terminal breaks a line that is longer than it is wide: nothing is cut off.
    Console(file=out, highlight=False, markup=False, emoji=False).print(text, soft_wrap=True)


def tell_json(data: Any) -> None:
    """Prints plain data to stdout as JSON: never coloured, and ASCII alone."""
    _print(json.dumps(data, indent=2))


def _print(text: str) -> None:
    try:
        print(text, file=stdout(), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UnwritableError(f"stdout cannot be written: {error.strerror}") from error


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
        return os.get_terminal_size(stdout().fileno()).columns or 100
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
        # A spinner hides the cursor, which must come back however this ends.
        with undone(lambda: os.write(own.fileno(), b"\r\x1b[K\x1b[?25h")), bar:
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
