"""The memory of one device over a step: live bytes by owner, moment by moment."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .._base import public, show_bytes
from .._hlo import Instruction, Module, Source, cause_of
from .lifetimes import Lifetimes, Value
from .owners import Kinds
from .writers import source_of_value, writer

# How many moments are kept, how many owners, and the share of the peak below which one has no name.
MOMENTS = 160
OWNERS = 16
_SMALL = 0.004


@dataclasses.dataclass(frozen=True, slots=True)
class Owner:
    """What a part of a device's memory is for.

    Attributes:
        kind: `parameters`, `optimizer`, `batch`, `outputs and padding`, `code` (of a TPU), `gradients`, `activations`
            (of the forward pass, also where it is repeated), `collectives` (what they bring),
            `temporaries` (all other), or `other`: small ones of any kind.
        module: the module that it comes from, with `*` for numbers, or empty.
        place: the user's line, or empty.
        label: how its bytes are known: `exact`, `compiled` or `modelled`.
        bytes: its live bytes at each moment.
    """

    kind: str
    module: str
    place: str
    label: str
    bytes: tuple[int, ...] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        """Returns its kind, module and line."""
        return " ".join(text for text in (self.kind, self.module, self.place) if text)


@dataclasses.dataclass(frozen=True, slots=True)
class LiveLoop:
    """A loop of the step, of which one iteration is shown.

    Attributes:
        first: the first moment in it.
        last: the last one.
        times: how many iterations it has; 1 if the program does not say.
    """

    first: int
    last: int
    times: int


@public
@dataclasses.dataclass(frozen=True)
class LiveMemory:
    """What is alive when in a step. The `live` of `sw.compile`'s result.

    A step is divided into parts of equal length, and each moment is the fullest of its part; of a
    loop, one iteration is shown for as long as all of them take. What the compiler reserves but no
    array is in, such as the space between arrays, is in none of the bytes.

    Attributes:
        label: how lifetimes are known: `compiled`, or `modelled` by the program's order where the
            compiler does not report them.
        places: the place of each moment in the program's order.
        seconds: when each moment is (modelled); empty where there is no model of time.
        length: the length of the step, in seconds or else in instructions.
        running: what runs at each moment: its module and line.
        owners: what the memory is for: what is resident first, then by bytes at the peak.
        peak: which moment is the fullest.
        loops: the loops of the step.
        compiled_bytes: the peak that the compiler reports.

    Example:
        >>> import jax, optax, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
        >>> recipe = sw.Recipe(model=make, loss=lambda model, x: model(x).mean(),
        ...                    optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((32, 64), "float32"))
        >>> layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), "dp")
        >>> live = sw.compile(recipe, layout).live
        >>> live.owners[0].kind, live.owners[0].bytes[live.peak]
        ('parameters', 16384)
    """

    label: str
    places: tuple[int, ...]
    seconds: tuple[float, ...]
    length: float
    running: tuple[str, ...]
    owners: tuple[Owner, ...]
    peak: int
    loops: tuple[LiveLoop, ...]
    compiled_bytes: int

    @property
    def bytes(self) -> tuple[int, ...]:
        """The live bytes at each moment."""
        return tuple(map(sum, zip(*(owner.bytes for owner in self.owners), strict=True)))

    @property
    def peak_bytes(self) -> int:
        """The live bytes at the peak."""
        return sum(owner.bytes[self.peak] for owner in self.owners)

    @property
    def explained(self) -> float:
        """The share of the compiler's own peak that is live at the peak."""
        return self.peak_bytes / self.compiled_bytes if self.compiled_bytes else 1.0

    def at(self, moment: int) -> dict[Owner, int]:
        """Returns the live bytes of each owner at a moment, largest first.

        Raises:
            IndexError: there is no such moment.
        """
        if not 0 <= moment < len(self.places):
            raise IndexError(
                f"there is no moment {moment}: the step has {len(self.places)}, from 0 on"
            )
        there = {owner: owner.bytes[moment] for owner in self.owners if owner.bytes[moment]}
        return dict(sorted(there.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        """Returns the peak and its owners."""
        found = ", ".join(f"{owner} {show_bytes(n)}" for owner, n in self.at(self.peak).items())
        return f"{show_bytes(self.peak_bytes)} at the peak ({self.label}): {found}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain data that `shardwise compile --format json` prints."""
        return {
            **dataclasses.asdict(self),
            "peak_bytes": self.peak_bytes,
            "explained": self.explained,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> LiveMemory:
        """Returns what `to_dict` wrote.

        Raises:
            ValueError: its parts do not have as many moments.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        given = {name: value for name, value in found.items() if name in names}
        for name in ("places", "seconds", "running"):
            given[name] = tuple(given[name])
        given["owners"] = tuple(
            Owner(**{**row, "bytes": tuple(row["bytes"])}) for row in given["owners"]
        )
        given["loops"] = tuple(LiveLoop(**row) for row in given["loops"])
        made = cls(**given)
        count = len(made.places)
        counts = {len(made.running), *(len(owner.bytes) for owner in made.owners)}
        if counts != {count} or len(made.seconds) not in (0, count) or not 0 <= made.peak < count:
            raise ValueError("its moments do not agree with each other")
        return made


def live_of(
    module: Module,
    lifetimes: Lifetimes,
    resident: Mapping[str, tuple[int, str]],
    compiled_bytes: int,
    paths: Collection[str],
    kinds: Kinds,
    spent: Mapping[str, float] | None,
) -> LiveMemory | None:
    """Returns what is alive when, or None for a program that allocates nothing.

    Args:
        module: the program.
        lifetimes: when each temporary is alive.
        resident: what is there during all of the step: bytes and label, by kind.
        compiled_bytes: the peak that the compiler reports.
        paths: the paths of the model's modules.
        kinds: tells gradients from activations.
        spent: seconds that each instruction takes in a step, by name; None for no model of time.
    """
    count = len(lifetimes.sequence)
    if not count or not lifetimes.values:
        return None
    ends = _ends(lifetimes.sequence, spent)
    peak = lifetimes.peak()[1]
    moments = _moments(lifetimes, ends, peak)
    homes = lifetimes.homes(module)
    known: dict[tuple[str, int | None, str], tuple[str, str, str]] = {}
    tables: list[Counter[tuple[str, str, str]]] = []
    for place in moments:
        table: Counter[tuple[str, str, str]] = Counter()
        for value in lifetimes.alive(place):
            key = (value.name, value.index, value.shape)
            if key not in known:
                known[key] = _group(module, homes, value, paths, kinds)
            table[known[key]] += value.bytes
        tables.append(table)
    at_peak = moments.index(peak)
    named = _named(tables, at_peak)
    owners = [
        Owner(kind, "", "", label, (size,) * len(moments))
        for kind, (size, label) in resident.items()
        if size
    ]
    for group in named:
        sizes = tuple(table[group] for table in tables)
        owners.append(Owner(*group, lifetimes.label, sizes))
    rest = tuple(sum(n for g, n in table.items() if g not in named) for table in tables)
    if any(rest):
        owners.append(Owner("other", "", "", lifetimes.label, rest))
    return LiveMemory(
        label=lifetimes.label,
        places=tuple(moments),
        seconds=tuple(ends[place] for place in moments) if spent is not None else (),
        length=ends[-1],
        running=tuple(_running(module, homes, lifetimes.sequence, p, paths) for p in moments),
        owners=tuple(owners),
        peak=at_peak,
        loops=tuple(_loops(module, lifetimes, homes, moments)),
        compiled_bytes=compiled_bytes,
    )


def _ends(sequence: Sequence[str], spent: Mapping[str, float] | None) -> list[float]:
    """Returns when each instruction ends: seconds since the step began, or its place."""
    if spent is None:
        return [float(place) for place in range(len(sequence))]
    return list(itertools.accumulate(spent.get(name, 0.0) for name in sequence))


def _moments(lifetimes: Lifetimes, ends: Sequence[float], peak: int) -> list[int]:
    """Returns the fullest place of each part of the step, with the first, the last and the peak."""
    levels: dict[int, int] = {place: most for most, place in lifetimes.begun}
    best: dict[int, tuple[int, int]] = {}
    length = ends[-1] or 1.0
    now = 0
    events = defaultdict(int)
    for value in lifetimes.values:
        events[value.end + 1] -= value.bytes
        events[value.start] += value.bytes
    for place, end in enumerate(ends):
        now += events.get(place, 0)
        part = min(MOMENTS - 1, int(end / length * MOMENTS))
        best[part] = max(best.get(part, (-1, 0)), (levels.get(place, now), -place))
    found = {-place for _, place in best.values()}
    return sorted(found | {0, len(ends) - 1, peak})


def _group(
    module: Module,
    homes: Mapping[str, tuple[str, Instruction]],
    value: Value,
    paths: Collection[str],
    kinds: Kinds,
) -> tuple[str, str, str]:
    """Returns the kind, the module and the line of a value."""
    source = source_of_value(module, homes, value, paths)
    if value.name not in homes:
        return "temporaries", "", ""
    kind = kinds.of(module, *writer(module, homes, value), source, value.shape)
    return kind, _numberless(source.module), source.place


def _numberless(path: str) -> str:
    return ".".join("*" if key.isdigit() else key for key in path.split("."))


def _named(
    tables: Sequence[Counter[tuple[str, str, str]]], peak: int
) -> list[tuple[str, str, str]]:
    """Returns the groups that are shown by name, by their bytes at the peak."""
    most: Counter[tuple[str, str, str]] = Counter()
    for table in tables:
        for group, size in table.items():
            most[group] = max(most[group], size)
    full = max(sum(table.values()) for table in tables)
    # Half of the names go to what makes the peak, the others to what is largest elsewhere.
    first = [group for group, size in tables[peak].most_common(OWNERS // 2) if size > _SMALL * full]
    more = [group for group, size in most.most_common() if size > _SMALL * full]
    chosen = list(dict.fromkeys([*first, *more]))[:OWNERS]
    return sorted(chosen, key=lambda group: (-tables[peak][group], -most[group], group))


def _running(
    module: Module,
    homes: Mapping[str, tuple[str, Instruction]],
    sequence: Sequence[str],
    place: int,
    paths: Collection[str],
) -> str:
    if sequence[place] not in homes:
        return ""
    source: Source = cause_of(module, *homes[sequence[place]], paths)
    known = [_numberless(source.module), source.place]
    if source.backward:
        known.append("backward")
    return " ".join(text for text in known if text)


def _loops(
    module: Module,
    lifetimes: Lifetimes,
    homes: Mapping[str, tuple[str, Instruction]],
    moments: Sequence[int],
) -> list[LiveLoop]:
    """Returns the outermost loops that have at least three moments."""
    at = {name: place for place, name in enumerate(lifetimes.sequence)}
    found = []
    for computation, instructions in module.computations.items():
        for loop in instructions:
            if loop.opcode != "while" or loop.name not in at:
                continue
            inner = [at[n] for n in _names(module, loop) if n in at]
            spanned = [
                i for i, p in enumerate(moments) if inner and min(inner) <= p < at[loop.name]
            ]
            if len(spanned) >= 3:
                times = module.trips(computation, loop) or 1
                found.append(LiveLoop(spanned[0], spanned[-1], times))
    return [
        one
        for one in sorted(found, key=lambda loop: loop.first)
        if not any(o != one and o.first <= one.first and one.last <= o.last for o in found)
    ]


def _names(module: Module, loop: Instruction) -> list[str]:
    return [i.name for called in loop.called for i in module.computations.get(called, ())]
