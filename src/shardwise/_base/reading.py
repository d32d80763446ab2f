"""Reading files that somebody else may have written: bounded, parsed and checked before use.

A file is data. Whatever is in it, reading it ends in plain values of the expected form, or in one
`ValueError` that says what is wrong: never in a RecursionError, a MemoryError or a KeyError, in an
endless read of a pipe or a device, or in a number that arithmetic cannot handle later.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
import types
import typing
from collections.abc import Callable
from typing import Any

from .text import show_type

# Far above what Shardwise writes: the layout of a model of a trillion parameters is a megabyte.
MOST_BYTES = 256 * 2**20
_MOST_TOML_BYTES = 2**22
_MOST_DEPTH = 64
_MOST_VALUES = 10_000_000
_MOST_DIGITS = 19
_LARGEST = 2**63

Form = Any
"""What a value must be: a type (`int`, `list[str]`, `float | None`, `dict[str, int]`), or a dict from
the names of an object's fields to their forms. A name that ends in `?` may be missing; the name `*`
stands for all others, which are errors without it."""


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """Returns the contents of a regular file, or of a pipe from the shell, of at most `most` bytes.

    Raises:
        OSError: it cannot be opened or read.
        ValueError: it is not a regular file, or is larger.
    """
    # A pipe that nobody writes to would block; a device may never end.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    with open(fd, "rb") as file:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise IsADirectoryError(21, os.strerror(21), os.fspath(path))
        if stat.S_ISFIFO(os.fstat(fd).st_mode) and _is_given(path):
            os.set_blocking(fd, True)
        elif not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is not a regular file")
        found = file.read(most + 1)
    if len(found) > most:
        raise ValueError(f"it is larger than {most} bytes")
    return found


def _is_given(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a descriptor that the shell opened: `<<`, `|` or `<(…)`."""
    text = os.fspath(path)
    return text == "/dev/stdin" or text.startswith(("/dev/fd/", "/proc/self/fd/"))


def read_json(path: str | os.PathLike[str], form: Form = Any, most: int = MOST_BYTES) -> Any:
    """Returns the plain data of a JSON file that has a form.

    Raises:
        OSError: the file cannot be opened or read.
        ValueError: it is not JSON, exceeds a limit, or has another form.
    """
    return parse_json(read_bytes(path, most), form)


def parse_json(text: str | bytes, form: Form = Any) -> Any:
    """Returns plain data from JSON, like `read_json`."""
    return _parsed(
        "JSON",
        lambda text: json.loads(text, parse_int=_integer, parse_constant=_refuse),
        text,
        form,
    )


def read_toml(path: str | os.PathLike[str], form: Form = Any) -> dict[str, Any]:
    """Returns the plain data of a TOML file that has a form.

    Raises:
        OSError: the file cannot be opened or read.
        ValueError: it is not TOML, exceeds a limit, or has another form.
    """
    return _parsed("TOML", tomllib.loads, read_bytes(path, _MOST_TOML_BYTES), form)


def require_form(value: Any, form: Form, where: str = "it") -> None:
    """Raises if a value has another form.

    Raises:
        ValueError: the message says where it differs.
    """
    if isinstance(form, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {show_type(value)} instead of an object")
        for name, inner in form.items():
            plain = name.rstrip("?")
            if plain in value:
                require_form(value[plain], inner, plain if where == "it" else f"{where}.{plain}")
            elif not name.endswith("?") and name != "*":
                raise ValueError(f"{where} has no {plain!r}")
        if "*" not in form:
            known = {name.rstrip("?") for name in form}
            for name in value:
                if name not in known:
                    raise ValueError(f"{where} has an unknown {_brief(name)}")
        return
    origin, inner = typing.get_origin(form), typing.get_args(form)
    if origin is list and isinstance(value, list):
        for index, each in enumerate(value):
            require_form(each, inner[0], f"{where}[{index}]")
    elif origin is dict and isinstance(value, dict):
        for name, each in value.items():
            require_form(each, inner[1], f"{where}[{_brief(name)}]")
    elif not _is_a(value, form):
        raise ValueError(f"{where} is {_brief(value)}")


def rows_of(form: Form) -> Form:
    """Returns the form of a list of objects, each of one form."""
    return _Rows(form)


class _Rows:
    def __init__(self, form: Form):
        self.form = form


def _is_a(value: Any, form: Form) -> bool:
    if isinstance(form, _Rows):
        if not isinstance(value, list):
            return False
        for index, row in enumerate(value):
            require_form(row, form.form, f"row {index}")
        return True
    if form is Any:
        return True
    origin, inner = typing.get_origin(form), typing.get_args(form)
    if origin in (types.UnionType, typing.Union):
        return any(_is_a(value, each) for each in inner)
    if origin is list:
        return isinstance(value, list) and all(_is_a(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(each, inner[1]) for each in value.values())
    if origin is typing.Literal:
        return any(value == each and type(value) is type(each) for each in inner)
    if form is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if form is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, form)


def _parsed(kind: str, parse: Callable[[str], Any], text: str | bytes, form: Form) -> Any:
    try:
        found = parse(text if isinstance(text, str) else text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not text ({error.reason} at byte {error.start})") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"it is not {kind}: it is nested too deeply") from error
    except ValueError as error:
        why = "it is empty" if not text.strip() else f"it is not {kind} ({str(error)[:200]})"
        raise ValueError(why) from error
    _require_bounds(found)
    require_form(found, form)
    return found


def _require_bounds(found: Any) -> None:
    """Raises if data is nested too deeply, or has a number that arithmetic would choke on."""
    level, depth, seen = [found], 0, 0
    while level:
        depth, seen = depth + 1, seen + len(level)
        if depth > _MOST_DEPTH:
            raise ValueError(f"it is nested more than {_MOST_DEPTH} levels deep")
        if seen > _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES} values")
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, int | float) and not -_LARGEST <= value < 1e300:
                raise ValueError(f"it has the number {_brief(value)}, which is out of range")
        level = below


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS + 1:
        raise ValueError(f"the number {text[:20]}… is out of range")
    return int(text)


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not a number of JSON")


def _brief(value: Any) -> str:
    text = repr(value) if not isinstance(value, dict | list) else show_type(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
