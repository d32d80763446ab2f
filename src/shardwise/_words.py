"""Words that every floor needs: numbers in sentences, and advice for each kind of caller."""

from __future__ import annotations

from typing import TypeVar

_Error = TypeVar("_Error", bound=Exception)


def count(number: int, one: str, many: str = "") -> str:
    """Returns a number with its noun: `1 leaf`, `2 leaves`, `3 devices`."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def helped(kind: type[_Error], fact: str, *, python: str, cli: str) -> _Error:
    """Returns an error whose advice suits its reader: arguments in Python, options on the CLI.

    Args:
        kind: the exception's class.
        fact: what is wrong.
        python: what to do, in Python.
        cli: what to do on the command line, which prints `cli_text` instead of the message.
    """
    error = kind(f"{fact}: {python}")
    error.cli_text = f"{fact}: {cli}"  # pyright: ignore[reportAttributeAccessIssue]
    return error
