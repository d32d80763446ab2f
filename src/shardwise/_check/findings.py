"""Findings: errors and warnings with permanent codes, printed as a compiler prints them."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .._base import count, either, public, show_type
from .._layout import pattern_regex, steps_text
from .._nnx import show_path, split_path

ERROR, WARNING = "error", "warning"

CODES: dict[str, tuple[str, str]] = {
    "SW101": ("unknown-axis", ERROR),
    "SW102": ("duplicate-axis", ERROR),
    "SW103": ("rank-overflow", ERROR),
    "SW104": ("indivisible-dim", ERROR),
    "SW105": ("replicated-leaf", WARNING),
    "SW106": ("bias-kernel-mismatch", WARNING),
    "SW107": ("dead-rule", WARNING),
    "SW108": ("ambiguous-rule", ERROR),
    "SW109": ("unresolved-name", ERROR),
    "SW110": ("stack-dim-lost", WARNING),
    "SW111": ("unused-axis", WARNING),
    "SW112": ("unused-allow", WARNING),
    "SW113": ("adapter-base-mismatch", WARNING),
    "SW201": ("not-as-planned", ERROR),
    "SW202": ("missing-leaf", ERROR),
    "SW203": ("unplanned-leaf", ERROR),
    "SW204": ("shape-or-dtype-mismatch", ERROR),
    "SW301": ("does-not-fit", ERROR),
    "SW302": ("replicated-activation", WARNING),
    "SW303": ("involuntary-full-rematerialisation", WARNING),
    "SW304": ("resharding-collective", WARNING),
    "SW401": ("missing-from-checkpoint", ERROR),
    "SW402": ("extra-in-checkpoint", ERROR),
    "SW403": ("checkpoint-shape-mismatch", ERROR),
    "SW404": ("checkpoint-dtype-mismatch", ERROR),
    "SW405": ("resharded-on-restore", WARNING),
    "SW501": ("devices-disagree", ERROR),
    "SW502": ("unproven-agreement", WARNING),
    "SW503": ("diverging-collective", ERROR),
    "SW601": ("unused-key", ERROR),
    "SW602": ("leaf-without-key", ERROR),
    "SW603": ("two-keys-for-one-place", ERROR),
    "SW604": ("weights-shape-mismatch", ERROR),
    "SW605": ("weights-dtype-mismatch", ERROR),
    "SW606": ("lossy-cast", WARNING),
    "SW607": ("damaged-weights-file", ERROR),
    "SW608": ("missing-weights-file", ERROR),
}


_BY_SUBTREE = (
    "SW202", "SW203", "SW204", "SW401", "SW402", "SW403", "SW404", "SW601", "SW602", "SW604",
)  # fmt: skip
# How many findings of one code are listed individually, and how many groups in one sentence.
_LISTED = 3


@public
@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong or suspicious.

    Attributes:
        code: a permanent code, such as `SW104`; each has a page in the docs.
        severity: `error` (it cannot run as planned) or `warning`.
        path: the leaf, rule or axis that it is about.
        message: the fact, with the numbers.
        help: what to do.
        context: the shape, spec and mesh, where they apply.
    """

    code: str
    severity: str
    path: str
    message: str
    help: str = ""
    context: str = ""

    @property
    def name(self) -> str:
        """The code's readable name, such as `indivisible-dim`."""
        return CODES[self.code][0]

    def __str__(self) -> str:
        """Returns it as a compiler would print it."""
        lines = [f"{self.severity}[{self.code}] {self.name}: {self.path}", f"  {self.message}"]
        if self.context:
            lines.append(f"  {self.context}")
        if self.help:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, str]:
        """Returns it as plain data."""
        return {**dataclasses.asdict(self), "name": self.name}

    @property
    def concise(self) -> str:
        """The finding on one line."""
        help_text = f" (help: {self.help})" if self.help else ""
        return f"{self.path}: {self.severity}[{self.code}] {self.message}{help_text}"

    @property
    def github(self) -> str:
        """The finding as a GitHub Actions annotation."""
        return f"::{self.severity} title={_escape(f'{self.code} {self.name}', True)}::{_escape(self.concise)}"


