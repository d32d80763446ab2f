"""One writer per checkpoint directory: a lock that the system releases if the writer dies."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from .._base import parse_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK, MARK = ".lock", ".shared-"
_SHARED_SECONDS = 10


def leave_mark(directory: Path) -> str:
    """Returns the name of a new, empty file in a directory; empty if it cannot be created."""
    name = f"{MARK}{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):
        os.close(os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        return name
    return ""


def sees_mark(directory: Path, name: str) -> bool:
    """Returns whether a file that another process left is visible in this directory."""
    until = time.monotonic() + _SHARED_SECONDS  # a network file system may lag a little
    while not os.path.lexists(directory / name):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
        with contextlib.suppress(OSError):
            os.listdir(directory)  # refreshes what a network file system has cached
    return True


class Taken(Exception):
    """Another writer has locked the directory; the message says which."""


class WriterLock:
    """The exclusive right to write to one directory.

    Within a process, the lock passes from an idle object to the next one that asks for it: an
    object that never saved anything does not block others.

    Attributes:
        held: whether this object has the lock.
        real: whether the file system supports locks; if not, other processes are not locked out.
    """

    def __init__(self, directory: Path, is_idle: Callable[[], bool]):
        """Sets the directory; nothing is created or locked."""
        self.directory, self.is_idle = directory, is_idle
        self.real = False
        self._file: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object currently has the lock."""
        return _HOLDERS.get(_key(self.directory)) is self

    def take(self, *, on_disk: bool) -> None:
        """Takes the lock, or raises an error that names its holder. The directory must exist.

        Args:
            on_disk: whether to lock the directory itself; only the first process of a run does.

        Raises:
            Taken: another writer has the lock.
            OSError: the lock file cannot be created.
        """
        with _ACCESS:
            key = _key(self.directory)
            other = _HOLDERS.get(key)
            if other is self:
                return
            if other is not None and not other.is_idle():
                raise Taken(
                    "this process is already saving there: close() the other Checkpoints first"
                )
            if other is not None:
                self._file, other._file, self.real = other._file, None, other.real
            elif on_disk:
                self._file, self.real = _lock(self.directory / LOCK)
            _HOLDERS[key] = self

    def release(self) -> None:
        """Releases the lock, if this object has it."""
        with _ACCESS:
            if not self.held:
                return
            del _HOLDERS[_key(self.directory)]
            if self._file is not None:
                file, self._file = self._file, None
                # Removed while locked: a process that has just opened it sees that it is gone.
                with contextlib.suppress(OSError):
                    (self.directory / LOCK).unlink()
                os.close(file)


# Within this process, the object that holds the lock of each directory.
_HOLDERS: dict[str, WriterLock] = {}
_ACCESS = threading.Lock()
_UNLOCKABLE: list[str] = []


def _key(directory: Path) -> str:
    return os.path.realpath(directory)


def _lock(path: Path) -> tuple[int | None, bool]:
    """Returns the open, locked file, and whether the file system supports locks."""
    while True:
        # A link in place of the lock would let its target be overwritten.
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        file = os.open(path, flags, 0o666)
        try:
            if not _flock(file, path):
                os.close(file)
                return None, False
            if _is_still(path, file):
                break
        except BlockingIOError:
            message = f"{_who(file)}; wait until it exits, or use another directory"
            os.close(file)
            raise Taken(message) from None
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # its owner has removed it since it was opened
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
    with contextlib.suppress(OSError):  # disk full: then only the holder is unknown
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
            f"{path.parent} is on a file system without locks{why}: nothing stops a second run "
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
        holder = parse_json(os.pread(file, 4096, 0), {"host": str, "pid": int, "started": float})
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["started"]))
        return f"process {holder['pid']} on {holder['host']} has been saving there since {since}"
    except (OSError, ValueError, OverflowError):
        return "another process is saving there"


def _forget() -> None:
    """Closes a forked child's copies of the lock files: the locks belong to the parent."""
    global _ACCESS
    _ACCESS = threading.Lock()
    for holder in _HOLDERS.values():
        if holder._file is not None:
            os.close(holder._file)
            holder._file = None
    _HOLDERS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
