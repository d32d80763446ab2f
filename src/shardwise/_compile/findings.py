"""Findings that only a compilation can show: SW301 to SW304."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from .._base import show_bytes
from .._check import Finding, make_finding
from .._hlo import (
    Collective,
    Instruction,
    Module,
    Reshard,
    Shape,
    Source,
    parse_shapes,
    replica_groups,
    source_of,
)
from .._layout import Layout, stage_axes
from .._memory import OTHER
from .._mesh import make_spec, padded, show_mesh, show_spec
from .._step import data_axes
from .result import Compiled

# Collectives that the program calls itself, as opposed to those the compiler inserts.
_ASKED_FOR = (
    "ppermute", "all_to_all", "all_gather", "psum", "psum_scatter", "pshuffle", "ragged_all_to_all",
    "psum_invariant", "all_gather_invariant", "reduce_scatter", "pbroadcast", "collective_permute",
)  # fmt: skip
_CONVOLUTION = "conv_general_dilated"
_SHARE = 0.02  # of the peak: anything smaller is not reported
_MOST = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What is known about a compiled step besides the compiler's report."""

    layout: Layout
    batch: Any
    accumulate: int
    paths: tuple[str, ...]
    module: Module | None
    reshards: Callable[[], list[Reshard]]


def compile_findings(compiled: Compiled, facts: Facts) -> Iterator[Finding]:
    """Yields what is wrong or suspicious in a compiled step."""
    replicated = list(_replicated_activations(compiled, facts))
    if compiled.fits is False:
        yield _does_not_fit(compiled, facts, replicated)
    yield from replicated
    reported: set[str] = set()
    yield from _rematerialised(compiled, facts, reported)
    yield from (finding for finding in _resharded(compiled, facts) if finding.path not in reported)


def _does_not_fit(compiled: Compiled, facts: Facts, replicated: list[Finding]) -> Finding:
    memory, advice = compiled.memory, []
    if memory is None:
        message = " ".join(compiled.refused.split())[:400]
    else:
        over = -(compiled.spare_bytes or 0)
        parts = ", ".join(f"{part.name} {show_bytes(part.bytes)}" for part in memory.parts)
        message = (
            f"the step needs {show_bytes(memory.peak)} on each device, "
            f"{show_bytes(over) + ' more than' if over > 0 else 'of'} the "
            f"{show_bytes(memory.capacity or 0)} that {compiled.chips.partition(':')[0]} has: {parts}"
        )
        advice = list(_advice(compiled, facts, replicated))
    causes = "; ".join(
        str(row)
        # Those of a stand-in, such as whole attention scores, are not why the chips run out.
        for row in (() if compiled.stand_in else compiled.buffers[:3])
        if row.total_bytes > _SHARE * compiled.buffers[0].total_bytes and row.shape != OTHER
    )
    return make_finding(
        "SW301",
        f"{show_mesh(facts.layout.mesh)} on {compiled.chips}",
        message,
        "; ".join(advice) or "use more devices, or a smaller batch",
        f"largest temporaries: {causes}" if causes else "",
    )


def _advice(compiled: Compiled, facts: Facts, replicated: list[Finding]) -> Iterator[str]:
    memory = compiled.memory
    assert memory is not None
    capacity = memory.capacity or 0
    if replicated:
        yield f"keep the batch split at {replicated[0].path} (SW302), with a sharding constraint there"
    state = memory.parameters + memory.optimizer
    resident = sum(leaf.shard_bytes for leaf in facts.layout.leaves) * facts.layout.mesh.size
    copies = resident / max(1, facts.layout.total_bytes)
    if state > 0.5 * capacity or (copies > 1.5 and state > 0.2 * capacity):
        if copies > 1.5:
            yield f"shard the state further: {copies:.1f} devices hold each byte of it (sw.fsdp)"
        else:
            yield "use more devices: the state is already split over all of them"
    if memory.temporaries > 0.3 * capacity:
        yield "keep less for the backward pass (Recipe(remat=…))"
        yield f"split the batch into microbatches (Recipe(accumulate={2 * facts.accumulate}))"


