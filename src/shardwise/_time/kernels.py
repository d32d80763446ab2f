"""Prices instructions of a program compiled for GPUs: products, library calls, fusions."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

from .._hlo import Access, Instruction, Module, Shape, access_of, flops_of, target_of
from .price import FREE, Price
from .rates import GpuRates, Products

_TILES = tuple(
    (m, n)
    for m in (32, 64, 96, 128, 160, 192, 256, 320)
    for n in (32, 64, 96, 128, 160, 192, 256, 320)
    if 64 * 32 <= m * n <= 320 * 128
)
_SPLITS = (1, 2, 4, 8, 16, 32)
# Calls without work on the device.
_NOTHING = re.compile(
    r"Sharding$|SPMD|annotate_device_placement|LayoutConstraint|shape_assertion|AllocateBuffer|"
    r"CreateBuffer|NopReturnToken|nop$|Pin$|Unpin$"
)


class GpuPricer:
    """Prices each instruction of a module on one kind of GPU."""

    def __init__(self, module: Module, rates: GpuRates):
        """Takes the program and the speeds."""
        self.module, self.rates = module, rates

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
                return max((self._call(inner, i) for i in calls), key=lambda p: p.seconds)
            dots = [
                i
                for i in self.module.computations.get(inner, ())
                if i.opcode in ("dot", "convolution", "ragged-dot")
            ]
            if dots:
                return self._fused_products(inner, dots, access)
            return self.streamed(access, self._penalty(inner), self._scattered(inner))
        if opcode in ("dot", "convolution", "ragged-dot"):
            return self._product(computation, instruction, access.total)
        if not access.total:
            return FREE
        if opcode == "sort":
            return self.sort(instruction, access)
        scattered = self._updates(computation, instruction) if opcode == "scatter" else ()
        return self.streamed(access, 1.0, scattered)

    def streamed(
        self, access: Access, penalty: float, scattered: tuple[tuple[int, int], ...] = ()
    ) -> Price:
        """Returns the price of a kernel that streams through memory."""
        rates = self.rates
        moved = penalty * access.total / rates.bandwidth
        computed = access.operations / rates.scalar
        added = sum(count / self._atomics(size) for count, size in scattered)
        body = max(moved, computed) + 0.5 * min(moved, computed)
        seconds = rates.kernel + max(body, added)
        kind = "scalar" if computed > moved else "memory"
        if max(body, added) < rates.kernel:
            kind = "launch"
        return Price(seconds, kind, access.total)

    def _atomics(self, size: int) -> float:
        known = self.rates.atomics
        return known[min(known, key=lambda other: abs(other - size))]

    def _penalty(self, inner: str) -> float:
        """Returns how much slower than a copy a fusion streams, by what it does to its arrays."""
        inside = self.module.computations.get(inner, ())
        if not inside:
            return 1.0
        found, root = {i.opcode for i in inside}, inside[-1]
        written = max((s.size for s in root.shapes), default=0)
        penalty = 1.0
        pads = [i for i in inside if i.opcode == "pad" and 4 * i.shapes[0].size >= written]
        if len(pads) > 1:
            # All sides are computed for each element, and loads are not vectorised.
            narrow = min(i.shapes[0].dims[-1] for i in pads if i.shapes[0].dims) < 512
            penalty = 2.5 if narrow and "slice" in found else 1.8
        if "transpose" in found:
            penalty = max(penalty * 1.25, 1.4)
        penalty *= max((_reducing(i, inside) for i in inside if i.opcode == "reduce"), default=1.0)
        if found <= {"broadcast", "constant", "bitcast", "copy", "tuple"}:
            # Filling with elements of 2 bytes or less is not vectorised.
            if root.shapes and root.shapes[0].nbytes <= 2 * root.shapes[0].size:
                penalty = 2.4
        return penalty

    def _scattered(self, inner: str) -> tuple[tuple[int, int], ...]:
        found = []
        for i in self.module.computations.get(inner, ()):
            if i.opcode == "scatter":
                found += self._updates(inner, i)
        return tuple(found)

    def _updates(self, computation: str, scatter: Instruction) -> tuple[tuple[int, int], ...]:
        own = self.module.by_name[computation]
        arrays = [own[n].shapes[0] for n in scatter.operands[-len(scatter.shapes) :] if n in own]
        return tuple((s.size, max(1, s.nbytes // max(1, s.size))) for s in arrays)

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

    def dot(self, shapes: list[Shape], numbers: list[list[int]], flops: int, moved: int) -> Price:
        """Returns the price of a product: contracted dims of both operands, batch dims of the first."""
        left, right = shapes[:2]
        contracted = math.prod(left.dims[d] for d in numbers[0])
        batch = math.prod(left.dims[d] for d in numbers[2])
        rows = left.size // max(1, contracted * batch)
        columns = right.size // max(1, contracted * batch)
        lies = (_minor(left) in numbers[0], _minor(right) in numbers[1])
        return self.matmul((batch, rows, columns, contracted), shapes, lies, flops, moved)

    def matmul(
        self,
        sizes: tuple[int, int, int, int],
        shapes: list[Shape],
        lies: tuple[bool, bool],
        flops: int,
        moved: int,
    ) -> Price:
        rates = self.rates
        products = _products(rates, shapes[0].dtype)
        share = products.layouts[lies]
        seconds = tiled_seconds(products, rates.cores, rates.bandwidth, share, *sizes)
        streamed = moved / rates.bandwidth
        total = products.start + max(seconds, streamed) + 0.15 * min(seconds, streamed)
        kind = "product" if shapes[0].nbytes <= 2 * shapes[0].size else "wide product"
        if streamed > seconds:
            kind = "memory"
        if max(seconds, streamed) < products.start:
            kind = "launch"
        return Price(total, kind, moved, flops)

    def _call(self, computation: str, instruction: Instruction) -> Price:
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
            return self.dot(shapes, numbers, flops or 0, access.total)
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
        total = _attended(rates, flops, moved, length, depth, backward=backward, causal=causal)
        return Price(total, "attention", moved, flops)

    def convolved(
        self, instruction: Instruction, shapes: list[Shape], target: str, flops: int, moved: int
    ) -> Price:
        """Returns the price of a convolution: an implicit product with its own efficiencies."""
        rates = self.rates
        dtype = shapes[0].dtype if shapes else "f32"
        products = _products(rates, dtype)
        groups = int(instruction.attribute("feature_group_count") or 1)
        wgrad, dgrad = "BackwardFilter" in target, "BackwardInput" in target
        if groups > 1:
            seconds = flops / (15e12 * rates.bandwidth / 4.2e12)
            return Price(rates.kernel + seconds, "convolution", moved, flops)
        rows, columns, channels = _implicit(instruction, shapes, wgrad)
        contracted = max(1, flops // max(1, 2 * rows * columns))
        if channels < 8:
            # Padded to what tensor cores take, and by kernels that nobody tunes for this.
            seconds = flops / (25e12 * rates.bandwidth / 4.2e12)
            return Price(rates.kernel + seconds, "convolution", moved, flops)
        if max((int(n) for n in re.findall(r"\d+", _window_size(instruction))), default=1) >= 32:
            # A gradient written as a convolution with the image as its kernel: nobody tunes for it.
            seconds = flops / (6e12 * rates.bandwidth / 4.2e12)
            return Price(rates.kernel + seconds, "convolution", moved, flops)
        efficiency = 0.5 if wgrad else 0.65 if dgrad else 0.75
        if dtype in ("bf16", "f16"):
            efficiency *= 0.8
        seconds = tiled_seconds(
            products, rates.cores, rates.bandwidth, efficiency, 1, rows, columns, contracted,
            splits=_SPLITS if wgrad else (1,),
        )  # fmt: skip
        streamed = 1.1 * moved / rates.bandwidth
        total = products.start + max(seconds, streamed) + 0.3 * min(seconds, streamed)
        return Price(total, "convolution", moved, flops)


def _products(rates: GpuRates, dtype: str) -> Products:
    if dtype in rates.products:
        return rates.products[dtype]
    if dtype in ("f16",):
        return rates.products["bf16"]
    if dtype.startswith("f8"):
        bf16 = rates.products["bf16"]
        return Products(
            bf16.start, 1.8 * bf16.rate, bf16.depth, bf16.small, bf16.split, bf16.layouts
        )
    if dtype == "f64":
        f32 = rates.products["f32"]
        return Products(f32.start, 0.1 * f32.rate, f32.depth, f32.small, f32.split, f32.layouts)
    return rates.products["f32" if dtype in ("f32", "c64") else "bf16"]


@functools.lru_cache(65536)
def _tiled(
    start: float, rate: float, depth: float, small: float, split: float,
    cores: int, bandwidth: float, batch: int, rows: int, columns: int, contracted: int,
    splits: tuple[int, ...],
) -> float:  # fmt: skip
    best = math.inf
    for m, n in _TILES:
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
        cores, bandwidth, batch, max(1, rows), max(1, columns), max(1, contracted), splits,
    )  # fmt: skip


def _window_size(instruction: Instruction) -> str:
    found = re.search(r"size=([\dx]+)", instruction.attribute("window"))
    return found[1] if found else ""


def _reducing(reduce: Instruction, inside: list[Instruction]) -> float:
    """Returns how much slower a reduction streams: over rows nearly as a copy, over columns not."""
    given = next((i for i in inside if i.name in reduce.operands and i.shapes), None)
    dims = {int(n) for n in re.findall(r"\d+", reduce.attribute("dimensions"))}
    return 1.03 if given is None or _minor(given.shapes[0]) in dims else 1.2


def _implicit(instruction: Instruction, shapes: list[Shape], wgrad: bool) -> tuple[int, int, int]:
    """Returns the rows and columns of a convolution as a product, and its input channels."""
    out = instruction.shapes[0]
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels"))
    if labels is None or len(shapes[0].dims) != len(labels[1]):
        return max(1, out.size // 64), 64, 64
    channels = shapes[0].dims[labels[1].index("f")]
    if wgrad and len(out.dims) == len(labels[2]):
        rows = out.dims[labels[2].index("o")]
        return rows, max(1, out.size // rows), channels
    columns = out.dims[labels[3].index("f")] if len(out.dims) == len(labels[3]) else 64
    return max(1, out.size // max(1, columns)), columns, channels


def _minor(shape: Shape) -> int:
    """Returns the dim whose elements are contiguous."""
    found = re.match(r"\{(\d+)", shape.layout)
    return int(found[1]) if found else len(shape.dims) - 1


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
    products = rates.products[dtype]
    size = 2 if dtype == "bf16" else 4
    moved = rows * contracted + contracted * columns + rows * columns
    moved *= batch * size / rates.bandwidth
    seconds = tiled_seconds(
        products, rates.cores, rates.bandwidth, products.layouts[lies],
        batch, rows, columns, contracted,
    )  # fmt: skip
    return products.start + max(seconds, moved) + 0.15 * min(seconds, moved)


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
