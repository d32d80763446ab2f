"""Runs the kernels of a partitioned step in their order, beside the collectives that they hide."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from .._chips import sent_bytes
from .._hlo import user_place
from .._time import HOT, Link, Machine, is_recomputed
from .kernels import (
    COLLECTIVES,
    Block,
    Kernel,
    combined,
    heads_of,
    hiding_order,
    nearby,
    peak_of,
    rewritten,
    run_between,
    size_of,
)
from .prices import Prices
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


class Estimator:
    """Prices a partitioned step on some chips."""

    def __init__(self, program: Program, machine: Machine):
        """Takes the step and the chips."""
        devices = math.prod(machine.mesh.values())
        program = rewritten(program, gpu=machine.gpu is not None, devices=devices)
        self.program, self.machine = program, machine
        self.shapes = program.shapes
        self.slower = 1.0
        self.names = list(machine.mesh)
        self.inner: dict[int, int] = {}
        self.near: set[int] = set()
        self.prices = Prices(machine, self.shapes, self.near)
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
        now, ready, links = 0.0, {}, {}
        from_start = self._early(block)
        needed = self._needed(block)
        groups = combined(block, from_start, needed) if self.machine.gpu is not None else []
        joined = {n: 0 for numbers in groups for n in numbers}
        for numbers in groups:
            joined[numbers[-1]] = sum(size_of(self.shapes, block.kernels[n].op) for n in numbers)
        heads = heads_of(block.kernels, self.shapes) if self.machine.gpu is None else set()
        self.near |= nearby(block, self.machine.chips.chip.name)
        spent: list[float] = []
        blocked: set[int] = set()
        # What only makes results runs where something else waits, or at the end, as its inputs come.
        last_ones = self._results(block) if self.machine.gpu is not None else set()
        waiting: list[tuple[float, float]] = []
        for number, kernel in enumerate(block.kernels):
            op, before = kernel.op, len(spent)
            inputs = max((ready.get(v, 0.0) for v in kernel.reads), default=0.0)
            if op.kind == "while" and kernel.heavy:
                inner = self._block(op.body, op.after)
                self.inner[id(op)] = inner.peak
                spent.append(0.0)  # this compiler does not count how long loops take
                if inner.traffic:
                    blocked.add(number)
                each = inner.seconds + (self.machine.gpu.iteration if self.machine.gpu else 0.0)
                now = max(run_between(waiting, now, inputs), inputs)
                now += op.trips * each
                run.add(inner, op.trips)
                run.parts["launch"] += op.trips * (each - inner.seconds)
                end = now
            elif kernel.windowed and op.kind in COLLECTIVES:
                self._counted(kernel, run)  # its permutes run with the product
                end = inputs
            elif op.kind in COLLECTIVES and kernel.heavy:
                start = inputs if number in from_start else max(now, inputs)
                seconds, end = self._collective(kernel, start, links, run, joined.get(number))
                spent.append(seconds)
                awaited = op.kind != "all-reduce" or any(v in needed for v in op.results)
                if self.machine.gpu is None and awaited:
                    # This compiler runs them one after the other with what computes.
                    run.parts["communication"] += max(0.0, end - now)
                    now = max(now, end)
            else:
                price = self.prices.of(kernel, heads)
                if price.kind in HOT:
                    price = dataclasses.replace(price, seconds=price.seconds * self.slower)
                spent.append(price.seconds)
                if number in last_ones:
                    waiting.append((inputs, price.seconds + price.gap))
                else:
                    now = run_between(waiting, now, inputs)
                    run.parts["communication"] += max(0.0, inputs - now)
                    now = max(now, inputs) + price.seconds + price.gap
                run.parts[price.bound] += price.seconds
                run.parts["launch"] += price.gap
                run.kinds[price.kind] += price.seconds
                if not price.known:
                    run.unpriced[op.attributes.get("call_target_name", op.kind).strip('"')] += 1
                run.flops += price.flops
                run.recomputed += price.flops if is_recomputed(op.location) else 0
                for partner in kernel.partners:
                    # One permute is sent before the first part, or after the last.
                    each = self._permuted(partner)
                    sent = partner.permutes * each
                    waits = max(each, sent - price.seconds)
                    run.parts["communication"] += waits
                    run.kinds["collective"] += sent
                    run.lines[user_place(partner.op.frames) or "?"] += sent
                    now += waits
                end = now
            if len(spent) == before:
                spent.append(0.0)
            for value in kernel.writes:
                ready[value] = end
            for value in op.results:
                ready[value] = end
        for begin, seconds in sorted(waiting):
            run.parts["communication"] += max(0.0, begin - now)
            now = max(now, begin) + seconds
        last = max([now, *links.values()])
        run.parts["communication"] += last - now
        run.seconds = last
        run.peak, run.bound = self._peak(block, spent, blocked, groups)
        return run

    def _results(self, block: Block) -> set[int]:
        """Returns the kernels that only write results of the block, which no other reads."""
        read = {value for kernel in block.kernels for value in kernel.reads}
        return {
            number
            for number, kernel in enumerate(block.kernels)
            if not kernel.heavy
            and not kernel.writes.keys() & read
            and all(block.root(v) in block.outputs for v in kernel.writes)
        }

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

    def _collective(
        self, kernel: Kernel, start: float, links: Any, run: _Run, combined: int | None
    ) -> tuple[float, float]:
        """Counts a collective; returns how long it takes, and when it ends."""
        op = kernel.op
        members = math.prod(size for _, size in op.axes)
        if members <= 1:
            return 0.0, start
        size = size_of(self.shapes, op) if combined is None else combined
        if size:
            link = self.machine.link(op.kind, size, self._groups(op))
        else:
            link = Link("none", 0.0)
        begin = max(start, links.get(link.name, 0.0))
        end = begin + kernel.repeats * link.seconds
        links[link.name] = end
        run.kinds["collective"] += link.seconds
        self._counted(kernel, run)
        run.lines[user_place(op.frames) or "?"] += link.seconds
        return link.seconds, end

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
        self, block: Block, spent: list[float], blocked: set[int], groups: list[list[int]]
    ) -> tuple[int, int]:
        kernels, ends = block.kernels, list(range(len(block.kernels)))
        if self.machine.gpu is not None and not any(k.op.kind == "while" for k in kernels):
            kernels = block.results_last
        elif self.machine.gpu is not None:
            kernels, ends = hiding_order(kernels, spent, blocked, groups)
        inside = {kernel: self.inner.get(id(kernel.op), 0) for kernel in kernels}.__getitem__
        peak, bound = peak_of(block, kernels, ends, inside, self.program.host, self.near)
        if self.near:  # whether an array is beside the cores is for the compiler to say
            bound = max(bound, *peak_of(block, kernels, ends, inside, self.program.host))
        return peak, bound
