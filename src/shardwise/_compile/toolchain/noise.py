"""What compilers and JAX's backends print by themselves: kept apart from what the user prints."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax


@contextlib.contextmanager
def compiler_noise() -> Iterator[Callable[[], str]]:
    """Withholds what C++ writes to stderr; yields a function that returns it.

    Descriptor 2 belongs to the whole process, and XLA offers no other way to its messages. Python's
    own stderr keeps writing where it wrote before: what the user's code, its other threads and
    its loggers print is not ours to withhold. Only what they write past Python, to descriptor 2
    itself, is taken for the compiler's meanwhile; it is in the result, like the rest.
    """
    text: list[str] = []
    try:
        before = os.dup(2)
    except OSError:  # closed: there is nothing to withhold
        yield lambda: ""
        return
    with tempfile.TemporaryFile() as file:

        def noise() -> str:
            if not text:
                file.seek(0)
                text.append(file.read().decode(errors="replace"))
            return text[0]

        try:
            with _python_writes_to(before):
                os.dup2(file.fileno(), 2)
                try:
                    yield noise
                finally:
                    os.dup2(before, 2)
        finally:
            os.close(before)
            noise()


@contextlib.contextmanager
def _python_writes_to(number: int) -> Iterator[None]:
    """Lets Python's stderr, whoever holds it, write to descriptor `number` instead of 2.

    The stream stays the same object, since loggers hold it: its file is opened anew in place.
    """
    files: list[Any] = []
    for stream in (sys.stderr, sys.__stderr__):
        buffer = getattr(stream, "buffer", None)
        file = getattr(buffer, "raw", buffer)  # with `python -u` there is no buffer in between
        if stream and isinstance(file, io.FileIO) and not file.closed and file.fileno() == 2:
            stream.flush()
            files.append(file)  # if it is both, the second one no longer has the descriptor 2
            _open_anew(file, number)
    try:
        yield
    finally:
        for file in files:
            _open_anew(file, 2)


def _open_anew(file: Any, number: int) -> None:
    name = file.name
    file.__init__(number, "w", closefd=False)
    file.name = name


def start_backends() -> str:
    """Starts JAX's backends, unless they are started; returns what is printed about it.

    With compilers installed and no accelerator here, JAX tells at length of each that it does
    not find, by logging as well as in C++; `shardwise doctor` tells it in a line. Started here,
    before the user's code is traced, they are not started by it.
    """
    held = _ThisThread(sys.stderr)
    with compiler_noise() as noise, contextlib.redirect_stderr(held):  # pyright: ignore[reportArgumentType] - it has all that is used
        with contextlib.suppress(RuntimeError):  # who needs devices is told so by JAX
            jax.devices()
    return held.text + noise()


class _ThisThread:
    """A stream that keeps what this thread writes and hands on what others do."""

    def __init__(self, stream: Any) -> None:
        self.text = ""
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            self.text += text
            return len(text)
        return self._stream.write(text) if self._stream is not None else 0

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
