"""Files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from .ending import undone
from .terminal import tell

# Wherever it is redirected to, it is open already: replacing a file would leave it unread.
_STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file; one that was there stays as it is until all of the new one is written.

    A link is followed, the permissions of what was there stay, and a device or a pipe is written
    to, not replaced.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    try:
        there = os.stat(path)
    except FileNotFoundError:
        there = None
    if there is not None and stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if os.fspath(path) in _STDOUT or (there is not None and not stat.S_ISREG(there.st_mode)):
        _write_through(path, text)
        return
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name[:200]}.{os.getpid()}.partial")
    with undone(lambda: partial.unlink(missing_ok=True)):
        try:
            with open(partial, "x", encoding="utf-8") as out:
                out.write(text)
            if there is not None:
                _keep_owner(partial, there)
            os.replace(partial, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            # A file may be writable in a folder that is not.
            if there is None or not isinstance(error, PermissionError):
                raise
            target.write_text(text, encoding="utf-8")


def _write_through(path: str | os.PathLike[str], text: str) -> None:
    if os.fspath(path) in _STDOUT:
        tell(text.removesuffix("\n"))
        return
    with open(os.open(path, os.O_WRONLY), "w", encoding="utf-8") as out:
        out.write(text)


def _keep_owner(partial: Path, there: os.stat_result) -> None:
    with contextlib.suppress(OSError):
        os.chown(partial, there.st_uid, there.st_gid)
    os.chmod(partial, stat.S_IMODE(there.st_mode))
