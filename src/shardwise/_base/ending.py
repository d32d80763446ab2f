"""Ends the process promptly on SIGINT and SIGTERM, and cleans up what must not be left behind.

Raising KeyboardInterrupt is not enough: a callback from C++ swallows it or crashes, and during a
long call into C++ Python does not see the signal at all. This module imports only the standard
library, since it is loaded before anything else.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast

_WORDS = {signal.SIGINT: b"interrupted", signal.SIGTERM: b"terminated"}
_undo: list[Callable[[], Any]] = []
_lock = threading.RLock()
_begun = False
_exit = os._exit  # kept here, because os._exit is replaced while the user's code is loaded
_stderr = -1


@contextlib.contextmanager
def cleaned_up_on_signal(undo: Callable[[], Any]) -> Iterator[None]:
    """Calls `undo` if a signal ends the process inside the block; inner blocks are undone first."""
    _undo.append(undo)
    try:
        yield
    finally:
        _undo.remove(undo)


def open_standard_streams() -> None:
    """Opens each of stdin, stdout and stderr that was closed (`>&-`) on /dev/null.

    Otherwise Python sets them to None, and the next file to be opened takes their descriptor.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


def end_on_signals() -> None:
    """Makes SIGINT and SIGTERM end this process with status 130 and 143, whatever it is doing.

    A signal that is ignored (nohup) stays ignored. Code that installs its own handler receives
    the signal instead, until it restores this one.
    """
    global _stderr
    # stderr is redirected to capture what compilers print: the final message bypasses that.
    _stderr = os.dup(2)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    taken = [n for n in _WORDS if signal.getsignal(n) is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, _end)
    # The main thread may be inside C++ for minutes, so another thread ends the process.
    threading.Thread(target=_watch, args=(reader,), name="shardwise-signals", daemon=True).start()
    os.register_at_fork(after_in_child=_be_plain)


def end(status: int) -> NoReturn:
    """Ends the process as Python would, but handles signals to the very end.

    Python drops its handlers some time before it exits, and a signal then kills the process.
    """
    jax: Any = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        # JAX's distributed runtime shuts down at interpreter exit, so the exit must be a real one.
        for number in _WORDS:
            if signal.getsignal(number) is _end:
                signal.signal(number, signal.SIG_DFL)
        sys.exit(status)
    cast(Any, threading)._shutdown()
    cast(Any, atexit)._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    _exit(status)


def _watch(reader: socket.socket) -> None:
    while numbers := reader.recv(64):
        for number in numbers:
            if number in _WORDS and signal.getsignal(number) is _end:
                _end(number, None)


def _be_plain() -> None:
    """Gives a forked child Python's default signal handling; its signals are not its parent's."""
    signal.set_wakeup_fd(-1)
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is _end:
            signal.signal(number, handler)


def _end(number: int, frame: Any) -> None:
    """Ends the process. Both threads may get here: the second waits until the first is done."""
    global _begun
    with _lock:
        if _begun:
            return
        _begun = True
        for undo in reversed(_undo):
            with contextlib.suppress(Exception):
                undo()
        with contextlib.suppress(OSError):
            start = b"\n" if os.isatty(_stderr) else b""  # the terminal shows ^C
            os.write(_stderr, b"%sshardwise: %s\n" % (start, _WORDS[signal.Signals(number)]))
        _exit(128 + number)
