"""A recipe and a layout with what a search chose: strategy, remat, microbatches, chunks, offloading."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from .._base import either
from .._layout import TENSOR_AXES, Layout, layout
from .._mesh import AnyMesh
from .._nnx import Recipe, abstract_model
from ..models import Decoder
from .space import Choice


def laid_out(recipe: Recipe, mesh: AnyMesh, strategy: str | None = None) -> Layout:
    """Returns the layout of a strategy; what the model's annotations call `tp` is the model axis.

    Annotated names that are no axis of the mesh are mapped as `axes_of_names` says.
    """
    made = layout(recipe, mesh, strategy)
    names = axes_of_names(made)
    return layout(recipe, mesh, strategy, logical=names) if names else made


def axes_of_names(made: Layout) -> dict[str, str | None]:
    """Returns the axis for each annotated name that resolves to none; None to replicate it.

    A model that was written for a mesh with an axis `tp` says by that what is split with tensor
    parallelism, which a search does over `model`. All other names leave it to the strategy.
    """
    names = {fault.name for leaf in made.leaves for fault in leaf.faults if fault.name}
    tensor = "model" if "model" in made.mesh.shape else None
    return {name: tensor if name in TENSOR_AXES else None for name in sorted(names)}


def with_choice(recipe: Recipe, choice: Choice) -> Recipe:
    """Returns a recipe with what a choice says of its step."""
    found = with_samples(recipe, choice.samples)
    found = dataclasses.replace(
        found,
        accumulate=choice.accumulate,
        loss_chunks=choice.loss_chunks,
        offload=choice.offload,
    )
    if choice.remat != "":
        found = with_remat(found, choice.remat)
    return found if choice.microbatches is None else with_microbatches(found, choice.microbatches)


def with_step(recipe: Recipe, fields: Mapping[str, Any]) -> Recipe:
    """Returns a recipe with some of remat, accumulate, loss_chunks, offload and microbatches.

    Args:
        recipe: the recipe.
        fields: by name, as a lockfile has them; microbatches that are None stay the model's own.
    """
    own = {name: value for name, value in fields.items() if name not in ("remat", "microbatches")}
    found = with_remat(recipe, fields["remat"]) if "remat" in fields else recipe
    if fields.get("microbatches") is not None:
        found = with_microbatches(found, fields["microbatches"])
    return dataclasses.replace(found, **own)


def with_samples(recipe: Recipe, samples: int) -> Recipe:
    """Returns a recipe whose global batch has so many samples."""
    if samples == samples_of(recipe):
        return recipe
    batch = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct((samples, *leaf.shape[1:]), leaf.dtype) if leaf.shape else leaf
        ),
        recipe.batch,
    )
    return dataclasses.replace(recipe, batch=batch)


def parse_batch(text: str) -> tuple[int, ...]:
    """Returns the sizes in a text such as `256x4096`.

    Raises:
        ValueError: the text is not of that form.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text.strip()):
        raise ValueError(f"{_said(text)}: write sizes, such as 256 or 256x4096")
    sizes = tuple(int(size[:20]) for size in text.strip().split("x"))
    if math.prod(sizes) >= 2**53:
        raise ValueError(f"{_said(text)} is too large")
    return sizes


def with_batch(recipe: Recipe, sizes: tuple[int, ...]) -> Recipe:
    """Returns the recipe with another batch size: the leading dims of each leaf become `sizes`.

    Raises:
        ValueError: a leaf has fewer dims.
    """

    def resized(leaf: Any) -> Any:
        if len(leaf.shape) < len(sizes):
            raise ValueError(
                f"{either('batch ', '--batch ')}{'x'.join(map(str, sizes))} has {len(sizes)} sizes, but the recipe's "
                f"batch has a leaf of shape {tuple(leaf.shape)}"
            )
        return jax.ShapeDtypeStruct((*sizes, *leaf.shape[len(sizes) :]), leaf.dtype)

    return dataclasses.replace(recipe, batch=jax.tree.map(resized, recipe.batch))


def _said(text: str) -> str:
    return f"{either('batch ', '--batch ')}{text!r}"


def samples_of(recipe: Recipe) -> int:
    """Returns the number of samples in a global batch."""
    sizes = [leaf.shape[0] for leaf in jax.tree.leaves(recipe.batch) if leaf.shape]
    return sizes[0] if sizes else 1


def with_remat(recipe: Recipe, policy: str | None) -> Recipe:
    """Returns a recipe with a remat policy for the model's blocks, as a search applies it.

    A model without a list of like blocks gets it for its whole loss.

    Args:
        recipe: the recipe.
        policy: the name of a policy; None for no rematerialisation.
    """
    model = made_abstract(recipe)
    if isinstance(model, Decoder):
        return dataclasses.replace(recipe, model=_changed(recipe.model, remat=policy), remat=None)
    pattern = blocks_of(model)
    applied = {pattern: policy} if pattern and policy else policy
    return dataclasses.replace(recipe, remat=applied)


def with_microbatches(recipe: Recipe, count: int) -> Recipe:
    """Returns a recipe whose decoder runs its pipeline with so many microbatches.

    Raises:
        ValueError: the model is not a Decoder, whose own call of `sw.pipeline` has the number.
    """
    if not isinstance(made_abstract(recipe), Decoder):
        raise ValueError(
            f"{either('microbatches=', '--microbatches ')}{count} needs a models.Decoder: another "
            f"model gives their number to sw.pipeline itself"
        )
    return dataclasses.replace(recipe, model=_changed(recipe.model, microbatches=count))


def made_abstract(recipe: Recipe) -> nnx.Module:
    """Returns the recipe's model without arrays."""
    abstract = abstract_model(recipe.model)
    return nnx.merge(abstract.graphdef, abstract.state)


def blocks_of(model: nnx.Module) -> str:
    """Returns the pattern of paths of the model's like blocks, the largest list of them."""
    found: list[tuple[int, str]] = []
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.List) and len(module) > 1:
            kinds = {type(each) for each in module}
            if len(kinds) == 1 and isinstance(module[0], nnx.Module):
                found.append((len(module), ".".join(map(str, (*path, "*")))))
    return max(found)[1] if found else ""


def _changed(make: Callable[[], Any], **attributes: Any) -> Callable[[], Any]:
    """Returns the function that makes a decoder with other attributes."""
    if isinstance(make, _Changed):
        make, attributes = make.make, {**dict(make.attributes), **attributes}
    return _Changed(make, tuple(sorted(attributes.items())))


@dataclasses.dataclass(frozen=True, slots=True)
class _Changed:
    """Makes a decoder with other attributes; compared by value, so that it is built once."""

    make: Callable[[], Any]
    attributes: tuple[tuple[str, Any], ...]

    def __call__(self) -> Any:
        model = self.make()
        for name, value in self.attributes:
            setattr(model, name, value)
        return model
