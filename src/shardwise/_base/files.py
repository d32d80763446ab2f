"""Atomic writes: a file is written completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from .ending import cleaned_up_on_signal
from .terminal import tell

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
_OVER = os.O_WRONLY | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
# stdout is open already, wherever it is redirected to: replacing that file would lose the output.
_STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file; an existing file stays untouched until the new one is complete.

    Symbolic links are followed, the permissions of an existing file are kept, and a device or a
    pipe is written to rather than replaced.

    Raises:
        OSError: the file cannot be written; no partial file is left behind.
    """
    try:
        existing = os.stat(path)
    except FileNotFoundError:
        existing = None
    if existing is not None and stat.S_ISDIR(existing.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if os.fspath(path) in _STDOUT or (existing is not None and not stat.S_ISREG(existing.st_mode)):
        _write_through(path, text)
        return
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        missing = f"there is no folder {target.parent}"
        raise FileNotFoundError(errno.ENOENT, missing, os.fspath(path))
    # Nobody can put a link where it will be: the name is random, and the file must be new.
    partial = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}.partial")
    with cleaned_up_on_signal(lambda: partial.unlink(missing_ok=True)):
        try:
            # Until it is complete it is nobody else's, whatever the mode of the existing file.
            mode = 0o666 if existing is None else 0o600
            with open(os.open(partial, _NEW, mode), "w", encoding="utf-8") as out:
                out.write(text)
            if existing is not None:
                _keep_owner(partial, existing)
            os.replace(partial, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            # A file may be writable in a folder that is not.
            if existing is None or not isinstance(error, PermissionError):
                raise
            with open(os.open(target, _OVER), "w", encoding="utf-8") as out:
                out.write(text)


def _write_through(path: str | os.PathLike[str], text: str) -> None:
    if os.fspath(path) in _STDOUT:
        tell(text.removesuffix("\n"))
        return
    with open(os.open(path, os.O_WRONLY), "w", encoding="utf-8") as out:
        out.write(text)


def _keep_owner(partial: Path, existing: os.stat_result) -> None:
    with contextlib.suppress(OSError):
        os.chown(partial, existing.st_uid, existing.st_gid)
    os.chmod(partial, stat.S_IMODE(existing.st_mode))
