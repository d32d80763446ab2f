"""The order in which a GPU's compiler runs kernels, so that they hide collectives.

Its scheduler goes from the end of the step to its beginning. A collective is two nodes: waiting for
it, which comes first in that direction, and sending it, which may come once it has had time to
travel. Of what nothing that is left waits for, it takes a collective's wait first, one at a time,
then what stalls least, and then what has the collectives behind it that travel longest.

Each node waits a microsecond for the next, which costs nothing where a kernel runs meanwhile. But
what a product returns is unpacked by a node that takes no time: right after it is needed, a product
is not ready yet, and another kernel that is ready runs instead. So gradients of weights are spread
along the backward pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from .graph import COLLECTIVES, Kernel, neighbours

# In microseconds: from a node to the next, what the scheduler thinks that loops and small fusions
# take, and what a copy takes.
_NEXT, _SHORT, _COPY = 1.0, 0.01, 5000.0
# Fusions that move less take less than a microsecond by its reckoning.
_TINY = 3 * 2**20
# To slice what products that were merged return.
_SLICE = 4.0
_SLICED = ("dynamic_slice", "dynamic_update_slice")


@dataclasses.dataclass(slots=True, frozen=True)
class Step:
    """A kernel that runs, or a collective that is sent or waited for.

    Attributes:
        kernels: the numbers of what runs as one.
        part: `run`, `send` or `wait`.
    """

    kernels: tuple[int, ...]
    part: str


@dataclasses.dataclass(slots=True)
class _Node:
    step: Step
    place: int
    cost: float = 0.0
    before: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    after: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    left: int = 0
    time: float = 0.0
    depth: float = 0.0
    # Whether it occupies what collectives travel on, or releases it; and whether it cannot run then.
    occupies: bool = False
    releases: bool = False
    blocked: bool = False
    first: bool = False
    after_wait: bool = False
    done: bool = False


def hiding_order(
    kernels: Sequence[Kernel],
    seconds: Sequence[float],
    blocked: Collection[int] = (),
    combined: Sequence[Sequence[int]] = (),
    copied: Collection[int] = (),
    places: Sequence[int] = (),
) -> list[Step]:
    """Returns what runs, is sent and is waited for, in order.

    Args:
        kernels: the kernels, each after what it reads.
        seconds: how long each takes.
        blocked: the numbers of those that never run beside a collective, such as loops with others.
        combined: the numbers of collectives that run as one, in lists.
        copied: the numbers of those that a copy engine runs.
        places: the order in which they would run without collectives, if it is another one.
    """
    nodes = _graph(kernels, seconds, blocked, combined, copied)
    for node in nodes if places else ():
        node.place = max(places[n] for n in node.step.kernels)
    _depths(nodes)
    ready = [n for n, node in enumerate(nodes) if not node.left]
    order: list[int] = []
    now, travels = 0.0, False
    for _ in nodes:
        free = [n for n in ready if not (travels and (nodes[n].occupies or nodes[n].blocked))]
        if free:
            chosen = _best(nodes, free, ready, now, travels)
            ready.remove(chosen)
        else:  # kernels that were merged may wait for each other
            chosen = max(n for n, node in enumerate(nodes) if not node.done)
            if chosen in ready:
                ready.remove(chosen)
        node = nodes[chosen]
        node.done = True
        order.append(chosen)
        travels = (travels or node.occupies) and not node.releases
        node.time = max([now, *(nodes[a].time + wait for a, wait in node.after if nodes[a].done)])
        now = node.time + node.cost
        for n, _ in node.before:
            nodes[n].left -= 1
            if not nodes[n].left and not nodes[n].done:
                nodes[n].time = max(nodes[a].time + wait for a, wait in nodes[n].after)
                ready.append(n)
    return [nodes[n].step for n in reversed(order)]


def _best(
    nodes: Sequence[_Node], free: Sequence[int], ready: Sequence[int], now: float, travels: bool
) -> int:
    """Returns which of the nodes that may come next the scheduler takes."""
    waits = [n for n in free if nodes[n].occupies or nodes[n].first or nodes[n].blocked]
    if waits:
        free = waits
    least = min(max(nodes[n].time - now, 0.0) for n in free)
    free = [n for n in free if max(nodes[n].time - now, 0.0) == least]
    if len(free) == 1:
        return free[0]
    backed_up = travels and any(nodes[n].occupies for n in ready)
    soon = min((nodes[n].time for n in ready if nodes[n].time > now), default=math.inf)

    def order(n: int) -> tuple[float, ...]:
        node = nodes[n]
        waste = -math.inf
        if soon < math.inf and not node.releases:
            waste = -abs(soon - now - node.cost)
        opens = sum(nodes[b].left == 1 for b, _ in node.before)
        return (
            not (node.releases and not backed_up and node.depth == 0),
            node.releases and backed_up,
            node.depth,
            waste,
            node.after_wait,
            -node.cost,
            opens,
            node.place,
        )

    return max(free, key=order)


def _graph(
    kernels: Sequence[Kernel],
    seconds: Sequence[float],
    blocked: Collection[int],
    combined: Sequence[Sequence[int]],
    copied: Collection[int],
) -> list[_Node]:
    """Returns the nodes, each with those that it waits for and those that wait for it."""
    leader = {i: group[-1] for group in combined for i in group}
    members: dict[int, list[int]] = {}
    for i in range(len(kernels)):
        members.setdefault(leader.get(i, i), []).append(i)
    nodes: list[_Node] = []
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    for place, group in enumerate(members.values()):
        first, numbers = kernels[group[0]], tuple(group)
        spent = 1e6 * sum(seconds[i] for i in group)
        sends = first.heavy and first.op.kind in COLLECTIVES
        if sends or group[0] in copied:
            last = len(nodes) + 1
            nodes.append(_Node(Step(numbers, "send"), place, _NEXT, releases=sends))
            nodes.append(_Node(Step(numbers, "wait"), place, _NEXT, occupies=sends, first=True))
            _join(nodes, last - 1, last, spent if sends else _COPY)
            begin |= dict.fromkeys(group, last - 1)
            end |= dict.fromkeys(group, last)
        else:
            small = not first.heavy and first.access.total < _TINY
            cost = _SHORT if first.op.kind == "while" or small else spent
            begin |= dict.fromkeys(group, len(nodes))
            end |= dict.fromkeys(group, len(nodes))
            nodes.append(_Node(Step(numbers, "run"), place, cost, blocked=group[0] in blocked))
    before, _ = neighbours(kernels)
    seen: set[tuple[int, int]] = set()
    for i, near in enumerate(before):
        for j in near:
            pair = end[j], begin[i]
            if pair[0] != pair[1] and pair not in seen and leader.get(i, i) != leader.get(j, j):
                seen.add(pair)
                # A result that has to be unpacked is there a little later.
                unpacked = kernels[j].heavy or len(kernels[j].writes) > 1
                merged = len(nodes[end[j]].step.kernels) > 1 and nodes[end[j]].step.part == "run"
                _join(nodes, *pair, _NEXT + merged * _SLICE, unpacked=unpacked)
                nodes[pair[1]].after_wait |= nodes[pair[0]].occupies
    return nodes


def _join(
    nodes: Sequence[_Node], one: int, other: int, wait: float, *, unpacked: bool = False
) -> None:
    # What unpacks comes right after what it is for has run.
    wait += max(wait, nodes[other].cost) if unpacked else 0.0
    nodes[one].after.append((other, wait))
    nodes[other].before.append((one, wait))
    nodes[one].left += 1


def _depths(nodes: Sequence[_Node]) -> None:
    """Works out how long the collectives travel that each node waits for."""
    waiting = [len(node.before) for node in nodes]
    ready = [n for n, count in enumerate(waiting) if not count]
    while ready:
        node = nodes[ready.pop()]
        for n, wait in node.after:
            more = wait if nodes[n].step.part == "wait" else 0.0
            nodes[n].depth = max(nodes[n].depth, node.depth + more)
            waiting[n] -= 1
            if not waiting[n]:
                ready.append(n)


def lives_of(steps: Sequence[Step]) -> tuple[list[int], list[int]]:
    """Returns kernels as they begin, and for each the place of the last that runs beside it."""
    order: list[int] = []
    ends: dict[int, int] = {}
    for step in steps:
        if step.part != "wait":
            order += step.kernels
        ends |= dict.fromkeys(step.kernels, len(order) - 1)
    return order, [ends[n] for n in order]


def is_copy(kernel: Kernel) -> bool:
    """Returns whether a copy engine runs a kernel: it only takes a slice, or puts one in its place."""
    kinds = {op.kind for op in kernel.ops}
    return kernel.op.kind in _SLICED and not kinds & {"convert", "reduce"}
