"""The entry points of the command line, and its exit statuses."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from .._base import UnwritableError, at_line_of, released_stdout, shell_words, stdout, tell_error
from . import planning, reference, running
from .options import app

# Importing these rooms registers their commands.
__all__ = ["main", "planning", "reference", "run", "running"]

# What a value must be, by the type of Pydantic's error.
_WANTED = {
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_parsing": "a number",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}


def main() -> None:
    """Runs the command line inside a process that may continue; `__main__` runs it as its own."""
    with released_stdout():
        status = run()
    sys.exit(status)


def run() -> int:
    """Returns the exit status; every failure is one sentence on stderr and status 2."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    with shell_words():
        return _run()


def _run() -> int:
    try:
        status = app(standalone_mode=False)
        return status if isinstance(status, int) else 0
    except SystemExit as ended:
        # `shardwise plan … | head` closes the pipe early, and typer exits with 1 for that.
        if isinstance(ended.__context__, BrokenPipeError):
            _close_stdout()
            return 141
        return ended.code if isinstance(ended.code, int) else 2
    except KeyboardInterrupt:
        return 130
    except UnwritableError as error:
        _close_stdout()
        tell_error(f"shardwise: {error}")
        return 2
    except Exception as error:
        tell_error(f"shardwise: {_sentence(error)}")
        return 2


def _close_stdout() -> None:
    """Discards buffered output: Python would complain at exit that it cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout().fileno())


def _example(error: Any) -> str:
    """Returns the first example in the help of the command that failed."""
    lines = error.ctx.command.help.partition("\n  shardwise ")[2].splitlines()
    example = [lines[0]]
    for line in lines[1:]:
        if not example[-1].endswith("\\"):
            break
        example.append(line.strip())
    return "shardwise " + " ".join(line.removesuffix("\\").strip() for line in example)


def _wrong_value(error: Any) -> str:
    """Returns a sentence about an option's value, or an empty text if Typer's own must do.

    Typer lets Pydantic parse values, and prints its words, which lack the value.
    """
    failures = getattr(error.__cause__, "errors", None)
    if not callable(failures) or error.param is None:
        return ""
    found: Any = failures()
    kind, given, context = found[0]["type"], str(found[0]["input"]), found[0].get("ctx", {})
    option = max(error.param.opts, key=len)
    if kind == "value_error":
        return f"{option} {str(context['error']).rstrip('.')}"
    if kind not in _WANTED:
        return ""
    wanted = "a positive integer" if context.get("ge") == 1 else _WANTED[kind].format(**context)
    shown = given if given.removeprefix("-").isdecimal() else repr(given)
    return f"{option} must be {wanted}, got {shown}"


def _sentence(error: Exception) -> str:
    # Typer's own errors (a wrong option, a missing argument) carry a ready message.
    ready = getattr(error, "format_message", None)
    text = str(ready() if callable(ready) else error)
    if type(error).__name__ == "BadParameter":
        text = _wrong_value(error) or text
    if type(error).__name__ == "MissingParameter":
        text = f"{text.rstrip('.')}: for example, {_example(error)}"
    if ready is None:
        if isinstance(error, OSError) and error.strerror:
            return f"{error.filename or 'a stream'}: {error.strerror}{at_line_of(error)}"
        # The package's own errors are full sentences, so the class name is left out.
        own = isinstance(error, ValueError) or type(error).__module__.startswith("shardwise")
        kind = "" if own else f"{type(error).__name__}: "
        text = f"{kind}{text}{at_line_of(error)}"
    return " ".join(text.split())
