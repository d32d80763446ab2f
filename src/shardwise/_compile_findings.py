"""Findings that only a compilation can show: SW301 to SW304."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax

from ._batch import data_axes
from ._compiled import Compiled
from ._findings import CODES, Finding
from ._hlo import Instruction, Module, Shape, parse_shapes
from ._layout import Layout
from ._mesh import show_mesh
from ._source import Source, short_path, source_of
from ._spec import padded, show_spec
from ._table import show_bytes
from ._traffic import Collective

# What a program moves by its own will, as against what the compiler had to insert.
_ASKED_FOR = (
    "ppermute", "all_to_all", "all_gather", "psum", "psum_scatter", "pshuffle", "ragged_all_to_all",
    "psum_invariant", "all_gather_invariant", "reduce_scatter", "pbroadcast", "collective_permute",
)  # fmt: skip
_SHARE = 0.02  # of the peak: what is smaller is not worth a word
_MOST = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a compiled step beside what the compiler said."""

    layout: Layout
    batch: Any
    accumulate: int
    paths: tuple[str, ...]
    module: Module | None


def compile_findings(compiled: Compiled, facts: Facts) -> Iterator[Finding]:
    """Yields what is wrong or suspicious in a compiled step."""
    whole = list(_replicated_activations(compiled, facts))
    if compiled.fits is False:
        yield _does_not_fit(compiled, facts, whole)
    yield from whole
    yield from _rematerialised(compiled)
    yield from _resharded(compiled, facts)


def _finding(code: str, path: str, message: str, help: str, context: str = "") -> Finding:
    return Finding(code, CODES[code][1], path, message, help, context)


def _does_not_fit(compiled: Compiled, facts: Facts, whole: list[Finding]) -> Finding:
    memory, advice = compiled.memory, []
    if memory is None:
        message = " ".join(compiled.refused.split())[:400]
    else:
        over = -(compiled.spare_bytes or 0)
        parts = {
            "parameters": memory.parameters,
            "optimizer": memory.optimizer,
            "batch": memory.batch,
            "temporaries": memory.temporaries,
        }
        told = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items() if size)
        message = (
            f"the step needs {show_bytes(memory.peak)} on each device, "
            f"{show_bytes(over) + ' more than' if over > 0 else 'of'} the "
            f"{show_bytes(memory.capacity or 0)} that {compiled.target.partition(':')[0]} has: {told}"
        )
        advice = list(_advice(compiled, facts, whole))
    causes = "; ".join(
        f"{row.shape}{f' ×{row.count}' if row.count > 1 else ''} "
        f"({show_bytes(row.total_bytes)}) from {row.source}"
        for row in compiled.buffers[:3]
    )
    return _finding(
        "SW301",
        f"{show_mesh(facts.layout.mesh)} on {compiled.target}",
        message,
        "; ".join(advice) or "use more devices, or a smaller batch",
        f"largest temporaries: {causes}" if causes else "",
    )


def _advice(compiled: Compiled, facts: Facts, whole: list[Finding]) -> Iterator[str]:
    memory = compiled.memory
    assert memory is not None
    capacity = memory.capacity or 0
    if whole:
        yield f"keep the batch split at {whole[0].path} (SW302), by a sharding constraint there"
    state = memory.parameters + memory.optimizer
    copies = _state_copies(facts.layout)
    if state > 0.5 * capacity or (copies > 1.5 and state > 0.2 * capacity):
        if copies > 1.5:
            yield f"shard the state further: {copies:.1f} devices hold each byte of it (sw.fsdp)"
        else:
            yield "use more devices: the state is split over all of them already"
    if memory.temporaries > 0.3 * capacity:
        yield "keep less for the backward pass (Recipe(remat=…))"
        yield f"cut the batch into parts (Recipe(accumulate={2 * facts.accumulate}))"


def _state_copies(layout: Layout) -> float:
    held = sum(leaf.shard_bytes for leaf in layout.leaves) * layout.mesh.size
    return held / max(1, layout.total_bytes)


def _replicated_activations(compiled: Compiled, facts: Facts) -> Iterator[Finding]:
    """Yields temporaries that hold the whole global batch although a data axis exists."""
    if facts.module is None or compiled.memory is None:
        return
    spans = list(_batch_spans(facts))
    if not spans:
        return
    found: dict[Source, tuple[int, Shape, tuple[str, ...]]] = {}
    least = _SHARE * compiled.memory.peak
    for _computation, instruction in _materialised(facts.module):
        for shape in instruction.shapes:
            if shape.nbytes < least or not shape.dtype.startswith(("f", "bf")):
                continue
            axes = next((span.axes for span in spans if span.in_whole(shape.dims)), None)
            if axes is None:
                continue
            source = source_of(facts.module, instruction, facts.paths)
            source = dataclasses.replace(source, op="", backward=False)
            if shape.nbytes > found.get(source, (0,))[0]:
                found[source] = (shape.nbytes, shape, axes)
    ordered = sorted(found.items(), key=lambda item: -item[1][0])
    for source, (size, shape, axes) in ordered[:_MOST]:
        ways = math.prod(facts.layout.mesh.shape[axis] for axis in axes)
        names = ", ".join(repr(axis) for axis in axes)
        yield _finding(
            "SW302",
            str(source),
            f"{shape} holds the whole batch on every device: {show_bytes(size)}, where a "
            f"{ways}th of it would be {show_bytes(size // ways)} split over {names}",
            f"constrain it there: jax.lax.with_sharding_constraint(x, P({_entry(axes)}, …)); or, "
            f"in the models of shardwise.models, name its dims",
        )


