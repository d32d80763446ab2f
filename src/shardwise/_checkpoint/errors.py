"""Why a checkpoint could not be written or read, in one clear message."""

from __future__ import annotations

import errno
import re

from .._base import public

_ERRNO = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk is full",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.ENOTDIR: "part of the path is a file",
    errno.EEXIST: "part of the path is a file",
    errno.ELOOP: "one of its files is a symbolic link",
}


@public
class CheckpointError(ValueError):
    """A checkpoint could not be written or read; other steps are unaffected."""


def reason_for(error: BaseException) -> str:
    """Returns what went wrong, in plain words where the error is a known one."""
    if isinstance(error, OSError) and error.errno in _ERRNO:
        return _ERRNO[error.errno]
    text = " ".join(str(error).split())
    # TensorStore raises a ValueError for all of these, with neither a status nor an errno: only the
    # message distinguishes them.
    known = {
        "No space left": "the disk is full",
        "Read-only file system": "the file system is read-only",
        "Permission denied": "permission denied",
        "Not a directory": "part of the path is a file",
        "File exists": "part of the path is a file",
        "checksum verification failed": "one of its files is damaged",
        "Error decoding": "one of its files is damaged",
        "DATA_LOSS": "one of its files is damaged",
        "OUT_OF_RANGE": "one of its files is truncated",
        "NOT_FOUND": "one of its files is missing",
        "Encountered error while reading": "one of its files is damaged",
    }
    for sign, reason in known.items():
        if sign in text:
            # The array that was being read, where the message says so.
            named = re.search(r'Error reading "([^"]+)/(?:zarr\.json|c/[^"]*|c)"', text)
            return f"{reason}, found while reading {named[1]}" if named else reason
    return f"{type(error).__name__}: {text[:300]}"
