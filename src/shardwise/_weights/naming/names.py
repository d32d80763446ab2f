"""Names: which key of a checkpoint goes to which leaf of a model, and how it is turned into it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..._base import public, read_toml, show_type
from .patterns import Pattern, parse_pattern, parse_template

FORM = (
    "names map a pattern of keys to a path, or to (path, (permute, reshape)), to sw.Name(path, …), to "
    "a list of these, or to None for keys that are not read"
)


@public
@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    r"""Where the tensor of a key goes, and how it is turned into the leaf.

    The tensor is reshaped to `view`, cut by `split`, permuted, and reshaped to `reshape`; the result
    is what the leaf has at the indices of `stack` followed by those of `at`. Nothing of this is
    done to an array: it decides which bytes of the file are read, and where each goes.

    Attributes:
        path: the leaf's dotted path. `\1` is the first group of the pattern that matched the key.
        view: the shape that the stored tensor is reshaped to first.
        split: `(dim, start, stop)`: the part of the tensor that is used, for a key that is divided
            among several leaves (a fused `qkv`).
        permute: the order of the dims, as for `np.transpose`.
        reshape: the shape after that; one size may be -1.
        stack: the groups of the pattern that are indices on the leaf's leading dims (scanned layers,
            experts): `1`, `(1, 2)`, or `"1//6"` for the first group, floor-divided by 6.
        at: for each dim after those of `stack`: None (all of it), an index, or `(start, stop)`. For
            keys that are joined in one leaf, such as gate and up.
        tie: the key repeats a leaf that another key fills: its shape is checked, and it is neither
            read nor saved.
        stored: the shape of the stored tensor. Only needed to save, and only where `view`, `split`
            or `reshape` do not determine it.

    Example:
        >>> import shardwise as sw
        >>> sw.Name(r"layers.\1.mlp.up.kernel", permute=(1, 0))
        Name('layers.\\1.mlp.up.kernel', permute=(1, 0))
    """

    path: str
    view: tuple[int, ...] | None = None
    split: tuple[int, int, int] | None = None
    permute: tuple[int, ...] | None = None
    reshape: tuple[int, ...] | None = None
    stack: Any = None
    at: tuple[Any, ...] | None = None
    tie: bool = False
    stored: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Rejects what is not a name."""
        if not isinstance(self.path, str) or not self.path:
            raise ValueError(f"a name's path is {self.path!r}: give the dotted path of a leaf")
        # Paths with escaped dots are used too, since they replace matches of a pattern.
        object.__setattr__(self, "path", self.path.replace(r"\.", "."))
        for field in ("view", "permute", "reshape", "split", "stored"):
            value = getattr(self, field)
            if value is None:
                continue
            sizes = tuple(value) if isinstance(value, Sequence) else (None,)
            if not all(type(size) is int for size in sizes):
                raise self._fault(field, value, "a tuple of integers")
            object.__setattr__(self, field, sizes)
        if self.permute is not None and sorted(self.permute) != list(range(len(self.permute))):
            raise self._fault("permute", self.permute, "an order of dims, such as (1, 0)")
        if self.split is not None and (len(self.split) != 3 or self.split[1] > self.split[2]):
            raise self._fault("split", self.split, "(dim, start, stop)")
        if self.at is not None:
            if not isinstance(self.at, Sequence) or isinstance(self.at, str):
                raise self._fault("at", self.at, "a tuple of None, indices and (start, stop)")
            entries = tuple(tuple(e) if isinstance(e, list) else e for e in self.at)
            if not all(map(_is_place, entries)):
                raise self._fault("at", self.at, "a tuple of None, indices and (start, stop)")
            object.__setattr__(self, "at", entries)
        object.__setattr__(self, "stack", tuple(map(_parse_stack, _listed(self.stack))))
        if type(self.tie) is not bool:
            raise self._fault("tie", self.tie, "True or False")

    def __repr__(self) -> str:
        """Returns it as it is written, without the defaults."""
        given = [repr(self.path)]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name == "stack" and value:
                shown = [f"{g}//{d}" if d > 1 else g for g, d in value]
                value = tuple(shown) if len(shown) > 1 else shown[0]
            if value not in (None, (), False):
                given.append(f"{field.name}={value!r}")
        return f"Name({', '.join(given)})"

    def _fault(self, field: str, value: Any, form: str) -> ValueError:
        return ValueError(f"the name of {self.path} has {field}={value!r}: give {form}")


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """A name with the groups of one key filled in.

    Attributes:
        name: the name.
        path: the leaf's path.
        index: the indices on the leaf's leading dims.
    """

    name: Name
    path: str
    index: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    pattern: Pattern
    names: tuple[Name, ...]


