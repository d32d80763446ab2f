"""Numbers in sentences."""

from __future__ import annotations


def count(number: int, one: str, many: str = "") -> str:
    """Returns a number with its noun: `1 leaf`, `2 leaves`, `3 devices`."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"
