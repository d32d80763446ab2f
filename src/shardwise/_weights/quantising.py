"""Quantising what was read: in the model's own way, shard by shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from .._layout import Layout
from .._nnx import AbstractModel, quantiser


class Quantise:
    """Makes the parts of a quantised array of the array that a checkpoint has."""

    def __init__(
        self, model: AbstractModel, layout: Layout, parts: Mapping[int, Mapping[str, int]]
    ) -> None:
        """Takes the parts of each array, by role, by the number of its values."""
        self.model, self.layout, self.parts = model, layout, parts
        # One program for all arrays of one kind.
        self.programs: dict[Any, Any] = {}

    def __call__(self, number: int, array: jax.Array) -> dict[int, jax.Array]:
        """Returns the values, the scale and the zero point, by number."""
        roles = {"qvalue": number, **self.parts[number]}
        leaves = {role: self.layout.leaves[n] for role, n in roles.items()}
        found = quantiser(leaves["qvalue"], self.model)
        assert found is not None, "only arrays that can be quantised are planned so"
        how, quantised = found
        shardings = {r: NamedSharding(self.layout.mesh, leaf.spec) for r, leaf in leaves.items()}
        dtypes = {role: leaf.dtype for role, leaf in leaves.items()}

        def run(array: jax.Array) -> dict[str, jax.Array]:
            made = quantised(array)
            return {role: getattr(made, role).astype(dtype) for role, dtype in dtypes.items()}

        kind = (
            repr(how),
            array.shape,
            array.dtype,
            *map(str, shardings.values()),
            *dtypes.values(),
        )
        if kind not in self.programs:
            self.programs[kind] = jax.jit(run, out_shardings=shardings)
        made = self.programs[kind](array)
        return {n: made[role] for role, n in roles.items()}