Value = Any
Names = Mapping[str, Value] | Callable[[str], Value]


class NameMap:
    """A checked map of names.

    Attributes:
        entries: the patterns with their names, in order; None if the map is a function.
    """

    def __init__(self, names: Names) -> None:
        """Reads a map.

        Raises:
            ValueError: it is not one.
        """
        self.function = None
        self.entries: list[_Entry] | None = None
        self._exact: dict[str, list[_Entry]] = {}
        self._general: list[_Entry] = []
        if not isinstance(names, Mapping):
            if not callable(names):
                raise ValueError(f"names is {show_type(names)}: {FORM}, or a function of a key")
            self.function = names
            return
        self.entries = []
        for text, value in names.items():
            entry = _Entry(parse_pattern(text), _names_of(value, text))
            groups = entry.pattern.regex.groups
            for name in entry.names:
                used = {*parse_template(name.path)[1::2], *(g for g, _ in name.stack)}
                if unknown := [g for g in used if not 1 <= g <= groups]:
                    raise ValueError(
                        f"the name of {text!r} uses group {unknown[0]}, but the pattern has {groups}"
                    )
            self.entries.append(entry)
            if entry.pattern.literal is not None:
                self._exact.setdefault(entry.pattern.literal, []).append(entry)
            else:
                self._general.append(entry)

    def find(self, key: str) -> list[tuple[str, tuple[Bound, ...]]]:
        """Returns each pattern that matches a key, with where its tensor goes."""
        if self.function is not None:
            value = self.function(key)
            if value is None:
                return []
            whole = re.match(".*", key, re.DOTALL)
            assert whole is not None
            return [("", tuple(_bind(name, whole) for name in _names_of(value, key)))]
        found = []
        for entry in (*self._exact.get(key, ()), *self._general):
            match = entry.pattern.regex.fullmatch(key)
            if match is not None:
                bound = tuple(_bind(name, match) for name in entry.names)
                found.append((entry.pattern.text, bound))
        return found

    def keys_for(self, path: str, shape: Sequence[int]) -> Iterator[tuple[str, Bound]]:
        """Yields the keys that a leaf is saved under, each with its bound name.

        Raises:
            ValueError: a pattern cannot be turned round.
        """
        for entry in self.entries or ():
            for name in entry.names:
                if name.tie:
                    continue
                groups = _groups_of(name.path, path)
                if groups is None:
                    continue
                places = [range(size) for size in shape[: len(name.stack)]]
                for index in itertools.product(*places):
                    key = entry.pattern.fill(groups, dict(zip(name.stack, index, strict=True)))
                    if key is not None:
                        yield key, Bound(name, path, index)


