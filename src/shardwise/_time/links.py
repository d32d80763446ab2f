"""How long collectives take: NVLink inside a node, the network between nodes, a TPU's torus.

GPUs: measured times inside one NVLink domain (`collectives.csv`, from XLA's table of measured
collectives) are interpolated by bytes; between nodes a ring over the nodes runs on all network
cards of the group's GPUs at once, and the slower of the two levels counts.

TPUs: a mesh axis lies on one or several dims of the torus. With a wrap-around both directions of
each are used: an all-gather of V bytes takes V / (2 W axes), where W is the bandwidth of one link in
one direction; without one, half of that bandwidth; an all-reduce takes twice as long. Between slices
a ring runs over the data-center network, each chip with its share of its host's bandwidth; what runs
inside the slices runs before or after it.
"""

from __future__ import annotations

import bisect
import csv
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources

from .._chips import Chips

# What a network card reaches of its datasheet bandwidth, and what one step of a ring over it costs.
_NETWORK_SHARE = 0.85
_NETWORK_STEP = 8e-6
_HOP = 1e-6
_ICI_SHARE = 0.9


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """What a collective runs over.

    Attributes:
        name: `nvlink`, `network`, `ici` or `dcn`, or `host` for devices without links.
        seconds: how long the collective takes.
    """

    name: str
    seconds: float


@functools.cache
def _table() -> Mapping[tuple[str, str, int], tuple[tuple[float, ...], tuple[float, ...]]]:
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    text = resources.files("shardwise._time").joinpath("collectives.csv").read_text()
    for row in csv.DictReader(text.splitlines()):
        key = (row["chip"], row["kind"], int(row["devices"]))
        found.setdefault(key, []).append((float(row["bytes"]), float(row["microseconds"]) * 1e-6))
    return {key: tuple(zip(*sorted(rows), strict=True)) for key, rows in found.items()}  # pyright: ignore[reportReturnType]


def measured_seconds(chip: str, kind: str, devices: int, size: float) -> float:
    """Returns the interpolated time of a collective of `size` bytes inside one NVLink domain."""
    table = _table()
    sizes = sorted({n for c, k, n in table if (c, k) == (chip, kind)})
    near = min(sizes, key=lambda n: abs(math.log(n / devices)))
    at, seconds = table[chip, kind, near]
    scale = 1.0
    if near != devices and kind != "collective-permute":
        scale = ((devices - 1) / devices) / ((near - 1) / near)
    if size <= at[0]:
        return seconds[0]
    if size >= at[-1]:
        return scale * seconds[-1] * size / at[-1]
    i = bisect.bisect_right(at, size)
    share = math.log(size / at[i - 1]) / math.log(at[i] / at[i - 1])
    low, high = math.log(seconds[i - 1]), math.log(seconds[i])
    return scale * math.exp(low + share * (high - low))


