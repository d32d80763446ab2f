"""The products that a TPU's compiler computes in parts while shards travel.

It turns a gather that one product reads, and a scatter of what a product makes, into a loop of
permutes around the ring in both directions, each with a part of the product (a collective matmul).
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from ...._hlo import Shape
from ...program import Op, dims_of, numbers_of
from ..graph import Kernel
from .filters import RELAYOUT, WIDE, cut_of, is_in_parts, is_rarely_used, shares_gather

# Devices over which products are computed in parts: seen for 4, 8 and 16, not for 2, nor for 64 of
# 256; nor for the 4 of one host.
RINGS = (4, 8, 12, 16, 20, 24, 28, 32)
PRODUCTS = ("dot_general", "convolution")
# Sums of at most so many bytes run as one. (Of 4 MiB and 4 MiB beside 8 MiB, only the first do.)
_TOGETHER = 4 * 2**20
# How much larger, of products as a whole (seen at 2.2 and more, not at 1.6), and of those in parts (seen
# at 3.3, not at 2.7).
_LARGER, _LARGER_IN_PARTS = 2, 3
# An array is gathered again for a use that is this much nearer to the end of the step.
_APART = 130


def mark_windows(
    kernels: Sequence[Kernel],
    shapes: Mapping[int, Shape],
    maker: Mapping[int, Op],
    is_ring: Callable[[Op], bool],
    devices: int,
) -> None:
    """Marks the gathers that feed one product alone, the scatters of products, and these products.

    Args:
        kernels: the kernels of a block.
        shapes: by value.
        maker: the operation that makes each value of the block.
        is_ring: returns whether the devices of a collective are such that it is computed so.
        devices: how many the mesh has: convolutions wait for a ring of all of them alone.
    """
    readers: dict[int, list[Kernel]] = defaultdict(list)
    owner: dict[int, Kernel] = {}
    for kernel in kernels:
        owner |= dict.fromkeys(kernel.writes, kernel)
        for value in kernel.reads:
            readers[value].append(kernel)
    zeros: set[Shape] = set()
    heights = _heights(maker)
    for kernel in kernels:
        parts = math.prod(size for _, size in kernel.op.axes)
        if kernel.op.kind == "all-gather":
            near = [k for value in kernel.writes for k in readers[value]]
            kernel.repeats = _repeats([heights[k.op.results[0]] for k in near if k.op.results])
            if near and all(k.op.kind == "convolution" and WIDE in k.op.attributes for k in near):
                kernel.repeats = len(near)  # each casts the filter for itself
        elif kernel.op.kind == "reduce-scatter":
            near = [owner[value] for value in kernel.reads if value in owner]
        else:
            continue
        if parts not in RINGS or not is_ring(kernel.op):
            continue
        if near and all(k.op.kind == "convolution" for k in near):
            if parts == devices:
                _mark_convolutions(kernel, near, parts, shapes)
            continue
        # The partitioner leaves what a `shard_map` contains as it is.
        if len(near) != 1 or near[0].op.kind != "dot_general" or near[0].op.manual:
            continue
        product = near[0]
        whole = max(shapes[v].size for v in (*kernel.op.operands, *kernel.op.results))
        if WIDE in product.op.attributes or is_rarely_used(product.op, whole, parts, shapes):
            continue
        if kernel.op.kind == "all-gather":
            summed = _sums(product.op, kernel.op, shapes, maker)
            if not summed and _partial(product, readers):
                continue
            # A ring of four is unrolled, and what no part needs is not sent.
            kernel.permutes = parts - 1 if parts == 4 else parts + 1
            product.summed |= summed
        else:
            shard = shapes[kernel.op.results[0]]
            # The same holds for the sums that begin at zero, if they have been sent before.
            kernel.permutes = parts - 1 if parts == 4 and shard in zeros else parts + 1
            zeros.add(shard)
        kernel.windowed = product.windowed = parts
        product.partners.append(kernel)
    if any(kernel.windowed > 4 for kernel in kernels):
        return  # in loops, with arrays laid out for them
    for kernel in kernels:
        if not kernel.heavy:
            near = [owner[v] for v in kernel.reads if v in owner]
            near += [k for v in kernel.writes for k in readers[v]]
            kernel.absorbed = any(k.op.kind in PRODUCTS for k in near if k.heavy)


def _mark_convolutions(
    kernel: Kernel, near: Sequence[Kernel], parts: int, shapes: Mapping[int, Shape]
) -> None:
    """Marks the collective of a filter and the convolutions that are computed while it runs."""
    cuts = [cut_of(k.op, kernel.op, shapes) for k in near]
    if not all(is_in_parts(k.op, parts, shapes) for k in near) or None in cuts:
        return
    if len(near) > 1 and any(shares_gather(k.op, shapes) for k in near):
        return
    kernel.windowed, kernel.repeats, kernel.permutes = parts, 1, 0
    for product, cut in zip(near, cuts, strict=True):
        # All begin with the same permute of a shard.
        own = parts - 1 if parts == 4 else parts if kernel.permutes else parts + 1
        kernel.permutes += own
        product.windowed, product.cut = parts, cut
        product.summed |= cut is not None and not cut.made and not cut.gradient
        product.partners.append(dataclasses.replace(kernel, permutes=own))


def relaid(
    kernels: Sequence[Kernel], shapes: dict[int, Shape], maker: dict[int, Op]
) -> list[Kernel]:
    """Returns the kernels with copies for what convolutions in parts have in another order."""
    found: list[Kernel] = []
    copies: dict[int, int] = {}
    for kernel in kernels:
        cut = kernel.cut
        found.append(kernel)
        if cut is None or not cut.by_image or cut.value not in (*kernel.reads, *kernel.writes):
            continue
        if cut.value not in copies or cut.made:
            copies[cut.value] = copy = len(shapes)
            dtype = shapes[cut.value].dtype
            narrow = dtype == "f32" and cut.itemsize == 2
            shapes[copy] = Shape("bf16" if narrow else dtype, cut.padded)
            pair = (copy, cut.value) if cut.made else (cut.value, copy)
            op = Op(RELAYOUT, pair[:1], pair[1:], location=kernel.op.location)
            read, written = ({value: shapes[value].nbytes} for value in pair)
            maker[copy] = kernel.op if cut.made else op
            place = len(found) if cut.made else len(found) - 1
            found.insert(place, Kernel([op], False, read, written, size=shapes[copy].size))
        copy = copies[cut.value]
        mine = kernel.writes if cut.made else kernel.reads
        del mine[cut.value]
        mine[copy] = shapes[copy].nbytes
    return found


def filters_last(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Returns the kernels with gradients of filters that travel, and what needs them, at the end.

    Seen where a norm is behind each convolution, so that its gradient waits for sums; not where
    only elementwise operations are, as in a VGG.
    """
    sums = {
        value
        for kernel in kernels
        if any(op.kind == "reduce" for op in kernel.ops) or kernel.op.kind == "all-reduce"
        for value in (*kernel.writes, *kernel.op.results)
    }
    waits = {
        value for kernel in kernels if not sums.isdisjoint(kernel.reads) for value in kernel.writes
    }
    made: set[int] = set()
    last: set[Kernel] = set()
    for kernel in kernels:
        travels = kernel.cut is not None and kernel.cut.gradient
        if (travels and kernel.op.operands[1] in waits) or not made.isdisjoint(kernel.reads):
            last.add(kernel)
            made.update(kernel.writes, kernel.op.results)
    readers: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        for value in kernel.reads:
            readers[value].append(kernel)
    for kernel in kernels:
        near = [k for value in kernel.writes for k in readers[value]]
        if kernel.op.kind == RELAYOUT and last.issuperset(near):
            last.add(kernel)
    return [k for k in kernels if k not in last] + [k for k in kernels if k in last]


