"""Grouped convolutions whose filters are split: where the partitioner of both compilers computes them.

Shardy would gather the filters of a depthwise convolution for activations that are split over the
batch. XLA's partitioner aligns activations with filters instead: all-to-alls turn the split of the
batch into one of the channels, and back, and gradients of filters need no sum.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ..._hlo import Shape
from .partitioning import Op, Program

_LABELS = re.compile(r"\[([^\]]*)\]x\[([^\]]*)\]->\[([^\]]*)\]")


def grouped(program: Program) -> Program:
    """Returns the program with grouped convolutions of the channels that a device's filters are for."""
    shapes = dict(program.shapes)
    return dataclasses.replace(program, ops=_Grouped(shapes).aligned(program.ops), shapes=shapes)


class _Grouped:
    """Rewrites the convolutions of a list of operations."""

    def __init__(self, shapes: dict[int, Shape]):
        """Takes the shapes of all values, to which it adds those of its own."""
        self.shapes = shapes

    def aligned(self, ops: Sequence[Op]) -> list[Op]:
        """Returns the operations with all-to-alls around convolutions whose filters are split."""
        maker = {value: op for op in ops for value in op.results}
        users: dict[int, list[Op]] = defaultdict(list)
        for op in ops:
            for value in op.operands:
                users[value].append(op)
        found: list[Op] = []
        turned: dict[Any, int] = {}
        replaced: set[int] = set()

        def turn(value: int, op: Op, axes: Any, whole: int, split: int) -> int:
            """Returns an operand whose dim `whole` is gathered as `split` is split."""
            key = value, axes, whole, split
            if key not in turned:
                ways = _ways(axes)
                turned[key] = self._like(value, {whole: ways, split: 1 / ways})
                found.append(
                    Op("all-to-all", (value,), (turned[key],), axes=axes, location=op.location)
                )
            return turned[key]

        for op in ops:
            if op.kind == "while":
                found.append(dataclasses.replace(op, body=self.aligned(op.body)))
                continue
            if id(op) in replaced:
                continue
            labels = _LABELS.search(op.attributes.get("dimension_numbers", ""))
            if op.kind != "convolution" or labels is None:
                found.append(op)
                continue
            left, right, out = (text.split(", ") for text in labels.groups())
            gather, sums = maker.get(op.operands[1]), users[op.results[0]]
            if _count(op, "feature") > 1 and gather is not None and gather.kind == "all-gather":
                axes = gather.axes
                if gather.dims == (right.index("o"),) and not _count(op, "feature") % _ways(axes):
                    b, f = out.index("b"), out.index("f")
                    mine = turn(op.operands[0], op, axes, left.index("b"), left.index("f"))
                    made = self._like(op.results[0], {b: _ways(axes), f: 1 / _ways(axes)})
                    operands = (mine, gather.operands[0])
                    found.append(_computed(op, "feature", axes, operands, (made,)))
                    found.append(
                        Op("all-to-all", (made,), op.results, axes=axes, location=op.location)
                    )
                    continue
            if _count(op, "batch") > 1 and len(sums) == 1 and sums[0].kind == "all-reduce":
                axes, slices = sums[0].axes, users[sums[0].results[0]]
                split = [op for op in slices if op.kind == "all_slice" and op.axes == axes]
                if slices and split == slices and not _count(op, "batch") % _ways(axes):
                    x = turn(op.operands[0], op, axes, left.index("f"), left.index("b"))
                    y = turn(op.operands[1], op, axes, right.index("i"), right.index("o"))
                    found.append(_computed(op, "batch", axes, (x, y), slices[0].results))
                    replaced |= {id(sums[0]), id(slices[0])}
                    continue
            found.append(op)
        return found

    def _like(self, value: int, times: dict[int, float]) -> int:
        """Returns a new value with the shape of another, of which some dims are longer or shorter."""
        shape, made = self.shapes[value], len(self.shapes)
        dims = tuple(int(n * times.get(d, 1)) for d, n in enumerate(shape.dims))
        self.shapes[made] = dataclasses.replace(shape, dims=dims)
        return made


def _computed(
    op: Op, kind: str, axes: Any, operands: tuple[int, ...], results: tuple[int, ...]
) -> Op:
    count = f"{_count(op, kind) // _ways(axes)} : i64"
    attributes = {**op.attributes, f"{kind}_group_count": count}
    return dataclasses.replace(op, operands=operands, results=results, attributes=attributes)


def _count(op: Op, kind: str) -> int:
    return int((re.findall(r"\d+", op.attributes.get(f"{kind}_group_count", "1")) or ["1"])[0])


def _ways(axes: Sequence[tuple[str, int]]) -> int:
    ways = 1
    for _, size in axes:
        ways *= size
    return ways