def _replicated_activations(compiled: Compiled, facts: Facts) -> Iterator[Finding]:
    """Yields temporaries that hold the global batch although there is a data axis."""
    spans = list(_batch_spans(facts))
    if facts.module is None or compiled.memory is None or not spans:
        return
    found: dict[Source, tuple[int, Shape, tuple[str, ...]]] = {}
    least = _SHARE * compiled.memory.peak
    for instruction in _materialised(facts.module):
        for shape in instruction.shapes:
            if shape.nbytes < least or not shape.dtype.startswith(("f", "bf")):
                continue
            axes = next((span.axes for span in spans if span.in_whole(shape.dims)), None)
            if axes is None:
                continue
            source = source_of(facts.module, instruction, facts.paths)
            source = dataclasses.replace(source, op=str(source), backward=False)
            if shape.nbytes > found.get(source, (0,))[0]:
                found[source] = (shape.nbytes, shape, axes)
    ordered = sorted(found.items(), key=lambda item: -item[1][0])
    for source, (size, shape, axes) in ordered[:_MOST]:
        ways = math.prod(facts.layout.mesh.shape[axis] for axis in axes)
        names = ", ".join(repr(axis) for axis in axes)
        entry = names if len(axes) == 1 else f"({names})"
        yield make_finding(
            "SW302",
            str(source),
            f"{shape} holds the global batch on every device: {show_bytes(size)}, or "
            f"{show_bytes(size // ways)} if split {ways} ways over {names}",
            f"constrain it there: jax.lax.with_sharding_constraint(x, P({entry}, …)); in models of "
            f"shardwise.models, name its dims instead",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """The sizes that identify a global batch in a shape: its rows and its columns."""

    rows: int
    columns: int | None
    axes: tuple[str, ...]
    ways: int
    sizes: frozenset[int]  # of the dims of the model's leaves and of their shards

    def in_whole(self, dims: tuple[int, ...]) -> bool:
        if len(dims) < 2:
            return False
        if self.columns is None:
            if self.rows in self.sizes or self.rows not in dims[:2]:
                return False
            # After a dim of one shard of the batch, a dim of `rows` is something else; and the axes
            # may split another dim.
            others = [d for d in dims if d != self.rows and d not in self.sizes]
            split = any(d * self.ways in self.sizes for d in others)
            return not split and (dims[0] == self.rows or dims[0] != self.rows // self.ways)
        features = [d for d in dims if d in self.sizes and d not in (self.rows, self.columns)]
        if not features:
            return False  # attention scores, for example, whose heads may look like rows
        # There is one column fewer if the loss predicts the next token.
        return any(
            (self.rows, columns) in zip(dims, dims[1:], strict=False)
            or (self.rows * columns in dims and self.rows * columns not in self.sizes)
            for columns in (self.columns, self.columns - 1)
        )


def _batch_spans(facts: Facts) -> Iterator[_Span]:
    mesh = facts.layout.mesh
    shapes = [(*leaf.shape, *leaf.shard_shape) for leaf in facts.layout.leaves]
    sizes = frozenset(size for shape in shapes for size in shape if size > 1)
    for leaf in (leaf for leaf in jax.tree.leaves(facts.batch) if leaf.shape):
        axes = tuple(a for a in padded(leaf.sharding.spec, len(leaf.shape))[0] if mesh.shape[a] > 1)
        if not axes:
            # The batch itself is not split, although these axes should split it by their names.
            axes = tuple(a for a in data_axes(facts.layout) if mesh.shape[a] > 1)
        rows = leaf.shape[0] // facts.accumulate
        if not axes or rows < 2:
            continue
        tokens = len(leaf.shape) == 2 and not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
        columns = leaf.shape[1] if tokens and leaf.shape[1] > 1 else None
        yield _Span(rows, columns, axes, math.prod(mesh.shape[a] for a in axes), sizes)


def _materialised(module: Module) -> Iterator[Instruction]:
    skipped = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "constant", "call")
    seen = set()
    for computation, _, fused in module.runs():
        if fused or computation in seen:
            continue
        seen.add(computation)
        for instruction in module.computations.get(computation, ()):
            if instruction.opcode not in skipped and not instruction.opcode.endswith("-done"):
                yield instruction


_INVOLUNTARY = re.compile(
    r"Involuntary full rematerialization\..*? from sharding (\{.*?\}) to (\{.*?\}) "
    r"(?:efficiently|without doing a full rematerialization of the tensor) for HLO operation:? (.*)"
)


def _rematerialised(compiled: Compiled, facts: Facts, places: set[str]) -> Iterator[Finding]:
    """Yields XLA's own warnings that it replicated an array; adds their places to `places`."""
    module = facts.module or Module("", {}, {})
    seen = set()
    for line in compiled.noise.splitlines():
        warning = _INVOLUNTARY.search(line)
        # The partitioner marks operations that it only tries, to estimate their cost, as fake.
        if warning is None or warning[3].startswith("%fake_"):
            continue
        before, after = (_spec_of(text, compiled.mesh) for text in warning.groups()[:2])
        shapes = tuple(parse_shapes(warning[3].partition("(")[0]))
        source = source_of(module, Instruction("", "", shapes, (), "", warning[3]), facts.paths)
        places.add(str(source))
        if (str(source), before, after) in seen or (source.backward and (after, before) in seen):
            continue  # the backward pass takes the same way back
        seen |= {(str(source), before, after), (before, after)}
        part = f" whose shard is {shapes[0]}" if shapes else ""
        yield make_finding(
            "SW303",
            str(source),
            f"the compiler replicates an array{part} to reshard it from {before} to {after}",
            "move one axis at a time, with a constraint in between, or keep one spec",
            f"at {source.op}{' in the backward pass' if source.backward else ''}",
        )


def _spec_of(sharding: str, mesh: dict[str, int]) -> str:
    """Returns XLA's `{devices=[2,1,4]<=[8]}` as a spec, or unchanged if it is not one."""
    named = re.fullmatch(r"\{mesh\[[^\]]*\], \[([^:]*?)\].*\}", sharding)
    tiled = re.fullmatch(r"\{devices=\[([\d,]+)\](<=\S+?)( last_tile_dim_replicate)?\}", sharding)
    if named:
        dims = [tuple(re.findall(r"'(\w+)'", dim)) for dim in re.findall(r"\{([^}]*)\}", named[1])]
    elif tiled is None:
        return sharding
    else:
        tiles = [int(size) for size in tiled[1].split(",")]
        order = np.reshape(replica_groups(f"[{math.prod(tiles)}]{tiled[2]}", 0), tiles)
        dims = []
        for dim in range(len(tiles) - bool(tiled[3])):
            along = np.moveaxis(order, dim, 0).reshape(tiles[dim], -1)[:, 0]
            rows = np.unravel_index(along, tuple(mesh.values()))
            changes = [np.count_nonzero(np.diff(row)) for row in rows]
            slowest = sorted(zip(changes, mesh, strict=True))
            dims.append(tuple(axis for times, axis in slowest if times))
        if [math.prod(mesh[a] for a in axes) for axes in dims] != tiles[: len(dims)]:
            return sharding
    return show_spec(make_spec(dims))


def _resharded(compiled: Compiled, facts: Facts) -> Iterator[Finding]:
    """Yields collectives that only undo a mismatch between two specs."""
    planned = facts.layout.leaves
    stored = {axis for leaf in planned for axis in (*leaf.gathered, *leaf.update_axes)}
    gathered = stored | set(data_axes(facts.layout))
    stages = set(stage_axes(facts.layout.leaves))
    leaves = {leaf.path: leaf for leaf in facts.layout.leaves}
    total = sum(row.total_bytes for row in compiled.collectives)
    rows: dict[tuple[str, str, tuple[str, ...]], list[Collective]] = {}
    for row in compiled.collectives:
        if row.source.op.split("[")[0] in _ASKED_FOR or _is_halo(row, facts):
            continue
        if row.kind == "collective-permute" and set(row.axes) <= stages:
            continue  # stages pass microbatches on
        ring = row.kind == "collective-permute" and row.source.op == "dot_general"
        if ring and set(row.axes) <= stored and not _moves(row, facts):
            continue  # a matrix product that scatters or gathers its result while it computes it
        leaf = leaves.get(row.source.leaf)
        moved = row.kind in ("all-to-all", "collective-permute")
        # FSDP gathers the shards it stores: that is intended, not a mismatch.
        unsharded = row.kind == "all-gather" and not set(row.axes) <= gathered
        if moved or (unsharded and (leaf is not None or row.source.op == "sharding_constraint")):
            rows.setdefault((row.kind, str(row.source), row.axes), []).append(row)
    ordered = sorted(rows.items(), key=lambda item: -sum(row.total_bytes for row in item[1]))
    for (kind, place, axes), found in ordered[:_MOST]:
        sent = sum(row.total_bytes for row in found)
        if sent < 0.01 * total:
            continue
        largest = max(found, key=lambda row: row.total_bytes)
        leaf = leaves.get(largest.source.leaf)
        over = ", ".join(repr(axis) for axis in axes)
        if leaf is not None:
            entries = padded(leaf.spec, leaf.ndim)
            used = show_spec(
                make_spec([tuple(a for a in entry if a not in axes) for entry in entries])
            )
            mismatch = f"it is stored as {show_spec(leaf.spec)} and used as {used}"
            path, help_text = leaf.path, f"store it as {used}, or use it split over {over}"
        else:
            path, (mismatch, help_text) = place, _mismatch(largest, facts)
        yield make_finding(
            "SW304",
            path,
            f"{sum(row.times for row in found)} {kind} over {over} in a step, {show_bytes(sent)} sent by each device: {mismatch}",
            help_text,
            f"at {largest.source.place}" if leaf is not None and largest.source.place else "",
        )


def _is_halo(row: Collective, facts: Facts) -> bool:
    """Returns whether a convolution exchanges the borders of a batch that is split in space."""
    if row.kind != "collective-permute" or row.source.op != _CONVOLUTION:
        return False
    leaves = jax.tree.leaves(facts.batch)
    entries = [e for leaf in leaves for e in padded(leaf.sharding.spec, len(leaf.shape))[1:]]
    return set(row.axes) <= {axis for entry in entries for axis in entry}


def _moves(row: Collective, facts: Facts) -> list[Reshard]:
    """Returns the reshards of Shardy at a collective's line that move its axes."""
    axes = set(row.axes)
    found = []
    for one in facts.reshards():
        before, after = ({a for dim in split for a in dim} for split in (one.before, one.after))
        # An axis that moves to another dim is on both sides, a gathered one only on the first.
        moved = axes <= before and (row.kind == "all-gather" or axes <= after)
        if one.place == row.source.place and moved:
            found.append(one)
    return found


def _mismatch(row: Collective, facts: Facts) -> tuple[str, str]:
    """Returns the specs that an array has and needs at the collective's line, and what to do."""
    found = _moves(row, facts)
    help_text = "give both the same spec: remove the constraint there, or move it"
    if found:
        most = max(found, key=lambda one: math.prod(one.shape))
        return (
            f"an array of shape {list(most.shape)} is produced as "
            f"{show_spec(make_spec(most.before))} and used as {show_spec(make_spec(most.after))}"
        ), help_text
    path = f"{row.source.module}.kernel"
    kernels = [leaf for leaf in facts.layout.leaves if leaf.path == path]
    if row.source.op == _CONVOLUTION and kernels:
        # Shardy leaves it to the compiler how a convolution is partitioned.
        spec, shape = show_spec(kernels[0].spec), list(kernels[0].shape)
        return (
            f"the compiler moves {row.shape} to partition the convolution with {path}, of shape "
            f"{shape}, stored as {spec}",
            f"store {path} as P()",
        )
    return f"{row.shape} is produced with one sharding and used with another", help_text
