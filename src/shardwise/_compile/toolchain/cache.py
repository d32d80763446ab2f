"""Compilations on disk: one file each, which counts only if every byte of it is as it was written."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

# Part of every entry's key and header: a version that keeps something else changes it.
FORMAT = 3
_MOST = 200
_DAY_SECONDS = 86_400.0


def cache_folder() -> Path | None:
    """Returns where compilations are kept; None where this user has no home for them."""
    given = os.environ.get("SHARDWISE_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):
        return Path(base or Path.home() / ".cache") / "shardwise" / "compiled"
    return None


def read_entry(folder: Path | None, key: str) -> dict[str, Any] | None:
    """Returns what was kept under `key`; None if nothing was, or if what is there is damaged."""
    if folder is None:
        return None
    place = folder / key
    try:
        header, _, packed = place.read_bytes().partition(b"\n")
        if json.loads(header) != _header(key, packed):
            return None
        found = json.loads(gzip.decompress(packed))
    except (OSError, ValueError, EOFError, zlib.error, RecursionError, MemoryError):
        return None
    if not isinstance(found, dict):
        return None
    # So that it is among the last to go; a cache that cannot be written can still be read.
    with contextlib.suppress(OSError):
        os.utime(place)
    return found


def write_entry(folder: Path | None, key: str, fields: dict[str, Any]) -> str:
    """Keeps `fields` in place of what was there; returns why that is impossible, or nothing.

    The file appears complete or not at all, so that processes that keep the same entry at once
    do no harm to each other.
    """
    if folder is None:
        return "this user has no home folder"
    packed = gzip.compress(json.dumps(fields).encode(), compresslevel=3)
    content = json.dumps(_header(key, packed)).encode() + b"\n" + packed
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=folder, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            _make_way(folder / key)
            os.replace(partial, folder / key)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
    except OSError as error:
        return error.strerror or type(error).__name__
    _make_room(folder)
    return ""


def _header(key: str, packed: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(packed).hexdigest()
    return {"shardwise_cache": FORMAT, "key": key, "bytes": len(packed), "sha256": digest}


def _make_way(place: Path) -> None:
    """Removes a folder that is where a file belongs: older versions kept each entry in one."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)


def _make_room(folder: Path) -> None:
    """Removes the entries that were used longest ago, and what killed processes left behind."""
    ages: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for place in folder.iterdir():
            with contextlib.suppress(OSError):  # another process has removed it
                ages.append((place.stat().st_mtime, place))
    ages.sort(key=lambda item: -item[0])
    entries = [place for _, place in ages if _is_key(place.name)]
    stale = [
        place
        for changed, place in ages
        if place.name.startswith(".new-") and changed < time.time() - _DAY_SECONDS
    ]
    for place in (*entries[_MOST:], *stale):
        _make_way(place)
        with contextlib.suppress(OSError):
            place.unlink(missing_ok=True)


def _is_key(name: str) -> bool:
    return len(name) == 32 and set(name) <= set("0123456789abcdef")
