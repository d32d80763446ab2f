"""Prices instructions of a program compiled for GPUs: products, library calls, fusions."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

from ..._hlo import (
    Access,
    Instruction,
    Module,
    Shape,
    access_of,
    flops_of,
    sliding_window_of,
    target_of,
)
from .convolutions import POINTWISE, Convolution, convolution_of, convolved_seconds
from .fusions import least_seconds, minor_of, penalty_of, turned_of, waits_of
from .price import FREE, Price
from .rates import GpuRates, Products

_SPLITS = (1, 2, 4, 8, 16, 32)
# Calls without work on the device.
_NOTHING = re.compile(
    r"Sharding$|SPMD|annotate_device_placement|MoveTo|LayoutConstraint|shape_assertion|AllocateBuffer|"
    r"CreateBuffer|NopReturnToken|nop$|Pin$|Unpin$"
)


class GpuPricer:
    """Prices each instruction of a module on one kind of GPU."""

    def __init__(self, module: Module, rates: GpuRates):
        """Takes the program and the speeds."""
        self.module, self.rates = module, rates

    @functools.cached_property
    def bodies(self) -> set[str]:
        """The computations that loops run."""
        loops = (i for found in self.module.computations.values() for i in found)
        return {name for i in loops if i.opcode == "while" for name in i.called}

    def estimates(self, fusion: Instruction) -> bool:
        """Returns whether a fusion with a collective in it computes something too."""
        return True

    def price(self, computation: str, instruction: Instruction) -> Price:
        """Returns what one run of an instruction costs, without what it calls in loops."""
        opcode = instruction.opcode
        if opcode in ("while", "conditional", "call", "async-start", "async-done", "async-update"):
            return FREE
        if opcode == "custom-call":
            return self._call(computation, instruction)
        access = access_of(self.module, computation, instruction)
        if opcode in ("fusion", "fusion-start") and instruction.called:
            inner = instruction.called[0]
            calls = [
                i for i in self.module.computations.get(inner, ()) if i.opcode == "custom-call"
            ]
            if calls:
                # A library call that reads and writes slices of larger arrays in place.
                prices = [self._call(inner, i, sliced=True) for i in calls]
                return max(prices, key=lambda p: p.seconds)
            dots = [
                i
                for i in self.module.computations.get(inner, ())
                if i.opcode in ("dot", "convolution", "ragged-dot")
            ]
            if dots:
                return self._fused_products(inner, dots, access)
            inside = self.module.computations.get(inner, ())
            sorts = [i for i in inside if i.opcode == "sort"]
            if sorts:
                return self.sort(sorts[0], access)
            least = latency = 0.0
            if "triton" not in instruction.rest:
                least = least_seconds(inside, self.rates.cores)
                latency = self.rates.kernel * waits_of(inside)
                latency = min(latency, 1.5 * access.total / self.rates.bandwidth)
                if turned := turned_of(instruction, inside):
                    latency += 0.85 * (turned - 1) * self.rates.kernel
            others = (*self._scattered(inner), self._gathered(inner), least)
            hot = computation in self.bodies
            penalty = penalty_of(instruction, inside)
            return self.streamed(access, penalty, others, latency, hot=hot)
        if opcode in ("dot", "convolution", "ragged-dot"):
            return self._product(computation, instruction, access.total)
        if not access.total:
            return FREE
        if opcode == "sort":
            return self.sort(instruction, access)
        scattered = self._updates(computation, instruction) if opcode == "scatter" else ()
        return self.streamed(access, 1.0, scattered)

    def streamed(
        self,
        access: Access,
        penalty: float,
        others: Sequence[float] = (),
        latency: float = 0.0,
        *,
        hot: bool = False,
    ) -> Price:
        """Returns the price of a kernel that streams through memory.

        Args:
            access: what it reads, writes and computes.
            penalty: how much slower than a copy it streams.
            others: seconds of what else goes on meanwhile, such as adding by atomics.
            latency: seconds that it waits besides.
            hot: whether it runs in a loop.
        """
        rates = self.rates
        moved = penalty * access.total / rates.bandwidth
        if hot and 2 * access.total < rates.cache:
            moved /= 1.4
        computed = access.operations / rates.scalar
        body = max(moved, computed) + 0.2 * min(moved, computed) + latency
        # One block for a few numbers starts sooner than a grid of them; so does a small kernel of a
        # loop, which finds what the last iteration touched in the cache.
        start = rates.kernel * (2 + min(0.8, access.total / 65536)) / 3
        if hot and 20 * access.total < rates.cache:
            start *= 0.8
        body = max([body, *others])
        seconds = start + body
        kind = "scalar" if computed > moved else "memory"
        if body < rates.kernel:
            kind = "launch"
        return Price(seconds, kind, access.total)

    def _atomics(self, size: int) -> float:
        known = self.rates.atomics
        return known[min(known, key=lambda other: abs(other - size))]

    def _scattered(self, inner: str) -> tuple[float, ...]:
        found = []
        for i in self.module.computations.get(inner, ()):
            if i.opcode == "scatter":
                found += self._updates(inner, i)
        return tuple(found)

    def _updates(self, computation: str, scatter: Instruction) -> tuple[float, ...]:
        """Returns how long it takes to add each array of updates; what is only placed is free."""
        own = self.module.by_name[computation]
        combiner = self.module.computations.get(scatter.attribute("to_apply").strip("%"), ())
        if combiner and combiner[-1].opcode == "parameter":
            return ()
        names = scatter.operands
        count = len(scatter.shapes)
        dims = [int(n) for n in re.findall(r"\d+", scatter.attribute("update_window_dims"))]
        found = []
        for name, given in zip(names[-count:], names[:count], strict=True):
            if name not in own or given not in own:
                continue
            updates, into = own[name].shapes[0], own[given].shapes[0]
            row = math.prod(updates.dims[d] for d in dims)
            size = max(1, updates.nbytes // max(1, updates.size))
            rate = self._atomics(0 if row == 1 else size)
            if row > 32 and updates.size > 4 * into.size:
                # Rows that many updates share wait for each other, however wide they are.
                rate = min(rate, self.rates.shared * row / 256)
            elif row > 1 and updates.dims[dims[-1]] == 1:
                rate = self._apart(into)
            found.append(updates.size / rate)
        return tuple(found)

    def _gathered(self, inner: str) -> float:
        """Returns how long a fusion takes to gather rows of many tables, or columns of one."""
        own = self.module.by_name.get(inner, {})
        seconds, rows, tables = 0.0, 0.0, 0
        for i in self.module.computations.get(inner, ()):
            given = own.get(i.operands[0]) if i.opcode == "gather" else None
            if given is None or not given.shapes:
                continue
            sizes = [int(n) for n in re.findall(r"\d+", i.attribute("slice_sizes"))]
            if math.prod(sizes) > 1 and sizes[-1] == 1 and given.shapes[0].dims[-1] > 1:
                seconds += i.shapes[0].size / (1.2 * self._apart(given.shapes[0]))
            elif sizes and sizes[-1] > 1:
                tables += 1
                rows += 4.2 * i.shapes[0].nbytes / self.rates.bandwidth + 0.4e-6
        return seconds + (rows if tables > 3 else 0.0)

    def _apart(self, shape: Shape) -> float:
        """Returns how many elements of a column are read or changed in a second."""
        return self.rates.shared / (1 if 2 * shape.nbytes < self.rates.cache else 3)

    def sort(self, instruction: Instruction, access: Access) -> Price:
        longest = max((s.dims[-1] if s.dims else 1 for s in instruction.shapes), default=1)
        passes = max(4.0, math.log2(max(2, longest)) ** 2 / 8)
        seconds = self.rates.kernel * 4 + passes * access.total / self.rates.bandwidth
        return Price(seconds, "memory", access.total)

    def _fused_products(self, inner: str, dots: list[Instruction], access: Access) -> Price:
        prices = [self._product(inner, dot, access.total) for dot in dots]
        longest = max(prices, key=lambda p: p.seconds)
        moved = access.total / self.rates.bandwidth + self.rates.kernel
        if moved > longest.seconds:
            return Price(moved, "memory", access.total, sum(p.flops for p in prices))
        return Price(longest.seconds, longest.kind, access.total, sum(p.flops for p in prices))

    def _product(self, computation: str, instruction: Instruction, moved: int) -> Price:
        flops = flops_of(self.module, computation, instruction) or 0
        own = self.module.by_name[computation]
        shapes = [own[n].shapes[0] for n in instruction.operands if n in own and own[n].shapes]
        if instruction.opcode == "convolution" or len(shapes) < 2:
            return self.convolved(instruction, shapes, "convForward", flops, moved)
        if instruction.opcode == "ragged-dot":
            out = instruction.shapes[0]
            return self.matmul(
                (1, out.dims[-2], out.dims[-1], shapes[0].dims[-1]),
                shapes,
                (True, False),
                flops,
                moved,
            )
        numbers = [
            [int(n) for n in re.findall(r"\d+", instruction.attribute(name))]
            for name in ("lhs_contracting_dims", "rhs_contracting_dims", "lhs_batch_dims")
        ]
        return self.dot(shapes, numbers, flops, moved)

    def dot(
        self,
        shapes: list[Shape],
        numbers: list[list[int]],
        flops: int,
        moved: int,
        *,
        added: int = 0,
        sliced: bool = False,
    ) -> Price:
        """Returns the price of a product.

        Args:
            shapes: of the operands.
            numbers: the contracted dims of both, and the batch dims of the first.
            flops: its floating-point operations.
            moved: bytes that it reads and writes.
            added: bytes of the array that it is added to.
            sliced: whether its operands are slices of larger arrays, read in place.
        """
        left, right = shapes[:2]
        contracted = math.prod(left.dims[d] for d in numbers[0])
        batch = math.prod(left.dims[d] for d in numbers[2])
        rows = left.size // max(1, contracted * batch)
        columns = right.size // max(1, contracted * batch)
        lies = (minor_of(left) in numbers[0], minor_of(right) in numbers[1])
        sizes = (batch, rows, columns, contracted)
        return self.matmul(sizes, shapes, lies, flops, moved, added=added, sliced=sliced)

    def matmul(
        self,
        sizes: tuple[int, int, int, int],
        shapes: list[Shape],
        lies: tuple[bool, bool],
        flops: int,
        moved: int,
        *,
        added: int = 0,
        sliced: bool = False,
    ) -> Price:
        rates = self.rates
        products = _products(rates, shapes[0].dtype)
        wide = shapes[0].nbytes >= 4 * shapes[0].size
        _, rows, columns, contracted = sizes
        minors = (contracted if lies[0] else rows, contracted if lies[1] else columns, columns)
        size = shapes[0].nbytes // max(1, shapes[0].size)
        splits, kernels = _SPLITS, [products]
        if products.older is not None:
            kernels.append(products.older)
        if sliced and wide and products.older is not None:
            # Nothing is tuned there: the library's first choice runs, which never splits.
            kernels, splits = [products.older], (1,)
        elif products.single and any(minor * size % 16 for minor in minors):
            kernels = [*products.single]
        if products.older is not None and lies == (False, False):
            kernels[0] = dataclasses.replace(kernels[0], tiles=_large(kernels[0].tiles))
        streamed, total = moved / rates.bandwidth, math.inf
        seconds = math.inf
        for kernel in kernels:
            own = tiled_seconds(
                kernel, rates.cores, rates.bandwidth, kernel.layouts[lies], *sizes, splits=splits
            )
            shown = kernel.overlap * (1.0 if own > streamed else 0.6)
            hidden = max(own, streamed) + shown * min(own, streamed)
            spent = kernel.start + hidden + kernel.added * added / rates.bandwidth
            if spent < total:
                total, seconds, products = spent, own, kernel
        kind = "product" if shapes[0].nbytes <= 2 * shapes[0].size else "wide product"
        if streamed > seconds:
            kind = "memory"
        if max(seconds, streamed) < products.start:
            kind = "launch"
        return Price(total, kind, moved, flops)

    def _call(self, computation: str, instruction: Instruction, *, sliced: bool = False) -> Price:
        target = target_of(instruction)
        if _NOTHING.search(target):
            return FREE
        own = self.module.by_name[computation]
        shapes = [own[n].shapes[0] for n in instruction.operands if n in own and own[n].shapes]
        access = access_of(self.module, computation, instruction)
        flops = flops_of(self.module, computation, instruction)
        if target.startswith("__cublas$") and len(shapes) >= 2:
            names = ("lhs_contracting", "rhs_contracting", "lhs_batch")
            numbers = [_listed(instruction, f"{name}_dimensions") for name in names]
            added = re.search(r'"beta":(\d)', instruction.rest)
            addend = shapes[2].nbytes if added and added[1] != "0" and len(shapes) > 2 else 0
            # What was written just before is still in the cache.
            addend = addend if 3 * addend > self.rates.cache else 0
            return self.dot(shapes, numbers, flops or 0, access.total, added=addend, sliced=sliced)
        if "fmha" in target and shapes:
            return self.attention(instruction, target, shapes, flops or 0, access.total)
        if "__cudnn$conv" in target and shapes:
            return self.convolved(instruction, shapes, target, flops or 0, access.total)
        if "TopK" in target or "sort" in target.lower():
            return self.sort(instruction, access)
        if flops:
            return self._declared(flops, access, shapes)
        known = flops == 0
        price = self.streamed(access, 1.0)
        return price if known else Price(price.seconds, "unknown", access.total, 0, known=False)

    def _declared(self, flops: int, access: Access, shapes: list[Shape]) -> Price:
        """Returns the price of a kernel of which only its flops are known."""
        rate = _products(self.rates, shapes[0].dtype if shapes else "bf16").rate * self.rates.cores
        seconds = max(flops / (0.5 * rate), access.total / self.rates.bandwidth)
        return Price(self.rates.kernel + seconds, "attention", access.total, flops)

    def attention(
        self, instruction: Instruction, target: str, shapes: list[Shape], flops: int, moved: int
    ) -> Price:
        rates, backward = self.rates, "Backward" in target
        length, depth = shapes[0].dims[1], shapes[0].dims[3]
        causal = "CAUSAL" in instruction.rest
        if 0 < (window := sliding_window_of(instruction)) < length:
            # Half of what tiles waste is at the edges of what a query sees.
            length = (length + window) // 2
        total = _attended(rates, flops, moved, length, depth, backward=backward, causal=causal)
        return Price(total, "attention", moved, flops)

    def convolved(
        self, instruction: Instruction, shapes: list[Shape], target: str, flops: int, moved: int
    ) -> Price:
        """Returns the price of a convolution.

        It is in no CUDA graph: those before and after it are launched apart.
        """
        price = self._convolution(instruction, shapes, target, flops, moved)
        return dataclasses.replace(price, gap=1.7 * self.rates.kernel)

    def _convolution(
        self, instruction: Instruction, shapes: list[Shape], target: str, flops: int, moved: int
    ) -> Price:
        rates, found = self.rates, convolution_of(instruction, shapes, target)
        if found is None:
            streamed = moved / rates.bandwidth
            half = 0.5 * rates.cores * _products(rates, shapes[0].dtype if shapes else "f32").rate
            return Price(rates.kernel + max(flops / half, streamed), "convolution", moved, flops)
        if found.pointwise:
            return self._pointwise(found, shapes, flops, moved)
        rate = _products(rates, shapes[0].dtype).rate
        seconds = convolved_seconds(found, rate, rates.cores, rates.bandwidth, rates.kernel)
        return Price(seconds, "convolution", moved, flops)

    def _pointwise(self, found: Convolution, shapes: list[Shape], flops: int, moved: int) -> Price:
        """Returns the price of a convolution of single pixels: a plain product."""
        sizes, lies = (1, found.made, found.features, found.channels), (True, True)
        if found.towards == "input":
            sizes, lies = (1, found.made, found.channels, found.features), (True, False)
        elif found.towards == "filter":
            sizes, lies = (1, found.features, found.channels, found.made), (False, False)
        price = self.matmul(sizes, shapes, lies, flops, moved)
        slower = POINTWISE[found.wide][found.towards == "filter"]
        return dataclasses.replace(price, seconds=slower * price.seconds, kind="convolution")


@functools.cache
def _large(tiles: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Returns the tiles of kernels that turn both operands on their way: the large ones."""
    return tuple(tile for tile in tiles if min(tile) >= 128)


