"""Arrays that XLA's partitioner gathers and slices where one all-to-all would do.

Its rule for products writes the sharding of a product, and of what it multiplies, in an older form,
with one dim more for axes that split nothing. It compares such a sharding with those of other
operations by numbers of dims, and so finds no all-to-all to them: it gathers the whole array then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .products import PRODUCTS, Split, inside, resharded, split_of, text_of

_MADE = "shardwise.made"  # the split of a product's result for those who read it


def mark_products(module: Any, ir: Any) -> None:
    """Notes how the results of products are split, before their reshards are inserted."""
    for op in [op for op in inside(module.operation) if op.name in PRODUCTS]:
        readers = [use.owner for use in op.results[0].uses]
        # A reshard of `match_products` is part of the product.
        reshards = len(readers) == 1 and readers[0].name == "sdy.reshard"
        split = split_of(readers[0].results[0] if reshards else op.results[0], ir)
        if split is not None:
            op.attributes[_MADE] = ir.StringAttr.get(str(split), op.context)


def gather_for_products(module: Any, mesh: Mapping[str, int], ir: Any) -> None:
    """Replaces all-to-alls by gathers and slices where XLA's partitioner finds no all-to-all.

    Args:
        module: the module with explicit reshards that are no collectives yet.
        mesh: the sizes of the mesh's axes by name.
        ir: MLIR's bindings.
    """
    (main,) = (op for op in module.body.operations if op.operation.name == "func.func")
    for block in _blocks(main.operation):
        _in_block(block, mesh, ir)
    for op in inside(module.operation):
        if _MADE in op.attributes:
            del op.attributes[_MADE]


def _blocks(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            yield block
            for op in block.operations:
                if op.operation.name != "sdy.manual_computation":
                    yield from _blocks(op.operation)


def _in_block(block: Any, mesh: Mapping[str, int], ir: Any) -> None:
    ops = [op.operation for op in block.operations]
    found = [op for op in ops if op.name == "sdy.reshard"]
    if not found or not any(op.name in PRODUCTS for op in ops):
        return
    visited = _visited(ops)
    # From when on the sharding of a value is in the older form.
    old: dict[Any, int] = {}
    for op in ops:
        if op.name in PRODUCTS:
            for value in (op.results[0], *map(_source, op.operands)):
                old[value] = min(old.get(value, len(ops)), visited[op])
    first: dict[tuple[Any, str], int] = {}
    wanted = []
    for op in found:
        source = _source(op.operands[0])
        before, after = _before(source, ir), split_of(op.results[0], ir)
        users = [use.owner for use in op.results[0].uses]
        outer = [user for user in users if user.name not in (*PRODUCTS, "sdy.reshard")]
        if not outer or before is None or after is None:
            continue
        when = min(visited.get(user, len(ops)) for user in outer)
        key = source, str(after)
        first[key] = min(first.get(key, len(ops)), when)
        wanted.append((op, source, before, after, key))
    for op, source, before, after, key in wanted:
        # A reshard from before is kept, and used again.
        if first[key] <= old.get(source, len(ops)) or not _unseen(before, after, mesh):
            continue
        text = text_of(op.results[0], ir)
        op.operands[0] = resharded(op.operands[0], text[1], [[] for _ in after], op, ir)


def _visited(ops: list[Any]) -> dict[Any, int]:
    """Returns when the compiler visits each operation: what the result needs, operands in order."""
    order: dict[Any, int] = {}
    here = {op: list(op.operands) + [v for o in inside(op) for v in o.operands] for op in ops}
    for root in (ops[-1], *ops):
        stack = [(root, iter(here[root]))]
        while stack:
            op, rest = stack[-1]
            owners = (value.owner for value in rest)
            following = next((o for o in owners if o in here and o not in order), None)
            if following is not None:
                stack.append((following, iter(here[following])))
                continue
            order.setdefault(op, len(order))
            stack.pop()
    return order


def _source(value: Any) -> Any:
    while getattr(value.owner, "name", "") in ("sdy.reshard", "sdy.all_reduce"):
        value = value.owner.operands[0]
    return value


def _before(value: Any, ir: Any) -> Split | None:
    owner = value.owner
    if _MADE in getattr(owner, "attributes", ()):
        text = ir.StringAttr(owner.attributes[_MADE]).value
        return [re.findall(r"'([^']+)'", dim) for dim in re.findall(r"\[([^\[\]]*)\]", text)]
    return split_of(value, ir)


def _unseen(before: Split, after: Split, mesh: Mapping[str, int]) -> bool:
    """Returns whether an all-to-all is not seen: if axes stay idle, and no dim stays split alike."""

    def ways(dim: list[str]) -> int:
        parts = [re.fullmatch(r'"([^"]+)"(?::\(\d+\)(\d+))?', axis) for axis in dim]
        return math.prod(int(p[2]) if p[2] else mesh.get(p[1], 1) for p in parts if p)

    old, new = [ways(dim) for dim in before], [ways(dim) for dim in after]
    tiles = math.prod(old)
    return (
        1 < tiles < math.prod(mesh.values())
        and old != new
        and sorted(old) == sorted(new)
        and not any(a == b > 1 for a, b in zip(old, new, strict=True))
    )
