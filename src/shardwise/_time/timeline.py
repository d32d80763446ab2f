"""A step as a trace in the Chrome format, which Perfetto opens."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from typing import Any

from .._base import public, write_atomically
from .._hlo import Module, cause_of
from .schedule import COMPUTE, Schedule


@public
class Timeline:
    """When each instruction of a step runs (modelled). Made by `compiled.timeline()`.

    Attributes:
        events: one dict for each instruction, with `stream`, `start`, `seconds`, `name`, `op`,
            `module`, `line`, `bytes`, `flops`, `bound` and `times`.
        seconds: the length of the step.
    """

    def __init__(self, events: list[dict[str, Any]], seconds: float, title: str):
        """Takes what ran when."""
        self.events, self.seconds, self.title = events, seconds, title

    @property
    def streams(self) -> list[str]:
        """The streams, compute first."""
        found = dict.fromkeys(event["stream"] for event in self.events)
        return sorted(found, key=lambda name: (name != COMPUTE, name))

    def to_chrome(self) -> dict[str, Any]:
        """Returns the trace: one process, one thread for each stream."""
        tracks = {name: number for number, name in enumerate(self.streams)}
        rows: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": self.title}}
        ]
        for name, number in tracks.items():
            rows.append(
                {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}}
            )
        for event in sorted(self.events, key=lambda event: event["start"]):
            # Both ends are rounded, not the length: viewers reject slices that overlap by a nanosecond.
            start, end = (
                round(at * 1e6, 3) for at in (event["start"], event["start"] + event["seconds"])
            )
            details = {
                key: value
                for key, value in event.items()
                if key not in ("stream", "start", "seconds", "name") and value
            }
            rows.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": tracks[event["stream"]],
                    "ts": start,
                    "dur": round(end - start, 3),
                    "name": event["name"],
                    "args": details,
                }
            )
        return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"label": "modelled"}}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace; open it at ui.perfetto.dev or in chrome://tracing."""
        write_atomically(path, json.dumps(self.to_chrome(), separators=(",", ":")) + "\n")


def timeline_of(module: Module, schedule: Schedule, paths: Collection[str], title: str) -> Timeline:
    """Returns the timeline of a schedule."""
    known: dict[tuple[str, str], dict[str, Any]] = {}
    events = []
    for s in schedule.slices:
        key = (s.computation, s.instruction.name)
        if key not in known:
            source = cause_of(module, s.computation, s.instruction, paths)
            known[key] = {
                "name": s.instruction.name,
                "op": source.op,
                "module": source.module,
                "line": source.place,
                "backward": source.backward,
                "bytes": s.price.bytes,
                "flops": s.price.flops,
                "bound": s.price.bound,
                "axes": ",".join(s.axes),
            }
        events.append(
            {
                **known[key],
                "stream": s.stream,
                "start": s.start,
                "seconds": s.seconds,
                "times": s.times,
                "exposed": s.exposed,
            }
        )
    for start, seconds, times in schedule.gaps:
        events.append(
            {
                "name": f"{times} more iterations like the last one",
                "stream": COMPUTE,
                "start": start,
                "seconds": seconds,
                "times": times,
                "bound": "",
            }
        )
    return Timeline(events, schedule.seconds, title)
