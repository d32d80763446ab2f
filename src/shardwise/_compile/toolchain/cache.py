"""Compilations on disk: one file each, used only if every byte of it is intact."""

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

from ..._base import parse_json, read_bytes

# Part of every entry's key and header: change it when the contents of entries change.
FORMAT = 3
_MOST = 200
_MOST_BYTES = 2**30
_DAY_SECONDS = 86_400.0


def cache_folder() -> Path | None:
    """Returns the folder of the cache; None if this user has no home folder."""
    given = os.environ.get("SHARDWISE_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):
        return Path(base or Path.home() / ".cache") / "shardwise" / "compiled"
    return None


def read_entry(folder: Path | None, key: str) -> dict[str, Any] | None:
    """Returns the entry of `key`; None if there is none, or if it is damaged."""
    if folder is None:
        return None
    place = folder / key
    try:
        header, _, packed = read_bytes(place, _MOST_BYTES).partition(b"\n")
        if parse_json(header) != _header(key, packed):
            return None
        unpacker = zlib.decompressobj(wbits=31)
        found = parse_json(unpacker.decompress(packed, _MOST_BYTES))
        if unpacker.unconsumed_tail:
            return None
    except (OSError, ValueError, EOFError, zlib.error, MemoryError):
        return None
    if not isinstance(found, dict):
        return None
    # Mark it as recently used; a cache that is read-only still works.
    with contextlib.suppress(OSError):
        os.utime(place)
    return found


def write_entry(folder: Path | None, key: str, fields: dict[str, Any]) -> str:
    """Writes or replaces an entry; returns why that is impossible, or an empty string.

    The file appears complete or not at all, so processes may write the same entry at once.
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
    """Removes a folder in place of a file: older versions stored each entry in a folder."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)


def _make_room(folder: Path) -> None:
    """Removes the least recently used entries, and what killed processes left behind."""
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
