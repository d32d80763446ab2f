"""Separates what compilers and JAX's backends print from what the user's code prints."""

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
    """Captures what C++ writes to stderr; yields a function that returns it.

    Descriptor 2 belongs to the whole process, and XLA offers no other access to its messages.
    Python's own stderr keeps writing where it wrote before: what the user's code, its other threads
    and its loggers print must not be captured. Only what they write directly to descriptor 2 in the
    meantime is mistaken for the compiler's output, and is part of the result.
    """
    text: list[str] = []
    try:
        before = os.dup(2)
    except OSError:  # closed: there is nothing to capture
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
    """Makes Python's stderr write to descriptor `number` instead of 2.

    The stream stays the same object, since loggers refer to it: its file is reopened in place.
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
    """Starts JAX's backends unless they are running; returns what they print.

    If compilers are installed and no accelerator is present, JAX reports at length each one that it
    does not find, both by logging and from C++; `shardwise doctor` needs one line. Starting them
    here keeps the tracing of the user's code from starting them.
    """
    stream = _ThisThread(sys.stderr)
    with compiler_noise() as noise, contextlib.redirect_stderr(stream):  # pyright: ignore[reportArgumentType] - it has all that is used
        # JAX raises the error again when devices are needed.
        with contextlib.suppress(RuntimeError), _without_cuda_checks():
            jax.devices()
    return stream.text + noise()


@contextlib.contextmanager
def _without_cuda_checks() -> Iterator[None]:
    """Within the block, the plugin for GPUs starts without every library of CUDA.

    Compiling for absent GPUs needs neither a driver nor all of them, but the plugin refuses to start
    when cuDNN's own dependencies are installed and the others are not.
    """
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    if name in os.environ or os.path.exists("/dev/nvidiactl"):
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


class _ThisThread:
    """A stream that keeps what this thread writes and forwards what others write."""

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
