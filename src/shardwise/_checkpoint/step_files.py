"""The files of a saved step: their names and sizes, and how damage to them is found."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from .._base import read_json, require_form

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
    write_new(directory / FILES, sealed({"files": found}))


def write_new(path: Path, text: str) -> None:
    """Writes a file that must not exist yet: a link in its place is not followed."""
    with open(path, "x", encoding="utf-8") as out:
        out.write(text)


def read_about(directory: Path) -> dict[str, Any]:
    """Returns the metadata of a step, after checking the size of each of its files.

    Raises:
        ValueError: a file is missing or damaged; the message names it.
        UnknownFormat: a later version wrote it.
    """
    for part in _PARTS:
        if not (directory / part).is_file():
            raise ValueError(f"its file {part} is missing")
    about = _unsealed(directory, ABOUT)
    if about["format"] == 1:  # has no list of its files
        for path in sorted(directory.rglob("*")):
            if path.is_file() and not path.stat().st_size:
                raise ValueError(f"its file {path.relative_to(directory)} is empty")
        if not any(path.is_file() for path in (directory / "state").glob("**/d/*")):
            raise ValueError("its array files, state/d, are missing")
        return about
    if not (directory / FILES).is_file():
        raise ValueError(f"its file {FILES} is missing")
    for name, size, checksum in _sizes(directory):
        try:
            got = (directory / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"its file {name} is missing") from None
        if got != size:
            raise ValueError(f"its file {name} has {got} bytes instead of {size}")
        if checksum is not None and _checksum(directory / name) != checksum:
            raise ValueError(f"the contents of its file {name} have changed")
    return about


class UnknownFormat(Exception):
    """The step has a format that this version cannot read."""


_ROW = {"shape": list[int], "dtype": str, "spec": str, "digest": str | int | list, "*": Any}
_FORMS = {
    ABOUT: {"format": int, "step": int, "position": int, "mesh": str, "arrays": dict[str, dict], "*": Any},
    FILES: {"files": dict[str, list], "*": Any},
}  # fmt: skip


def _unsealed(directory: Path, name: str) -> dict[str, Any]:
    try:
        body = read_json(directory / name, {"*": Any})
        if name == ABOUT and body.get("format", FORMAT) not in FORMATS:
            raise UnknownFormat(
                f"has format {body['format']!r:.20}: this version reads format {FORMAT} and older"
            )
        if body.pop("crc32", None) != _crc32(body):
            raise ValueError("its contents have changed")
        require_form(body, _FORMS[name])
        for path, row in body.get("arrays", {}).items():
            require_form(row, _ROW, path)
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"its file {name} cannot be read ({error})") from error
    return body


def _sizes(directory: Path) -> Iterator[tuple[str, int, int | None]]:
    for name, row in _unsealed(directory, FILES)["files"].items():
        inside = PurePosixPath(name)
        if len(row) != 2 or inside.is_absolute() or ".." in inside.parts:
            raise ValueError(f"its file {FILES} is damaged: it names {name!r:.200}")
        yield name, *row


def _checksum(path: Path) -> int | None:
    """Returns the checksum of an index file, else None: arrays have digests instead."""
    is_index = path.name in ("_METADATA", "manifest.ocdbt") or path.parent.name == "array_metadatas"
    return zlib.crc32(path.read_bytes()) if is_index else None


def _crc32(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
