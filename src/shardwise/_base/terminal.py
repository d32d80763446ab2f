"""Printing: in colour on a terminal, plain when piped, and complete in any encoding."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from .ending import cleaned_up_on_signal
from .text import visible

if TYPE_CHECKING:
    from rich.text import Text

# What is highlighted on a terminal; the text reads the same without colours.
_STYLES = (
    (r"^error\[SW\d+\] [\w-]+", "bold red"),
    (r"^warning\[SW\d+\] [\w-]+", "bold yellow"),
    (r"^ +help:", "cyan"),
    (r"^(fits|no findings)\b", "bold green"),
    (r"^may fit\b", "bold yellow"),
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
    """A result could not be printed, for example because the disk behind stdout is full."""


# Where results are printed, once everything else that writes to stdout is redirected to stderr.
_own: TextIO | None = None


def stdout() -> TextIO:
    """Returns the stream that results are printed to."""
    return _own if _own is not None else sys.stdout


def claim_stdout() -> None:
    """Reserves stdout for results: everything that user code prints from now on goes to stderr.

    This holds until the process ends, and for the file descriptor too: the code of a target may
    print at any time, from threads, from C++ and from processes that it starts.
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
    """Restores stdout on exit, for a process that continues."""
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
    """Prints text to stdout: in colour on a terminal, unchanged otherwise.

    Raises:
        UnwritableError: stdout cannot be written to.
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
    # The terminal itself wraps long lines, so that nothing is cut off.
    Console(file=out, highlight=False, markup=False, emoji=False).print(text, soft_wrap=True)


def tell_part(text: str) -> None:
    """Prints a part of a line to stdout, at once.

    Raises:
        UnwritableError: stdout cannot be written to.
    """
    _print(_encodable(text, stdout()), end="")


def tell_error(text: str) -> None:
    """Prints a message to stderr."""
    print(_encodable(text, sys.stderr), file=sys.stderr, flush=True)


def tell_json(data: Any) -> None:
    """Prints plain data to stdout as JSON: never coloured, and ASCII only."""
    _print(json.dumps(data, indent=2))


def _print(text: str, end: str = "\n") -> None:
    try:
        print(text, file=stdout(), end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UnwritableError(f"cannot write to stdout: {error.strerror}") from error


def is_live(stream: Any) -> bool:
    """Returns whether a stream is a terminal with colours and cursor movement."""
    return (
        stream.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    )


def columns() -> int:
    """Returns the width available for a drawing: that of the terminal, or 100 when piped."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(stdout().fileno()).columns or 100
    return 100


@contextlib.contextmanager
def working(what: str, *, show: bool = True) -> Iterator[None]:
    """Shows a spinner with the elapsed time on stderr until the block ends; nothing when piped."""
    if not show or not is_live(sys.stderr):
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    encoding = sys.stderr.encoding or "ascii"
    # A separate descriptor for the terminal: stderr is captured while compilers print to it.
    with os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding=encoding) as own:
        spinner = "dots" if encoding.lower().startswith("utf") else "line"
        bar = Progress(
            SpinnerColumn(spinner),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=Console(file=own, force_terminal=True),
            transient=True,
            # Loggers created in the meantime would keep a redirected stream.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        # A spinner hides the cursor, which must be restored however this ends.
        with cleaned_up_on_signal(lambda: os.write(own.fileno(), b"\r\x1b[K\x1b[?25h")), bar:
            bar.add_task(what, total=None)
            yield


def _encodable(text: str, stream: Any) -> str:
    text = visible(text)
    encoding = stream.encoding or "ascii"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_PLAIN)
        return text.encode(encoding, errors="backslashreplace").decode(encoding)
    return text
