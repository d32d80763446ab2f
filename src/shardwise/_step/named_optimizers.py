"""Optimizers by name, to see what another one's state would take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

from .._base import either
from .._nnx import Recipe

# Those that need no more than a learning rate, which changes neither bytes nor times.
OPTIMIZERS: dict[str, Callable[[float], Any]] = {
    "adamw": optax.adamw,
    "adam": optax.adam,
    "adafactor": optax.adafactor,
    "lion": optax.lion,
    "sgd": optax.sgd,
}
_RATE = 1e-4


def with_optimizer(recipe: Recipe, name: str) -> Recipe:
    """Returns a recipe with the optimizer of this name instead of its own.

    Raises:
        ValueError: there is no such optimizer.
    """
    if name not in OPTIMIZERS:
        raise ValueError(
            f"{either('optimizer=', '--optimizer ')}{name!r} is not known by name: give one of "
            f"{', '.join(OPTIMIZERS)}"
        )
    return dataclasses.replace(recipe, optimizer=OPTIMIZERS[name](_RATE))
