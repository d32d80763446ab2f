"""How much slower than a copy a fusion streams on a GPU, by what it does to its arrays."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..._hlo import Instruction, Shape


def penalty_of(inside: Sequence[Instruction], *, triton: bool) -> float:
    """Returns how much slower than a copy a fusion streams."""
    if not inside:
        return 1.0
    found, root = {i.opcode for i in inside}, inside[-1]
    largest = max(root.shapes, key=lambda s: s.size, default=None)
    written = largest.size if largest else 0
    narrow = largest is not None and largest.nbytes <= 2 * largest.size
    dims = largest.dims if largest is not None else ()
    penalty = 1.0
    pads = [i for i in inside if i.opcode == "pad" and 4 * i.shapes[0].size >= written]
    if len(pads) > 1:
        # All sides are computed for each element, and loads of 2 bytes are not vectorised.
        short = min(i.shapes[0].dims[-1] for i in pads if i.shapes[0].dims) < 512
        penalty = 2.5 if short and "slice" in found else 1.8 if narrow else 1.3
    elif pads and narrow and len(pads[0].shapes[0].dims) > 3:
        # Images: which elements are padding is worked out for each, most of all between pixels.
        penalty = 2.0 if _between(pads[0]) else 1.5
    if "transpose" in found:
        # Filters, of which a step reads and writes several, with places of the window between.
        windows = len(root.shapes) > 1 and 1 < max(dims[:-2], default=1) <= 16
        # Only the outermost goes through shared memory: those below it, and those beside it,
        # read or write single elements.
        single = sum(i.opcode == "transpose" for i in inside) == 1
        factor = 1.0 if triton else 1.05 if single else 1.7
        if single and len(dims) > 3 and _turned(inside):
            factor = 2.2 if narrow else 1.45
        if _nested(inside):
            factor = (1.0 if narrow else 2.1) if triton else 4.5 if narrow or windows else 3.0
        penalty = max(penalty * 1.1, factor)
    if "reduce" in found:
        row = 1.3 if triton and not narrow else 1.03
        columns = any(over_columns(i, inside) for i in inside if i.opcode == "reduce")
        penalty = max(penalty, (1.25 if narrow else 1.05) if columns else row)
        if columns and not triton:
            penalty = max(penalty, _of_images(inside, found))
    fills = found <= {"broadcast", "constant", "bitcast", "copy"}
    # Filling with elements of 2 bytes or less is not vectorised.
    return 2.4 if fills and narrow else penalty


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
        return 2.5
    if narrow:
        return 2.6 if found & {"exponential", "logistic"} else 1.9
    return 1.35


def _turned(inside: Sequence[Instruction]) -> bool:
    """Returns whether images and channels change places."""
    turned = [i.attribute("dimensions") for i in inside if i.opcode == "transpose"]
    return any(dims.endswith(",0}") for dims in turned)


def _between(pad: Instruction) -> bool:
    """Returns whether elements are padded apart, as by strides."""
    return bool(re.search(r"\d+_\d+_[1-9]", pad.attribute("padding")))


def waits_of(inside: Sequence[Instruction]) -> int:
    """Returns how many sums over columns wait, up to two: few of their blocks run at once."""
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
