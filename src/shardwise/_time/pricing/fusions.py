"""How much slower than a copy a fusion streams on a GPU, by what it does to its arrays."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ..._hlo import Instruction, Shape


def penalty_of(fusion: Instruction, inside: Sequence[Instruction]) -> float:
    """Returns how much slower than a copy a fusion streams.

    Args:
        fusion: the fusion.
        inside: what it computes.
    """
    if not inside:
        return 1.0
    triton = "triton" in fusion.rest
    found, root = {i.opcode for i in inside}, inside[-1]
    largest = max(root.shapes, key=lambda s: s.size, default=None)
    written = largest.size if largest else 0
    narrow = largest is not None and largest.nbytes <= 2 * largest.size
    penalty = _padded(inside, found, written, narrow=narrow)
    if "transpose" in found:
        penalty = _transposed(fusion, inside, penalty, triton=triton, narrow=narrow)
    if "reduce" in found and triton:
        penalty = max(penalty, _by_rows(fusion, inside, narrow=narrow))
    elif "reduce" in found:
        columns = any(over_columns(i, inside) for i in inside if i.opcode == "reduce")
        if columns:
            penalty = max(penalty, 1.25 if narrow else 1.05, _of_images(inside, found))
        else:
            penalty = max(penalty, _short_rows(inside))
    if "slice" in found and not narrow and penalty == 1.0 and largest and _odd(largest):
        penalty = 1.9  # rows that begin anywhere, cut from longer ones
    fills = found <= {"broadcast", "constant", "bitcast", "copy"}
    # Filling with elements of 2 bytes or less is not vectorised.
    return 2.4 if fills and narrow else penalty


def _padded(inside: Sequence[Instruction], found: set[str], written: int, *, narrow: bool) -> float:
    """Returns how much slower than a copy a fusion streams because it pads."""
    pads = [i for i in inside if i.opcode == "pad" and 4 * i.shapes[0].size >= written]
    if len(pads) > 1:
        # All sides are computed for each element, and loads of 2 bytes are not vectorised.
        short = min(i.shapes[0].dims[-1] for i in pads if i.shapes[0].dims) < 512
        if short and "slice" in found:
            return 1.9 if narrow else 1.3 if "transpose" in found else 1.7
        return 2.3 if narrow else 1.2 if "transpose" in found else 1.7
    if pads and narrow and len(pads[0].shapes[0].dims) > 3:
        # Images: which elements are padding is worked out for each, most of all between pixels.
        return 2.0 if _between(pads[0]) else 1.5
    if pads and narrow and not pads[0].attribute("padding").endswith("0_0"):
        # Rows made longer, as of an odd number of words: read one element at a time.
        return 2.1 if "exponential" in found else 1.35
    return 1.0


def _transposed(
    fusion: Instruction,
    inside: Sequence[Instruction],
    penalty: float,
    *,
    triton: bool,
    narrow: bool,
) -> float:
    """Returns how much slower than a copy a fusion streams that transposes."""
    transposes = [i for i in inside if i.opcode == "transpose"]
    ways = [i.attribute("dimensions") for i in transposes]
    largest = max(inside[-1].shapes, key=lambda s: s.size, default=None)
    dims = largest.dims if largest is not None else ()
    if _nested(inside):
        # Only the outermost goes through shared memory: those below it read single elements.
        if triton:
            factor = 1.15
        elif narrow:
            # Tiles of 32 places that depths such as 80 do not fill.
            depth = dims[-1] if dims else 0
            factor = 5.4 if depth > 64 and depth % 32 and _swaps(ways[-1]) else 2.7
        else:
            # Filters whose gradients are narrow: three arrays, and each written anew.
            loads = [s for i in inside if i.opcode == "parameter" for s in i.shapes]
            cast = any(s.nbytes <= 2 * s.size and s.size > 4096 for s in loads)
            filters = len(inside[-1].shapes) > 2 and cast
            far = filters or len(dims) > 4 or any(i.opcode == "pad" for i in inside)
            factor = 2.6 if _swaps(ways[-1]) else 5.7 if far else 3.3
    elif triton:
        # Rows of an odd length begin anywhere.
        factor = 1.5 if narrow and dims and dims[-1] % 8 else 1.0
    elif len(set(ways)) == 1:
        factor = 1.05 if len(ways) == 1 else 1.15
        if len(ways) == 1 and len(dims) > 3 and _turned(ways):
            factor = 2.2 if narrow else 1.45
            if "kind=kLoop" in fusion.rest:
                factor = max(factor, _few_last(inside))
        if narrow and "pad" in {i.opcode for i in inside} and penalty > 2:
            factor = 2.8  # both halves of a gated layer's gradient, then transposed
        if narrow and any(n % 2 for s in inside[-1].shapes for n in s.dims[-1:]):
            factor *= 1.35
    else:
        factor = 1.7
    return max(penalty * 1.1, factor) if penalty > 1.0 else factor


def _few_last(inside: Sequence[Instruction]) -> float:
    """Returns how much slower than a copy a fusion streams that puts a dim of a few last.

    Dims shorter than 16 do not go through shared memory: each element is read from a place of its
    own, and as many bytes come with it as a place of the cache has.
    """
    moved = [s for i in inside if i.opcode == "parameter" for s in i.shapes] + [*inside[-1].shapes]
    found = [i.shapes[0] for i in inside if i.opcode == "transpose"]
    apart = sum(28 * s.size for s in found if s.dims[-1] < 16)
    total = sum(s.nbytes for s in moved)
    return 1.0 + max(0.0, apart - sum(s.nbytes for s in found)) / max(1, total)


def _swaps(way: str) -> bool:
    """Returns whether a transpose exchanges the last two dims alone, or brings the first to the end."""
    found = [int(n) for n in re.findall(r"\d+", way)]
    count = len(found)
    return found == [*range(count - 2), count - 1, count - 2] or found[-1] == 0


def _by_rows(fusion: Instruction, inside: Sequence[Instruction], *, narrow: bool) -> float:
    """Returns how much slower than a copy sums along rows stream in Triton.

    Each block holds whole rows in its registers. With 64 elements to a thread they no longer fit,
    most of all in the gradient of a softmax, and worst where a block's rows do not lie together.
    """
    largest = max((s for i in inside for s in i.shapes), key=lambda s: s.size)
    tile = re.search(r'"sizes":\[([^\]]*)\]', fusion.rest)
    warps = re.search(r'"num_warps":"?(\d+)', fusion.rest)
    whole = 2 * max(s.size for s in inside[-1].shapes) > largest.size
    if tile is None or warps is None:
        return 1.3 if not narrow else 1.03
    sizes = [1 << (int(n) - 1).bit_length() for n in re.findall(r"\d+", tile[1])]
    held = math.prod(sizes)
    if not whole:
        sums = next(i for i in inside if i.opcode == "reduce")
        given = next((i for i in inside if i.name == sums.operands[0] and i.shapes), None)
        dims = [int(n) for n in re.findall(r"\d+", sums.attribute("dimensions"))]
        if given is not None:
            held *= math.prod(1 << (given.shapes[0].dims[d] - 1).bit_length() for d in dims)
    full = held >= 64 * 32 * int(warps[1])
    rows = sizes[:-1] if whole else sizes
    together = math.prod(rows[:-1]) == 1
    if not whole:
        return 1.03 if narrow else 1.28 if not full else 1.15 if together else 1.5
    found = {i.opcode for i in inside}
    products = [i for i in inside if i.opcode == "multiply" and 2 * i.shapes[0].size > largest.size]
    if narrow:
        return 1.25 if full else 1.0
    if len(products) > 3 and "divide" in found:
        if together:
            return 1.08
        if full:
            return 3.0 if rows[-1] == 1 else 1.65
        return 1.85 if math.prod(rows) >= 8 and rows[-1] == 1 and rows[0] >= 8 else 1.25
    if not full:
        return 1.05
    return 1.6 if "transpose" in found and sizes[-1] < 64 else 1.4


def _short_rows(inside: Sequence[Instruction]) -> float:
    """Returns how much slower than a copy sums along rows stream outside Triton."""
    worst = 1.03
    for i in inside:
        given = next((g for g in inside if i.operands and g.name == i.operands[0]), None)
        if i.opcode != "reduce" or given is None or not given.shapes:
            continue
        shape = given.shapes[0]
        loads = [g for g in inside if g.opcode == "parameter" and 2 * g.shapes[0].size > shape.size]
        if all(not g.shapes[0].dims or g.shapes[0].dims[-1] % 8 == 0 for g in loads) and not any(
            g.opcode == "slice" and g.shapes[0].dims[-1] % 8 for g in inside
        ):
            continue
        small = any(g.shapes[0].nbytes <= 2 * g.shapes[0].size for g in loads)
        short = shape.dims[-1] < 64
        worst = max(worst, (4.3 if small else 2.1) if short else 1.75 if small else 1.2)
    return worst


def _odd(shape: Shape) -> bool:
    """Returns whether rows are so many bytes that few of them begin at a multiple of 16."""
    size = shape.nbytes // max(1, shape.size)
    return bool(shape.dims) and shape.dims[-1] > 512 and shape.dims[-1] * size % 16 != 0


def image_of(inside: Sequence[Instruction]) -> Shape | None:
    """Returns the largest array of images that a fusion reads, if its loads are not vectorised.

    They are if the channels are a power of two or a multiple of 128.
    """
    given = [s for i in inside if i.opcode == "parameter" for s in i.shapes if len(s.dims) > 3]
    image = max(given, key=lambda s: s.size, default=None)
    if image is None:
        return None
    channels = image.dims[minor_of(image)]
    return image if channels & (channels - 1) and channels % 128 else None


def _of_images(inside: Sequence[Instruction], found: set[str]) -> float:
    """Returns how much slower than a copy sums over the pixels of images stream, if anything."""
    image = image_of(inside)
    if image is None:
        return 1.0
    narrow = image.nbytes <= 2 * image.size
    if "reduce-window" in found:
        return 4.4 if narrow else 1.8
    if "slice" in found:
        return 2.3 if narrow else 1.2
    if narrow and any(len(s.dims) > 4 and s.dims[-1] % 4 for i in inside for s in i.shapes):
        # Groups of channels end inside of what a thread reads: each element's is worked out alone.
        return 4.9 if any(2 * s.size > image.size for s in inside[-1].shapes) else 3.1
    if narrow:
        return 2.9 if found & {"exponential", "logistic"} else 1.9
    return 1.15 if sum(i.opcode == "reduce" for i in inside) == 1 else 1.4


def _turned(ways: Sequence[str]) -> bool:
    """Returns whether images and channels change places."""
    return any(dims.endswith(",0}") for dims in ways)


def _between(pad: Instruction) -> bool:
    """Returns whether elements are padded apart, as by strides."""
    return bool(re.search(r"\d+_\d+_[1-9]", pad.attribute("padding")))


def least_seconds(inside: Sequence[Instruction], cores: int) -> float:
    """Returns how long the slowest block takes of a fusion that runs outside Triton.

    A block sums 32 columns. Where it writes what it reads as well, it waits for each row.
    """
    longest = 0.0
    root = inside[-1] if inside else None
    for i in inside:
        given = next((g for g in inside if i.operands and g.name == i.operands[0]), None)
        if i.opcode != "reduce" or given is None or not over_columns(i, inside):
            continue
        result, shape = i.shapes[0], given.shapes[0]
        rows = shape.size // max(1, result.size)
        writes = root is not None and any(2 * s.size > shape.size for s in root.shapes)
        waves = -(-result.size // (32 * 8 * cores))
        longest = max(longest, waves * rows * 32 / (2.5e9 if writes else 24e9))
    return longest


def turned_of(fusion: Instruction, inside: Sequence[Instruction]) -> int:
    """Returns how many arrays a fusion writes transposed that it computes from transposed ones.

    Updates of filters do so.
    """
    if "kind=kInput" not in fusion.rest or len(inside[-1].shapes) < 2 or not _nested(inside):
        return 0
    return len(inside[-1].shapes)


def waits_of(inside: Sequence[Instruction]) -> int:
    """Returns how many sums over columns wait, up to two: their blocks start one after the other."""
    sums = [i for i in inside if i.opcode == "reduce" and over_columns(i, inside)]
    return 0 if image_of(inside) is not None else min(2, len(sums))


def over_columns(reduce: Instruction, inside: Sequence[Instruction]) -> bool:
    """Returns whether a reduction leaves the contiguous dim."""
    given = next((i for i in inside if i.name == reduce.operands[0] and i.shapes), None)
    dims = {int(n) for n in re.findall(r"\d+", reduce.attribute("dimensions"))}
    return given is not None and minor_of(given.shapes[0]) not in dims


def _nested(inside: Sequence[Instruction]) -> bool:
    """Returns whether a transpose is transposed again."""
    below: set[str] = set()
    for i in inside:
        touched = any(name in below for name in i.operands)
        if i.opcode == "transpose" and touched:
            return True
        if touched or i.opcode == "transpose":
            below.add(i.name)
    return False


def minor_of(shape: Shape) -> int:
    """Returns the dim whose elements are contiguous."""
    found = re.match(r"\{(\d+)", shape.layout)
    return int(found[1]) if found else len(shape.dims) - 1