def sums_last(
    kernels: Sequence[Kernel], shapes: Mapping[int, Shape], maker: Mapping[int, Op]
) -> list[Kernel]:
    """Returns the kernels with some gradients of weights, and what needs them, at the end.

    A TPU's compiler combines the sums of small gradients in a loop, where these are not computed in
    parts. And it computes the gradient of a head after the loop over the layers, if that reads a stack
    much larger than what the gradient is computed from. What these products read is kept until then.
    """
    products = {v: k for k in kernels if k.op.kind in PRODUCTS for v in k.writes}
    readers: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        for value in kernel.reads:
            readers[value].append(kernel)
    last: set[Kernel] = set()
    largest = 0
    for kernel in reversed(kernels):
        if kernel.op.kind == "while":
            # What another loop has stacked.
            stacks = [v for v in kernel.op.operands if v in maker and maker[v].kind == "while"]
            largest = max([largest, *(shapes[v].nbytes for v in stacks)])
        if kernel.op.kind != "reduce-scatter" or not products.keys() >= kernel.reads.keys():
            continue
        made = [products[v] for v in kernel.reads]
        after, todo = {kernel, *made}, [kernel, *made]
        while todo:
            near = {k for v in todo.pop().writes for k in readers[v]} - after
            after |= near
            todo += near
        ends = after - {kernel, *made}
        small = not kernel.windowed and sum(shapes[v].nbytes for v in kernel.reads) <= _TOGETHER
        stacked = bool(ends) and all(k.op.kind == "dynamic_update_slice" for k in ends)
        read = sum(shapes[v].nbytes for each in made for v in each.reads)
        times = _LARGER_IN_PARTS if kernel.windowed else _LARGER
        if small and stacked or largest > times * read and not any(k.heavy for k in ends):
            last |= after
    return [k for k in kernels if k not in last] + [k for k in kernels if k in last]