def read_names(path: str | os.PathLike[str]) -> dict[str, Value]:
    """Returns the names in a TOML file.

    Raises:
        ValueError: the file cannot be read, or is not of the expected form.
    """
    try:
        table = read_toml(path)
    except OSError as error:
        raise ValueError(f"names file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"names file {path}: {error}") from error
    names = table.get("names")
    if set(table) != {"names"} or not isinstance(names, dict):
        raise ValueError(
            f"names file {path} has {', '.join(table) or 'nothing'}: it needs one table [names], with "
            f"rows such as 'norm\\.weight' = \"norm.scale\""
        )
    return names


def names_toml(names: Mapping[str, Value], notes: Mapping[str, str] | None = None) -> str:
    """Returns a map as TOML, with a comment above each pattern that has a note."""
    lines = ["[names]"]
    for text, value in names.items():
        note = (notes or {}).get(text)
        lines += [f"# {line}" for line in note.splitlines()] if note else []
        rows = [_toml_row(name) for name in _names_of(value, text)]
        shown = rows[0] if len(rows) == 1 else f"[{', '.join(rows)}]" if rows else '""'
        lines.append(f"{_toml_text(text)} = {shown}")
    return "\n".join(lines)


def _toml_row(name: Name) -> str:
    rows = [f"path = {_toml_text(name.path)}"]
    for field in ("view", "split", "permute", "reshape", "stored"):
        if getattr(name, field) is not None:
            rows.append(f"{field} = {list(getattr(name, field))}")
    if name.stack:
        shown = [f"{g}//{d}" if d > 1 else g for g, d in name.stack]
        rows.append(f"stack = {shown if len(shown) > 1 else shown[0]!r}".replace("'", '"'))
    if name.at is not None:
        shown = [[] if e is None else list(e) if isinstance(e, tuple) else e for e in name.at]
        rows.append(f"at = {shown}")
    rows += ["tie = true"] if name.tie else []
    return _toml_text(name.path) if len(rows) == 1 else f"{{ {', '.join(rows)} }}"


def _toml_text(text: str) -> str:
    if "'" in text or not text.isprintable():
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"'{text}'"


def _names_of(value: Value, text: str) -> tuple[Name, ...]:
    """Returns the names that the value of a pattern stands for.

    Raises:
        ValueError: it stands for none.
    """
    value = value.value if isinstance(value, enum.Enum) else value
    if value is None or value == "":
        return ()
    if isinstance(value, Name):
        return (value,)
    if isinstance(value, str):
        return (Name(value),)
    if isinstance(value, Mapping):
        known = {field.name for field in dataclasses.fields(Name)}
        unknown = [key for key in value if key not in known]
        if unknown or "path" not in value:
            raise ValueError(
                f"the name of {text!r} has "
                + (f"an unknown field {unknown[0]!r}" if unknown else "no path")
                + f": the fields are {', '.join(sorted(known))}"
            )
        return (Name(**{**value, **_no_empty(value.get("at"))}),)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return (Name(value[0], **_transform(value[1], text)),)
    if isinstance(value, list | tuple) and value:
        return tuple(name for part in value for name in _names_of(part, text))
    raise ValueError(f"the name of {text!r} is {value!r}: {FORM}")


def _no_empty(at: Any) -> dict[str, Any]:
    """Returns `at` with [] as None, which TOML does not have."""
    if not isinstance(at, list | tuple):
        return {}
    return {"at": [None if entry == [] else entry for entry in at]}


def _transform(given: Any, text: str) -> dict[str, Any]:
    """Returns the fields of a name for `(permute, reshape)`, perhaps with whether to reshape first."""
    given = given.value if isinstance(given, enum.Enum) else given
    if given is None:
        return {}
    if not isinstance(given, list | tuple) or len(given) not in (2, 3):
        raise ValueError(
            f"the transform of {text!r} is {given!r}: give None, (permute, reshape) or "
            f"(permute, reshape, reshape_first)"
        )
    permute, reshape, first = (*given, False)[:3]
    return {"permute": permute or None, "view" if first else "reshape": reshape}


def _bind(name: Name, match: re.Match[str]) -> Bound:
    text = parse_template(name.path)
    path = "".join(match[part] or "" if isinstance(part, int) else part for part in text)
    index = []
    for group, by in name.stack:
        number = match[group]
        if number is None or not number.isascii() or not number.isdigit():
            raise ValueError(
                f"the name {name!r} stacks by group {group}, which is {number!r} in "
                f"{match.string!r}: it must match a number"
            )
        index.append(int(number) // by)
    return Bound(name, path, tuple(index))


@functools.lru_cache(maxsize=4096)
def _path_regex(template: str) -> re.Pattern[str]:
    seen: set[int] = set()
    parts = []
    for part in parse_template(template):
        if isinstance(part, str):
            parts.append(re.escape(part))
        else:
            parts.append(f"(?P=g{part})" if part in seen else f"(?P<g{part}>.+?)")
            seen.add(part)
    return re.compile("".join(parts))


def _groups_of(template: str, path: str) -> dict[int, str] | None:
    """Returns the groups with which a template gives a path, or None if it never does."""
    match = _path_regex(template).fullmatch(path) or _path_regex(template).fullmatch(
        f"{path}.value"
    )
    return None if match is None else {int(k[1:]): v for k, v in match.groupdict().items()}


def _is_place(entry: Any) -> bool:
    if isinstance(entry, tuple):
        return len(entry) == 2 and all(type(e) is int for e in entry) and 0 <= entry[0] <= entry[1]
    return entry is None or (type(entry) is int and entry >= 0)


def _listed(value: Any) -> Sequence[Any]:
    return () if value is None else value if isinstance(value, list | tuple) else (value,)


def _parse_stack(entry: Any) -> tuple[int, int]:
    if isinstance(entry, tuple) and len(entry) == 2:
        return entry
    found = re.fullmatch(r"(\d+)(?://(\d+))?", str(entry))
    if found is None or isinstance(entry, bool) or int(found[2] or 1) < 1:
        raise ValueError(f"stack has {entry!r}: give the number of a group, or text such as '1//6'")
    return int(found[1]), int(found[2] or 1)
