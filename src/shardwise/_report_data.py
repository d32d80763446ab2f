"""What the report's page is given: a layout and its compilation as plain, small data."""

from __future__ import annotations

import dataclasses
from typing import Any

from ._check import check
from ._compiled import Compiled
from ._findings import Finding, Findings, alike
from ._layout import Layout
from ._leaf import Leaf
from ._mesh import show_mesh, target_of
from ._spec import padded, show_spec
from ._table import show_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One thing that is reported.

    Attributes:
        name: what it is called beside another.
        layout: the layout; None for a compilation that was read from a file.
        compiled: its compilation, if there is one.
        optimizer_bytes: on one device (exact), where the optimizer is known and nothing compiled.
        batch_bytes: of the batch alike.
    """

    name: str
    layout: Layout | None
    compiled: Compiled | None = None
    optimizer_bytes: int = 0
    batch_bytes: int = 0

    @property
    def findings(self) -> Findings:
        """What is wrong with the layout, and with what was compiled."""
        found = check(self.layout) if self.layout is not None else ()
        return Findings((*found, *(self.compiled.findings if self.compiled is not None else ())))

    @property
    def bad(self) -> bool:
        """Whether it cannot be used so."""
        return _verdict(self, self.findings)["state"] == "bad"

    @property
    def verdict(self) -> str:
        """Whether it fits, or what it needs, in a sentence."""
        return _verdict(self, self.findings)["text"]


def side_data(side: Side) -> dict[str, Any]:
    """Returns what the page shows of one side, as JSON can hold it."""
    layout, compiled = side.layout, side.compiled
    findings = side.findings
    sizes = dict(layout.mesh.shape) if layout is not None else _mesh(compiled)
    return {
        "name": side.name,
        "mesh": [[axis, size] for axis, size in sizes.items()],
        "target": _target(side),
        "verdict": _verdict(side, findings),
        "memory": _memory(side),
        "findings": [_finding_row(group) for group in alike(findings)],
        **_leaves(layout, list(sizes)),
        "compiled": _compiled(compiled),
    }


def _mesh(compiled: Compiled | None) -> dict[str, int]:
    assert compiled is not None, "a side has a layout or a compilation"
    return compiled.mesh


def _target(side: Side) -> str:
    if side.compiled is not None:
        return side.compiled.target
    assert side.layout is not None
    target = target_of(side.layout.mesh)
    return str(target) if target is not None else ""


def _verdict(side: Side, findings: Findings) -> dict[str, str]:
    if side.compiled is not None:
        state = {True: "good", False: "bad", None: "plain"}[side.compiled.fits]
        return {"state": state, "text": side.compiled.verdict}
    layout = side.layout
    assert layout is not None
    held = layout.bytes_per_device + side.optimizer_bytes + side.batch_bytes
    where = f"each of {layout.mesh.size} devices, {show_mesh(layout.mesh)}"
    known = "the state and the batch need" if side.optimizer_bytes else "the model needs"
    text = f"{known} {show_bytes(held)} on {where} (exact); what a step needs in between is not compiled"
    target = target_of(layout.mesh)
    if findings.errors:
        return {
            "state": "bad",
            "text": f"it cannot be laid out so: {findings.summary}. Leaves with errors are counted whole.",
        }
    if target is None:
        return {"state": "plain", "text": text}
    capacity = target.chip.capacity_bytes
    if held > capacity:
        over = show_bytes(held - capacity)
        return {
            "state": "bad",
            "text": f"does not fit: {known} {show_bytes(held)} of {show_bytes(capacity)}, {over} too much, on {where} (exact)",
        }
    return {"state": "plain", "text": f"{text}; {target.chip.name} has {show_bytes(capacity)}"}


def _memory(side: Side) -> dict[str, Any]:
    if side.compiled is not None and (memory := side.compiled.memory) is not None:
        other = memory.arguments - memory.parameters - memory.optimizer - memory.batch
        parts = [
            ["parameters", memory.parameters, "exact"],
            ["optimizer", memory.optimizer, "exact"],
            ["batch", memory.batch, "exact"],
            ["other arguments", max(0, other), "compiled"],
            ["outputs beyond them", max(0, memory.outputs - memory.aliased), "compiled"],
            ["temporaries", memory.temporaries, "compiled"],
        ]
        return {"parts": [p for p in parts if p[1]], "capacity": memory.capacity, "whole": True}
    if side.layout is None:
        return {"parts": [], "capacity": None, "whole": False}
    target = target_of(side.layout.mesh)
    parts = [
        ["parameters", side.layout.bytes_per_device, "exact"],
        ["optimizer", side.optimizer_bytes, "exact"],
        ["batch", side.batch_bytes, "exact"],
    ]
    capacity = target.chip.capacity_bytes if target is not None else None
    return {"parts": [p for p in parts if p[1]], "capacity": capacity, "whole": False}


def _finding_row(group: list[Finding]) -> dict[str, Any]:
    first = group[0]
    row = {
        name: getattr(first, name)
        for name in ("code", "name", "severity", "path", "message", "context", "help")
    }
    return {**row, "more": [finding.path for finding in group[1:]]}


def _leaves(layout: Layout | None, axes: list[str]) -> dict[str, Any]:
    """Returns the leaves as short rows; texts that many share are kept once, by number."""
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    rows = []
    for leaf in layout.leaves if layout is not None else ():
        cuts = [] if leaf.faults else [[axes.index(a) for a in d] for d in _cuts(leaf)]
        rows.append(
            [
                leaf.path,
                number(leaf.kind),
                number(str(leaf.dtype)),
                leaf.shape,
                number(show_spec(leaf.spec)),
                cuts,
                None if leaf.faults else leaf.shard_shape,
                leaf.bytes,
                leaf.bytes if leaf.faults else leaf.shard_bytes,
                0 if leaf.faults else leaf.copies,
                number(leaf.reason),
                [number(_opinion(opinion)) for opinion in leaf.trail],
                number(_names(leaf)),
                [number(f"{fault.code}: {fault.message}; {fault.help}") for fault in leaf.faults],
                int(leaf.meant),
            ]
        )
    return {"leaves": rows, "texts": list(texts)}


def _cuts(leaf: Leaf) -> list[tuple[str, ...]]:
    return padded(leaf.spec, leaf.ndim)


def _names(leaf: Leaf) -> str:
    if leaf.names is None:
        return ""
    entries = ("+".join(n) if isinstance(n, tuple) else n or "" for n in leaf.names)
    return ",".join(entries)


def _opinion(opinion: Any) -> str:
    spec = show_spec(opinion.spec) if opinion.spec is not None else "no opinion"
    source = f"{opinion.source}: " if opinion.source else ""
    return f"{source}{spec}{' - ' if opinion.reason else ''}{opinion.reason}"


def _compiled(compiled: Compiled | None) -> dict[str, Any] | None:
    if compiled is None:
        return None
    return {
        "flops": compiled.flops,
        "bytes_accessed": compiled.bytes_accessed,
        "refused": compiled.refused,
        "stand_in": bool(compiled.refused and compiled.hlo),
        "seconds": compiled.seconds,
        "collectives": [
            [
                row.kind,
                list(row.axes),
                row.shape,
                row.times,
                row.step_bytes,
                row.source.place,
                row.source.module,
                row.source.leaf,
                row.source.op,
                int(row.source.backward),
            ]
            for row in sorted(compiled.collectives, key=lambda row: -row.step_bytes)
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
