"""Patterns of keys, read closely enough to be turned round: from a leaf back to its key."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression of keys.

    Attributes:
        text: as it was given.
        regex: compiled.
        literal: the only key that it matches; None if there may be others.
        parts: literals, and groups as numbers with what they match; None if it has other syntax, and
            therefore cannot be turned round.
    """

    text: str
    regex: re.Pattern[str]
    literal: str | None
    parts: tuple[str | tuple[int, str], ...] | None

    def fill(self, groups: Mapping[int, str], stacked: Mapping[tuple[int, int], int]) -> str | None:
        """Returns the key that the pattern matches with these groups; None if there is none.

        Args:
            groups: the text of the groups that the path says.
            stacked: the index, by (group, divisor), of groups that are on a stacked dim.

        Raises:
            ValueError: the pattern does not say which key.
        """
        if self.parts is None:
            raise self._unclear("has syntax that cannot be turned round")
        indices = {group: (by, index) for (group, by), index in stacked.items()}
        key = ""
        for part in self.parts:
            if isinstance(part, str):
                key += part
                continue
            group, inner = part
            if group in groups:
                found = [groups[group]]
            else:
                found = _candidates(inner, indices.get(group))
                if found is None:
                    raise self._unclear(f"does not say what group {group} is")
            found = [text for text in found if re.fullmatch(inner, text)]
            if group in indices:
                by, index = indices[group]
                found = [text for text in found if text.isdigit() and int(text) // by == index]
            if not found:
                return None
            if len(found) > 1:
                raise self._unclear(
                    f"does not say which of {', '.join(found[:4])} group {group} is"
                )
            key += found[0]
        return key if self.regex.fullmatch(key) else None

    def _unclear(self, why: str) -> ValueError:
        return ValueError(
            f"the pattern {self.text!r} {why}: give like=, a checkpoint with the same keys"
        )


def _candidates(inner: str, stacked: tuple[int, int] | None) -> list[str] | None:
    """Returns what a group may be; None if nothing says it."""
    alternatives = inner.split("|")
    if all(re.fullmatch(r"\w+", text) for text in alternatives):
        return alternatives
    if stacked is None:
        return None
    by, index = stacked
    return [str(n) for n in range(index * by, (index + 1) * by)]


def parse_pattern(text: str) -> Pattern:
    """Returns a pattern.

    Raises:
        ValueError: it is not a regular expression.
    """
    if not isinstance(text, str):
        raise ValueError(f"names has the pattern {text!r}: give a regular expression of keys")
    try:
        regex = re.compile(text)
    except re.error as error:
        raise ValueError(f"the pattern {text!r} is not a regular expression: {error}") from error
    parsed = _parse(text)
    if parsed is None:
        return Pattern(text, regex, None, None)
    parts, exact = parsed
    literal = "".join(parts) if exact and all(isinstance(p, str) for p in parts) else None  # type: ignore[arg-type]
    return Pattern(text, regex, literal, tuple(parts))


def _parse(text: str) -> tuple[list[str | tuple[int, str]], bool] | None:
    """Returns the parts, and whether literals match nothing else; None for other syntax."""
    parts: list[str | tuple[int, str]] = []
    place, groups, exact = 0, 0, True
    while place < len(text):
        char = text[place]
        place += 1
        if char == "\\":
            char = text[place]
            place += 1
            if char.isalnum():
                return None
            parts.append(char)
        elif char in "^$":
            exact = False
        elif char == ".":
            exact = False
            parts.append(".")
        elif char == "(":
            end = _closing(text, place)
            inner = text[place:end]
            place = end + 1
            after = text[place : place + 1]
            if inner.startswith("?:"):
                exact = False
                if "(" in inner[2:].replace(r"\(", "").replace("(?:", ""):
                    return None  # a group inside, which may not take part
                if after in ("?", "*"):
                    place += 1
                    continue
                first = _parse(inner[2:].split("|")[0])
                if first is None or after in ("+", "{"):
                    return None
                parts += first[0]
                continue
            named = re.match(r"\?P<\w+>", inner)
            inner = inner[named.end() :] if named else inner
            if inner.startswith("?") or after in ("?", "*", "+", "{") or "(" in inner:
                return None
            groups += 1
            parts.append((groups, inner))
        elif char in "[]*+?{}|)":
            return None
        else:
            parts.append(char)
        if place < len(text) and text[place] in "*+?{" and not isinstance(parts[-1:], tuple):
            return None
    return parts, exact


def _closing(text: str, place: int) -> int:
    """Returns where the group that begins before `place` ends; the pattern has compiled."""
    depth, in_class = 1, False
    while True:
        char = text[place]
        if char == "\\":
            place += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            if text[place + 1 : place + 2] == "]":
                place += 1
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if depth == 0:
                return place
        place += 1


@functools.lru_cache(maxsize=4096)
def parse_template(template: str) -> tuple[str | int, ...]:
    r"""Returns a path's text and groups in turn: `a.\1.b` is `("a.", 1, ".b")`."""
    parts = re.split(r"\\(?:g<)?(\d+)>?", template)
    return tuple(int(part) if n % 2 else part for n, part in enumerate(parts))
