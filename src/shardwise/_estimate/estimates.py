"""How long a step takes and how much memory it needs, from the partitioned program alone."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from .._base import public, show_bytes, show_seconds
from .._chips import sent_bytes
from .._hlo import (
    Access,
    Instruction,
    Shape,
    convolution_flops,
    is_attention,
    splash_flops,
    user_place,
)
from .._time import HOT, SPREAD, Link, Machine, Price, is_recomputed, largest, mfu_of, rate_of
from .kernels import (
    COLLECTIVES,
    LEFT,
    Block,
    Kernel,
    combined,
    heads_of,
    hiding_order,
    nearby,
    outside,
    padded,
    peak_of,
    rewritten,
    run_between,
    size_of,
)
from .program import Program, forward_of, numbers_of, written

_KINDS = {"all-reduce": "psum", "all-gather": "all_gather", "reduce-scatter": "psum_scatter",
          "all-to-all": "all_to_all", "collective-permute": "ppermute"}  # fmt: skip
# A TPU's compiler computes what lies before and after a product with it, unless the product is
# computed in parts: this much is left.
_ABSORBED = 0.4
# Custom calls that only move memory.
_STREAMING = {"cu_threefry2x32", "cu_threefry2x32_ffi", "mhlo.topk", "TopK", "PartialReduce"}
# What temporary arrays take, of those that are alive at once: what is lost between them, and copies.
_TPU_TEMPORARY, _GPU_TEMPORARY = 1.09, 1.02
# A TPU's program is in its memory: bytes of each kernel (140 to 170 kB in compiled steps).
_CODE = 150_000


@public
@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a step would take, without compiling it. Returned by `sw.estimate` (modelled).

    Attributes:
        chips: the chips.
        mesh: the sizes of the mesh's axes by name.
        seconds: one step.
        low: seconds that it takes at least, if the models err as far as they were seen to.
        high: seconds that it takes at most.
        parts: how the seconds divide: `compute`, `memory`, `communication` (exposed), `launch`,
            `unknown`.
        peak_bytes: the memory of one device at its peak.
        peak_bound: the peak if nothing that a compiler may free early is freed.
        capacity: what a program can use on one device.
        state_bytes: the share of the arguments: parameters, optimizer state, batch (exact); what is
            offloaded does not count.
        by_axis: by axes and kind, how many collectives a step runs and the bytes that each device
            sends in the ring model.
        lines: by line of the user's code, the seconds of collectives, longest first.
        flops: floating-point operations of one device in a step.
        model_flops: those without recomputation.
        tokens: tokens in a global batch; None if the batch has none.
        peak_flops: the device's peak per second, in bfloat16.
        unpriced: custom calls that no model knows, by name, with how many times a step runs each:
            `seconds` has the memory that they move and nothing of what they compute, and `high`
            ten times as much.
    """

    chips: str
    mesh: dict[str, int]
    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    peak_bytes: int
    peak_bound: int
    capacity: int
    state_bytes: int
    by_axis: dict[str, dict[str, tuple[int, int]]]
    lines: dict[str, float]
    flops: int
    model_flops: int
    tokens: int | None
    peak_flops: float
    unpriced: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def fits(self) -> bool | None:
        """Whether a device's memory holds it; None if only compiling can tell.

        True if the upper bound of the peak fits, False if the modelled peak itself does not. In
        between it fits by the estimate, and nobody knows yet whether it does.
        """
        if self.peak_bytes > self.capacity:
            return False
        return True if self.peak_bound <= self.capacity else None

    @property
    def mfu(self) -> float:
        """The share of the peak that the model's own operations use, without recomputation."""
        return mfu_of(self.model_flops, self.seconds, self.peak_flops)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the global batch per second."""
        return rate_of(self.tokens, self.seconds)

    @property
    def bound(self) -> str:
        """The largest part of the step; what each would gain if free, only a compiled step knows."""
        return largest(self.parts)

    @property
    def verdict(self) -> str:
        """Memory and time, in two lines, and what is not priced."""
        fits = {True: "fits", False: "does not fit", None: "may fit"}[self.fits]
        # Near its limit, the compiler computes some values again and orders others anew.
        near = self.fits is not True and self.peak_bytes < 2 * self.capacity
        unsure = "; compile to be sure" if near else ""
        text = (
            f"{fits}: needs about {show_bytes(self.peak_bytes)} of {show_bytes(self.capacity)} "
            f"(modelled; at most {show_bytes(self.peak_bound)}{unsure}), on {self.chips}\n"
            f"{show_seconds(self.seconds)} per step "
            f"({show_seconds(self.low)} to {show_seconds(self.high)}, modelled)"
        )
        if self.tokens_per_second is not None:
            text += f", {self.tokens_per_second:,.0f} tokens/s"
        text += f", mostly {self.bound}"
        if self.unpriced:
            names = ", ".join(f"{n} ×{k}" if k > 1 else n for n, k in self.unpriced.items())
            text += f"\nnot priced, only the memory that they move: {names}"
        return text

    def __str__(self) -> str:
        """Returns the verdict and the collectives by axis."""
        lines = [self.verdict]
        for axes, kinds in self.by_axis.items():
            counts = ", ".join(f"{count} {kind}" for kind, (count, _) in kinds.items())
            sent = sum(sent for _, sent in kinds.values())
            lines.append(
                f"over {axes}: {counts}; {show_bytes(sent)} sent by each device (modelled)"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain data that `--format json` prints."""
        found = dataclasses.asdict(self)
        found["by_axis"] = {
            axis: {kind: {"count": n, "bytes": b} for kind, (n, b) in kinds.items()}
            for axis, kinds in self.by_axis.items()
        }
        names = ("fits", "tokens_per_second", "mfu", "bound")
        return {**found, **{name: getattr(self, name) for name in names}}


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
        self.pricer: Any = machine.pricer(None)  # pyright: ignore[reportArgumentType] - priced by shapes
        self.slower = 1.0
        self.names = list(machine.mesh)
        self.inner: dict[int, int] = {}
        self.near: set[int] = set()
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
                price = self._price(kernel, heads)
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

    def _price(self, kernel: Kernel, heads: set[int]) -> Price:
        op, access = kernel.op, kernel.access
        if not kernel.heavy:
            share = _ABSORBED if kernel.absorbed else 1.0
            moved = outside(kernel, padded(kernel, self.shapes, heads), self.near)
            return self.pricer.streamed(moved, share * self._penalty(kernel))
        if op.kind == "dot_general":
            return self._dot(kernel)
        if op.kind == "convolution":
            return self._convolution(kernel)
        if op.kind == "ragged_dot" and any(
            len(self.shapes[v].dims) == 3 for v in (*op.operands, *op.results)
        ):
            return self._ragged(kernel)
        if op.kind == "custom_call":
            return self._call(kernel)
        if op.kind == "sort":
            return self.pricer.streamed(access, 8.0)
        return self.pricer.streamed(access, 1.5)

    def _penalty(self, kernel: Kernel) -> float:
        if kernel.op.kind == "transpose":
            return 1.4
        kinds = {op.kind for op in kernel.ops}
        if sum(op.kind == "pad" for op in kernel.ops) > 1:
            # A TPU's compiler pads in another kernel.
            return 1.8 if self.machine.gpu is not None else 2.2
        return 1.1 if "reduce" in kinds else 1.0

    def _dot(self, kernel: Kernel) -> Price:
        op = kernel.op
        numbers = numbers_of(op)[:3]
        shapes = [self.shapes[v] for v in op.operands[:2]]
        # The wider of two dtypes is cast to the other one.
        narrow = min(shapes, key=lambda shape: shape.nbytes / max(1, shape.size)).dtype
        shapes = [Shape(narrow, shape.dims) for shape in shapes]
        out = self.shapes[op.results[0]]
        flops = 2 * out.size * math.prod(shapes[0].dims[d] for d in numbers[0])
        moved = sum(s.nbytes for s in (*shapes, out))
        summed = math.prod(shapes[0].dims[d] for d in numbers[0])
        batch = math.prod(shapes[0].dims[d] for d in numbers[2])
        if batch * summed >= min(shape.size for shape in shapes) or summed <= 4:
            # Of a vector, or of a few columns: computed as a sum of products, without the units for matrices.
            return dataclasses.replace(
                self.pricer.streamed(Access(moved, 0, flops), 1.1), flops=flops
            )
        moved = sum(s.nbytes for s in shapes)
        moved = outside(kernel, Access(moved, out.nbytes), self.near).total
        price = self.pricer.dot(shapes, numbers, flops, moved)
        if kernel.windowed:
            # Each part reads and writes the whole sum, or its own piece of the result.
            moved = 2 * out.nbytes * (kernel.windowed if kernel.summed else 1)
            moved = int(moved * (LEFT if op.results[0] in self.near else 1.0))
            more = self.pricer.streamed(Access(moved, 0, 0), 1.0).seconds
            price = dataclasses.replace(price, seconds=price.seconds + 0.8 * more)
        return price

    def _ragged(self, kernel: Kernel) -> Price:
        """Prices a product of groups of rows, each with its own matrix."""
        shapes = [self.shapes[v] for v in (*kernel.op.operands[:2], kernel.op.results[0])]
        rows = max(shape.dims[0] for shape in shapes)
        # The operand that has a matrix for each group; or the result, for the gradient of these.
        groups, before, after = next(s.dims for s in shapes if len(s.dims) == 3)
        # A GPU's compiler computes all rows with every matrix, and masks what is not wanted.
        times = groups if self.machine.gpu is not None else 1
        flops = 2 * times * rows * before * after
        flat = [Shape(shapes[0].dtype, dims) for dims in ((times * rows, before), (before, after))]
        return self.pricer.dot(flat, [[1], [0], []], flops, kernel.access.total)

    def _convolution(self, kernel: Kernel) -> Price:
        op, moved = kernel.op, kernel.access.total
        left, right = (self.shapes[v] for v in op.operands[:2])
        out = self.shapes[op.results[0]]
        made = written(op, out)
        flops = convolution_flops(made, left, right, out) or 0
        if self.machine.gpu is not None:
            return self.pricer.convolved(*forward_of(made, left, right), flops, moved)
        # A TPU's products are convolutions: rows of pixels, features, and what is summed for each.
        features = out.dims[made.attribute("dim_labels").partition("->")[2].index("f")]
        summed = max(1, flops // (2 * max(1, out.size)))
        dot = [Shape(left.dtype, (max(1, out.size // features), summed)),
               Shape(left.dtype, (summed, features))]  # fmt: skip
        price = self.pricer.dot(dot, [[1], [0], []], flops, moved)
        return dataclasses.replace(price, kind="convolution")

    def _call(self, kernel: Kernel) -> Price:
        op, access = kernel.op, kernel.access
        target = op.attributes.get("call_target_name", "")
        shapes = [self.shapes[v] for v in op.operands]
        configs = ("mhlo.backend_config", "backend_config")
        config = "".join(op.attributes.get(name, "") for name in configs)
        splash = splash_flops(op.location, shapes)
        if splash is not None:
            moved = access.total / self.pricer.bandwidth
            seconds = max(splash / (0.5 * self.machine.peak_flops), moved)
            return Price(seconds, "attention", access.total, splash)
        wide = [s for s in shapes if len(s.dims) >= 3]
        names = target + config + op.location
        made = [self.shapes[v] for v in op.results]
        attention = any(n in names for n in ("fmha", "flash", "dot_product_attention"))
        if (attention and len(wide) >= 2) or is_attention(target, shapes, made):
            q, k = wide[0], wide[1]
            backward = any(n in names for n in ("Backward", "_bwd", "dkv", "_dq"))
            backward |= [s.dims for s in made] == [s.dims for s in shapes[:3]]
            # A call that its own function partitions does not show its mask: taken to be causal.
            causal = 1 if "fmha" in target and "CAUSAL" not in config else 2
            flops = 2 * q.size * k.dims[1] * (5 if backward else 2) // causal
            if self.machine.gpu is not None and len(q.dims) == 4:
                mask = "CAUSAL" if causal == 2 else ""
                call = Instruction("", "custom-call", (), (), "", mask)
                kind = "Backward" if backward else ""
                return self.pricer.attention(call, kind, wide, flops, access.total)
            seconds = max(
                flops / (0.5 * self.machine.peak_flops), access.total / self.pricer.bandwidth
            )
            return Price(seconds, "attention", access.total, flops)
        price = self.pricer.streamed(access, 1.0)
        if target.strip('"') in _STREAMING:
            return price
        return dataclasses.replace(price, kind="unknown", known=False)

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


def estimate_of(program: Program, machine: Machine, tokens: int | None) -> Estimate:
    """Returns what a partitioned step takes on some chips."""
    run = Estimator(program, machine).run()
    known = {kind: t for kind, t in run.kinds.items() if kind != "unknown"}
    off = math.sqrt(sum((1.5 * SPREAD[kind] * t) ** 2 for kind, t in known.items()))
    off = max(off, 0.08 * run.seconds)
    seconds = machine.at_least(run.seconds)
    temporary, code = _GPU_TEMPORARY, 0
    if machine.gpu is None:
        temporary, code = _TPU_TEMPORARY, _CODE * run.kernels
    state = sum(program.shapes[v].nbytes for v in program.arguments if v not in program.host)
    # State that is offloaded comes to the device in parts for its update (half of it, in Llama 3
    # 70B on 32 v6e chips).
    away = sum(program.shapes[v].nbytes for v in program.arguments if v in program.host) // 2
    table: dict[str, dict[str, tuple[int, int]]] = {}
    for (axes, kind), (count, sent) in run.traffic.items():
        table.setdefault(axes, {})[kind] = (count, sent)
    return Estimate(
        chips=str(machine.chips),
        mesh=dict(machine.mesh),
        seconds=seconds,
        low=max(0.0, seconds - off),
        high=seconds + off + 10 * run.kinds.get("unknown", 0.0),
        parts={name: value for name, value in run.parts.items() if value > 0},
        peak_bytes=state + away + int(temporary * run.peak) + code,
        peak_bound=state + 2 * away + int(temporary * run.bound) + code,
        capacity=machine.chips.chip.capacity_bytes,
        state_bytes=state,
        by_axis=table,
        lines=dict(sorted(run.lines.items(), key=lambda item: -item[1])),
        flops=run.flops,
        model_flops=run.flops - run.recomputed,
        tokens=tokens,
        peak_flops=machine.peak_flops,
        unpriced=dict(run.unpriced),
    )
