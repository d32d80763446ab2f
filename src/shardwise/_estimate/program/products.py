"""Which dim of a product each mesh axis splits, as XLA's partitioner chooses it.

Shardings are propagated by the same code in the compilers as here. But where those of a product's
operands and result do not agree, Shardy reshards what is cheapest, while XLA's own partitioner
matches dims in a fixed order, whatever it costs: a dim of one operand and the result first, then a
dim that both operands sum over. So it gathers weights that are larger than what they are multiplied
with, and gathers activations where features are split over the axis that splits the batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_AXIS = re.compile(r'"[^"]+"(?::\(\d+\)\d+)?')
_SHARDING = re.compile(r"<(@\w+), \[([^\[\]]*)\]")
PRODUCTS = ("stablehlo.dot_general", "stablehlo.convolution")
_LISTS = ("lhs_batching", "rhs_batching", "lhs_contracting", "rhs_contracting")

# For each dim, its axes as MLIR writes them.
Split = list[list[str]]


def match_products(module: Any, mesh: Mapping[str, int], ir: Any) -> None:
    """Adds reshards to a propagated module where XLA's partitioner reshards for a product.

    Args:
        module: the module, after propagation.
        mesh: the sizes of the mesh's axes by name.
        ir: MLIR's bindings.
    """
    (main,) = (op for op in module.body.operations if op.operation.name == "func.func")
    for op in [op for op in inside(main.operation) if op.name in PRODUCTS]:
        _match(op, mesh, ir)


def inside(operation: Any) -> Iterator[Any]:
    """Yields the operations inside of another that are resharded."""
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                # In the body of a `shard_map` nothing is resharded.
                if op.operation.name != "sdy.manual_computation":
                    yield op.operation
                    yield from inside(op.operation)


def _match(op: Any, sizes: Mapping[str, int], ir: Any) -> None:
    splits = [split_of(value, ir) for value in (*op.operands, *op.results)]
    texts = [text_of(value, ir) for value in (*op.results, *op.operands)]
    mesh = next((text[1] for text in texts if text is not None), None)
    left, right, made = splits
    if mesh is None or left is None or right is None or made is None:
        return
    before = [left, right, made]
    groups = _groups(op)
    factors = (
        _factors(op, [len(split) for split in before])
        if op.name == PRODUCTS[0]
        else _convolved(op, groups)
    )
    names = dict.fromkeys(axis for split in before for dim in split for axis in dim)
    if len({name.partition(":")[0] for name in names}) < len(names):
        return  # parts of one axis split several dims
    if any(
        dim and not _holds(place, d, factors)
        for place, split in enumerate(before)
        for d, dim in enumerate(split)
    ):
        return  # a dim of images is split
    whole = _whole(before, factors, sizes) if groups > 1 else None
    after: list[Split] = [[[] for _ in split] for split in before]
    for axis in names:
        held = [_factor_with(axis, split, place, factors) for place, split in enumerate(before)]
        chosen = _chosen(held) if whole is None or axis not in whole[1] else whole[0]
        for place, split in enumerate(after):
            # What is not decided here is left to Shardy.
            own = held[place] if chosen is None else chosen
            dim = None if own is None else factors[own].get(place)
            if dim is not None:
                split[dim].append(axis)
    for old, new in zip(before, after, strict=True):
        # The order of axes that split one dim is not for a product to change.
        new[:] = [a if set(a) == set(b) else b for a, b in zip(old, new, strict=True)]
    if after == before:
        return
    for place in (0, 1):
        if after[place] != before[place]:
            op.operands[place] = resharded(op.operands[place], mesh, after[place], op, ir)
    if after[2] != before[2]:
        text = f"#sdy.sharding_per_value<[{_written(mesh, after[2])}]>"
        op.attributes["sdy.sharding"] = ir.Attribute.parse(text, op.context)
        users = [(use.owner, use.operand_number) for use in op.results[0].uses]
        made_again = resharded(op.results[0], mesh, before[2], op, ir, after=True)
        for user, number in users:
            user.operands[number] = made_again


def _factors(op: Any, ranks: Sequence[int]) -> list[dict[int, int]]:
    """Returns the dims of a product: for each, where it is in both operands and in the result."""
    text = str(op.attributes["dot_dimension_numbers"])
    found = [re.search(rf"{name}_dimensions = \[([^\]]*)\]", text) for name in _LISTS]
    lists = [[int(n) for n in re.findall(r"\d+", m[1])] if m else [] for m in found]
    batch = list(zip(*lists[:2], strict=True))
    factors = [{0: a, 1: b, 2: place} for place, (a, b) in enumerate(batch)]
    factors += [{0: a, 1: b} for a, b in zip(*lists[2:], strict=True)]
    out = len(batch)
    for place in (0, 1):
        used = {*lists[place], *lists[place + 2]}
        for dim in range(ranks[place]):
            if dim not in used:
                factors.append({place: dim, 2: out})
                out += 1
    return factors


def _groups(op: Any) -> int:
    """Returns in how many groups the features of a convolution are; one for a product."""
    names = ("feature_group_count", "batch_group_count")
    found = [re.search(r"\d+", str(op.attributes[n])) for n in names if n in op.attributes]
    return max([1, *(int(m[0]) for m in found if m)])


def _convolved(op: Any, groups: int) -> list[dict[int, int]]:
    """Returns the dims of a convolution that are no dims of images: those of groups come first."""
    text = re.search(r"\[(.*?)\]x\[(.*?)\]->\[(.*?)\]", str(op.attributes["dimension_numbers"]))
    assert text is not None
    left, right, out = (labels.split(", ") for labels in text.groups())
    b, f, i, o = left.index("b"), left.index("f"), right.index("i"), right.index("o")
    if groups == 1:
        return [{0: b, 2: out.index("b")}, {1: o, 2: out.index("f")}, {0: f, 1: i}]
    if "1 :" in str(op.attributes["batch_group_count"]):
        return [{0: f, 1: o, 2: out.index("f")}, {0: b, 2: out.index("b")}]
    return [{0: b, 1: o, 2: out.index("f")}, {0: f, 1: i}]


def _whole(
    before: Sequence[Split], factors: Sequence[Mapping[int, int]], sizes: Mapping[str, int]
) -> tuple[int, list[str]] | None:
    """Returns the groups of a convolution, and the axes that split them over all devices.

    Then all devices compute their groups of features, whatever splits the images.
    """
    for place in (0, 1):
        axes = before[place][factors[0][place]]
        ways = math.prod(sizes.get(axis.strip('"'), 1) for axis in axes)
        if ways > 1 and ways == math.prod(sizes.values()):
            return 0, axes
    return None


def _holds(place: int, dim: int, factors: Sequence[Mapping[int, int]]) -> bool:
    return any(factor.get(place) == dim for factor in factors)


def _factor_with(
    axis: str, split: Split, place: int, factors: Sequence[Mapping[int, int]]
) -> int | None:
    for number, factor in enumerate(factors):
        if place in factor and axis in split[factor[place]]:
            return number
    return None


def _chosen(held: Sequence[int | None]) -> int | None:
    """Returns the dim that an axis splits, of those that it splits in both operands and the result."""
    left, right, made = held
    if made is not None and made in (left, right):
        return made
    if left is not None and left == right:
        return left
    return made


def _written(mesh: str, split: Split) -> str:
    return f"<{mesh}, [{', '.join('{' + ', '.join(dim) + '}' for dim in split)}]>"


def resharded(value: Any, mesh: str, split: Split, op: Any, ir: Any, *, after: bool = False) -> Any:
    """Returns a value as it is split otherwise, before an operation or after it."""
    made = ir.Operation.create(
        "sdy.reshard",
        results=[value.type],
        operands=[value],
        attributes={
            "sharding": ir.Attribute.parse(f"#sdy.sharding{_written(mesh, split)}", op.context)
        },
        loc=op.location,
        ip=ir.InsertionPoint(op),
    )
    if after:
        made.operation.move_after(op)
    return made.results[0]


def text_of(value: Any, ir: Any) -> Any:
    """Returns how a value is split, as MLIR writes it; nothing if that is not stated."""
    if isinstance(value.owner, ir.Block):
        owner, number = value.owner.owner.operation, ir.BlockArgument(value).arg_number
        if owner.name == "func.func":
            if "arg_attrs" not in owner.attributes:
                return None
            return _SHARDING.search(str(ir.ArrayAttr(owner.attributes["arg_attrs"])[number]))
    else:
        owner = value.owner
        number = next(n for n, result in enumerate(owner.results) if result == value)
    for name in ("sdy.sharding", "sharding", "out_sharding"):
        if name in owner.attributes:
            found = list(_SHARDING.finditer(str(owner.attributes[name])))
            return found[number] if number < len(found) else None
    return None


def split_of(value: Any, ir: Any) -> Split | None:
    """Returns how the dims of a value are split; nothing if that is not known."""
    rank = len(ir.RankedTensorType(value.type).shape)
    found = text_of(value, ir)
    if found is None:
        return [[] for _ in range(rank)]
    split = [_AXIS.findall(dim) for dim in re.findall(r"\{([^}]*)\}", found[2])]
    return split if len(split) == rank else None
