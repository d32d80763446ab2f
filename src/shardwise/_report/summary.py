"""What a reader asks first: what is large, what is wrong, and what to do about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from .._base import show_bytes, show_seconds
from .._check import group_similar
from .._compile import Part, Plan
from .._layout import Layout
from .._mesh import spec_axes
from .._nnx import Leaf, array_bytes

# Below these shares, something is no answer to "what to do".
_LARGE_WASTE = 0.01
_LARGE_GAIN = 0.1
_MUCH_FREE = 0.2
_MOST_ADVICE = 4


def summary_data(plan: Plan, ask: str = "") -> dict[str, Any]:
    """Returns the answers of the first screen, as data for JSON.

    Args:
        plan: what the page shows.
        ask: the command, or the call, that compiles it; or nothing.
    """
    wasted = _wasted(plan)
    parts = plan.parts
    return {
        "fits": plan.fits,
        "errors": len(plan.findings.errors),
        "problem": plan.problem,
        "ask": ask if plan.compiled is None and not plan.findings.errors else "",
        "facts": _facts(plan, parts, wasted),
        "advice": _advice(plan, parts, wasted, ask)[:_MOST_ADVICE],
    }


def spare_bytes(leaf: Leaf) -> int:
    """Returns by how much a device's part of a leaf would shrink, split over every axis that can (exact).

    Dims that layers are stacked along are left alone, as strategies do.
    """
    if leaf.faults or leaf.copies == 1:
        return 0
    shape = list(leaf.shard_shape)
    used = {axis for dim in spec_axes(leaf.spec) for axis in dim}
    free = [(size, axis) for axis, size in leaf.sizes.items() if axis not in used and size > 1]
    for size, _ in sorted(free, reverse=True):
        dims = [d for d, n in enumerate(shape) if n % size == 0 and d not in leaf.stacked]
        if dims:
            largest = max(dims, key=lambda dim: shape[dim])
            shape[largest] //= size
    return leaf.resident_bytes - array_bytes(shape, leaf.dtype)


def _wasted(plan: Plan) -> list[tuple[int, Leaf]]:
    """Returns the leaves that could be smaller on each device, the largest saving first."""
    leaves = plan.layout.leaves if plan.layout is not None else ()
    found = ((spare_bytes(leaf), leaf) for leaf in leaves)
    return sorted((row for row in found if row[0]), key=lambda row: -row[0])


def _fact(name: str, value: str, text: str, label: str, **to: str) -> dict[str, Any]:
    return {"name": name, "value": value, "text": text, "label": label, "to": to}


def _facts(
    plan: Plan, parts: Sequence[Part], wasted: list[tuple[int, Leaf]]
) -> list[dict[str, Any]]:
    """Returns the largest of everything, each with the section that has the rest."""
    facts = []
    compiled = plan.compiled
    if len(parts) > 1:
        part = max(parts, key=lambda part: part.bytes)
        total = sum(part.bytes for part in parts)
        text = f"{part.name}, {_share(part.bytes, total)} of what is known"
        if compiled is not None:
            text = f"{part.name}, {_share(part.bytes, total)} of the peak"
            rows = [row for row in compiled.buffers if row.shape != "other"]
            if part.name == "temporaries" and rows:
                most = max(rows, key=lambda row: row.total_bytes)
                text += f"; the largest is {show_bytes(most.total_bytes)}"
                text += f" of {most.source.place}" if most.source.place else f", {most.shape}"
        label = part.label
        facts.append(_fact("Most memory", show_bytes(part.bytes), text, label, at="memory"))
    if plan.layout is not None and plan.layout.leaves:
        if compiled is None:
            facts.append(_largest_leaf(plan.layout.leaves))
        facts.append(_waste_fact(plan.layout, wasted))
    if compiled is not None and compiled.collectives:
        sent: dict[str, int] = defaultdict(int)
        for row in compiled.collectives:
            sent[row.source.place] += row.total_bytes
        place, most = max(sent.items(), key=lambda row: row[1])
        total = sum(sent.values())
        text = (
            f"{place or 'no line of yours'}: {_share(most, total)} of the {show_bytes(total)} "
            "that each device sends in a step"
        )
        to = {"at": "traffic", "tab": "traffic-by-line"}
        facts.append(_fact("Most traffic", show_bytes(most), text, "modelled", **to))
    if compiled is not None and compiled.time is not None and compiled.time.lines:
        line, time = compiled.time.lines[0], compiled.time
        text = f"{line.name or 'no line of yours'}: {_share(line.seconds, time.seconds)} of the step's {show_seconds(time.seconds)}"
        facts.append(_fact("Most time", show_seconds(line.seconds), text, "modelled", at="time"))
    return facts


def _largest_leaf(leaves: Sequence[Leaf]) -> dict[str, Any]:
    leaf = max(leaves, key=lambda leaf: leaf.resident_bytes)
    text = f"{leaf.path}, of {show_bytes(leaf.bytes)} in all"
    value = show_bytes(leaf.resident_bytes)
    return _fact("Largest leaf on a device", value, text, "exact", leaf=leaf.path)


def _waste_fact(layout: Layout, wasted: list[tuple[int, Leaf]]) -> dict[str, Any]:
    if not wasted:
        text = "no leaf could be split further" if layout.mesh.size > 1 else "one device"
        return _fact("Largest waste", "None", text, "exact", at="model")
    total = sum(saved for saved, _ in wasted)
    held = layout.bytes_per_device
    saved, leaf = wasted[0]
    text = (
        f"replicated that could be split: {_share(total, held)} of a device's parameters; "
        f"{show_bytes(saved)} of it is {leaf.path}"
    )
    return _fact("Largest waste", show_bytes(total), text, "exact", leaf=leaf.path)


def _share(part: float, whole: float) -> str:
    share = 100 * part / whole if whole else 0.0
    return f"{share:.0f}%" if share >= 9.95 else f"{share:.1f}%" if share >= 0.05 else "under 0.1%"


def _advice(
    plan: Plan, parts: Sequence[Part], wasted: list[tuple[int, Leaf]], ask: str
) -> list[dict[str, Any]]:
    """Returns what to do, the most urgent first; each entry follows from a number or a finding."""
    found = [*_wrong(plan), *_too_large(plan, parts, wasted)]
    if plan.findings.errors:
        return found
    if plan.compiled is None:
        found.append(_unknown(plan, ask))
    found += [*_slow(plan), *_free(plan, parts)]
    return found


def _do(head: str, text: str, label: str = "", **to: str) -> dict[str, Any]:
    return {"head": head, "text": text, "label": label, "to": to}


def _wrong(plan: Plan) -> list[dict[str, Any]]:
    rows = []
    if plan.problem:
        rows.append(_do("Make it run", plan.problem, "exact"))
    groups = group_similar(plan.all_findings)
    groups.sort(key=lambda group: group[0].severity != "error")
    # One piece of help for all findings that have it.
    by_help: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for group in groups:
        by_help[group[0].code, group[0].help].extend(group)
    for (code, help), group in list(by_help.items())[:2]:
        first = group[0]
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        text = f"{code} {first.name}, {first.path}{more}: {help or first.message}"
        compiled = plan.compiled is not None and first in plan.compiled.findings
        verb = "Fix" if first.severity == "error" else "Look at"
        head = f"{verb} {len(group)} {first.severity}{'s' if len(group) > 1 else ''}"
        rows.append(_do(head, text, "compiled" if compiled else "exact", at="findings"))
    return rows


def _too_large(
    plan: Plan, parts: Sequence[Part], wasted: list[tuple[int, Leaf]]
) -> list[dict[str, Any]]:
    total = sum(saved for saved, _ in wasted)
    if not wasted or plan.layout is None:
        return []
    held = sum(part.bytes for part in parts) or 1
    limit = plan.capacity or held
    if total < _LARGE_WASTE * limit:
        return []
    saved, leaf = wasted[0]
    return [
        _do(
            f"Split {show_bytes(total)}",
            f"of parameters that are replicated, {leaf.path} first ({show_bytes(saved)})"
            f"{'; their optimizer state follows them' if leaf.moments is None else ''}",
            "exact",
            leaf=leaf.path,
        )
    ]


def _slow(plan: Plan) -> list[dict[str, Any]]:
    time = plan.compiled.time if plan.compiled is not None else None
    if time is None:
        return []
    rows = []
    gain = time.gains.get(time.bound, 0.0)
    if gain > _LARGE_GAIN * time.seconds:
        what = {
            "compute": "arithmetic were free",
            "memory": "reading and writing memory were free",
            "communication": "no communication were waited for",
            "launch": "starting kernels took no time",
        }.get(time.bound, f"{time.bound} were free")
        lines = [line for line in time.lines if line.name]
        start = (
            f"; {lines[0].name} takes {_share(lines[0].seconds, time.seconds)} of it"
            if lines
            else ""
        )
        text = f"if {what}: it bounds the step of {show_seconds(time.seconds)}{start}"
        rows.append(_do(f"Gain {show_seconds(gain)}", text, "modelled", at="time"))
    exposed = [row for row in time.communication if row.exposed > _LARGE_GAIN * time.seconds]
    if exposed and time.bound != "communication":
        row = max(exposed, key=lambda row: row.exposed)
        text = (
            f"that compute waits for {', '.join(row.axes) or 'a link'} over {row.link}, "
            f"{_share(row.exposed, time.seconds)} of the step"
        )
        rows.append(_do(f"Hide {show_seconds(row.exposed)}", text, "modelled", at="traffic"))
    return rows


def _free(plan: Plan, parts: Sequence[Part]) -> list[dict[str, Any]]:
    if plan.compiled is None or not plan.fits or not plan.capacity:
        return []
    free = plan.capacity - sum(part.bytes for part in parts)
    if free < _MUCH_FREE * plan.capacity:
        return []
    text = f"free on each device, {_share(free, plan.capacity)}: room for a larger batch, or less remat"
    return [_do(f"Use {show_bytes(free)}", text, "compiled", at="memory")]


def _unknown(plan: Plan, ask: str) -> dict[str, Any]:
    """Returns what only compiling tells, and what compiles it."""
    what = "temporaries, collectives" + (", and how long a step takes" if plan.chips else "")
    text = f"to know what it does not say: {what}"
    if plan.fits is False:
        text = "once it fits: the rest of its memory, its collectives and time are not known"
    return {**_do("Compile it", text), "command": ask}
