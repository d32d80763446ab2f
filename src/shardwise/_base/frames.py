"""The user's line: which frames of a stack are the user's own code, and how a line is written."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterable

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SHIPPED = ("models", "examples")  # models that we ship are read as anybody's
_LIBRARIES = tuple(
    os.path.abspath(sysconfig.get_paths()[key]) + os.sep for key in ("stdlib", "purelib", "platlib")
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_users(file: str) -> bool:
    """Says whether a file is the user's own, or a model that ships with the package."""
    if not file or file.startswith("<"):
        return False
    path = os.path.abspath(file)
    if is_ours(path):
        return os.path.relpath(path, _PACKAGE).split(os.sep)[0] in _SHIPPED
    return not path.startswith(_LIBRARIES) and not any(part in path for part in _INSTALLED)


def is_ours(file: str) -> bool:
    """Says whether a file belongs to this package."""
    return os.path.abspath(file).startswith(_PACKAGE + os.sep)


def users_line(frames: Iterable[tuple[str, int | None]]) -> str:
    """Returns `file.py:12`, the first frame that is the user's own, or an empty string.

    Args:
        frames: file and line of each, the innermost first.
    """
    return next((show_line(file, line) for file, line in frames if is_users(file)), "")


def line_of(error: BaseException) -> str:
    """Returns `file.py:12`, the innermost line of the user's that an error passed, or nothing."""
    stack = traceback.extract_tb(error.__traceback__)
    return users_line((frame.filename, frame.lineno) for frame in reversed(stack))


def at_line_of(error: BaseException) -> str:
    """Returns `, at file.py:12`, to end a sentence with, or nothing."""
    line = line_of(error)
    return f", at {line}" if line else ""


def show_line(file: str, line: int | None) -> str:
    """Returns `file.py:12`, the file from the current folder where it is below it, else its end."""
    path = os.path.abspath(file)
    below = os.path.relpath(path, os.getcwd())
    if below.startswith(".."):
        below = os.sep.join(path.split(os.sep)[-2:])
    return f"{below}:{line}"