@public
class LayoutError(ValueError):
    """Raised when a layout with errors is about to be used. `findings` has all of them."""

    def __init__(self, findings: Findings):
        """Stores the findings, and makes them the message."""
        super().__init__(str(findings))
        self.findings = findings

    def format_message(self) -> str:
        """Returns the count and the first few findings as one sentence, for the command line.

        Click calls the method of this name to print an error.
        """
        found = [*self.findings.errors, *self.findings.warnings]
        groups = [part for code in _by_code(found) for g in subtrees(code) for part in _facts(g)]
        listed = [f"{_subtree(g)}: {g[0].code} {g[0].message}" for g in groups[:_LISTED]]
        if len(groups) > _LISTED:
            listed.append(f"and {len(found) - sum(map(len, groups[:_LISTED]))} more")
        helps = [f.help for f in found if f.help]
        help_text = f" (help: {helps[0]})" if helps else ""
        counted = f"{count(len(found), 'finding')}: " if len(found) > 1 else ""
        return f"{counted}{'; '.join(listed)}{help_text}"


@public
@dataclasses.dataclass(frozen=True)
class Findings(Sequence[Finding]):
    """The findings of one check. Truthy if there are any.

    Attributes:
        items: the findings.
        allowed: the findings that `allow` suppressed.
    """

    items: tuple[Finding, ...]
    allowed: tuple[Finding, ...] = ()

    def __getitem__(self, index: Any) -> Any:
        """Returns one finding."""
        return self.items[index]

    def __len__(self) -> int:
        """Returns the number of findings."""
        return len(self.items)

    def __iter__(self) -> Iterator[Finding]:
        """Yields each finding."""
        return iter(self.items)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that make the layout unusable."""
        return tuple(f for f in self.items if f.severity == ERROR)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that are only suspicious."""
        return tuple(f for f in self.items if f.severity == WARNING)

    def raise_if_errors(self) -> Findings:
        """Returns itself, or raises a `LayoutError` (a `ValueError`) with every error."""
        if self.errors:
            raise LayoutError(Findings(self.errors))
        return self

    def to_json(self) -> str:
        """Returns the findings as JSON, one object each."""
        rows = [finding.to_dict() for finding in self.items]
        return json.dumps(
            {"findings": rows, "errors": len(self.errors), "warnings": len(self.warnings)}, indent=2
        )

    def __str__(self) -> str:
        """Returns all findings; those that differ only in a layer's number are shown as one.

        If a layout or a checkpoint is of another model, every array may be a finding: these are
        grouped by subtree.
        """
        blocks = []
        for code in _by_code(self.items):
            groups = group_similar(code)
            if code[0].code in _BY_SUBTREE and len(groups) > _LISTED:
                blocks += map(_subtree_text, subtrees(code))
                continue
            for group in groups:
                text = str(group[0])
                if len(group) > 1:
                    text += f"\n  and {len(group) - 1} more like it, up to {group[-1].path}"
                blocks.append(text)
        return "\n".join([*blocks, self.summary])

    __repr__ = __str__

    @property
    def summary(self) -> str:
        """The numbers of errors and warnings, as text."""
        if not self.items:
            text = "no findings"
        else:
            text = f"{count(len(self.errors), 'error')}, {count(len(self.warnings), 'warning')}"
        return text + (f", {len(self.allowed)} allowed" if self.allowed else "")


Allow = Mapping[str, str | Sequence[str]]


def sift(found: Iterable[Finding], allow: Allow | None) -> Findings:
    """Returns the findings without the allowed ones; an unused allowance is itself a finding.

    Args:
        found: the findings.
        allow: path patterns by code: `{"SW105": ["embed.**"]}`.

    Raises:
        ValueError: a code is unknown.
    """
    found = list(found)
    patterns = _allowances(allow)
    regexes = {pattern: pattern_regex(pattern) for _, pattern in patterns}
    needed: set[tuple[str, str]] = set()
    kept, allowed = [], []
    for finding in found:
        text = steps_text(split_path(finding.path))
        hits = [(c, p) for c, p in patterns if c == finding.code and regexes[p].fullmatch(text)]
        needed.update(hits)
        (allowed if hits else kept).append(finding)
    for code, pattern in patterns:
        if (code, pattern) not in needed:
            kept.append(
                make_finding(
                    "SW112",
                    pattern,
                    f"{code} is allowed here but not found",
                    "remove the allowance",
                )
            )
    return Findings(tuple(kept), tuple(allowed))


