"""How many bytes an array takes in a device's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# NumPy has a byte for each of these; XLA packs them, on every platform.
_PACKED_BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}


def array_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Returns the bytes of an array in a device's memory, elements of less than a byte packed.

    That is what compiled programs take and return. `nbytes` of a JAX array says a byte for each
    element, as NumPy has it, and JAX 0.10 keeps arrays so on CPU devices between programs.
    """
    packed = _PACKED_BITS.get(str(dtype))
    bits: int = packed if packed is not None else 8 * dtype.itemsize
    return -(-math.prod(shape) * bits // 8)
