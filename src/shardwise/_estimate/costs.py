"""How long each kernel of a partitioned step takes, by its shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from .._hlo import (
    Access,
    Instruction,
    Shape,
    convolution_flops,
    is_attention,
    splash_flops,
)
from .._time import Machine, Price
from .convolutions import convolution_in_parts, convolution_of_groups
from .kernels import LEFT, RELAYOUT, VECTOR, Kernel, is_added_up, outside, padded
from .program import Op, dims_of, forward_of, numbers_of, written

# A TPU's compiler computes what lies before and after a product with it, unless the product is
# computed in parts: this much is left.
_ABSORBED = 0.4
# Rows that a TPU reads or adds by index: as fast as memory allows, which is twice as fast as its fusions.
_INDEXED = 0.5
# What each part of a product takes more in a loop, seen as what steps of small products lacked.
_PART = 1.5e-6
# How much slower than a fusion copies of activations are in which images fill the lanes.
_INTO_LANES, _OUT_OF_LANES, _WIDE_OUT_OF_LANES = 1.5, 2.3, 1.0
# Custom calls that only move memory.
_STREAMING = {"cu_threefry2x32", "cu_threefry2x32_ffi", "mhlo.topk", "TopK", "PartialReduce"}
# Elements that a block of Triton holds; and how much slower than a copy it sums rows: two sums of a row
# alone, whole rows, and gradients of a softmax by where the rows of a block lie.
_HELD = 16384
# Rows that a block sums over columns; and how many elements a second, if it writes what it reads too.
_COLUMN = 4096
_WAITING, _PASSING = 2.5e9, 24e9
_STATISTICS, _ROWS = 1.55, 1.3
_TOGETHER, _APART, _SCATTERED, _FEW = 1.13, 1.65, 3.0, 1.07


class Costs:
    """Prices the kernels of a step on some chips."""

    def __init__(self, machine: Machine, shapes: Mapping[int, Shape], near: Collection[int]):
        """Takes the chips, the shapes of values, and those that are kept beside a TPU's cores."""
        self.machine, self.shapes, self.near = machine, shapes, near
        self.pricer: Any = machine.pricer(None)  # pyright: ignore[reportArgumentType] - priced by shapes

    def of(self, kernel: Kernel, heads: Collection[int]) -> Price:
        """Returns what a kernel takes; `heads` are the sizes of heads that fill registers."""
        op, access = kernel.op, kernel.access
        if not kernel.heavy:
            share = _ABSORBED if kernel.absorbed else 1.0
            moved = outside(kernel, padded(kernel, self.shapes, heads), self.near)
            price = self.pricer.streamed(moved, share * self._penalty(kernel))
            least = 0.0 if self.machine.gpu is None else self._least(kernel)
            return dataclasses.replace(price, seconds=max(price.seconds, least))
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
        if op.kind in ("gather", "scatter") and self.machine.gpu is None:
            return self.pricer.streamed(access, _INDEXED)
        return self.pricer.streamed(access, 1.5)

    def _penalty(self, kernel: Kernel) -> float:
        if kernel.op.kind == "transpose":
            return 1.4
        if kernel.op.kind == RELAYOUT:
            return self._relayout(kernel)
        kinds = {op.kind for op in kernel.ops}
        if sum(op.kind == "pad" for op in kernel.ops) > 1:
            # A TPU's compiler pads in another kernel.
            return 1.8 if self.machine.gpu is not None else 2.2
        if self.machine.gpu is not None and (rows := self._by_rows(kernel)) is not None:
            return rows
        return 1.1 if "reduce" in kinds else 1.0

    def _least(self, kernel: Kernel) -> float:
        """Returns how long the slowest block takes of a kernel that sums over columns.

        Long columns are summed in two steps.
        """
        longest = 0
        for op in kernel.ops:
            if op.kind == "reduce" and not self._is_last(op):
                given = self.shapes[op.operands[0]]
                rank, dims = len(given.dims), dims_of(op, "dimensions")
                if rank - 1 in dims:
                    continue
                rows = math.prod(given.dims[d] for d in dims)
                longest = max(
                    longest, rows if rows <= _COLUMN else rows >> ((rows.bit_length() - 1) // 2)
                )
        writes = any(2 * self.shapes[v].size > kernel.size for v in kernel.writes)
        return longest * 32 / (_WAITING if writes else _PASSING)

    def _by_rows(self, kernel: Kernel) -> float | None:
        """Returns how much slower than a copy a kernel streams that sums rows which it holds.

        In Triton each block holds as many rows as fill its registers. The gradient of a softmax with
        grouped heads is written in an order of its own; it is worst where a block's rows do not lie
        together, as the group is no power of two.
        """
        sums = [op for op in kernel.ops if op.kind == "reduce"]
        last = [op for op in sums if self._is_last(op)]
        if not last or not kernel.size:
            return None
        whole = [v for v in kernel.writes if 2 * self.shapes[v].size > kernel.size]
        if not whole:
            stages = len(last) > 1 and any(op.kind == "exponential" for op in kernel.ops)
            return _STATISTICS if stages else None
        written = self.shapes[whole[0]]
        if written.dtype != "f32" or len(written.dims) != 5 or written.dims[-2] == 1:
            return _ROWS
        *batch, _, group, row = written.dims
        held = _HELD >> (row - 1).bit_length()
        if group & (group - 1) == 0:
            return _TOGETHER if group >= held else _APART
        return _SCATTERED if math.prod(batch) >= held else _FEW

    def _is_last(self, op: Op) -> bool:
        rank = len(self.shapes[op.operands[0]].dims)
        return dims_of(op, "dimensions") == [rank - 1]

    def _relayout(self, kernel: Kernel) -> float:
        """Returns how much slower than a fusion a TPU copies images into the lanes, or back."""
        (source,), (made,) = kernel.op.operands, kernel.op.results
        if len(self.shapes[made].dims) < len(self.shapes[source].dims):
            return _INTO_LANES
        wide = self.shapes[made].nbytes > 2 * self.shapes[made].size
        return _WIDE_OUT_OF_LANES if wide else _OUT_OF_LANES

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
        if is_added_up(op, self.shapes):
            # Of a vector, or of a few columns: computed as a sum of products, without the units for matrices.
            return dataclasses.replace(
                self.pricer.streamed(Access(moved, 0, flops), 1.1), flops=flops
            )
        moved = sum(s.nbytes for s in shapes)
        moved = outside(kernel, Access(moved, out.nbytes), self.near).total
        if self.machine.gpu is not None and all(s.nbytes == 2 * s.size for s in shapes):
            shapes, numbers = _aligned(shapes, out.size, numbers)
        price = self.pricer.dot(shapes, numbers, flops, moved)
        if kernel.windowed:
            # Each part reads and writes the whole sum, or its own piece of the result.
            moved = 2 * out.nbytes * (kernel.windowed if kernel.summed else 1)
            moved = int(moved * (LEFT if op.results[0] in self.near else 1.0))
            more = self.pricer.streamed(Access(moved, 0, 0), 1.0).seconds
            more = 0.8 * more + (_PART * kernel.windowed if kernel.windowed > 4 else 0.0)
            price = dataclasses.replace(price, seconds=price.seconds + more)
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
        if kernel.windowed:
            near = self.machine.chips.chip.name in VECTOR
            return convolution_in_parts(kernel, self.shapes, self.pricer, flops, near=near)
        grouped = convolution_of_groups(kernel, self.shapes, self.pricer, flops, moved)
        if grouped is not None:
            return grouped
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


def _aligned(
    shapes: list[Shape], made: int, numbers: list[list[int]]
) -> tuple[list[Shape], list[list[int]]]:
    """Returns a product as a GPU's compiler pads it, so that rows begin at 16 bytes."""
    left, right = shapes
    summed = math.prod(left.dims[d] for d in numbers[0])
    batch = math.prod(left.dims[d] for d in numbers[2])
    rows, columns = (shape.size // max(1, summed * batch) for shape in shapes)
    if not (summed % 8 or rows % 8 or columns % 8) or made != batch * rows * columns:
        return shapes, numbers
    summed, rows, columns = (-(-n // 8) * 8 for n in (summed, rows, columns))
    left = dataclasses.replace(left, dims=(batch, rows, summed))
    right = dataclasses.replace(right, dims=(batch, summed, columns))
    return [left, right], [[2], [1], [0]]