def _entry(axes: tuple[str, ...]) -> str:
    return repr(axes[0]) if len(axes) == 1 else repr(axes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """The sizes by which a whole batch is known in a shape: its rows, and what follows them."""

    rows: int
    columns: int | None
    axes: tuple[str, ...]
    sizes: frozenset[int]  # of the model's leaves, whole and in shards

    def in_whole(self, dims: tuple[int, ...]) -> bool:
        if len(dims) < 2:
            return False
        if self.columns is None:
            return self.rows not in self.sizes and self.rows in dims[:2]
        features = [d for d in dims if d in self.sizes and d not in (self.rows, self.columns)]
        if not features:
            return False  # scores of a few sequences, say: their heads may look like rows
        tokens = self.rows * self.columns
        flat = tokens in dims and tokens not in self.sizes
        return flat or (self.rows, self.columns) in zip(dims, dims[1:], strict=False)


def _batch_spans(facts: Facts) -> Iterator[_Span]:
    mesh = facts.layout.mesh
    sizes = frozenset(
        size
        for leaf in facts.layout.leaves
        for size in (*leaf.shape, *leaf.shard_shape)
        if size > 1
    )
    for leaf in jax.tree.leaves(facts.batch):
        if not leaf.shape:
            continue
        axes = tuple(a for a in padded(leaf.sharding.spec, len(leaf.shape))[0] if mesh.shape[a] > 1)
        if not axes:
            # The batch itself is not split: an axis by whose name it should be is one too many.
            axes = tuple(a for a in data_axes(facts.layout) if mesh.shape[a] > 1)
        rows = leaf.shape[0] // facts.accumulate
        if not axes or rows < 2:
            continue
        tokens = len(leaf.shape) == 2 and not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
        columns = leaf.shape[1] if tokens and leaf.shape[1] > 1 else None
        yield _Span(rows, columns, axes, sizes)


def _materialised(module: Module) -> Iterator[tuple[str, Instruction]]:
    skipped = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "constant", "call")
    seen = set()
    for computation, _, fused in module.runs():
        if fused or computation in seen:
            continue
        seen.add(computation)
        for instruction in module.computations.get(computation, ()):
            if instruction.opcode not in skipped and not instruction.opcode.endswith("-done"):
                yield computation, instruction


_INVOLUNTARY = re.compile(
    r"Involuntary full rematerialization.*?from sharding (\{.*?\}) to (\{.*?\}) .*?"
    r"for HLO operation: (.*)"
)


def _rematerialised(compiled: Compiled) -> Iterator[Finding]:
    """Yields XLA's own warnings that it had to make an array whole to change its sharding."""
    seen = set()
    for line in compiled.noise.splitlines():
        told = _INVOLUNTARY.search(line)
        if told is None:
            continue
        before, after, operation = told.groups()
        shapes = parse_shapes(operation.partition("(")[0])
        name = re.search(r'op_name="([^"]*)"', operation)
        file = re.search(r'source_file="([^"]*)"', operation)
        number = re.search(r"source_line=(\d+)", operation)
        place = f"{short_path(file[1])}:{number[1]}" if file and number else ""
        op = name[1] if name else operation.strip()[:80]
        key = (place or op, str(shapes[:1]))
        if key in seen:
            continue
        seen.add(key)
        what = f"{shapes[0]}" if shapes else "an array"
        yield _finding(
            "SW303",
            place or op,
            f"the compiler makes {what} whole on every device to change its sharding, at {op}",
            "constrain the array on both sides of that operation, so that one axis changes at a time",
            f"from {before} to {after}",
        )


def _resharded(compiled: Compiled, facts: Facts) -> Iterator[Finding]:
    """Yields collectives that only undo a mismatch between two specs."""
    gathered = {axis for leaf in facts.layout.leaves for axis in leaf.gathered}
    gathered |= set(data_axes(facts.layout))
    leaves = {leaf.path: leaf for leaf in facts.layout.leaves}
    total = sum(row.step_bytes for row in compiled.collectives)
    rows: dict[tuple[str, str, tuple[str, ...]], list[Collective]] = {}
    for row in compiled.collectives:
        if row.source.op.split("[")[0] in _ASKED_FOR:
            continue
        leaf = leaves.get(row.source.leaf)
        moved = row.kind in ("all-to-all", "collective-permute")
        # FSDP gathers what it stores in parts: that is its work, and no mismatch.
        used_whole = row.kind == "all-gather" and not set(row.axes) <= gathered
        if moved or (used_whole and (leaf is not None or row.source.op == "sharding_constraint")):
            rows.setdefault((row.kind, str(row.source), row.axes), []).append(row)
    ordered = sorted(rows.items(), key=lambda item: -sum(row.step_bytes for row in item[1]))
    for (kind, place, axes), found in ordered[:_MOST]:
        sent = sum(row.step_bytes for row in found)
        if sent < 0.01 * total:
            continue
        leaf = leaves.get(found[0].source.leaf)
        over = ", ".join(repr(axis) for axis in axes)
        if leaf is not None:
            without = [
                tuple(a for a in entry if a not in axes) or None
                for entry in padded(leaf.spec, leaf.ndim)
            ]
            used = show_spec(
                jax.P(*[e[0] if e is not None and len(e) == 1 else e for e in without])
            )
            mismatch = f"it is stored as {show_spec(leaf.spec)} and used as {used}"
            path, help_text = leaf.path, f"store it as {used}, or use it split over {over}"
        else:
            mismatch = f"what made {found[0].shape} and what uses it are split differently"
            path = place
            help_text = "give both the same spec: drop the constraint there, or move it"
        times = sum(row.times for row in found)
        yield _finding(
            "SW304",
            path,
            f"{times} {kind} over {over} in a step, {show_bytes(sent)} sent by each device: {mismatch}",
            help_text,
            f"at {found[0].source.place}" if leaf is not None and found[0].source.place else "",
        )
