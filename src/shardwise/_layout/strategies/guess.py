"""Tensor-parallel pairs guessed from module types and widths, when there are no inputs to trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax import nnx

from ..._base import either
from ..._mesh import padded
from ..._nnx import AbstractModel, Keys, Leaf


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """The decision for one leaf: the dim to split, or None, and why."""

    dim: int | None
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Guess:
    """Leaf dims that are assumed to be the same dim, as `(keys, dim without stacks)` pairs."""

    dims: tuple[tuple[Keys, int], ...]
    size: int
    what: str


def guess_pairs(
    leaves: Sequence[Leaf],
    model: AbstractModel,
    axis: str,
    ways: int,
    unmet: frozenset[int] | None = None,
    traced: str = "",
) -> Mapping[int, Split]:
    """Returns a split, or the reason for not splitting, for each leaf by its index.

    Args:
        leaves: the model's leaves.
        model: the abstract model.
        axis: the axis to split over.
        ways: the size of the axis.
        unmet: the leaves that a trace did not reach, to guess only those; None to guess all.
        traced: the name of what was traced.
    """
    because = _guessed()
    if unmet is not None:
        because = f"guessed from module types and widths, since {traced} never uses it"
    asked = frozenset(range(len(leaves))) if unmet is None else unmet
    index_of = {leaf.keys: i for i, leaf in enumerate(leaves)}
    found: dict[int, Split] = {}
    for guess in _guesses(model):
        members = [(index_of[keys], dim) for keys, dim in guess.dims if keys in index_of]
        if not all(i in asked for i, _ in members):
            continue  # part of it was traced, and is already decided
        if any(found[i].dim is not None for i, _ in members if i in found):
            continue
        placed = {i: _with_stacks(leaves[i], dim) for i, dim in members}
        why = _refuse(guess, leaves, placed, axis, ways)
        for index, dim in placed.items():
            if why is None:
                found[index] = Split(dim, f"dim {dim}, {guess.what}; {because}")
            elif index not in found:
                found[index] = Split(None, f"left alone: {why}; {because}")
    undecided = f"left alone: its role is not clear from its module's type and widths; {because}"
    if unmet is not None:
        undecided = (
            f"left alone: {traced} never uses it, and its role is not clear from its module's "
            f"type and widths"
        )
    return {i: found.get(i, Split(None, undecided)) for i in sorted(asked)}


def _guessed() -> str:
    how = either("pass inputs= to layout to trace it", "pass --inputs to trace it")
    return f"guessed from module types and widths ({how})"


def _refuse(
    guess: _Guess, leaves: Sequence[Leaf], placed: Mapping[int, int], axis: str, ways: int
) -> str | None:
    if guess.size % ways:
        return f"{guess.what}, but size {guess.size} cannot be split {ways} ways"
    for index, dim in placed.items():
        taken = padded(leaves[index].spec, leaves[index].ndim)
        if taken[dim] or any(axis in entry for entry in taken):
            return f"an earlier rule already splits {leaves[index].path}"
    return None


def _with_stacks(leaf: Leaf, dim: int) -> int:
    kept = [d for d in range(leaf.ndim) if d not in leaf.stacked]
    return kept[dim]


def _guesses(model: AbstractModel) -> Iterator[_Guess]:
    """Yields guesses, most certain first."""
    modules = model.modules
    attention = [k for k, m in modules.items() if isinstance(m, nnx.MultiHeadAttention)]
    inside = {(*keys, part) for keys in attention for part in ("query", "key", "value", "out")}
    for keys in attention:
        yield from _attention(keys, modules[keys])
    children: dict[Keys, list[Keys]] = {}
    for keys, module in modules.items():
        if keys and keys not in inside and _widths(module) is not None:
            children.setdefault(keys[:-1], []).append(keys)
    for parent, keys in children.items():
        if parent and isinstance(modules[parent[:-1]], nnx.Sequential):
            yield from _chain(sorted(keys), model)
        elif not keys or not isinstance(keys[0][-1], int):  # layers in a list may be parallel
            yield from _siblings(keys, modules)
    yield from _vocabulary(modules)


def _attention(keys: Keys, module: nnx.MultiHeadAttention) -> Iterator[_Guess]:
    heads = module.num_heads
    kv_heads = getattr(module, "num_kv_heads", None) or heads
    dims: list[tuple[Keys, int]] = [((*keys, "out", "kernel"), 0)]
    for part in ("query", "key", "value"):
        dims += [((*keys, part, "kernel"), 1), ((*keys, part, "bias"), 0)]
    what = f"the heads of {'.'.join(map(str, keys)) or 'the attention'}"
    yield _Guess(tuple(dims), min(heads, kv_heads), what)


def _widths(module: Any) -> tuple[int, int] | None:
    if isinstance(module, nnx.Linear):
        return (module.in_features, module.out_features)
    if isinstance(module, nnx.Conv) and module.feature_group_count == 1:
        return (module.in_features, module.out_features)
    return None


def _column(keys: Keys, module: Any) -> list[tuple[Keys, int]]:
    last = len(module.kernel_size) + 1 if isinstance(module, nnx.Conv) else 1
    return [((*keys, "kernel"), last), ((*keys, "bias"), 0)]


def _row(keys: Keys, module: Any) -> tuple[Keys, int]:
    return ((*keys, "kernel"), len(module.kernel_size) if isinstance(module, nnx.Conv) else 0)


def _siblings(keys: list[Keys], modules: Mapping[Keys, Any]) -> Iterator[_Guess]:
    """Yields up-and-down pairs among the layers that are attributes of one module."""
    by_width: dict[tuple[int, int], list[Keys]] = {}
    for k in keys:
        widths = _widths(modules[k])
        assert widths is not None
        by_width.setdefault(widths, []).append(k)
    for (stream, hidden), ups in by_width.items():
        downs = by_width.get((hidden, stream), [])
        if stream >= hidden or len(downs) != 1:
            continue
        if sum(hidden in widths for widths in by_width) > 2:
            continue  # another layer has this width too, and may come between them
        dims = [d for up in ups for d in _column(up, modules[up])]
        dims.append(_row(downs[0], modules[downs[0]]))
        yield _Guess(
            tuple(dims), hidden, f"a hidden width of {hidden} between {stream} and {stream}"
        )


def _chain(keys: list[Keys], model: AbstractModel) -> Iterator[_Guess]:
    """Yields consecutive pairs in a list of layers, with the norms between them."""
    modules = model.modules
    position = 0
    while position + 1 < len(keys):
        first, second = keys[position], keys[position + 1]
        widths, next_widths = _widths(modules[first]), _widths(modules[second])
        assert widths is not None and next_widths is not None
        if widths[1] != next_widths[0] or first[-1] >= second[-1]:
            position += 1
            continue
        between = [k for k in modules if k[:-1] == first[:-1] and first[-1] < k[-1] < second[-1]]
        norms = [
            k
            for k in between
            if isinstance(modules[k], nnx.LayerNorm | nnx.RMSNorm | nnx.GroupNorm)
        ]
        if norms:
            position += 1
            continue
        dims = [*_column(first, modules[first]), _row(second, modules[second])]
        for k in between:
            if isinstance(modules[k], nnx.BatchNorm):
                dims += [((*k, name), 0) for name in ("scale", "bias", "mean", "var")]
        yield _Guess(tuple(dims), widths[1], f"a width of {widths[1]} between consecutive layers")
        position += 2


def _vocabulary(modules: Mapping[Keys, Any]) -> Iterator[_Guess]:
    embeds = {k: m for k, m in modules.items() if isinstance(m, nnx.Embed)}
    for keys, embed in embeds.items():
        what = f"a vocabulary of {embed.num_embeddings}"
        yield _Guess((((*keys, "embedding"), 0),), embed.num_embeddings, what)
    for keys, module in modules.items():
        for embed in embeds.values():
            if isinstance(module, nnx.Linear) and _widths(module) == (
                embed.features,
                embed.num_embeddings,
            ):
                what = f"an output head over a vocabulary of {embed.num_embeddings}"
                yield _Guess(tuple(_column(keys, module)), embed.num_embeddings, what)
                break
