"""Sums of which each device keeps a part: what the compilers scatter, and what they reduce as a whole."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from ..._hlo import Shape
from ..program import Op
from .tpu import RINGS, is_in_parts, is_rarely_used, splits_features

# Other names for the same memory.
ALIASES = {
    "reshape",
    "transpose",
    "bitcast_convert",
    "optimization_barrier",
    "copy",
    "sharding_constraint",
}
# A tile of a TPU's memory; in how many chunks of how many elements it sends the part of a sum.
_LANES, _ROWS = 128, 8
_CHUNK, _CHUNKS = 2**19, 128


def scattered(
    ops: list[Op],
    shapes: dict[int, Shape],
    ring: int,
    is_ring: Callable[[Op], bool] | None = None,
) -> list[Op]:
    """Returns the operations with a reduce-scatter for each all-reduce of which a part is kept.

    A TPU's compiler does so for products, and for convolutions that it computes in parts; for
    others, not if all devices (`ring`) take part.
    """
    filters = {v: op for op in ops if op.kind == "convolution" for v in op.results}

    def of_filter(op: Op, dims: Sequence[int]) -> bool:
        """Returns whether the parts of a filter's gradient travel while they are computed."""
        made, parts = filters.get(op.operands[0]), math.prod(size for _, size in op.axes)
        if made is None or is_ring is None or parts != ring:
            return False
        if not splits_features(made, dims, shapes):
            return False
        return parts in RINGS and is_ring(op) and is_in_parts(made, parts, shapes)

    products = {
        v: op for op in ops if op.kind == "dot_general" and not op.manual for v in op.results
    }

    def of_products(op: Op, parts: int) -> bool:
        """Returns whether products make what is summed, of rows enough to be computed in parts."""
        return all(
            v in products and not is_rarely_used(products[v], shapes[v].size, parts, shapes)
            for v in op.operands
        )

    users: dict[int, list[Op]] = defaultdict(list)
    for op in ops:
        for operand in op.operands:
            users[operand].append(op)
    found, gone = [], set()
    for op in ops:
        if id(op) in gone:
            continue
        if ring and op.kind == "reduce-scatter" and len(op.results) == 1:
            (source,), (part,) = op.operands, op.results
            parts = math.prod(size for _, size in op.axes)
            windowed = (parts in RINGS and of_products(op, parts)) or of_filter(op, op.dims)
            turned = _turned(part, users)
            if not windowed and not in_tiles(shapes[source], shapes[part], parts, turned):
                total = len(shapes)
                shapes[total] = shapes[source]
                found.append(dataclasses.replace(op, kind="all-reduce", results=(total,), dims=()))
                op = dataclasses.replace(op, kind="all_slice", operands=(total,))
        if op.kind == "all-reduce" and len(op.results) == 1:
            value, through, user = op.results[0], [], users[op.results[0]]
            while len(user) == 1 and user[0].kind in ALIASES | {"convert"}:
                through.append(user[0])
                value = user[0].results[0]
                user = users[value]
            sliced = len(user) == 1 and user[0].kind == "all_slice"
            parts = math.prod(size for _, size in op.axes)
            casts = bool(through)
            if ring and parts != ring:
                casts = any(each.kind != "convert" for each in through)
            travels = sliced and of_filter(op, user[0].dims)
            of_product = of_products(op, parts) or travels
            if travels:
                casts = any(each.kind != "convert" for each in through)
            if sliced and ring and not (of_product and parts in RINGS):
                sliced = in_tiles(shapes[op.results[0]], shapes[user[0].results[0]], parts)
            if sliced and not casts and (parts != ring or of_product):
                scattered = user[0].results
                inner = user[0].axes or op.axes
                outer = tuple(axis for axis in op.axes if axis not in inner)
                if set(inner) <= set(op.axes) and outer:
                    # Scattered over some axes, and the parts reduced over the others.
                    part = len(shapes)
                    shapes[part] = dataclasses.replace(
                        shapes[scattered[0]], dtype=shapes[op.results[0]].dtype
                    )
                    ways, turned = math.prod(n for _, n in inner), _turned(scattered[0], users)
                    whole = shapes[op.results[0]]
                    if (
                        ring
                        and ways not in RINGS
                        and not in_tiles(whole, shapes[part], ways, turned)
                    ):
                        total = len(shapes)
                        shapes[total] = whole
                        found.append(dataclasses.replace(op, axes=inner, results=(total,)))
                        found.append(
                            dataclasses.replace(user[0], operands=(total,), results=(part,))
                        )
                    else:
                        found.append(dataclasses.replace(op, kind="reduce-scatter", axes=inner,
                                                         results=(part,), dims=user[0].dims))  # fmt: skip
                    op = dataclasses.replace(op, operands=(part,), axes=outer)
                    found.append(dataclasses.replace(op, results=scattered))
                    gone |= {id(each) for each in (*through, user[0])}
                    continue
                if through:
                    # Scattered first, and cast then.
                    part = len(shapes)
                    shapes[part] = dataclasses.replace(
                        shapes[scattered[0]], dtype=shapes[op.results[0]].dtype
                    )
                    scattered = (part,)
                found.append(
                    dataclasses.replace(
                        op, kind="reduce-scatter", results=scattered, dims=user[0].dims
                    )
                )
                gone |= {id(each) for each in (*through, user[0])}
                if through:
                    found.append(
                        dataclasses.replace(
                            through[-1], operands=scattered, results=user[0].results
                        )
                    )
                continue
        found.append(op)
    return found


def _turned(value: int, users: dict[int, list[Op]]) -> bool:
    """Returns whether nothing but a transpose reads a value, through casts."""
    near = users[value]
    while len(near) == 1 and near[0].kind == "convert":
        near = users[near[0].results[0]]
    return [op.kind for op in near] == ["transpose"]


def in_tiles(whole: Shape, part: Shape, parts: int, turned: bool = False) -> bool:
    """Returns whether a TPU's compiler scatters a sum: if each part is whole tiles, in equal chunks.

    Seen in small programs: the chunks divide the other dim, and two devices send halves of bfloat16.
    """
    rank = len(whole.dims)
    split = [d for d in range(rank) if whole.dims[d] != part.dims[d]]
    if len(split) != 1:
        return not split
    (dim,) = split
    size = part.dims[dim]
    if rank != 2:
        # Two rows of bfloat16 fill one of a tile.
        rows = 2 * _ROWS if whole.dtype == "bf16" else _ROWS
        return size % (_LANES if dim == rank - 1 else rows) == 0
    # The dim that fills the lanes is the last (of what is transposed, the first), unless only the
    # other one does.
    last = 0 if turned else 1
    if whole.dims[last] % _LANES and not whole.dims[1 - last] % _LANES:
        last = 1 - last
    other = part.dims[1 - dim]
    mine, rest = (_LANES, _ROWS) if dim == last else (_ROWS, _LANES)
    halves = parts == 2 and whole.dtype == "bf16"
    if size % mine or other % rest or (halves and size // mine % 2):
        return False
    least = -(-part.size // _CHUNK)
    most = max(_CHUNKS, 4 * least)
    return any(other // rest % chunks == 0 for chunks in range(least, most + 1))
