"""Wording that every room needs: numbers with nouns, and advice for Python or for a shell."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
BYTES_FORM = "give a number of bytes, such as 65536, 64KiB or 1MiB"


def count(number: int, one: str, many: str = "") -> str:
    """Returns a number with its noun: `1 leaf`, `2 leaves`, `3 devices`."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


# Control characters, of which a terminal takes some for commands, except tab and line feed; what
# changes the direction of the text around it; and halves of characters.
_UNSEEN = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)


def visible(text: str) -> str:
    r"""Returns a text with everything in it that is not shown as itself written as an escape.

    Names in files and messages of other programs may hold codes that move the cursor, change the
    terminal's title or hide what follows.

    Example:
        >>> from shardwise._base import visible
        >>> visible("kernel\x1b[2J")
        'kernel\\x1b[2J'
    """
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def show_type(value: object) -> str:
    """Returns the name of a value's type with its article: `a dict`, `an int`, `an MLP`."""
    name = type(value).__name__
    is_spelled = name[:2].isupper() or name.startswith("nd")  # letter by letter, as in `an ndarray`
    vowels = "aefhilmnorsx" if is_spelled else "aeio"
    is_short_u = name[0] in "uU" and name[1:2].lower() not in "ins"  # `an Update`, but `a UNet`
    return f"{'an' if name[0].lower() in vowels or is_short_u else 'a'} {name}"


def parse_bytes(text: str) -> int:
    """Returns the number of bytes that a text such as `64KiB` stands for.

    Raises:
        ValueError: the text is not a number of bytes.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), re.IGNORECASE | re.ASCII)
    unit = _UNITS.get(found[2].upper()) if found else None
    size = float(found[1]) * unit if found and unit else 0.5
    if size != int(size):
        raise ValueError(f"{text!r} is not a number of bytes: {BYTES_FORM}")
    return int(size)


_on_the_command_line = False


@contextlib.contextmanager
def shell_words() -> Iterator[None]:
    """Within the block, messages mention command-line options rather than Python arguments."""
    global _on_the_command_line
    before, _on_the_command_line = _on_the_command_line, True
    try:
        yield
    finally:
        _on_the_command_line = before


def either(python: str, shell: str) -> str:
    """Returns whichever text suits the reader: the one for Python, or the one for a shell."""
    return shell if _on_the_command_line else python


def option(name: str, value: object) -> str:
    """Returns an argument as the caller wrote it: `on='cpu:8'` in Python, `--on cpu:8` in a shell."""
    return either(f"{name}={value!r}", f"--{name} {value}")
