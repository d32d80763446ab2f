"""What a search chooses from, and what the user has decided already."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from .._base import either, option
from .._layout import PART_AXES

Batch = int | Literal["free"] | None
# Slowest first: what sends the least is between the devices that are farthest apart.
AXES = ("pipe", "data", "fsdp", "expert", "sequence", "model")
# What the axes beyond data and fsdp add to a strategy's name.
PARTS = {"expert": "expert", "sequence": "sequence", "model": "tensor", "pipe": "pipeline"}
# The axes that split the samples of a batch.
BATCH_AXES = ("pipe", "data", "fsdp", "expert")
BASE = ("data", "fsdp", "model")
# A tensor axis beyond this many devices was never worth its all-reduces.
_MOST = {"model": 64, "pipe": 64, "sequence": 64}


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One point of the space.

    Attributes:
        chips: such as `v5p:4x8x8`.
        axes: names and sizes of the mesh's axes, slowest first.
        strategy: its name, such as `fsdp+tensor`.
        remat: the policy for the model's blocks; None for none, "" for the recipe's own.
        accumulate: in how many microbatches the batch is processed.
        loss_chunks: in how many chunks the loss is computed with the head.
        offload: what is kept in the memory of the hosts; "" for nothing.
        microbatches: into how many parts a pipeline splits the batch; None for the model's own.
        samples: the samples of the global batch.
    """

    chips: str
    axes: tuple[tuple[str, int], ...]
    strategy: str
    remat: str | None
    accumulate: int
    loss_chunks: int = 1
    offload: str = ""
    microbatches: int | None = None
    samples: int = 1

    @property
    def mesh(self) -> str:
        """The mesh as `sw.mesh` takes it."""
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the mesh's axes by name."""
        return dict(self.axes)

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return math.prod(size for _, size in self.axes)

    @property
    def data_ways(self) -> int:
        """Over how many devices the batch is split."""
        return math.prod(size for name, size in self.axes if name in BATCH_AXES)

    @property
    def key(self) -> str:
        """The text that tells it from all others."""
        return repr(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Place:
    """The size of every axis of `AXES`, in their order; 1 for those that a mesh does not have.

    Example:
        >>> from shardwise._search.space import Place
        >>> place = Place.of({"fsdp": 4, "model": 2})
        >>> place.axes, place.strategy
        ((('fsdp', 4), ('model', 2)), 'fsdp+tensor')
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Place:
        """Returns the place with these sizes."""
        return cls(tuple(sizes.get(name, 1) for name in AXES))

    def __getitem__(self, name: str) -> int:
        """Returns the size of an axis."""
        return self.sizes[AXES.index(name)]

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The axes that a mesh has; one of size 1 if there is only one device."""
        pairs = zip(AXES, self.sizes, strict=True)
        return tuple((name, size) for name, size in pairs if size > 1) or (("data", 1),)

    @property
    def is_plain(self) -> bool:
        """Whether all devices are on data, fsdp and model axes."""
        return all(self[name] == 1 for name in AXES if name not in BASE)

    @property
    def strategy(self) -> str:
        """The name of the strategy for these axes."""
        parts = ["fsdp" if self["fsdp"] > 1 else "dp"]
        return "+".join(parts + [part for name, part in PARTS.items() if self[name] > 1])

    def moved(self, less: str, more: str, factor: int = 0) -> Place | None:
        """Returns the place with a factor, by default the smallest, taken from one axis to another."""
        size = self[less]
        factor = factor or next((f for f in range(2, size + 1) if size % f == 0), 0)
        if less == more or not factor or size % factor:
            return None
        sizes = list(self.sizes)
        sizes[AXES.index(less)] //= factor
        sizes[AXES.index(more)] *= factor
        return Place(tuple(sizes))

    def neighbours(self) -> Iterator[Place]:
        """Yields the places that differ by one prime factor between two of the axes."""
        for less in AXES:
            for more in AXES:
                if (found := self.moved(less, more)) is not None:
                    yield found


def divisors(count: int) -> list[int]:
    """Returns the divisors of a count, smallest first."""
    small = [d for d in range(1, math.isqrt(count) + 1) if count % d == 0]
    return sorted({*small, *(count // d for d in small)})


def places(devices: int, samples: int, limits: Mapping[str, int]) -> list[Place]:
    """Returns every place of so many devices that divides the batch.

    Args:
        devices: how many there are.
        samples: those of a global batch, which the axes of the batch must divide.
        limits: by name of an axis beyond data and fsdp, the count that its size must divide, such
            as the number of experts; an axis that is not in it has the size 1.
    """
    found = [((), 1)]
    for name in AXES:
        sizes = divisors(devices) if name in limits or name in ("data", "fsdp") else [1]
        allowed = [
            size
            for size in sizes
            if size <= _MOST.get(name, devices) and not limits.get(name, 0) % size
        ]
        found = [
            ((*before, size), product * size)
            for before, product in found
            for size in allowed
            if devices % (product * size) == 0
        ]
    made = [Place(sizes) for sizes, product in found if product == devices]
    return [p for p in made if samples % math.prod(p[name] for name in BATCH_AXES) == 0]


def corners(found: Sequence[Place]) -> list[Place]:
    """Returns for each size of the tensor axis the pure forms of the others."""
    kept = []
    plain = [place for place in found if place.is_plain]
    for model in sorted({place["model"] for place in plain}):
        of = sorted(place for place in plain if place["model"] == model)
        kept += [of[0], of[len(of) // 2]]
    return list(dict.fromkeys(kept))


def beyond(place: Place, found: Sequence[Place]) -> list[Place]:
    """Returns starts with each further axis: some devices of a place's largest axes moved to it."""
    known, kept = set(found), []
    for name in (axis for axis in AXES if axis not in BASE):
        for source in sorted(BASE, key=lambda axis: -place[axis])[:2]:
            moved = [place.moved(source, name, size) for size in (2, 4, 8)]
            open_ones = [each for each in moved if each in known]
            kept += [each for each in (open_ones[:1] + open_ones[-1:]) if each is not None]
    return list(dict.fromkeys(kept))


def accumulations(batch: int, ways: int) -> list[int]:
    """Returns into how many microbatches a batch can be split, over this many devices."""
    each = batch // ways
    return [n for n in divisors(each) if n & (n - 1) == 0] or [1]


def orders(axes: Sequence[tuple[str, int]]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yields the axes with each of them as the fastest one, as given first."""
    yield tuple(axes)
    for place in range(len(axes) - 1):
        rest = [axis for i, axis in enumerate(axes) if i != place]
        yield (*rest, axes[place])


def given_axes(text: str | Mapping[str, int]) -> dict[str, int]:
    """Returns the sizes in `data=4,model=2`, or a mapping of them."""
    if isinstance(text, Mapping):
        return dict(text)
    found = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.strip().isidentifier() or not size.strip().isdecimal() or not int(size):
            where = either("", "--mesh has ")
            raise ValueError(f"{where}{part!r} is not an axis with its size: write data=4,model=2")
        found[name.strip()] = int(size)
    return found


@dataclasses.dataclass(frozen=True)
class Fixed:
    """What stays as it is; see the arguments of `sw.search`.

    Attributes:
        mesh: the sizes of the axes; None if they are searched.
        strategy: its name; None if it is searched.
        axes: the sizes of some axes.
        remat: the policy; "free" if it is searched.
        accumulate: the number of microbatches; None if it is searched.
        loss_chunks: the number of chunks; None if they are tried where memory demands it.
        offload: what is offloaded; None if that is tried where memory demands it.
        batch_per_device: the samples for each device; "free" if they are searched; None for the
            recipe's own global batch.
    """

    mesh: Mapping[str, int] | None = None
    strategy: str | None = None
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    remat: str | None = "free"
    accumulate: int | None = None
    loss_chunks: int | None = None
    offload: str | None = None
    batch_per_device: Batch = None

    def __post_init__(self) -> None:
        """Rejects what no search can keep."""
        for word, given in (("axes=", self.axes), ("mesh=", self.mesh or {})):
            said = either(word, "--axis" if word == "axes=" else "--mesh")
            for name in given:
                if name not in AXES:
                    raise ValueError(
                        f"{said} has the axis {name!r}: a search has the axes {', '.join(AXES)}"
                    )
        _require_strategy(self.strategy)
        for word in ("accumulate", "loss_chunks"):
            value = getattr(self, word)
            if value is not None and (type(value) is not int or value < 1):
                what = "microbatches" if word == "accumulate" else "chunks"
                raise ValueError(f"{word}={value} is not a number of {what}")
        batch = self.batch_per_device
        if batch not in (None, "free") and (type(batch) is not int or batch < 1):
            raise ValueError(
                f"batch_per_device={batch!r} must be a positive integer, or 'free' to search it"
            )

    def place(self, chips: str, devices: int) -> Place:
        """Returns the mesh that is fixed.

        Raises:
            ValueError: it is not one of these chips.
        """
        assert self.mesh is not None
        sizes = dict(self.mesh)
        if math.prod(sizes.values()) != devices:
            raise ValueError(
                f"{either('mesh=', '--mesh')} has {math.prod(sizes.values())} devices, but {chips} "
                f"has {devices}"
            )
        if "fsdp" in (self.strategy or "") and sizes.get("fsdp", 1) == 1:
            # As a strategy takes it: FSDP over the data axis.
            sizes["fsdp"] = sizes.pop("data", 1)
        return Place.of(sizes)

    def strategy_of(self, place: Place) -> str:
        """Returns the name of the strategy for a place, with ZeRO if that is fixed."""
        parts = [part.strip() for part in (self.strategy or "").split("+")]
        zero = next((part for part in parts if part.startswith("zero")), None)
        return place.strategy if zero is None else place.strategy.replace("dp", zero, 1)

    def kept(self, found: Sequence[Place]) -> list[Place]:
        """Returns the places that have the axes and the strategy that are fixed."""
        for name, size in self.axes.items():
            found = [place for place in found if place[name] == size]
        if self.strategy is None:
            return list(found)
        parts = {part.strip() for part in self.strategy.split("+")}
        single = [place for place in found if place.axes == (("data", 1),)]
        return [
            place
            for place in found
            if (place["fsdp"] > 1) == ("fsdp" in parts)
            and all((place[axis] > 1) == (part in parts) for axis, part in PARTS.items())
        ] or single


def _require_strategy(name: str | None) -> None:
    """Raises if a search knows no strategy of this name."""
    parts = [part.strip() for part in name.split("+")] if name is not None else []
    for part in parts:
        if part not in PART_AXES:
            raise ValueError(
                f"{option('strategy', name)} is unknown: use {', '.join(PART_AXES)}, or several "
                f"joined by +, such as fsdp+tensor"
            )


def fixed_parts(mesh: str | Mapping[str, int] | None = None, **parts: object) -> Fixed:
    """Returns the fixed parts, with the mesh as `sw.mesh` takes it."""
    return Fixed(mesh=given_axes(mesh) if mesh is not None else None, **parts)  # pyright: ignore[reportArgumentType]
