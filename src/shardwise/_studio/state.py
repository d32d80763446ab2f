"""One state of the studio's controls: as a link, and parsed from one that nobody trusts."""

from __future__ import annotations

import dataclasses
import math
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

from .._base import parse_bytes
from .._chips import MOST_DEVICES
from .._mesh import parse_spec

# What a link may have: more is a mistake, or meant to be one.
_LONGEST, _MOST_AXES, _MOST_RULES, _MOST_NUMBER = 32_768, 8, 256, 2**20
_AXIS = re.compile(r"[A-Za-z_]\w{0,31}", re.ASCII)
_WORD = re.compile(r"[\w:.+,-]{1,200}", re.ASCII)
_NUMBERS = ("accumulate", "loss_chunks", "microbatches")
_WORDS = ("on", "strategy", "batch", "remat", "optimizer", "offload", "min_bytes")


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """Everything that the controls choose. An empty text or 0 leaves a choice to the target.

    Attributes:
        target: what is laid out, as the command line names it.
        on: chips, such as `h100:2x8`, or `none`.
        mesh: the axes and their sizes, in order.
        strategy: its name; empty for the model's annotations and the rules alone.
        rules: path patterns and the specs that they get, before the strategy.
        batch: the leading dims of the batch, such as `16x2048`.
        remat: the name of a policy, or `none`.
        optimizer: the name of one that replaces the recipe's.
        accumulate: the number of microbatches whose gradients are averaged.
        loss_chunks: in how many chunks the loss is computed.
        offload: what is kept in the memory of the hosts, or `none`.
        microbatches: into how many parts a pipeline splits the batch.
        min_bytes: the size from which fsdp, zero1 and zero2 split a leaf.
    """

    target: str
    on: str
    mesh: tuple[tuple[str, int], ...]
    strategy: str = ""
    rules: tuple[tuple[str, str], ...] = ()
    batch: str = ""
    remat: str = ""
    optimizer: str = ""
    accumulate: int = 0
    loss_chunks: int = 0
    offload: str = ""
    microbatches: int = 0
    min_bytes: str = ""

    @property
    def axes(self) -> str:
        """The mesh as `sw.mesh` takes it."""
        return show_axes(self.mesh)

    @property
    def devices(self) -> int:
        """How many devices the mesh has."""
        return math.prod(size for _, size in self.mesh)

    @property
    def query(self) -> str:
        """The state as the query of a link; equal states have equal ones."""
        pairs: list[tuple[str, str]] = []
        for name in ("target", *_WORDS, *_NUMBERS):
            if value := getattr(self, name):
                pairs.append((name, str(value)))
        pairs.insert(2, ("mesh", self.axes))
        pairs += [("rule", f"{pattern}={spec}") for pattern, spec in self.rules]
        return as_query(pairs)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain data that the page has."""
        return {
            **dataclasses.asdict(self),
            "mesh": dict(self.mesh),
            "query": self.query,
            "devices": self.devices,
        }


def as_query(pairs: Iterable[tuple[str, str]]) -> str:
    """Returns pairs as a query, in which `fsdp+tensor` is written so."""
    return urllib.parse.urlencode(list(pairs), safe=":,=*()+", quote_via=urllib.parse.quote)


def show_axes(axes: Mapping[str, int] | tuple[tuple[str, int], ...]) -> str:
    """Returns axes and sizes as `data=2,model=4`."""
    pairs = axes.items() if isinstance(axes, Mapping) else axes
    return ",".join(f"{name}={size}" for name, size in pairs)


def parse_query(text: str) -> State:
    """Returns the state of a link's query.

    Raises:
        ValueError: it is not one, or has more than a state can have.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"the state has {len(text):,} characters: at most {_LONGEST:,}")
    pairs = urllib.parse.parse_qsl(
        text.removeprefix("?").replace("+", "%2B"),
        keep_blank_values=True,
        max_num_fields=_MOST_RULES + 20,
    )
    found: dict[str, Any] = {}
    rules: list[tuple[str, str]] = []
    for name, value in pairs:
        if any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
            raise ValueError(f"the state's {name[:40]} has a control character")
        if name == "rule":
            rules.append(_rule(value))
        elif name in found:
            raise ValueError(f"the state has {name} twice: give it once")
        elif name in ("target", "mesh", *_WORDS, *_NUMBERS):
            found[name] = value
        else:
            raise ValueError(f"the state has {name[:40]!r}, which is none of its fields")
    for name in ("target", "on", "mesh"):
        if not found.get(name):
            raise ValueError(f"the state has no {name}")
    if len(rules) > _MOST_RULES:
        raise ValueError(f"the state has {len(rules)} rules: at most {_MOST_RULES}")
    for name in _WORDS:
        if found.get(name) and not _WORD.fullmatch(found[name]):
            raise ValueError(
                f"the state's {name} is {found[name][:60]!r}, which is not a valid name"
            )
    for name in _NUMBERS:
        if name in found:
            found[name] = _number(name, found[name] or "0", least=0)
    if found.get("min_bytes"):
        parse_bytes(found["min_bytes"])
    return State(**{**found, "mesh": parse_axes(found["mesh"])}, rules=tuple(rules))


def parse_axes(text: str) -> tuple[tuple[str, int], ...]:
    """Returns the axes in `data=2,model=4`.

    Raises:
        ValueError: it is not of that form, or has more axes or devices than a mesh may have.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals or not _AXIS.fullmatch(name.strip()):
            raise ValueError(f"the mesh has {part[:40]!r}: write axes as data=2,model=4")
        if name.strip() in axes:
            raise ValueError(f"the mesh has the axis {name.strip()} twice")
        axes[name.strip()] = _number(f"axis {name.strip()}", size.strip(), least=1)
    if len(axes) > _MOST_AXES:
        raise ValueError(f"the mesh has {len(axes)} axes: at most {_MOST_AXES}")
    if math.prod(axes.values()) > MOST_DEVICES:
        raise ValueError(f"the mesh has more devices than the limit of {MOST_DEVICES:,}")
    return tuple(axes.items())


def _number(name: str, text: str, *, least: int) -> int:
    if not re.fullmatch(r"\d{1,8}", text, re.ASCII) or not least <= int(text) <= _MOST_NUMBER:
        raise ValueError(f"{name} is {text[:40]!r}: give an integer of at least {least}")
    return int(text)


def _rule(text: str) -> tuple[str, str]:
    # A spec has no "=", and a path may.
    pattern, equals, spec = text.rpartition("=")
    if not equals or not pattern or len(text) > 400:
        raise ValueError(f"the rule {text[:60]!r} is not of the form **.kernel=P(None, 'model')")
    parse_spec(spec)  # or raises
    return pattern, spec
