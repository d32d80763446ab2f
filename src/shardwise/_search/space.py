"""What a search chooses from: sizes of mesh axes, strategies, remat policies, accumulation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from .._base import either
from .._nnx import Recipe, abstract_model
from ..models import Decoder

# In the order in which they save memory.
POLICIES = ("dots_with_no_batch_dims_saveable", "nothing_saveable")
# A tensor axis beyond this many devices was never worth its all-reduces.
_MOST_TENSOR = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One point of the space.

    Attributes:
        chips: such as `v5p:4x8x8`.
        axes: names and sizes of the mesh's axes, slowest first.
        strategy: its name, such as `fsdp+tensor`.
        remat: the policy for the model's blocks; None for none, "" for the recipe's own.
        accumulate: in how many microbatches the batch is processed.
    """

    chips: str
    axes: tuple[tuple[str, int], ...]
    strategy: str
    remat: str | None
    accumulate: int

    @property
    def mesh(self) -> str:
        """The mesh as `sw.mesh` takes it."""
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the mesh's axes by name."""
        return dict(self.axes)

    @property
    def data_ways(self) -> int:
        """Over how many devices the batch is split."""
        return math.prod(size for name, size in self.axes if name in ("data", "fsdp"))


def divisors(count: int) -> list[int]:
    """Returns the divisors of a count, smallest first."""
    small = [d for d in range(1, math.isqrt(count) + 1) if count % d == 0]
    return sorted({*small, *(count // d for d in small)})


def axes_of(data: int, fsdp: int, model: int) -> tuple[tuple[tuple[str, int], ...], str]:
    """Returns the axes with these sizes, and the strategy for them."""
    sizes = (("data", data), ("fsdp", fsdp), ("model", model))
    axes = tuple((name, size) for name, size in sizes if size > 1) or (("data", 1),)
    first = "fsdp" if fsdp > 1 else "dp"
    return axes, f"{first}+tensor" if model > 1 else first


def meshes(devices: int, batch: int, *, tensor: bool) -> Iterator[tuple[int, int, int]]:
    """Yields every `(data, fsdp, model)` whose product is the number of devices.

    Args:
        devices: how many there are.
        batch: the number of samples in a global batch, which must be divisible by the data ways.
        tensor: whether the model can be split by tensor parallelism.
    """
    for model in divisors(devices):
        if model > 1 and (not tensor or model > _MOST_TENSOR):
            break
        rest = devices // model
        if batch % rest:
            continue
        for data in divisors(rest):
            yield data, rest // data, model


def accumulations(batch: int, ways: int) -> list[int]:
    """Returns into how many microbatches a batch can be split, over this many devices."""
    each = batch // ways
    return [n for n in divisors(each) if n & (n - 1) == 0] or [1]


def samples_of(recipe: Recipe) -> int:
    """Returns the number of samples in a global batch."""
    sizes = [leaf.shape[0] for leaf in jax.tree.leaves(recipe.batch) if leaf.shape]
    return sizes[0] if sizes else 1


def remats_of(recipe: Recipe, model: nnx.Module) -> tuple[list[str | None], str]:
    """Returns the remat policies that a search may try, and why, if there is only one.

    Args:
        recipe: the recipe.
        model: its model, without arrays.
    """
    if recipe.remat is not None:
        return [""], "the recipe sets remat itself"
    if isinstance(model, Decoder) or blocks_of(model):
        return [None, *POLICIES], ""
    return [""], "the model has no list of like blocks to rematerialise"


def blocks_of(model: nnx.Module) -> str:
    """Returns the pattern of paths of the model's like blocks, the largest list of them."""
    found: list[tuple[int, str]] = []
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.List) and len(module) > 1:
            kinds = {type(each) for each in module}
            if len(kinds) == 1 and isinstance(module[0], nnx.Module):
                found.append((len(module), ".".join(map(str, (*path, "*")))))
    return max(found)[1] if found else ""


def with_choice(recipe: Recipe, choice: Choice, pattern: str) -> Recipe:
    """Returns a recipe with a choice's remat and accumulation."""
    changes: dict[str, Any] = {"accumulate": choice.accumulate}
    if choice.remat != "":
        if pattern:
            changes["remat"] = {pattern: choice.remat} if choice.remat else None
        else:
            changes["model"] = functools.partial(_with_remat, recipe.model, choice.remat)
    return dataclasses.replace(recipe, **changes)


def with_remat(recipe: Recipe, policy: str | None) -> Recipe:
    """Returns a recipe with a remat policy for the model's blocks, as a search applies it.

    A model without a list of like blocks gets it for its whole loss.

    Args:
        recipe: the recipe.
        policy: the name of a policy; None for no rematerialisation.
    """
    abstract = abstract_model(recipe.model)
    model = nnx.merge(abstract.graphdef, abstract.state)
    if isinstance(model, Decoder):
        make = functools.partial(_with_remat, recipe.model, policy)
        return dataclasses.replace(recipe, model=make, remat=None)
    pattern = blocks_of(model)
    applied = {pattern: policy} if pattern and policy else policy
    return dataclasses.replace(recipe, remat=applied)


def _with_remat(make: Callable[[], Any], policy: str | None) -> Any:
    model = make()
    model.remat = policy
    return model


def orders(axes: Sequence[tuple[str, int]]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yields the axes with each of them as the fastest one, as given first."""
    yield tuple(axes)
    for place in range(len(axes) - 1):
        rest = [axis for i, axis in enumerate(axes) if i != place]
        yield (*rest, axes[place])


def given_axes(text: str | Mapping[str, int]) -> dict[str, int]:
    """Returns the sizes in `data=4,model=2`, or a mapping of them."""
    if isinstance(text, Mapping):
        return dict(text)
    found = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.strip().isidentifier() or not size.strip().isdecimal() or not int(size):
            where = either("", "--mesh has ")
            raise ValueError(f"{where}{part!r} is not an axis with its size: write data=4,model=2")
        found[name.strip()] = int(size)
    return found