def allowed_paths(allow: Allow | None, code: str) -> Callable[[str], bool]:
    """Returns a function that says whether findings of this code are allowed at a path.

    Raises:
        ValueError: a code is unknown.
    """
    regexes = [pattern_regex(pattern) for c, pattern in _allowances(allow) if c == code]
    return lambda path: any(r.fullmatch(steps_text(split_path(path))) for r in regexes)


def _allowances(allow: Allow | None) -> list[tuple[str, str]]:
    form = "allow maps codes to path patterns: {'SW105': 'embed.**'}"
    if allow is not None and not isinstance(allow, Mapping):
        raise ValueError(f"allow is {show_type(allow)}: {form}")
    name = either("allow", "--allow")
    patterns = []
    for code, value in (allow or {}).items():
        if code not in CODES:
            near = " or ".join(nearest_codes(code))
            hint = f"did you mean {near}?" if near else f"the codes are {', '.join(CODES)}"
            raise ValueError(f"{name} names {code!r}, an unknown code: {hint}")
        if not isinstance(value, str | list | tuple) or not all(isinstance(p, str) for p in value):
            raise ValueError(f"allow has {value!r} for {code}: {form}")
        patterns += [(code, p) for p in ((value,) if isinstance(value, str) else value)]
    return patterns


def nearest_codes(given: str) -> list[str]:
    """Returns the codes that a wrong one may stand for."""
    # All codes share their first letters: 0.8 means that one character of the five is wrong.
    return difflib.get_close_matches(given.upper(), CODES, n=3, cutoff=0.8)


def make_finding(code: str, path: str, message: str, help: str = "", context: str = "") -> Finding:
    """Returns a finding with its code's severity."""
    return Finding(code, CODES[code][1], path, message, help, context)


def group_similar(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Returns findings in groups that differ only in a layer's number."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        key = tuple(_numberless(text) for text in dataclasses.astuple(finding))
        groups.setdefault(key, []).append(finding)
    return list(groups.values())


def subtrees(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Returns findings in a few groups, one per subtree of paths."""
    groups = [list(findings)]
    while True:
        # Divides the largest group that can be divided without exceeding the limit.
        for group in sorted(groups, key=len, reverse=True):
            depth = len(_shared(group))
            children: dict[Any, list[Finding]] = {}
            for finding in group:
                children.setdefault(tuple(split_path(finding.path)[: depth + 1]), []).append(
                    finding
                )
            if 1 < len(children) <= _LISTED + 1 - len(groups):
                place = groups.index(group)
                groups[place : place + 1] = children.values()
                break
        else:
            return groups


def _shared(group: Sequence[Finding]) -> tuple[Any, ...]:
    """Returns the common prefix of the paths."""
    paths = [split_path(finding.path) for finding in group]
    same = itertools.takewhile(lambda steps: len(set(steps)) == 1, zip(*paths, strict=False))
    return tuple(steps[0] for steps in same)


def _prefix(group: Sequence[Finding]) -> str:
    shared = _shared(group)
    return f"{show_path(shared)}.**" if shared else "**"


def _facts(group: list[Finding]) -> list[list[Finding]]:
    """Returns a group as it is, or each finding by itself if all are about one array."""
    return [group] if _paths(group) > 1 else [[finding] for finding in group]


def _paths(group: Sequence[Finding]) -> int:
    """Returns the number of arrays: one array may have several findings."""
    return len({finding.path for finding in group})


def _subtree(group: Sequence[Finding]) -> str:
    if len(group) == 1:
        return group[0].path
    return f"{_prefix(group)} ({_paths(group)} arrays, the first {group[0].path})"


def _subtree_text(group: Sequence[Finding]) -> str:
    first = group[0]
    if _paths(group) == 1:
        return "\n".join(map(str, group))
    helps = f"\n  help: {first.help}" if first.help else ""
    return (
        f"{first.severity}[{first.code}] {first.name}: {_prefix(group)}\n"
        f"  {_paths(group)} arrays, the first {first.path}: {first.message}{helps}"
    )


def _by_code(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Returns findings grouped by code and help, in order of first occurrence."""
    found: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        # Findings share a subtree only if they share the help: another help is another cause.
        help = finding.help if finding.code in _BY_SUBTREE else ""
        found.setdefault((finding.code, help), []).append(finding)
    return list(found.values())


def _numberless(text: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)|(?<=\.)\d+$", "#", text)


def _escape(text: str, is_property: bool = False) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if is_property else text
