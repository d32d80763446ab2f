"""Who keeps which shards: every shard of the state in the memory of two hosts, if there are two."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One shard of one array: the array's name, where the shard is in it, and its bytes."""

    name: str
    box: Box
    size: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """Shards that the same hosts keep.

    Attributes:
        name: unique among the bundles of a copy.
        owner: the process that writes them to its host's memory.
        second: the process on another host that keeps them too; None if there is one host.
        sent: whether only the owner holds them, so that they must be sent to the second.
        pieces: the shards.
    """

    name: str
    owner: int
    second: int | None
    sent: bool
    pieces: tuple[Piece, ...]


def bundles_of(arrays: Mapping[str, Any], hosts: Sequence[Any]) -> list[Bundle]:
    """Returns the bundles of a state; the same on every process.

    Args:
        arrays: abstract arrays with their shardings, by name.
        hosts: for each process, which host it is on.
    """
    found: dict[tuple[int, int | None, bool], list[Piece]] = collections.defaultdict(list)
    turns: collections.Counter[tuple[int, ...]] = collections.Counter()
    for name, x in arrays.items():
        if not x.size:
            continue
        for box, holders in _holders(x).items():
            size = math.prod(stop - start for start, stop in box) * x.dtype.itemsize
            # In turns, so that no process keeps all of what every process holds.
            owner = holders[turns[holders] % len(holders)]
            turns[holders] += 1
            after = [p for p in holders if p > owner] + [p for p in holders if p < owner]
            second = next((p for p in after if hosts[p] != hosts[owner]), None)
            sent = second is None
            if second is None:
                second = neighbour(owner, hosts)
            found[owner, second, sent].append(Piece(name, box, size))
    return [
        Bundle(_name(owner, second, sent), owner, second, sent, tuple(pieces))
        for (owner, second, sent), pieces in sorted(found.items(), key=str)
    ]


def neighbour(process: int, hosts: Sequence[Any]) -> int | None:
    """Returns the next process on another host, or None if there is none."""
    order = [(process + i) % len(hosts) for i in range(1, len(hosts))]
    return next((p for p in order if hosts[p] != hosts[process]), None)


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Returns a shard's index as the start and end of each dim."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _holders(x: Any) -> dict[Box, tuple[int, ...]]:
    """Returns the processes that hold each distinct shard of an array."""
    found: dict[Box, set[int]] = collections.defaultdict(set)
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        found[box_of(index, x.shape)].add(device.process_index)
    return {box: tuple(sorted(holders)) for box, holders in found.items()}


def _name(owner: int, second: int | None, sent: bool) -> str:
    if second is None:
        return f"{owner}"
    return f"{owner}{'to' if sent else 'and'}{second}"