def gpu_seconds(chips: Chips, kind: str, size: float, groups: Sequence[Sequence[int]]) -> Link:
    """Returns how long a collective takes on GPUs.

    Args:
        chips: the chips; devices are numbered node by node.
        kind: its HLO name.
        size: bytes of the larger of its operand and its result, on one device.
        groups: the devices of each group; for a permute, pairs.
    """
    chip, (_, local) = chips.chip, chips.topology
    if kind == "collective-permute":
        crossing = any(a // local != b // local for a, b in groups)
        if crossing:
            bandwidth = chip.network_bytes_per_second * _NETWORK_SHARE
            return Link("network", _NETWORK_STEP + size / bandwidth)
        return Link("nvlink", _nvlink(chips, kind, 2, size))
    group = max(groups, key=len)
    nodes = len({device // local for device in group})
    inside = max(1, len(group) // nodes)
    if nodes == 1:
        return Link("nvlink", _nvlink(chips, kind, len(group), size))
    seconds = _network(chip.network_bytes_per_second, kind, size, nodes, inside)
    within = _nvlink(chips, kind, inside, size) if inside > 1 else 0.0
    return Link("network", max(seconds, within) + 0.2 * min(seconds, within))


def _network(each: float, kind: str, size: float, nodes: int, inside: int) -> float:
    """Returns how long a ring over nodes or slices takes.

    Args:
        each: the bandwidth of one device's share of the network.
        kind: the collective's HLO name.
        size: bytes of the larger of its operand and its result, on one device.
        nodes: how many nodes or slices the group is on.
        inside: how many devices of the group are on each.
    """
    bandwidth = each * _NETWORK_SHARE
    across = (nodes - 1) / nodes
    if kind == "all-to-all":
        seconds = across * size / bandwidth
    else:
        # Each device carries its part around the ring.
        seconds = across * size / (bandwidth * inside)
        seconds *= 2 if kind == "all-reduce" else 1
    return seconds + _NETWORK_STEP * math.log2(nodes) * (2 if kind == "all-reduce" else 1)


def _nvlink(chips: Chips, kind: str, devices: int, size: float) -> float:
    known = {"h100": "h100", "h200": "h100", "b200": "b200", "gb200": "gb200", "a100": "h100"}
    table = known.get(chips.chip.name, "h100")
    kind = {"ragged-all-to-all": "all-to-all", "collective-broadcast": "all-gather"}.get(kind, kind)
    seconds = measured_seconds(table, kind, devices, size)
    if chips.chip.name == "a100":
        # The same switches with 300 instead of 450 GB/s: what is not latency scales.
        least = measured_seconds(table, kind, devices, 1.0)
        seconds = least + (seconds - least) * 450e9 / chips.chip.link_bytes_per_second
    return seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Torus:
    """The coordinates of each device of a mesh on its torus, in the mesh's order."""

    coordinates: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    wraps: tuple[bool, ...]

    def spans(self, group: Iterable[int]) -> tuple[tuple[int, bool], ...]:
        """Returns each torus dim that a group spans: how many places, and whether it is a ring."""
        places = [self.coordinates[device] for device in group]
        found = []
        for dim, size in enumerate(self.sizes):
            extent = len({place[dim] for place in places})
            if extent > 1:
                found.append((extent, self.wraps[dim] and extent == size))
        return tuple(found)


def tpu_seconds(chips: Chips, torus: Torus, kind: str, size: float, group: Sequence[int]) -> Link:
    """Returns how long a collective takes on a TPU slice.

    Args:
        chips: the chips.
        torus: where each device lies.
        kind: its HLO name.
        size: bytes of the larger of its operand and its result, on one device.
        group: the devices of one of its groups, or one pair of a permute.
    """
    one_way = chips.chip.link_bytes_per_second * _ICI_SHARE
    spans = torus.spans(group)
    if not spans:
        # Two devices of one chip: through its memory.
        return Link("ici", _HOP + size / chips.chip.hbm_bytes_per_second)
    hops = sum(extent // 2 if ring else extent - 1 for extent, ring in spans)
    bandwidth = sum(2 * one_way if ring else one_way for _, ring in spans)
    if kind == "collective-permute":
        return Link("ici", hops * _HOP + size / one_way)
    share = (len(group) - 1) / len(group)
    if kind in ("all-to-all", "ragged-all-to-all"):
        longest, ring = max(spans)
        seconds = size * longest / (4 * (2 * one_way if ring else one_way))
        return Link("ici", hops * _HOP + seconds)
    seconds = share * size / bandwidth * (2 if kind == "all-reduce" else 1)
    return Link("ici", hops * _HOP * (2 if kind == "all-reduce" else 1) + seconds)


def slices_seconds(
    chips: Chips, torus: Torus, kind: str, size: float, groups: Sequence[Sequence[int]]
) -> Link:
    """Returns how long a collective takes on TPU slices, whose devices are numbered slice by slice.

    Args:
        chips: the chips.
        torus: where each device of one slice lies.
        kind: its HLO name.
        size: bytes of the larger of its operand and its result, on one device.
        groups: the devices of each group; for a permute, pairs.
    """
    local = chips.device_count // chips.slices
    # Of a permute's pairs, those between slices take longest.
    group = max(groups, key=lambda group: (len({device // local for device in group}), len(group)))
    slices = len({device // local for device in group})
    inside = [device % local for device in group if device // local == group[0] // local]
    if slices == 1:
        return tpu_seconds(chips, torus, kind, size, inside)
    each = chips.chip.network_bytes_per_second / chips.chip.devices_per_chip
    if kind == "collective-permute":
        return Link("dcn", _NETWORK_STEP + size / (each * _NETWORK_SHARE))
    seconds = _network(each, kind, size, slices, len(inside))
    if len(inside) > 1:
        seconds += tpu_seconds(chips, torus, kind, size, inside).seconds
    return Link("dcn", seconds)
