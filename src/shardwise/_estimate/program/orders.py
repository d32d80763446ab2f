"""What the dims of operations are: their order in memory, what products sum, what windows cover."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from ..._hlo import Instruction, Shape
from .partitioning import Op

Order = tuple[int, ...]
_SAME = {"convert", "slice", "dynamic_slice", "pad", "concatenate", "dynamic_update_slice", "copy",
         "optimization_barrier", "sharding_constraint", "bitcast_convert", "all-reduce"}  # fmt: skip


def numbers_of(op: Op, attribute: str = "dot_dimension_numbers") -> list[list[int]]:
    """Returns the contracted dims of both operands of a product, and the batch dims of both."""
    text = op.attributes.get(attribute, "")
    names = ("lhs_contracting", "rhs_contracting", "lhs_batching", "rhs_batching")
    found = [re.search(rf"{name}_dimensions = \[([^\]]*)\]", text) for name in names]
    return [[int(n) for n in re.findall(r"\d+", each[1])] if each else [] for each in found]


def dims_of(op: Op, attribute: str) -> list[int]:
    """Returns the integers of an attribute such as `array<i64: 0, 2>`."""
    text = op.attributes.get(attribute, "")
    return [int(n) for n in re.findall(r"\d+", text.partition(":")[2] or text)]


def written(op: Op, out: Shape) -> Instruction:
    """Returns a convolution as HLO writes it."""
    named = re.search(
        r"\[([^\]]*)\]x\[([^\]]*)\]->\[([^\]]*)\]", op.attributes.get("dimension_numbers", "")
    )
    labels = [group.replace(", ", "") for group in named.groups()] if named else ["", "", ""]

    def sizes(name: str) -> str:
        return "x".join(map(str, dims_of(op, name)))

    stated = op.attributes.get("padding", "dense<0>").partition(" : ")[0]
    ends = re.findall(r"-?\d+", stated)
    ends = ends * 2 * (len(out.dims) - 2) if len(ends) == 1 else ends
    pads = "x".join(f"{a}_{b}" for a, b in zip(ends[::2], ends[1::2], strict=True))
    window = f"stride={sizes('window_strides')} pad={pads}"
    window += f" lhs_dilate={sizes('lhs_dilation')} rhs_dilate={sizes('rhs_dilation')}"
    groups = [
        int((re.findall(r"\d+", op.attributes.get(f"{name}_group_count", "1")) or ["1"])[0])
        for name in ("feature", "batch")
    ]
    rest = f", window={{{window}}}, dim_labels={labels[0]}_{labels[1]}->{labels[2]}"
    rest += f", feature_group_count={max(groups)}"
    return Instruction("", "convolution", (out,), (), "", rest)


def forward_of(
    made: Instruction, left: Shape, right: Shape
) -> tuple[Instruction, list[Shape], str]:
    """Returns a convolution as cuDNN names it: its forward pass, and which array it makes of that.

    Gradients towards the input have a dilated input, or a filter whose features come first;
    those towards the filter have a window as large as the images.
    """
    labels = made.attribute("dim_labels")
    lhs, rhs, out = re.split("_|->", labels)
    window, result = made.attribute("window"), made.shapes[0]
    spatial = [c for c in out if c.isdigit()]
    covers = math.prod(right.dims[rhs.index(c)] for c in spatial)
    stays = math.prod(result.dims[out.index(c)] for c in spatial)
    dilated = {
        name: re.search(rf"{name}=([\dx]+)", window) for name in ("lhs_dilate", "rhs_dilate")
    }
    steps = {name: found[1] if found else "1" for name, found in dilated.items()}
    if covers > stays and lhs.index("f") < lhs.index("b"):
        turned = str.maketrans("bf", "fb")
        text = f"{lhs.translate(turned)}_{out.translate(str.maketrans('bf', 'io'))}"
        text += f"->{rhs.translate(str.maketrans('io', 'bf'))}"
        operands, towards, step = [left, right], "BackwardFilter", steps["rhs_dilate"]
    elif math.prod(int(n) for n in steps["lhs_dilate"].split("x")) > 1 or "oi" in rhs:
        text = f"{out}_{rhs.translate(str.maketrans('io', 'oi'))}->{lhs}"
        operands, towards, step = [left, right], "BackwardInput", steps["lhs_dilate"]
    else:
        return made, [left, right], "convForward"
    rest = made.rest.replace(labels, text)
    rest = re.sub(r"window=\{[^}]*\}", f"window={{stride={step}}}", rest)
    return Instruction("", "convolution", (result,), (), "", rest), operands, towards


class Orders:
    """For each value, its dims from the slowest to the fastest in memory."""

    def __init__(self, shapes: Mapping[int, Shape], ops: Sequence[Op], gpu: bool):
        """Follows the operations: products write in order, everything else keeps what it reads."""
        self.shapes, self.gpu = shapes, gpu
        self.found: dict[int, Order] = {}
        for op in ops:
            for value in op.results:
                order = self._made(op, value)
                if order is not None and list(order) != sorted(order):
                    self.found[value] = order

    def of(self, value: int) -> Order:
        """Returns the order of a value's dims."""
        return self.found.get(value) or tuple(range(len(self.shapes[value].dims)))

    def _made(self, op: Op, value: int) -> Order | None:
        if op.kind == "transpose":
            before, permutation = self.of(op.operands[0]), dims_of(op, "permutation")
            return tuple(permutation.index(dim) for dim in before)
        if op.kind == "reshape":
            return self._reshaped(op.operands[0], value)
        if op.kind == "reduce":
            gone = dims_of(op, "dimensions")
            kept = [d for d in self.of(op.operands[0]) if d not in gone]
            return tuple(sorted(kept).index(d) for d in kept)
        if op.kind == "all-gather" and self.gpu:
            rank = range(len(self.shapes[value].dims))
            split = op.dims
            # Shards arrive one after the other: the gathered dim becomes the slowest.
            return (*split, *(d for d in rank if d not in split)) if len(split) == 1 else None
        rank = len(self.shapes[value].dims)
        alike = [v for v in op.operands if len(self.shapes[v].dims) == rank]
        same = alike and all(self.shapes[v].dims == self.shapes[value].dims for v in alike)
        if alike and (same or op.kind in _SAME):
            return next((self.found[v] for v in alike if v in self.found), None)
        return None

    def _reshaped(self, source: int, value: int) -> Order | None:
        if source not in self.found:
            return None
        before, after = self.shapes[source].dims, self.shapes[value].dims
        order, made, i, j = self.of(source), {}, 0, 0
        # Dims that become others as a block: each block must lie together.
        while i < len(before):
            left, right = [i], [j] if j < len(after) else []
            i, j = i + 1, j + 1
            while math.prod(before[d] for d in left) != math.prod(after[d] for d in right):
                if math.prod(before[d] for d in left) < math.prod(after[d] for d in right):
                    left.append(i)
                    i += 1
                else:
                    right.append(j)
                    j += 1
                if i > len(before) or j > len(after):
                    return None
            places = [order.index(d) for d in left]
            if places != list(range(places[0], places[0] + len(places))):
                return None
            made[places[0]] = right
        found = [d for place in sorted(made) for d in made[place]]
        found += [d for d in range(len(after)) if d not in found]
        return tuple(found)

    def suits(self, value: int, batch: Sequence[int], contracted: Sequence[int]) -> bool:
        """Returns whether a product can read a value as it lies in memory."""
        dims = self.shapes[value].dims
        order = [d for d in self.of(value) if dims[d] > 1]
        first = [d for d in batch if dims[d] > 1]
        summed = [d for d in contracted if dims[d] > 1]
        free = [d for d in range(len(dims)) if dims[d] > 1 and d not in (*first, *summed)]
        rest = order[len(first) :]
        return order[: len(first)] == first and rest in (free + summed, summed + free)
