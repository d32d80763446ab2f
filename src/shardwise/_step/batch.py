"""The batch: how it is split over the mesh, and whether a batch matches the recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._jax import shorten, show_value
from .._layout import Layout, stage_axes, zero_axes
from .._mesh import DATA_AXES, SEQUENCE_AXES, AnyMesh, Fault, faults, padded, show_mesh, show_spec
from .._nnx import Recipe
from .bounds import Bound


def data_axes(layout: Layout) -> tuple[str, ...]:
    """Returns the axes that split a batch: those named as data axes, of FSDP, ZeRO, and of stages.

    Stages share a batch outside of their stack: otherwise each would compute, say, all logits.
    """
    split = frozenset[str]().union(*(leaf.gathered for leaf in layout.leaves))
    split |= {*DATA_AXES, *stage_axes(layout.leaves), *zero_axes(layout.leaves)}
    split -= set(SEQUENCE_AXES)
    return tuple(axis for axis in layout.mesh.shape if axis in split)


def batch_layout(recipe: Recipe, layout: Layout) -> Any:
    """Returns the recipe's batch with a sharding on each leaf.

    Raises:
        ValueError: a leaf cannot be split this way; the message has its sizes and what would fit.
    """
    treedef = jax.tree.structure(recipe.batch)
    specs = _specs(recipe, layout, treedef)
    found = []
    for (name, leaf), spec in zip(named_batch(recipe.batch), specs, strict=True):
        _require_fit(name, leaf, spec, recipe.accumulate, layout.mesh)
        sharding = NamedSharding(layout.mesh, spec)
        # JAX narrows 64-bit dtypes unless they are enabled.
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        found.append(jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding))
    return jax.tree.unflatten(treedef, found)


def named_batch(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yields each leaf of a batch with its name in error messages."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        yield f"batch{jax.tree_util.keystr(path)}", leaf


def require_batch(batch: Any, planned: Any, local: Any = None, given: Any = None) -> None:
    """Rejects a batch that is not the planned one, naming every wrong leaf.

    Args:
        batch: the batch.
        planned: the recipe's batch, a pytree of shapes and dtypes.
        local: the shapes of one process's part, if that is accepted too.
        given: the recipe's batch before JAX narrows 64-bit dtypes.
    """
    if jax.tree.structure(batch) != jax.tree.structure(planned):
        got, wanted = (_names(tree) for tree in (batch, planned))
        if got == wanted:
            got, wanted = (shorten(str(jax.tree.structure(tree))) for tree in (batch, planned))
        raise ValueError(
            f"the batch has a different structure from the recipe's: got {got}, wanted {wanted}"
        )
    wrong = []
    parts = jax.tree.leaves(local) if local is not None else [None] * len(jax.tree.leaves(planned))
    wide = jax.tree.leaves(planned if given is None else given)
    leaves = zip(named_batch(batch), jax.tree.leaves(planned), wide, parts, strict=True)
    for (name, leaf), want, own, part in leaves:
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is None or dtype is None:
            wrong.append(f"{name} has type {type(leaf).__name__}, wanted {_show(want)}")
        elif dtype not in (want.dtype, own.dtype) or tuple(shape) not in (
            want.shape,
            part and part.shape,
        ):
            also = f" or {_show(part)}" if part is not None and part.shape != want.shape else ""
            cast = (
                ""
                if dtype in (want.dtype, own.dtype)
                else f" (cast it: .astype({str(want.dtype)!r}))"
            )
            wrong.append(f"{name} is {dtype}{list(shape)}, wanted {_show(want)}{also}{cast}")
    if wrong:
        raise ValueError(f"the batch does not match the recipe: {'; '.join(wrong)}")


def require_integers(
    batch: Any, planned: Any, bounds: Sequence[Bound], sample: Callable[[int], int]
) -> None:
    """Rejects integers that the step would silently change or clip.

    Args:
        batch: host arrays, in the structure of `planned`; dim 0 may have only some samples.
        planned: the recipe's batch, with the dtypes that JAX uses.
        bounds: what the step's lookups allow.
        sample: returns the number of the sample in a row.

    Raises:
        ValueError: an integer does not fit its dtype, or the weight it indexes has no such row.
    """
    flat = list(named_batch(batch))
    for (name, x), want in zip(flat, jax.tree.leaves(planned), strict=True):
        if x.dtype == want.dtype or not (_is_integer(x.dtype) and _is_integer(want.dtype)):
            continue
        limits = np.iinfo(want.dtype)
        if place := _outside(x, int(limits.min), int(limits.max)):
            raise ValueError(
                f"{name} has {x[place]} in sample {sample(place[0])}, which does not fit "
                f"{want.dtype}: JAX would turn it into {x[place].astype(want.dtype)}"
            )
    for bound in bounds:
        name, x = flat[bound.leaf]
        part = x[(slice(None), *(slice(*ends) for ends in bound.part[1:]))] if x.ndim else x
        if part.ndim and (place := _outside(part, 0, bound.size - 1)):
            raise ValueError(
                f"{name} has {part[place]} in sample {sample(place[0])}, but the weight that it "
                f"looks up has {bound.size} rows: give integers from 0 to {bound.size - 1}, such as "
                f"tokens within the vocabulary, or clip them in the loss if that is intentional"
            )


def _outside(x: np.ndarray, least: int, most: int) -> tuple[int, ...] | None:
    """Returns the index of the first number that is out of range, if there is one."""
    if not x.size or (int(x.min()) >= least and int(x.max()) <= most):
        return None
    first = int(np.argmax((x < least) | (x > most)))
    return tuple(int(i) for i in np.unravel_index(first, x.shape))


def _is_integer(dtype: Any) -> bool:
    return np.issubdtype(dtype, np.integer)


def local_spans(leaf: Any) -> list[tuple[tuple[int, int], ...]]:
    """Returns, for each dim, the spans that this process's devices hold of a planned leaf."""
    indices = list(leaf.sharding.addressable_devices_indices_map(leaf.shape).values())
    return [
        tuple(sorted({index[dim].indices(size)[:2] for index in indices}))
        for dim, size in enumerate(leaf.shape)
    ]


