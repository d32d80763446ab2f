"""What happened in a simulated shard_map: its collectives, and what each device held."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._base import count, html_table, public, show_bytes, text_table
from .._chips import MODEL, sent_bytes
from .._layout import show_shape
from .._mesh import Axes
from .._nnx import array_bytes
from .collectives import TracedCollective
from .held import Held, Sizes, is_traced

_MOST_ROWS = 64


@public
@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One collective of the body.

    Attributes:
        kind: `psum`, `pmax`, `pmin`, `all_gather`, `psum_scatter`, `all_to_all`, `ppermute` or
            `pbroadcast`.
        axes: the axes that it runs over, major first.
        devices: how many devices take part.
        shape: of the operand on one device.
        dtype: of the operand.
        times: how often it was executed (by the device that did so most often).
        sent_bytes: what one device sends each time, by the ring model (modelled).
        line: the user's file and line.
    """

    kind: str
    axes: Axes
    devices: int
    shape: tuple[int, ...]
    dtype: str
    times: int
    sent_bytes: int
    line: str

    @property
    def total_bytes(self) -> int:
        """What one device sends in all (modelled)."""
        return self.times * self.sent_bytes


@public
@dataclasses.dataclass(frozen=True)
class Trace(Sequence[Event]):
    """Every collective that one call executed, in order. Prints as a table.

    Attributes:
        mesh: its axes, in words.
        events: the collectives.
    """

    mesh: str
    events: tuple[Event, ...]

    def __getitem__(self, index: Any) -> Any:
        """Returns one collective."""
        return self.events[index]

    def __len__(self) -> int:
        """Returns how many places of the body communicate."""
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        """Yields each collective."""
        return iter(self.events)

    @property
    def total_bytes(self) -> int:
        """What one device sends in all (modelled)."""
        return sum(event.total_bytes for event in self.events)

    def __str__(self) -> str:
        """Returns a table."""
        return text_table(_EVENT_HEADER, self._rows(), self._caption())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Returns the table for notebooks."""
        return html_table(_EVENT_HEADER, self._rows(), self._caption())

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                event.kind,
                ",".join(event.axes),
                show_shape(event),
                event.line,
                str(event.times),
                show_bytes(event.sent_bytes),
                show_bytes(event.total_bytes),
            )
            for event in self.events
        ]

    def _caption(self) -> str:
        times = sum(event.times for event in self.events)
        return (
            f"{count(times, 'collective')} on {self.mesh}; each device sends {show_bytes(self.total_bytes)} "
            f"(modelled)\n{MODEL}"
        )


_EVENT_HEADER = ("collective", "axes", "operand", "line", "times", "sent/device", "total")


class Tracker:
    """Counts collectives while the simulated devices run."""

    def __init__(self, sizes: Sizes):
        """Starts at none."""
        self._sizes = sizes
        self._sites: list[tuple[Event, dict[tuple[int, ...], int]]] = []

    def log(
        self, collective: TracedCollective, held: Held, line: str, at: Mapping[str, Any]
    ) -> None:
        """Adds one place of the body; each execution is counted when it happens."""
        devices = collective.devices(self._sizes)
        dtype = held.value.dtype
        size = array_bytes(held.local_shape, dtype)
        event = Event(
            collective.kind,
            collective.axes,
            devices,
            held.local_shape,
            str(dtype),
            0,
            sent_bytes(collective.kind, size, devices),
            line,
        )
        counts: dict[tuple[int, ...], int] = {}
        self._sites.append((event, counts))

        def count(*coordinates: Any) -> None:
            key = tuple(int(c) for c in coordinates)
            counts[key] = counts.get(key, 0) + 1

        jax.debug.callback(count, *at.values())

    def events(self) -> Iterator[Event]:
        """Yields what was executed at least once, in the order of the body."""
        for event, counts in self._sites:
            if counts:
                yield dataclasses.replace(event, times=max(counts.values()))


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """What one device is given and returns.

    Attributes:
        device: its mesh coordinates.
        inputs: the body's arguments on this device.
        outputs: what the body returns on this device.
    """

    device: Mapping[str, int]
    inputs: Any
    outputs: Any


@public
class Shards(Mapping[tuple[int, ...], Shard]):
    """What every simulated device held, by mesh coordinates: `shards[0, 3]`. Prints as a table."""

    def __init__(self, mesh: str, sizes: Sizes, inputs: Any, outputs: Any):
        """Keeps the stacked values with their tree and names; a device's own are cut out if asked for."""
        self._mesh, self._sizes = mesh, sizes
        self._inputs, self._outputs = inputs, outputs

    def __getitem__(self, device: int | tuple[int, ...] | Mapping[str, int]) -> Shard:
        """Returns what one device held.

        Args:
            device: its coordinates in the mesh's order, or by name: `{"data": 0, "model": 3}`.
        """
        at = self._coordinates(device)
        return Shard(at, *(self._local(part, at) for part in (self._inputs, self._outputs)))

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Yields the coordinates of every device, the last axis fastest."""
        return iter(np.ndindex(*self._sizes.values()))

    def __len__(self) -> int:
        """Returns the number of devices."""
        return math.prod(self._sizes.values())

    def __str__(self) -> str:
        """Returns a table: a row for each value of each device."""
        return text_table(self._header(), self._rows(), self._caption())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Returns the table for notebooks."""
        return html_table(self._header(), self._rows(), self._caption())

    def _coordinates(self, device: Any) -> dict[str, int]:
        if isinstance(device, Mapping):
            given = [device.get(axis) for axis in self._sizes]
            extra = set(device) - set(self._sizes)
        else:
            given, extra = list(device) if isinstance(device, tuple) else [device], set()
        fits = len(given) == len(self._sizes) and all(
            isinstance(i, int | np.integer) and 0 <= i < size
            for i, size in zip(given, self._sizes.values(), strict=False)
        )
        if extra or not fits:
            raise KeyError(f"{device!r} is no device of the mesh {self._mesh}")
        return {axis: int(i) for axis, i in zip(self._sizes, given, strict=True)}  # pyright: ignore

    def _local(self, part: tuple[Any, Sequence[Held], Any], at: Mapping[str, int]) -> Any:
        tree, held, _ = part
        return jax.tree.unflatten(tree, [_cut_out(h, at) for h in held])

    def _header(self) -> tuple[str, ...]:
        return ("device", "", "value", "holds")

    def _caption(self) -> str:
        more = len(self) - len(self._shown())
        text = f"{len(self)} devices on {self._mesh}"
        return text + (f"; {more} more not shown" if more > 0 else "")

    def _shown(self) -> list[tuple[int, ...]]:
        values = max(1, len(self._inputs[1]) + len(self._outputs[1]))
        return list(self)[: max(1, _MOST_ROWS // values)]

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for device in self._shown():
            at = self._coordinates(device)
            name = ",".join(f"{a}={i}" for a, i in at.items())
            for word, (_, held, names) in (("in", self._inputs), ("out", self._outputs)):
                for label, value in zip(names, held, strict=True):
                    leaf = _cut_out(value, at)
                    yield (name, f"{word} {label}".strip(), show_shape(leaf), _brief(leaf))
                    name = ""


def _cut_out(held: Held, at: Mapping[str, int]) -> Any:
    return held.value[tuple(at[a] for a in held.axes)]


def _brief(leaf: Any) -> str:
    """Returns the first numbers of an array, on one line."""
    if is_traced(leaf):
        return "(traced)"
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
        leaf = jax.random.key_data(leaf)
    flat = np.asarray(leaf).reshape(-1)
    many = flat[:8]
    shown = [f"{x:.4g}" if many.dtype.kind not in "biu" else str(x) for x in many]
    return " ".join(shown) + (" …" if flat.size > 8 else "")
