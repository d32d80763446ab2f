"""The files of a saved step: their names and sizes, and how damage to them is found."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

ABOUT, LAYOUT, FILES = "about/about.json", "about/layout.json", "about/files.json"
FORMAT, FORMATS = 2, (1, 2)
_PARTS = ("state/_METADATA", "state/manifest.ocdbt", ABOUT)


def sealed(body: dict[str, Any]) -> str:
    """Returns a JSON object as text, with its checksum added."""
    return json.dumps({**body, "crc32": _crc32(body)}, indent=1)


def write_sizes(directory: Path) -> None:
    """Writes a list of a step's files with their sizes, just before the step appears."""
    found = {
        path.relative_to(directory).as_posix(): [path.stat().st_size, _checksum(path)]
        for item in ("about", "state")
        for path in sorted((directory / item).rglob("*"))
        if path.is_file()
    }
    (directory / FILES).write_text(sealed({"files": found}))


def read_about(directory: Path) -> dict[str, Any]:
    """Returns the metadata of a step, after checking the size of each of its files.

    Raises:
        ValueError: a file is missing or damaged; the message names it.
        UnknownFormat: a later version wrote it.
    """
    for part in _PARTS:
        if not (directory / part).is_file():
            raise ValueError(f"its file {part} is missing")
    about = _unsealed(directory, ABOUT, "format")
    if about["format"] == 1:  # has no list of its files
        for path in sorted(directory.rglob("*")):
            if path.is_file() and not path.stat().st_size:
                raise ValueError(f"its file {path.relative_to(directory)} is empty")
        if not any(path.is_file() for path in (directory / "state").glob("**/d/*")):
            raise ValueError("its array files, state/d, are missing")
        return about
    if not (directory / FILES).is_file():
        raise ValueError(f"its file {FILES} is missing")
    for name, (size, checksum) in _unsealed(directory, FILES, "files")["files"].items():
        try:
            got = (directory / name).stat().st_size
        except OSError:
            raise ValueError(f"its file {name} is missing") from None
        if got != size:
            raise ValueError(f"its file {name} has {got} bytes instead of {size}")
        if checksum is not None and _checksum(directory / name) != checksum:
            raise ValueError(f"the contents of its file {name} have changed")
    return about


class UnknownFormat(Exception):
    """The step has a format that this version cannot read."""


def _unsealed(directory: Path, name: str, key: str) -> dict[str, Any]:
    try:
        body = json.loads((directory / name).read_text(encoding="utf-8"))
        body[key]
        if key == "format" and body[key] not in FORMATS:
            raise UnknownFormat(
                f"has format {body[key]}: this version reads format {FORMAT} and older"
            )
        if body.pop("crc32") != _crc32(body):
            raise ValueError("its contents have changed")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"its file {name} cannot be read ({error})") from error
    return body


def _checksum(path: Path) -> int | None:
    """Returns the checksum of an index file, else None: arrays have digests instead."""
    is_index = path.name in ("_METADATA", "manifest.ocdbt") or path.parent.name == "array_metadatas"
    return zlib.crc32(path.read_bytes()) if is_index else None


def _crc32(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
