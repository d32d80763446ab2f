"""Numbers in sentences, and sizes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
BYTES_FORM = "give a number of bytes, such as 65536, 64KiB or 1MiB"


def count(number: int, one: str, many: str = "") -> str:
    """Returns a number with its noun: `1 leaf`, `2 leaves`, `3 devices`."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def parse_bytes(text: str) -> int:
    """Returns how many bytes a text such as `64KiB` says.

    Raises:
        ValueError: it is no such text.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), re.IGNORECASE | re.ASCII)
    unit = _UNITS.get(found[2].upper()) if found else None
    size = float(found[1]) * unit if found and unit else 0.5
    if size != int(size):
        raise ValueError(f"{text!r} is not a number of bytes: {BYTES_FORM}")
    return int(size)
