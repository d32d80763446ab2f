"""Source lines: which frames of a stack are the user's own code, and how a line is shown."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterable

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SHIPPED = ("models", "examples")  # the models that we ship count as user code
_LIBRARIES = tuple(
    os.path.abspath(sysconfig.get_paths()[key]) + os.sep for key in ("stdlib", "purelib", "platlib")
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_users(file: str) -> bool:
    """Returns whether a file is the user's own, or a model that ships with the package."""
    if not file or file.startswith("<"):
        return False
    path = os.path.abspath(file)
    if is_ours(path):
        return os.path.relpath(path, _PACKAGE).split(os.sep)[0] in _SHIPPED
    return not path.startswith(_LIBRARIES) and not any(part in path for part in _INSTALLED)


def is_ours(file: str) -> bool:
    """Returns whether a file belongs to this package."""
    return os.path.abspath(file).startswith(_PACKAGE + os.sep)


def users_line(frames: Iterable[tuple[str, int | None]]) -> str:
    """Returns `file.py:12`, the first frame in the user's own code, or an empty string.

    Args:
        frames: the file and line of each frame, innermost first.
    """
    return next((show_line(file, line) for file, line in frames if is_users(file)), "")


def line_of(error: BaseException) -> str:
    """Returns `file.py:12`, the innermost user line in an error's traceback, or an empty string."""
    stack = traceback.extract_tb(error.__traceback__)
    return users_line((frame.filename, frame.lineno) for frame in reversed(stack))


def at_line_of(error: BaseException) -> str:
    """Returns `, at file.py:12`, to append to a sentence, or an empty string."""
    line = line_of(error)
    return f", at {line}" if line else ""


def show_line(file: str, line: int | None) -> str:
    """Returns `file.py:12`: relative to the current folder, else the last two parts of the path."""
    path = os.path.abspath(file)
    below = os.path.relpath(path, os.getcwd())
    if below.startswith(".."):
        below = os.sep.join(path.split(os.sep)[-2:])
    return f"{below}:{line}"


def user_traceback(error: BaseException) -> str:
    """Returns a traceback cut to the user's own frames."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    parts = traceback.format_list(frames) + traceback.format_exception_only(error)
    lines = "".join(parts).rstrip().splitlines()
    text = "\n".join(line for line in lines if line.strip(" ^~"))
    # JAX appends a note on where to find its own frames, which are not the user's.
    return text.partition("\n--------------------")[0]
