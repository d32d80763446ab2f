"""Bounds: which integers of a batch look up rows of a weight, and how many rows there are.

JAX reads some row for an index that is out of range, so training on a token outside the vocabulary
fails silently. The step's program shows which leaf of the batch indexes which weight: the allowed
range is read from there, and each batch is checked against it before it is placed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .._jax import call_jaxpr, is_literal, opened, scan_parts

# Both move values without changing them; those of the first also keep their positions.
_SAME_PLACE = {"convert_element_type", "copy", "copy_p", "name", "sharding_constraint"}
_MOVED = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev"}


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """A part of a leaf of the batch whose integers must be at least 0 and less than `size`.

    Attributes:
        leaf: the index of the leaf in the batch.
        part: for each of its dims, the start and the stop of the part.
        size: how many rows the weight has.
    """

    leaf: int
    part: tuple[tuple[int, int], ...]
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Origin:
    """Where a value comes from: part of a leaf, perhaps moved or shifted."""

    leaf: int
    part: tuple[tuple[int, int], ...]
    in_place: bool = True
    shifted: bool = False


_WEIGHT = "weight"


def index_bounds(closed: Any, batch_leaves: int) -> tuple[Bound, ...]:
    """Returns the bounds that a step's program puts on its batch.

    Args:
        closed: the step's jaxpr, whose last inputs are the batch.
        batch_leaves: how many inputs the batch has.
    """
    jaxpr, _ = opened(closed)
    first = len(jaxpr.invars) - batch_leaves
    known: dict[Any, Any] = dict.fromkeys(jaxpr.invars[:first], _WEIGHT)
    for leaf, v in enumerate(jaxpr.invars[first:]):
        if v.aval.dtype.kind in "iu":
            known[v] = _Origin(leaf, tuple((0, size) for size in v.aval.shape))
    found = list(_lookups(jaxpr, known))
    weights = {Bound(o.leaf, o.part, size) for weight, o, size in found if weight}
    # Indices into the logits, such as targets, are only bounded if inputs from the same leaf are:
    # other labels may be out of range on purpose, and masked.
    sizes = {(bound.leaf, bound.size) for bound in weights}
    others = {Bound(o.leaf, o.part, n) for weight, o, n in found if (o.leaf, n) in sizes}
    return tuple(sorted(weights | others, key=lambda b: (b.leaf, b.part, b.size)))


def row_bounds(bounds: Sequence[Bound], batch: Any) -> list[Bound]:
    """Returns the bounds that apply to every sample of a batch."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(batch)]
    return [b for b in bounds if b.part and b.part[0] == (0, shapes[b.leaf][0])]


def _lookups(jaxpr: Any, known: dict[Any, Any]) -> Iterator[tuple[bool, _Origin, int]]:
    """Yields each lookup by the batch: whether it reads a weight, its origin, the number of rows."""

    def of(v: Any) -> Any:
        return None if is_literal(v) else known.get(v)

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        origins = [of(v) for v in eqn.invars]
        if name == "gather" and isinstance(origins[1], _Origin):
            dims = eqn.params["dimension_numbers"].start_index_map
            if len(dims) == 1 and not origins[1].shifted:
                size = eqn.invars[0].aval.shape[dims[0]]
                yield origins[0] == _WEIGHT, origins[1], size
        if not any(origins):
            continue
        if name == "scan":
            inner, _ = opened(eqn.params["jaxpr"])
            constants, carried = scan_parts(eqn)
            kept = [
                *origins[:constants],
                *[None] * carried,
                *map(_moved, origins[constants + carried :]),
            ]
            yield from _lookups(inner, _named(inner, kept))
        elif (called := call_jaxpr(eqn)) is not None:
            inner, _ = opened(called)
            within = _named(inner, origins)
            yield from _lookups(inner, within)
            for v, out in zip(eqn.outvars, inner.outvars, strict=True):
                if not is_literal(out) and (origin := within.get(out)) is not None:
                    known[v] = origin
        elif (origin := _through(eqn, name, origins)) is not None:
            known[eqn.outvars[0]] = origin


def _named(jaxpr: Any, origins: list[Any]) -> dict[Any, Any]:
    pairs = zip(jaxpr.invars, origins, strict=True)
    return {v: origin for v, origin in pairs if origin is not None}


def _moved(origin: Any) -> Any:
    return dataclasses.replace(origin, in_place=False) if isinstance(origin, _Origin) else origin


def _through(eqn: Any, name: str, origins: list[Any]) -> Any:
    """Returns where an equation's result comes from, or None if its values differ."""
    origin = origins[0]
    if name in _SAME_PLACE:
        return origin
    if name in _MOVED:
        return _moved(origin)
    if name == "slice" and isinstance(origin, _Origin) and origin.in_place:
        params = eqn.params
        if params["strides"] is not None and any(step != 1 for step in params["strides"]):
            return None
        cuts = zip(origin.part, params["start_indices"], params["limit_indices"], strict=True)
        part = tuple((first + start, first + stop) for (first, _), start, stop in cuts)
        return dataclasses.replace(origin, part=part)
    if name == "add":
        one = next((o for o in origins if isinstance(o, _Origin)), None)
        constant = any(is_literal(v) for v in eqn.invars)
        return dataclasses.replace(one, shifted=True) if one is not None and constant else None
    if name == "select_n":
        # JAX counts negative indices from the end: i, or i + n if i < 0.
        cases = origins[1:]
        if all(isinstance(case, _Origin) for case in cases):
            plain = [case for case in cases if not case.shifted]
            same = {dataclasses.replace(case, shifted=False) for case in cases}
            return plain[0] if plain and len(same) == 1 else None
    return None