def _specs(recipe: Recipe, layout: Layout, treedef: Any) -> list[P]:
    given = recipe.batch_spec
    flat = treedef.flatten_up_to(recipe.batch)
    if given is None:
        rows = data_axes(layout)
        columns = tuple(axis for axis in layout.mesh.shape if axis in SEQUENCE_AXES)
        entries = (rows or None, columns) if columns else (rows,) if rows else ()
        return [P(*entries[: len(leaf.shape)]) for leaf in flat]
    if isinstance(given, P):
        return [given] * len(flat)
    found: list[Any]
    try:
        found: list[Any] = treedef.flatten_up_to(given)
    except (ValueError, TypeError):
        found = [None]
    if not all(isinstance(spec, P) for spec in found):
        raise ValueError(
            f"batch_spec is {show_value(given)}: give one PartitionSpec, or a pytree of them like the batch, "
            f"which has {', '.join(name for name, _ in named_batch(recipe.batch))}"
        )
    return found


def _require_fit(name: str, leaf: Any, spec: P, parts: int, mesh: AnyMesh) -> None:
    wrong = faults(leaf.shape, spec, dict(mesh.shape))
    if wrong:
        raise ValueError(
            f"{name} of shape {tuple(leaf.shape)} cannot be split as {show_spec(spec)} on "
            f"{show_mesh(mesh)}: {wrong[0].message}; {_remedy(wrong[0])}"
        )
    axes = padded(spec, len(leaf.shape))[0] if leaf.shape else ()
    ways = math.prod(mesh.shape[axis] for axis in axes)
    if parts > 1 and leaf.shape and (leaf.shape[0] // parts) % ways:
        raise ValueError(
            f"accumulate={parts} splits {name} into microbatches of {leaf.shape[0] // parts} samples, "
            f"which cannot be split {ways} ways over {'+'.join(axes)}: make the batch a multiple "
            f"of {parts * ways}"
        )


def _remedy(fault: Fault) -> str:
    if fault.code == "SW104":
        return "make the batch divisible, or give the recipe batch_spec="
    return fault.help


def _names(tree: Any) -> str:
    names = [name for name, _ in named_batch(tree)]
    return f"{', '.join(names[:8]) or 'none'}{', …' if len(names) > 8 else ''}"


def _show(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
