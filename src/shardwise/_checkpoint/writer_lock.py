"""One writer for each directory of checkpoints: a lock that the system takes back when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = ".lock"
_SHARED_SECONDS = 10


class Taken(Exception):
    """Another writer has the directory; the message says who."""


class WriterLock:
    """The right to write to one directory.

    Within a process the lock passes from one object to the next as soon as the first is idle:
    what was opened and never saved keeps nobody waiting.

    Attributes:
        held: whether this object has it.
        real: whether the file system locks at all; without, other processes are not kept out.
    """

    def __init__(self, directory: Path, is_idle: Callable[[], bool]):
        """Names the directory; nothing is made or locked."""
        self.directory, self.is_idle = directory, is_idle
        self.real = False
        self._file: int | None = None

    @property
    def mark(self) -> str:
        """What the lock's file says of its holder; nothing where this process has no such file."""
        if self._file is None:
            return ""
        return os.pread(self._file, 4096, 0).decode(errors="replace")

    def sees(self, mark: str) -> bool:
        """Returns whether the lock that another process has taken is found in this directory."""
        until = time.monotonic() + _SHARED_SECONDS  # a network file system may be a little late
        while True:
            with contextlib.suppress(OSError):
                if (self.directory / LOCK).read_text(errors="replace") == mark:
                    return True
            if time.monotonic() > until:
                return False
            time.sleep(0.1)

    @property
    def held(self) -> bool:
        """Whether this object has the lock now."""
        return _HOLDERS.get(_key(self.directory)) is self

    def take(self, *, on_disk: bool) -> None:
        """Takes the lock, or says who has it. The directory must exist.

        Args:
            on_disk: whether to lock the directory too; of many processes the first one does.

        Raises:
            Taken: another writer has it.
            OSError: the lock's file cannot be made.
        """
        with _ACCESS:
            key = _key(self.directory)
            other = _HOLDERS.get(key)
            if other is self:
                return
            if other is not None and not other.is_idle():
                raise Taken(
                    "this process has it open for writing already: close() the other "
                    "Checkpoints first"
                )
            if other is not None:
                self._file, other._file, self.real = other._file, None, other.real
            elif on_disk:
                self._file, self.real = _lock(self.directory / LOCK)
            _HOLDERS[key] = self

    def release(self) -> None:
        """Gives the lock back, if it has it."""
        with _ACCESS:
            if not self.held:
                return
            del _HOLDERS[_key(self.directory)]
            if self._file is not None:
                file, self._file = self._file, None
                # Removed while it is locked: who opened it meanwhile sees that it is gone.
                with contextlib.suppress(OSError):
                    (self.directory / LOCK).unlink()
                os.close(file)


# The system knows one lock for each open file of a process: so does the process.
_HOLDERS: dict[str, WriterLock] = {}
_ACCESS = threading.Lock()
_UNLOCKABLE: list[str] = []


def _key(directory: Path) -> str:
    return os.path.realpath(directory)


def _lock(path: Path) -> tuple[int | None, bool]:
    """Returns the open file that holds the lock, and whether the file system can lock."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _flock(file, path):
                os.close(file)
                return None, False
            if _is_still(path, file):
                break
        except BlockingIOError:
            told = f"{_who(file)}; wait until it has ended, or give another directory"
            os.close(file)
            raise Taken(told) from None
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # its owner has removed it since it was opened
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
    with contextlib.suppress(OSError):  # a full disk: only who holds it is not known then
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(mine).encode(), 0)
    return file, True


def _flock(file: int, path: Path) -> bool:
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            raise
        except OSError as error:
            why = f" ({error.strerror})"
    else:
        why = ""
    if not _UNLOCKABLE:
        _UNLOCKABLE.append(str(path))
        warnings.warn(
            f"{path.parent} is on a file system without locks{why}: nothing keeps a second run "
            f"from saving there too",
            RuntimeWarning,
            stacklevel=2,
        )
    return False


def _is_still(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _who(file: int) -> str:
    try:
        told: Any = json.loads(os.pread(file, 4096, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told["started"]))
        return f"process {told['pid']} on {told['host']} is saving there, since {since}"
    except (OSError, ValueError, LookupError, TypeError):
        return "another process is saving there"


def _forget() -> None:
    """Closes a forked child's copies: the lock is the parent's, and ends with it."""
    global _ACCESS
    _ACCESS = threading.Lock()
    for holder in _HOLDERS.values():
        if holder._file is not None:
            os.close(holder._file)
            holder._file = None
    _HOLDERS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
