"""A step's timeline as small, plain data for the page."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .._time import Timeline

# The most slices that the page has. Above it, runs of slices shorter than this share of the step
# become one block each; the share doubles until they are few enough.
MOST_SLICES = 1500
SHORT = 1 / 5000


def short_op(op: str) -> str:
    """Returns an operation's name; of those that the compiler made one, the first and how many."""
    if not (op.startswith("(") and op.endswith(")") and ":" in op):
        return op
    first, *others = op[1:-1].split(":")
    return f"{first} and {len(others)} more"


def timeline_data(timeline: Timeline, most: int = MOST_SLICES) -> dict[str, Any]:
    """Returns the slices by stream, in nanoseconds; shared texts and kinds are stored once.

    A slice is `[kind, start, duration, times, exposed]`. A block of short slices goes on with
    `count, busy, bound, bytes, flops`, and its kind is that of its longest slice.
    """
    texts: dict[str, int] = {}
    kinds: dict[tuple[int, ...], int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    def kind(event: dict[str, Any]) -> int:
        row = (
            number(event["name"]),
            number(short_op(event.get("op", ""))),
            *(number(event.get(name, "")) for name in ("module", "line", "axes", "bound")),
            int(event.get("backward", False)),
            event.get("bytes", 0),
            event.get("flops", 0),
        )
        return kinds.setdefault(row, len(kinds))

    def slice_row(run: list[dict[str, Any]]) -> list[int]:
        if len(run) == 1:
            event = run[0]
            exposed = _ns(event.get("exposed", 0.0))
            span = (_ns(event["start"]), _ns(event["seconds"]))
            return [kind(event), *span, event["times"], exposed]
        longest = max(run, key=lambda event: event["seconds"])
        bounds: Counter[str] = Counter()
        for event in run:
            bounds[event["bound"]] += event["seconds"]
        start = run[0]["start"]
        return [
            kind(longest),
            _ns(start),
            _ns(run[-1]["start"] + run[-1]["seconds"] - start),
            longest["times"],
            _ns(sum(event["exposed"] for event in run)),
            len(run),
            _ns(sum(event["seconds"] for event in run)),
            number(bounds.most_common(1)[0][0]),
            sum(event["bytes"] for event in run),
            sum(event["flops"] for event in run),
        ]

    runs = _merged(timeline, most)
    return {
        "seconds": timeline.seconds,
        "streams": [[name, [slice_row(run) for run in runs[name]]] for name in timeline.streams],
        "kinds": list(kinds),
        "texts": list(texts),
    }


def _merged(timeline: Timeline, most: int) -> dict[str, list[list[dict[str, Any]]]]:
    by_stream = {
        name: sorted(
            (event for event in timeline.events if event["stream"] == name),
            key=lambda event: event["start"],
        )
        for name in timeline.streams
    }
    short = 0.0 if len(timeline.events) <= most else SHORT * timeline.seconds
    while True:
        found = {name: _runs(events, short) for name, events in by_stream.items()}
        if sum(map(len, found.values())) <= most or short >= timeline.seconds:
            return found
        short *= 2


def _runs(events: list[dict[str, Any]], short: float) -> list[list[dict[str, Any]]]:
    """Returns events, with those shorter than `short` that follow one another together."""
    runs: list[list[dict[str, Any]]] = []
    is_open = False  # whether the last run takes another event
    for event in events:
        # The event that stands for the iterations that are not drawn stays by itself.
        mergeable = event["seconds"] < short and bool(event["bound"])
        follows = (
            is_open
            and event["times"] == runs[-1][-1]["times"]
            and event["start"] - _end(runs[-1]) < short
        )
        if mergeable and follows:
            runs[-1].append(event)
        else:
            runs.append([event])
        is_open = mergeable
    return runs


def _end(run: list[dict[str, Any]]) -> float:
    return run[-1]["start"] + run[-1]["seconds"]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