def _heights(maker: Mapping[int, Op]) -> dict[int, int]:
    """Returns how far each value is from the end of the step, as XLA measures it: more for more users."""
    heights: dict[int, int] = defaultdict(int)
    done: set[int] = set()
    for op in reversed(list(maker.values())):
        if id(op) in done:
            continue
        done.add(id(op))
        own = max(heights[value] for value in op.results)
        heights.update(dict.fromkeys(op.results, own))
        for value in set(op.operands):
            heights[value] = max(heights[value], own) + 1
    return heights


def _repeats(heights: Sequence[int]) -> int:
    """Returns how often an array is gathered for uses at these heights."""
    found, lowest = 1, None
    for height in sorted(heights, reverse=True):
        found += lowest is not None and lowest > height + 1 + _APART
        lowest = height
    return found


def _partial(product: Kernel, readers: Mapping[int, Sequence[Kernel]]) -> bool:
    """Returns whether a product's result is summed over devices, as a contracted dim is split."""
    return any(
        k.op.kind in ("all-reduce", "reduce-scatter") for v in product.writes for k in readers[v]
    )


def _sums(product: Op, gather: Op, shapes: Mapping[int, Shape], maker: Mapping[int, Op]) -> bool:
    """Returns whether a product contracts the dim that is gathered for it."""
    numbers = numbers_of(product)
    for side, operand in enumerate(product.operands[:2]):
        dims = _gathered(operand, gather, shapes, maker)
        if dims:
            return bool(dims & set(numbers[side]))
    return False


def _gathered(
    value: int, gather: Op, shapes: Mapping[int, Shape], maker: Mapping[int, Op]
) -> set[int]:
    """Returns the dims of a value that are the gathered ones of what it renames."""
    if value in gather.results:
        return set(gather.dims)
    op = maker.get(value)
    if op is None or len(op.operands) != 1:
        return set()
    before = _gathered(op.operands[0], gather, shapes, maker)
    if op.kind == "transpose":
        return {i for i, dim in enumerate(dims_of(op, "permutation")) if dim in before}
    if op.kind == "reshape":
        old, new = shapes[op.operands[0]].dims, shapes[value].dims
        ends = {math.prod(old[dim + 1 :]) for dim in before}
        return {i for i in range(len(new)) if math.prod(new[i + 1 :]) in ends and new[i] > 1}
    return before
