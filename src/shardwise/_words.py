"""Numbers in sentences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


def count(number: int, one: str, many: str = "") -> str:
    """Returns a number with its noun: `1 leaf`, `2 leaves`, `3 devices`."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


_on_the_command_line = False


@contextlib.contextmanager
def shell_words() -> Iterator[None]:
    """While entered, messages speak of options of the command line, not of Python."""
    global _on_the_command_line
    before, _on_the_command_line = _on_the_command_line, True
    try:
        yield
    finally:
        _on_the_command_line = before


def either(python: str, shell: str) -> str:
    """Returns the one of two texts that helps whoever is reading: in Python, or in a shell."""
    return shell if _on_the_command_line else python


def option(name: str, value: object) -> str:
    """Returns what was given: `on='cpu:8'` in Python, `--on cpu:8` in a shell."""
    return either(f"{name}={value!r}", f"--{name} {value}")
