"""What a recipe can do: which axes its model has dims for, what may be recomputed or offloaded."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy

from .._check import LayoutError
from .._compile import job_of, traced
from .._jax import opened, seeing, sub_jaxprs
from .._layout import layout
from .._mesh import dim_axes
from .._mesh import mesh as make_mesh
from .._nnx import Leaf, Recipe
from ..models import Decoder
from .applied import axes_of_names, blocks_of, laid_out, made_abstract
from .space import AXES

# In the order in which they save memory.
POLICIES = ("dots_with_no_batch_dims_saveable", "nothing_saveable")
# Of the activations that a decoder names: what is dear to compute again, for the bytes it takes.
_SAVED = ("context", "q", "k", "v", "out")
CHUNKS = 8


class Abilities:
    """What the model and the loss of a recipe can do; each is found out when it is first asked."""

    def __init__(self, recipe: Recipe):
        """Takes the recipe."""
        self.recipe = recipe
        self.model = made_abstract(recipe)

    @functools.cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves of the model, replicated."""
        return laid_out(self.recipe, make_mesh("data=1", on="none")).leaves

    @functools.cached_property
    def names_of_axes(self) -> dict[str, str | None]:
        """The axis that is taken for each annotated name that is no axis; None for none."""
        mesh = make_mesh(",".join(f"{axis}=1" for axis in AXES), on="none")
        return axes_of_names(layout(self.recipe, mesh))

    @functools.cached_property
    def model_bytes(self) -> int:
        """The bytes of the parameters."""
        return sum(math.prod(leaf.shape) * _width(leaf.dtype) for leaf in self.leaves)

    @functools.cached_property
    def limits(self) -> tuple[dict[str, int], str]:
        """By axis, the count that its size must divide (0 for any); and why others are missing."""
        found: dict[str, int] = {}
        missing = []
        for axis, count, why in (
            ("model", 0 if self._splits else None, "tensor (no pairs of dims to split)"),
            ("pipe", self._layers or None, "pipeline (no stack of layers that sw.pipeline runs)"),
            ("expert", self._experts or None, "expert (no dim named experts)"),
            ("sequence", self._length or None, "sequence (no tokens [batch, length] in the batch)"),
        ):
            if count is None:
                missing.append(why)
            else:
                found[axis] = count
        return found, ", ".join(missing)

    @functools.cached_property
    def _splits(self) -> bool:
        """Whether tensor parallelism splits anything of this model."""
        try:
            made = laid_out(self.recipe, make_mesh("data=1,fsdp=1,model=2", on="none"), "tensor")
        except ValueError:
            return False
        return any(leaf.resident_bytes < leaf.bytes for leaf in made.leaves)

    @functools.cached_property
    def _layers(self) -> int:
        """The layers of the stack that the model runs as a pipeline; 0 if there is none."""
        depths = [leaf.shape[min(leaf.stacked)] for leaf in self.leaves if leaf.stacked]
        depth = math.gcd(*depths)
        stages = next((n for n in range(2, depth + 1) if depth % n == 0), 0)
        if not stages:
            return 0
        mesh = make_mesh(f"pipe={stages}", on="none")
        with seeing() as seen:
            # It ends where a pipeline is seen, which is before its batch may be too small for it.
            with contextlib.suppress(LayoutError, ValueError):
                traced(job_of(self.recipe, laid_out(self.recipe, mesh, "pipeline"), None))
        return depth if seen.pipelined else 0

    @functools.cached_property
    def _experts(self) -> int:
        dims = [
            leaf.shape[dim]
            for leaf in self.leaves
            for dim, names in enumerate(leaf.names or ())
            if "experts" in dim_axes(names)
        ]
        return math.gcd(*dims)

    @functools.cached_property
    def _length(self) -> int:
        """The length of the batch's sequences; 0 if it has none."""
        if self.recipe.batch_spec is not None:
            return 0
        leaves = [leaf for leaf in jax.tree.leaves(self.recipe.batch) if len(leaf.shape) > 1]
        lengths = {leaf.shape[1] for leaf in leaves}
        tokens = any(
            len(leaf.shape) == 2 and jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer)
            for leaf in leaves
        )
        return lengths.pop() if len(lengths) == 1 and tokens else 0

    @functools.cached_property
    def remats(self) -> tuple[list[str | None], str]:
        """The remat policies that a search may try, and why, if there is only one."""
        if self.recipe.remat is not None:
            return [""], "the recipe sets remat itself"
        if isinstance(self.model, Decoder) or blocks_of(self.model):
            return [None, *POLICIES], ""
        return [""], "the model has no list of like blocks to rematerialise"

    @functools.cached_property
    def saved(self) -> list[str]:
        """Policies that save named activations on the device, dearest to recompute first."""
        kept = [name for name in _SAVED if name in self.names]
        return [f"save:{','.join(kept)}"] if len(kept) > 1 else []

    @functools.cached_property
    def offloaded(self) -> list[str]:
        """Policies that offload named activations to the hosts, smallest memory first."""
        if not self.names:
            return []
        if "input" not in self.names:
            return [f"offload:{','.join(self.names)}"]
        more = [name for name in ("input", "out", "q", "k", "v") if name in self.names]
        return [f"offload:{','.join(more)}", "offload:input"]

    @functools.cached_property
    def names(self) -> list[str]:
        """The names that the model gives to activations."""
        try:
            jaxpr = opened(self.unsplit.jaxpr)[0]
        except (LayoutError, ValueError):
            return []
        return sorted(set(_names(jaxpr)))

    @functools.cached_property
    def chunks(self) -> bool:
        """Whether the loss can be computed in chunks with the head."""
        if self.recipe.loss_chunks > 1:
            return True
        try:
            traced(job_of(dataclasses.replace(self.recipe, loss_chunks=2), self._replicated, None))
        except (LayoutError, ValueError):
            return False
        return True

    @functools.cached_property
    def _replicated(self) -> Any:
        return laid_out(self.recipe, make_mesh("data=1", on="none"), "dp")

    @functools.cached_property
    def unsplit(self) -> Any:
        """The step on one device, traced.

        Raises:
            ValueError: it cannot be traced.
        """
        return traced(job_of(self.recipe, self._replicated, None))

    @property
    def own_microbatches(self) -> bool:
        """Whether the number of a pipeline's microbatches can be set from outside."""
        return isinstance(self.model, Decoder)


def _names(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        for inner in sub_jaxprs(eqn):
            yield from _names(opened(inner)[0])


def _width(dtype: Any) -> int:
    """Returns the bytes of one element; a random key counts as two words."""
    key = jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
    return 8 if key else jax.numpy.dtype(dtype).itemsize
