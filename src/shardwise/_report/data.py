"""The data of the report's page: a layout and its compilation as small, plain data."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import Mesh

from .._check import Finding, group_similar
from .._compile import Compiled, Plan, host_of
from .._layout import Layout
from .._mesh import padded
from .._nnx import Leaf
from .._time import StepTime
from .hardware import hardware_data
from .summary import summary_data
from .timeline import short_op, timeline_data


def plan_data(name: str, plan: Plan, ask: str = "") -> dict[str, Any]:
    """Returns what the page shows of one plan, as data for JSON; `ask` is what compiles it."""
    found = plan.all_findings
    # Good is what is known to fit: no findings alone prove nothing.
    good = "good" if plan.fits else "plain"
    state = "bad" if not plan.usable else "warn" if found else good
    # The compiler's verdict does not mention findings.
    summary = f"; {found.summary}" if plan.compiled is not None and found else ""
    return {
        "name": name,
        "mesh": [[axis, size] for axis, size in plan.mesh.items()],
        "chips": plan.chips,
        "verdict": {"state": state, "text": plan.verdict + summary},
        "memory": {
            "parts": [dataclasses.astuple(part) for part in plan.parts],
            "capacity": plan.capacity,
            "whole": plan.compiled is not None,
        },
        "summary": summary_data(plan, ask),
        "findings": [_finding_row(group) for group in group_similar(found)],
        **_leaves(plan.layout, list(plan.mesh)),
        "compiled": _compiled(plan.compiled),
        "time": _time(plan.compiled),
        "live": _live(plan.compiled),
        "hardware": _hardware(plan),
    }


def _live(compiled: Compiled | None) -> dict[str, Any] | None:
    """Returns what is alive when; None for a layout, or without a program."""
    return compiled.live.to_dict() if compiled is not None and compiled.live is not None else None


def _hardware(plan: Plan) -> dict[str, Any]:
    mesh = plan.layout.mesh if plan.layout is not None else None
    platform = plan.compiled.platform if plan.compiled is not None else ""
    hosts = 1
    if isinstance(mesh, Mesh):
        platform = mesh.devices.flat[0].platform
        hosts = len(set(host_of(mesh) or [0]))
    return hardware_data(plan.chips, platform, plan.mesh, hosts)


def _finding_row(group: list[Finding]) -> dict[str, Any]:
    first = group[0]
    row = {
        name: getattr(first, name)
        for name in ("code", "name", "severity", "path", "message", "context", "help")
    }
    return {**row, "more": [finding.path for finding in group[1:]]}


def _leaves(layout: Layout | None, axes: list[str]) -> dict[str, Any]:
    """Returns the leaves as short rows; shared texts are stored once and referred to by number."""
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    rows = []
    for leaf in layout.leaves if layout is not None else ():
        cuts = (
            []
            if leaf.faults
            else [[axes.index(a) for a in dim] for dim in padded(leaf.spec, leaf.ndim)]
        )
        row = leaf.to_dict()
        rows.append(
            [
                row["path"],
                number(row["kind"]),
                number(row["dtype"]),
                row["shape"],
                number(row["spec"]),
                cuts,
                row["shard_shape"],
                leaf.bytes,
                leaf.resident_bytes,
                row["copies"] or 0,
                number(row["reason"]),
                [number(_opinion(opinion)) for opinion in leaf.trail],
                number(_names(leaf)),
                [number(f"{fault.code}: {fault.message}; {fault.help}") for fault in leaf.faults],
            ]
        )
    return {"leaves": rows, "texts": list(texts)}


def _names(leaf: Leaf) -> str:
    if leaf.names is None:
        return ""
    entries = ("+".join(n) if isinstance(n, tuple) else n or "" for n in leaf.names)
    return ",".join(entries)


def _opinion(opinion: Any) -> str:
    source = f"{opinion.source}: " if opinion.source else ""
    return f"{source}{opinion.verdict}{' - ' if opinion.reason else ''}{opinion.reason}"


def _time(compiled: Compiled | None) -> dict[str, Any] | None:
    """Returns how long a step takes and when each instruction runs; None if nobody knows."""
    if compiled is None or compiled.time is None:
        return None
    # A compilation that was read from a file has no program.
    has_timeline = compiled.machine is not None and bool(compiled.hlo)
    return {
        **compiled.time.to_dict(),
        "modules": _modules(compiled.time),
        "verdict": compiled.time.verdict,
        "timeline": timeline_data(compiled.timeline()) if has_timeline else None,
    }


def _modules(time: StepTime) -> list[dict[str, Any]]:
    """Returns the time by module; those of layers that repeat, such as `blocks.#.up`, are one."""
    found: dict[str, dict[str, Any]] = {}
    for share in time.modules:
        name = ".".join("#" if key.isdigit() else key for key in short_op(share.name).split("."))
        row = found.setdefault(
            name, {"name": name, "seconds": 0.0, "flops": 0, "bytes": 0, "count": 0}
        )
        for field in ("seconds", "flops", "bytes"):
            row[field] += getattr(share, field)
        row["count"] += 1
    return sorted(found.values(), key=lambda row: -row["seconds"])


def _compiled(compiled: Compiled | None) -> dict[str, Any] | None:
    if compiled is None:
        return None
    return {
        "flops": compiled.flops,
        "bytes_accessed": compiled.bytes_accessed,
        "not_counted": compiled.not_counted,
        "note": compiled.note,
        "collectives": [
            [
                row.kind,
                list(row.axes),
                row.shape,
                row.times,
                row.total_bytes,
                row.source.place,
                row.source.module,
                row.source.leaf,
                row.source.op,
                int(row.source.backward),
                row.hosts,
            ]
            for row in sorted(compiled.collectives, key=lambda row: -row.total_bytes)
        ],
        "buffers": [
            [
                row.shape,
                row.count,
                row.total_bytes,
                row.source.place,
                row.source.module,
                row.source.op,
            ]
            for row in compiled.buffers
        ],
    }
