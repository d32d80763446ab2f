"""Runs the kernels of a partitioned step in their order, beside the collectives that they hide."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._chips import sent_bytes
from .._hlo import user_place
from .._time import HOT, Link, Machine, is_recomputed
from .costs import Costs
from .kernels import (
    COLLECTIVES,
    Block,
    Kernel,
    Step,
    combined,
    heads_of,
    hiding_order,
    is_copy,
    lives_of,
    nearby,
    paired,
    peak_of,
    rewritten,
    size_of,
)
from .program import Program

_KINDS = {"all-reduce": "psum", "all-gather": "all_gather", "reduce-scatter": "psum_scatter",
          "all-to-all": "all_to_all", "collective-permute": "ppermute"}  # fmt: skip


@dataclasses.dataclass(slots=True)
class _Run:
    """What a list of kernels takes."""

    seconds: float = 0.0
    parts: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    kinds: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    lines: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    traffic: dict[tuple[str, str], list[int]] = dataclasses.field(
        default_factory=lambda: defaultdict(lambda: [0, 0])
    )
    unpriced: Counter[str] = dataclasses.field(default_factory=Counter)
    flops: int = 0
    recomputed: int = 0
    kernels: int = 0
    peak: int = 0
    bound: int = 0

    def add(self, other: _Run, times: int) -> None:
        """Adds what `times` runs of another list take."""
        for mine, theirs in (
            (self.parts, other.parts), (self.kinds, other.kinds), (self.lines, other.lines),
        ):  # fmt: skip
            for name, value in theirs.items():
                mine[name] += times * value
        for key, (count, sent) in other.traffic.items():
            self.traffic[key][0] += times * count
            self.traffic[key][1] += times * sent
        for name, count in other.unpriced.items():
            self.unpriced[name] += times * count
        self.flops += times * other.flops
        self.recomputed += times * other.recomputed
        self.kernels += other.kernels


@dataclasses.dataclass(slots=True)
class _Piece:
    """What one kernel takes: seconds, the pause after it, its link, and whether a loop sends."""

    seconds: float
    gap: float = 0.0
    link: str = "none"
    sends: bool = False


class Estimator:
    """Prices a partitioned step on some chips."""

    def __init__(self, program: Program, machine: Machine):
        """Takes the step and the chips."""
        devices = math.prod(machine.mesh.values())
        program = rewritten(program, gpu=machine.gpu is not None)
        self.program, self.machine = program, machine
        self.shapes = program.shapes
        self.slower = 1.0
        self.names = list(machine.mesh)
        self.inner: dict[int, int] = {}
        self.near: set[int] = set()
        self.costs = Costs(machine, self.shapes, self.near)
        self.rings: dict[Any, bool] = {}
        self.devices = np.arange(devices).reshape(tuple(machine.mesh.values()))

    def run(self) -> _Run:
        """Returns what the step takes."""
        first = self._block(self.program.ops, self.program.outputs)
        gpu = self.machine.gpu
        if gpu is not None and first.seconds:
            total = sum(t for kind, t in first.kinds.items() if kind != "collective")
            hot = sum(HOT.get(kind, 0.0) * t for kind, t in first.kinds.items())
            self.slower = gpu.slowdown(hot / total if total else 0.0)
            if self.slower > 1.0:
                return self._block(self.program.ops, self.program.outputs)
        return first

    def _block(self, ops: Any, outputs: Any) -> _Run:
        block = self._grouped(ops, outputs)
        run = _Run(kernels=len(block.kernels))
        gpu = self.machine.gpu is not None
        from_start, needed = self._early(block), self._needed(block)
        groups = combined(block, from_start, needed) if gpu else []
        heads = set() if gpu else heads_of(block.kernels, self.shapes)
        self.near |= nearby(block, self.machine.chips.chip.name)
        pieces = self._priced(block, heads, groups, run)
        if gpu:
            blocked = {n for n, piece in enumerate(pieces) if piece.sends}
            copied = {n for n, kernel in enumerate(block.kernels) if is_copy(kernel)}
            spent = [piece.seconds for piece in pieces]
            groups += paired(block, groups)
            steps = hiding_order(block.kernels, spent, blocked, groups, copied)
            run.seconds = self._overlapped(steps, pieces, run)
            order, ends = lives_of(steps)
            kernels = [block.kernels[n] for n in order]
        else:
            run.seconds = self._streamed(block, pieces, from_start, needed, run)
            kernels, ends = block.kernels, list(range(len(block.kernels)))
        run.peak, run.bound = self._peak(block, kernels, ends)
        return run

    def _priced(
        self, block: Block, heads: set[int], groups: list[list[int]], run: _Run
    ) -> list[_Piece]:
        """Returns what each kernel takes, and counts it."""
        joined = {n: 0 for numbers in groups for n in numbers}
        for numbers in groups:
            joined[numbers[-1]] = sum(size_of(self.shapes, block.kernels[n].op) for n in numbers)
        found = []
        for number, kernel in enumerate(block.kernels):
            op = kernel.op
            if op.kind == "while" and kernel.heavy:
                inner = self._block(op.body, op.after)
                self.inner[id(op)] = inner.peak
                each = inner.seconds + (self.machine.gpu.iteration if self.machine.gpu else 0.0)
                run.add(inner, op.trips)
                run.parts["launch"] += op.trips * (each - inner.seconds)
                piece = _Piece(op.trips * each, sends=bool(inner.traffic))
            elif kernel.windowed and op.kind in COLLECTIVES:
                self._counted(kernel, run)  # its permutes run with the product
                piece = _Piece(0.0)
            elif op.kind in COLLECTIVES and kernel.heavy:
                piece = self._collective(kernel, run, joined.get(number))
            else:
                price = self.costs.of(kernel, heads)
                if price.kind in HOT:
                    price = dataclasses.replace(price, seconds=price.seconds * self.slower)
                piece = _Piece(price.seconds, price.gap)
                run.parts[price.bound] += price.seconds
                run.parts["launch"] += price.gap
                run.kinds[price.kind] += price.seconds
                if not price.known:
                    run.unpriced[op.attributes.get("call_target_name", op.kind).strip('"')] += 1
                run.flops += price.flops
                run.recomputed += price.flops if is_recomputed(op.location) else 0
            found.append(piece)
        return found

    def _overlapped(self, steps: Sequence[Step], pieces: Sequence[_Piece], run: _Run) -> float:
        """Returns how long a GPU takes for steps in order, and what it waits for collectives."""
        now, links, ends = 0.0, {}, {}
        for step in steps:
            seconds = sum(pieces[n].seconds for n in step.kernels)
            if step.part == "run":
                now += seconds + sum(pieces[n].gap for n in step.kernels)
            elif step.part == "send":
                link = max((pieces[n] for n in step.kernels), key=lambda piece: piece.seconds).link
                ends[step.kernels] = links[link] = max(now, links.get(link, 0.0)) + seconds
            else:
                run.parts["communication"] += max(0.0, ends[step.kernels] - now)
                now = max(now, ends[step.kernels])
        return now

    def _streamed(
        self,
        block: Block,
        pieces: Sequence[_Piece],
        from_start: set[int],
        needed: set[int],
        run: _Run,
    ) -> float:
        """Returns how long a TPU takes, which waits for most collectives where they are sent."""
        now, ready, links = 0.0, {}, {}
        for number, (kernel, piece) in enumerate(zip(block.kernels, pieces, strict=True)):
            op = kernel.op
            inputs = max((ready.get(v, 0.0) for v in kernel.reads), default=0.0)
            if kernel.windowed and op.kind in COLLECTIVES:
                end = inputs
            elif op.kind in COLLECTIVES and kernel.heavy:
                start = inputs if number in from_start else max(now, inputs)
                end = max(start, links.get(piece.link, 0.0)) + piece.seconds
                links[piece.link] = end
                if op.kind != "all-reduce" or any(v in needed for v in op.results):
                    run.parts["communication"] += max(0.0, end - now)
                    now = max(now, end)
            else:
                run.parts["communication"] += max(0.0, inputs - now)
                now = max(now, inputs) + piece.seconds + piece.gap
                for partner in kernel.partners:
                    # One permute is sent before the first part, or after the last.
                    each = self._permuted(partner)
                    sent = partner.permutes * each
                    waits = max(each, sent - piece.seconds)
                    run.parts["communication"] += waits
                    run.kinds["collective"] += sent
                    run.lines[user_place(partner.op.frames) or "?"] += sent
                    now += waits
                end = now
            for value in (*kernel.writes, *op.results):
                ready[value] = end
        last = max([now, *links.values()])
        run.parts["communication"] += last - now
        return last

    def _needed(self, block: Block) -> set[int]:
        """Returns what is read by something else than what only writes results of the block."""
        return {
            value
            for kernel in block.kernels
            if kernel.heavy or not all(block.root(v) in block.outputs for v in kernel.writes)
            for value in kernel.reads
        }

    def _grouped(self, ops: Any, outputs: Any) -> Block:
        gpu = self.machine.gpu is not None
        is_ring = None if gpu else self._is_ring
        return Block(self.program, ops, outputs, is_ring=is_ring, devices=self.devices.size)

    def _is_ring(self, op: Any) -> bool:
        """Returns whether the devices of a collective are more than those of one host."""
        if op.axes not in self.rings:
            extents = self.machine.extents(self._groups(op)[0])
            several = math.prod(size for _, size in op.axes) > 4
            self.rings[op.axes] = several or max(extents, default=1) > 2
        return self.rings[op.axes]

    def _early(self, block: Block) -> set[int]:
        """Returns the collectives that wait for nothing but what is there when a block begins."""
        here: set[int] = set()
        found = set()
        for number, kernel in enumerate(block.kernels):
            # What feeds them casts or slices parameters, and may run ahead.
            light = not kernel.heavy and kernel.access.total < 2**32
            waits = any(value in here for value in kernel.reads)
            if kernel.op.kind in COLLECTIVES and not waits:
                found.add(number)
            if not (light and not waits):
                here.update(kernel.writes)
                here.update(kernel.op.results)
        return found

    def _collective(self, kernel: Kernel, run: _Run, combined: int | None) -> _Piece:
        """Counts a collective; returns how long it takes, and over which link."""
        op = kernel.op
        if math.prod(size for _, size in op.axes) <= 1:
            return _Piece(0.0)
        size = size_of(self.shapes, op) if combined is None else combined
        link = self.machine.link(op.kind, size, self._groups(op)) if size else Link("none", 0.0)
        run.kinds["collective"] += link.seconds
        self._counted(kernel, run)
        run.lines[user_place(op.frames) or "?"] += link.seconds
        return _Piece(kernel.repeats * link.seconds, link=link.name)

    def _counted(self, kernel: Kernel, run: _Run) -> None:
        """Counts a collective and the bytes that it sends."""
        op = kernel.op
        members = math.prod(size for _, size in op.axes)
        axes = ",".join(name for name in self.names if name in dict(op.axes))
        local = sum(self.shapes[v].nbytes for v in op.operands)
        sent = sent_bytes(_KINDS[op.kind], local, members)
        kind, count = op.kind, kernel.repeats
        sent *= count
        if kernel.windowed:
            kind, count = "collective-permute", kernel.permutes
            sent = sent * kernel.permutes // (members - 1)
        row = run.traffic[axes, kind]
        row[0] += count
        row[1] += sent

    def _permuted(self, kernel: Kernel) -> float:
        """Returns how long one permute of a windowed collective takes."""
        op = kernel.op
        shard = size_of(self.shapes, op) // kernel.windowed
        pairs = [list(pair) for group in self._groups(op) for pair in itertools.pairwise(group)]
        return self.machine.link("collective-permute", shard, pairs).seconds

    def _groups(self, op: Any) -> list[list[int]]:
        # An axis of which two parts are used is there twice.
        used = list(dict.fromkeys(self.names.index(name) for name, _ in op.axes))
        others = [i for i in range(len(self.names)) if i not in used]
        members = math.prod(self.devices.shape[i] for i in used)
        arranged = self.devices.transpose(others + used).reshape(-1, members)
        part = math.prod(size for _, size in op.axes)
        groups = arranged[:1, :part].tolist()
        if op.kind == "collective-permute":
            return [[group[0], group[-1]] for group in arranged.tolist()]
        return groups

    def _peak(
        self, block: Block, kernels: Sequence[Kernel], ends: Sequence[int]
    ) -> tuple[int, int]:
        inside = {kernel: self.inner.get(id(kernel.op), 0) for kernel in kernels}.__getitem__
        peak, bound = peak_of(block, kernels, ends, inside, self.program.host, self.near)
        if self.near:  # whether an array is beside the cores is for the compiler to say
            bound = max(bound, *peak_of(block, kernels, ends, inside, self.program.host))
        return peak, bound
