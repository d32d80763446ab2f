"""The order in which a GPU's compiler runs kernels, so that they hide collectives.

Its scheduler goes from the end of the step to its beginning. Of what nothing that is left waits
for, it takes a collective first, one at a time, and then what has the longest way behind it. So a
gradient of which only a result is made runs beside a late collective, or before the loop that
comes in between; what it reads is alive until then.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from .fused import COLLECTIVES, neighbours
from .windows import Kernel


def hiding_order(
    kernels: Sequence[Kernel],
    seconds: Sequence[float],
    blocked: Collection[int],
    combined: Sequence[Sequence[int]] = (),
) -> tuple[list[Kernel], list[int]]:
    """Returns kernels as they run, and for each the place of the last one that runs beside it.

    Args:
        kernels: the kernels, each after what it reads.
        seconds: how long each takes.
        blocked: the numbers of those that never run beside a collective, such as loops with others.
        combined: the numbers of collectives that run as one, in lists.
    """
    nodes, before, after = _nodes(kernels, combined)
    spent = [sum(seconds[i] for i in node) for node in nodes]
    sends = [kernels[n[0]].heavy and kernels[n[0]].op.kind in COLLECTIVES for n in nodes]
    depth = _depths(spent, before, after)
    waiting = [len(near) for near in after]
    done = [False] * len(nodes)
    # Collectives, what never runs beside them, and all others: those that may run next.
    ready: tuple[list[tuple[float, int]], ...] = ([], [], [])

    def offer(n: int) -> None:
        place, way = 2, depth[n]
        if sends[n]:
            # What waits for a collective waits for its transfer too.
            place, way = 0, way + spent[n]
        elif nodes[n][0] in blocked:
            # The last kernel before a loop also makes the sums that others wait for.
            near = [depth[j] + (spent[j] if sends[j] else 0.0) for j in before[n]]
            place, way = 1, max(near, default=0.0)
        heapq.heappush(ready[place], (-way, -n))

    for n, count in enumerate(waiting):
        if not count:
            offer(n)
    order: list[Kernel] = []
    ends: list[int] = []
    now, until, sent, begun = 0.0, 0.0, -1, 0
    for _ in nodes:
        free = [queue for queue in ready[0 if sent < 0 else 2 :] if queue]
        if sent < 0 and ready[0] and min(free, key=lambda queue: queue[0]) is ready[0]:
            sent = -heapq.heappop(ready[0])[1]
            until, begun = now + spent[sent], len(order)
            free = [ready[2]] if ready[2] else []
        end = len(order)
        if sent >= 0 and (now >= until or not free):
            now, made, sent, end = max(now, until), sent, -1, begun
        elif free:
            made = -heapq.heappop(min(free, key=lambda queue: queue[0]))[1]
            now += spent[made]
        else:  # kernels that were merged may wait for each other
            made = max(n for n, is_done in enumerate(done) if not is_done)
        done[made] = True
        for i in reversed(nodes[made]):
            order.append(kernels[i])
            ends.append(end)
        for n in before[made]:
            waiting[n] -= 1
            if not waiting[n] and not done[n]:
                offer(n)
    return order[::-1], [len(order) - 1 - end for end in reversed(ends)]


def _nodes(
    kernels: Sequence[Kernel], combined: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[set[int]], list[set[int]]]:
    """Returns the numbers of what runs as one; by place, what each waits for, and what for it."""
    leader = {i: group[-1] for group in combined for i in group}
    members: dict[int, list[int]] = {}
    for i in range(len(kernels)):
        members.setdefault(leader.get(i, i), []).append(i)
    nodes = list(members.values())
    place = {i: n for n, node in enumerate(nodes) for i in node}
    found = []
    for near in neighbours(kernels):
        found.append(
            [{place[j] for i in node for j in near[i]} - {n} for n, node in enumerate(nodes)]
        )
    return nodes, found[0], found[1]


def _depths(
    spent: Sequence[float], before: Sequence[set[int]], after: Sequence[set[int]]
) -> list[float]:
    """Returns for each the seconds of the longest chain that it waits for."""
    depth = [0.0] * len(spent)
    waiting = [len(near) for near in before]
    ready = [n for n, count in enumerate(waiting) if not count]
    while ready:
        n = ready.pop()
        for other in after[n]:
            depth[other] = max(depth[other], depth[n] + spent[n])
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return depth


def run_between(waiting: list[tuple[float, float]], now: float, until: float) -> float:
    """Returns the time after what is ready has run until another kernel's inputs come."""
    while now < until and waiting and min(waiting)[0] <= now:
        found = min(waiting)
        waiting.remove(found)
        now += found[1]
    return now