def _products(rates: GpuRates, dtype: str) -> Products:
    if dtype in rates.products:
        return rates.products[dtype]
    if dtype in ("f16",):
        return rates.products["bf16"]
    if dtype.startswith("f8"):
        bf16 = rates.products["bf16"]
        return bf16.scaled(1.8)
    if dtype == "f64":
        f32 = rates.products["f32"]
        return dataclasses.replace(f32, rate=0.1 * f32.rate, older=None)
    return rates.products["f32" if dtype in ("f32", "c64") else "bf16"]


@functools.lru_cache(65536)
def _tiled(
    start: float, rate: float, depth: float, small: float, split: float,
    tiles_known: tuple[tuple[int, int], ...],
    cores: int, bandwidth: float, batch: int, rows: int, columns: int, contracted: int,
    splits: tuple[int, ...],
) -> float:  # fmt: skip
    best = math.inf
    for m, n in tiles_known:
        tiles = batch * -(-rows // m) * -(-columns // n)
        each = 2 * m * n * (1 + small * (128 / m + 128 / n) / 2) / rate
        for parts in splits:
            if parts > 1 and contracted < 256 * parts:
                break
            waves = -(-tiles * parts // cores)
            seconds = waves * each * (contracted / parts + depth)
            if parts > 1:
                seconds += split + batch * rows * columns * 4 * (parts + 0.5) / bandwidth
            best = min(best, seconds)
    return best


def tiled_seconds(
    products: Products, cores: int, bandwidth: float, share: float,
    batch: int, rows: int, columns: int, contracted: int, splits: tuple[int, ...] = _SPLITS,
) -> float:  # fmt: skip
    """Returns the seconds of a product in the best of many tilings, without its start."""
    return _tiled(
        products.start, products.rate * share, products.depth, products.small, products.split,
        products.tiles, cores, bandwidth, batch, max(1, rows), max(1, columns), max(1, contracted), splits,
    )  # fmt: skip


def _listed(instruction: Instruction, name: str) -> list[int]:
    found: Any = re.search(rf'"{name}":\[([^\]]*)\]', instruction.rest)
    return [int(n.strip('"')) for n in found[1].split(",") if n] if found else []


def product_seconds(
    rates: GpuRates, dtype: str, rows: int, columns: int, contracted: int,
    *, batch: int = 1, lies: tuple[bool, bool] = (True, False),
) -> float:  # fmt: skip
    """Returns the seconds of a product of two matrices, or of a batch of them.

    `lies` says of each operand whether its contracted dim is the contiguous one: by default both
    are in row-major order.
    """
    products = _products(rates, dtype)
    size = 1 if dtype.startswith("f8") else 2 if dtype in ("bf16", "f16") else 4
    moved = rows * contracted + contracted * columns + rows * columns
    moved *= batch * size / rates.bandwidth
    seconds = tiled_seconds(
        products, rates.cores, rates.bandwidth, products.layouts[lies],
        batch, rows, columns, contracted,
    )  # fmt: skip
    return products.start + max(seconds, moved) + products.overlap * min(seconds, moved)


def attention_seconds(rates: GpuRates, shape: tuple[int, int, int, int]) -> float:
    """Returns the seconds of a causal attention's forward pass in bfloat16: `(b, length, heads, d)`."""
    batch, length, heads, depth = shape
    flops = 2 * batch * heads * length * length * depth
    moved = 4 * 2 * batch * length * heads * depth
    return _attended(rates, flops, moved, length, depth, backward=False, causal=True)


def _attended(
    rates: GpuRates,
    flops: int,
    moved: int,
    length: int,
    depth: int,
    *,
    backward: bool,
    causal: bool,
) -> float:
    near = 128 if depth > 96 else 64
    # Short sequences fill the tiles badly; a causal mask leaves half of those at the diagonal.
    half = rates.attention_length * near / 128 * (1.2 if causal else 0.6)
    seconds = flops * (1 + half / max(1, length)) / rates.attention[near, backward]
    streamed = (2.5 if backward else 1.0) * moved / rates.bandwidth
    kernels = 7 if backward else 3
    return kernels * rates.kernel + max(seconds, streamed) + 0.15 * min(seconds, streamed)
