"""Products of what differs between devices with what does not, as one matrix product.

Under vmap the devices' dim would be a second free dim of the operand, which XLA copies into
another order first. Merged with a dim that the result keeps, it costs nothing.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ._held import Held


def merged_dot(params: dict[str, Any], args: list[Held]) -> Held | None:
    """Returns a dot_general of all devices, or None where it is not such a product.

    Args:
        params: the equation's, without any sharding.
        args: its two operands.
    """
    (contracting, batch) = params["dimension_numbers"]
    sides = [i for i, a in enumerate(args) if a.axes]
    if len(sides) != 1 or any(batch):
        return None
    (side,) = sides
    held = args[side]
    free = [d for d in range(len(held.local_shape)) if d not in contracting[side]]
    if not free:
        return None
    # The devices' dims go before the first dim that the result keeps, and become one with it.
    count, dim = len(held.axes), free[0]
    value = jnp.moveaxis(held.value, range(count), range(dim, dim + count))
    sizes = value.shape[dim : dim + count + 1]
    value = value.reshape(*value.shape[:dim], math.prod(sizes), *value.shape[dim + count + 1 :])
    operands = [a.value for a in args]
    operands[side] = value
    out = jax.lax.dot_general_p.bind(*operands, **params)
    at = 0 if side == 0 else len(args[0].local_shape) - len(contracting[0])
    out = out.reshape(*out.shape[:at], *sizes, *out.shape[at + 1 :])
    return Held(jnp.moveaxis(out, range(at, at + count), range(count)), held.axes)
