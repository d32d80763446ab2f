"""Arithmetic on PartitionSpecs: what a spec does to a shape on a mesh, and what is wrong with it.

Nothing here builds a `NamedSharding`: a wrong spec is to be described, not raised as an error.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from .._base import count, either, show_type
from .._jax import show_value

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One reason why a spec cannot be applied, under a finding's permanent code."""

    code: str
    message: str
    help: str
    name: str = ""  # the logical name that does not resolve


def dim_axes(entry: Any) -> Axes:
    """Returns the axes that one entry of a spec names, major first."""
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry)


def spec_axes(spec: P) -> list[Axes]:
    """Returns the axes of each entry of `spec`."""
    return [dim_axes(entry) for entry in spec]


def make_spec(axes: Iterable[Axes]) -> P:
    """Returns the spec with these axes for each dim, without trailing Nones."""
    entries: list[Any] = [a[0] if len(a) == 1 else (a or None) for a in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def normal_spec(spec: P) -> P:
    """Returns `spec` without trailing Nones, so that equivalent specs compare equal."""
    return make_spec(spec_axes(spec))


def padded(spec: P, ndim: int) -> list[Axes]:
    """Returns the axes of each of `ndim` dims; entries beyond them are kept."""
    axes = spec_axes(spec)
    return axes + [()] * (ndim - len(axes))


def show_spec(spec: P) -> str:
    """Returns `spec` as it is written in source: `P(None, 'model')`."""
    return f"P({', '.join(map(repr, spec))})"


_LONGEST_SPEC, _MOST_BRACKETS = 4000, 70


def parse_spec(text: str) -> P:
    """Returns the spec written as `P(None, 'model')`; the inverse of `show_spec`.

    Raises:
        ValueError: the text is not a spec.
    """
    wanted = f"{text!r:.200} is not a spec: write it as P(None, 'model') or P(('data', 'model'))"
    try:
        # Python's parser runs out of memory or stack on some deeply nested texts.
        if len(text) > _LONGEST_SPEC or text.count("(") > _MOST_BRACKETS:
            raise ValueError(f"it is too long: {len(text)} characters")
        call = ast.parse(text.strip(), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ValueError(wanted)
        if call.func.id not in ("P", "PartitionSpec") or call.keywords:
            raise ValueError(wanted)
        spec = P(*(ast.literal_eval(argument) for argument in call.args))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(wanted) from error
    require_spec(spec, text)
    return spec


def require_spec(value: Any, source: str) -> P:
    """Returns `value` if it is a spec of names, Nones and tuples of names.

    Raises:
        ValueError: it is something else; `source` says where it comes from.
    """
    if not isinstance(value, P):
        raise ValueError(
            f"{source} gave {show_value(value)}, which is {show_type(value)}: "
            f"a rule gives a PartitionSpec, or None for no opinion"
        )
    require_plain(value, source)
    for entry in value:
        plain = entry is None or isinstance(entry, str)
        if not plain and not (isinstance(entry, tuple) and all(isinstance(a, str) for a in entry)):
            raise ValueError(
                f"{source} gave {show_spec(value)}, whose entry {show_value(entry)} is not None, "
                f"an axis name, or a tuple of axis names"
            )
    return value


def require_plain(spec: P, source: str) -> None:
    """Raises if a spec says more than the axes of each dim; JAX cannot even iterate over such a one.

    Raises:
        ValueError: it has `reduced` or `unreduced` axes.
    """
    for word in ("reduced", "unreduced"):
        if axes := getattr(spec, word, None):
            extra = f"{word}={{{', '.join(map(repr, sorted(axes)))}}}"
            raise ValueError(
                f"{source} gave a spec with {extra}: that is for values inside a step, and arrays "
                f"that are kept between steps cannot have it; give the axes of each dim alone"
            )


def faults(
    shape: Sequence[int],
    spec: P,
    sizes: Mapping[str, int],
    names: frozenset[str] = frozenset(),
    places: Mapping[str, str | None] | None = None,
    stacked: Sequence[int] = (),
) -> list[Fault]:
    """Returns every reason why JAX would reject `spec` for `shape` on a mesh of `sizes`.

    Args:
        shape: the array's shape.
        spec: the spec to check.
        sizes: the mesh's axes and their sizes.
        names: logical names that the model's annotation left in the spec, to distinguish an
            unresolved name from a mistyped axis.
        places: the axis to suggest for each unresolved name, or None to replicate it; by default,
            one that suits this array.
        stacked: dims that are stacks of layers, which no other dim can stand in for.
    """
    found: list[Fault] = []
    axes = spec_axes(spec)
    mesh_axes = ", ".join(sizes)
    goes = places_for_names([(shape, spec)], names, sizes) if places is None else places
    for axis in dict.fromkeys(itertools.chain(*axes)):
        if axis in sizes:
            continue
        if axis in names:
            to = goes.get(axis)
            found.append(
                Fault(
                    "SW109",
                    f"name {axis!r} in the annotation does not resolve to an axis of the mesh "
                    f"({mesh_axes})",
                    "map it to an axis: "
                    + either(
                        f"sw.layout(..., logical={{{axis!r}: {to!r}}})",
                        f"--rules with [logical] {axis} = {[] if to is None else to!r}",
                    )
                    + (
                        f", or {either(f'{{{axis!r}: None}}', f'{axis} = []')} to replicate it"
                        if to is not None
                        else ""
                    ),
                    axis,
                )
            )
        else:
            found.append(
                Fault(
                    "SW101",
                    f"axis {axis!r} is not on the mesh",
                    _nearest(axis, shape, spec, sizes) or f"the mesh has {mesh_axes}",
                )
            )
    dims_of: dict[str, list[int]] = {}
    for dim, entry in enumerate(axes):
        for axis in entry:
            dims_of.setdefault(axis, []).append(dim)
    for axis, dims in dims_of.items():
        if len(dims) > 1:
            where = " and ".join(f"dim {d}" for d in dict.fromkeys(dims))
            found.append(
                Fault(
                    "SW102",
                    f"axis {axis!r} is used {len(dims)} times, for {where}",
                    "each axis may be used only once: keep one use and drop the others",
                )
            )
    if len(axes) > len(shape):
        found.append(
            Fault(
                "SW103",
                f"the spec has {count(len(axes), 'entry', 'entries')} but the array has "
                f"{count(len(shape), 'dim', 'dims')}",
                f"give at most {count(len(shape), 'entry', 'entries')}"
                if shape
                else "a scalar cannot be split: use P()",
            )
        )
    for dim, (size, entry) in enumerate(zip(shape, axes, strict=False)):
        ways = math.prod(sizes.get(axis, 1) for axis in entry)
        if size % ways:
            over = " x ".join(repr(axis) for axis in entry)
            word = "axis" if len(entry) == 1 else "axes"
            found.append(
                Fault(
                    "SW104",
                    f"dim {dim} (size {size}) cannot be split {ways} ways over {word} {over}",
                    _layers_help(size, ways, entry)
                    if dim in stacked
                    else _divides(
                        shape, axes, sizes, dim, sound=not found or found[0].code == "SW104"
                    ),
                )
            )
    return found


def places_for_names(
    arrays: Iterable[tuple[Sequence[int], P]], names: frozenset[str], sizes: Mapping[str, int]
) -> dict[str, str | None]:
    """Returns an axis for each unresolved name, such that every array can be split.

    The last axis of the mesh is preferred; a name that no axis suits maps to None: replicated.

    Args:
        arrays: shapes, and specs that may contain names.
        names: the logical names.
        sizes: the mesh's axes and their sizes.
    """
    arrays = list(arrays)
    found = {
        axis: None
        for _, spec in arrays
        for axis in itertools.chain(*spec_axes(spec))
        if axis in names and axis not in sizes
    }
    places: dict[str, str | None] = dict(found)
    for name in found:
        using = [pair for pair in arrays if name in itertools.chain(*spec_axes(pair[1]))]
        for axis in reversed(list(sizes)):
            tried = {**places, name: axis}
            if not any(_worse(shape, spec, tried, sizes) for shape, spec in using):
                places = tried
                break
    return places


def _worse(
    shape: Sequence[int], spec: P, places: Mapping[str, str | None], sizes: Mapping[str, int]
) -> bool:
    """Returns whether these places cause faults that replicating along the names would not."""
    replicated = dict.fromkeys(places)
    before, after = (_problems(shape, _placed(spec, at), sizes) for at in (replicated, places))
    return bool(after - before)


def _problems(
    shape: Sequence[int], spec: P, sizes: Mapping[str, int]
) -> set[tuple[str, str | int]]:
    """Returns the codes of all faults except unknown axes, each with its axis or dim."""
    axes = spec_axes(spec)
    flat = list(itertools.chain(*axes))
    found: set[tuple[str, str | int]] = {("SW102", a) for a in flat if flat.count(a) > 1}
    if len(axes) > len(shape):
        found.add(("SW103", len(axes)))
    for dim, (size, entry) in enumerate(zip(shape, axes, strict=False)):
        if size % math.prod(sizes.get(axis, 1) for axis in entry):
            found.add(("SW104", dim))
    return found


def _placed(spec: P, places: Mapping[str, str | None]) -> P:
    """Returns a spec with each name replaced by the axis that it maps to."""
    return make_spec(
        [
            tuple(a for a in (places.get(axis, axis) for axis in entry) if a)
            for entry in spec_axes(spec)
        ]
    )


def ways(spec: P, sizes: Mapping[str, int]) -> int:
    """Returns the number of distinct shards that `spec` splits an array into."""
    return math.prod(sizes[axis] for axis in itertools.chain(*spec_axes(spec)))


def shard_shape(shape: Sequence[int], spec: P, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of one shard; `spec` must have no faults."""
    axes = padded(spec, len(shape))
    return tuple(
        size // math.prod(sizes[axis] for axis in entry)
        for size, entry in zip(shape, axes, strict=True)
    )


def divisible_dims(
    shape: Sequence[int], taken: Sequence[Axes], ways: int, *, skip: Iterable[int] = ()
) -> list[int]:
    """Returns the free dims whose size is divisible by `ways`, largest first."""
    skipped = set(skip)
    dims = [
        d
        for d, size in enumerate(shape)
        if d not in skipped and size >= ways and size % ways == 0 and not taken[d]
    ]
    return sorted(dims, key=lambda d: -shape[d])


def _divides(
    shape: Sequence[int], axes: Sequence[Axes], sizes: Mapping[str, int], dim: int, sound: bool
) -> str:
    """Returns help that names a spec with the same axes that divides evenly, if there is one.

    A spec that splits the same dims is preferred, then one that splits large dims.
    """
    by = math.prod(sizes.get(a, 1) for a in axes[dim])
    pad = f"pad dim {dim} to {-(-shape[dim] // by) * by}, or do not split it"
    if not sound or len(shape) > 6:
        return pad
    used = {d for d, entry in enumerate(axes) if entry}
    together = [entry for entry in axes if entry]
    apart = [(axis,) for entry in together for axis in entry]

    def cost(dims: tuple[int, ...]) -> tuple[int, list[int]]:
        return (len(set(dims) - used), [-shape[d] for d in dims])

    for groups in (together, apart):
        groups = sorted(groups, key=lambda entry: -math.prod(sizes[a] for a in entry))
        splits = [math.prod(sizes[a] for a in entry) for entry in groups]
        for dims in sorted(itertools.permutations(range(len(shape)), len(groups)), key=cost):
            if all(shape[d] % ways == 0 for d, ways in zip(dims, splits, strict=True)):
                placed = dict(zip(dims, groups, strict=True))
                entries = [placed.get(d, ()) for d in range(len(shape))]
                spec = P(*(e[0] if len(e) == 1 else (e or None) for e in entries))
                return f"{show_spec(spec)} divides evenly"
    return f"no arrangement of these axes divides {tuple(shape)} evenly; {pad}"


def _layers_help(layers: int, ways: int, axes: Axes) -> str:
    """Returns help for a stack of layers that does not divide: other depths and other sizes."""
    depths = [n for n in (layers // ways * ways, (layers // ways + 1) * ways) if n]
    sizes = [n for n in range(2, min(layers, 2 * ways) + 1) if layers % n == 0]
    smaller = f", or {'x'.join(axes)} of size {' or '.join(map(str, sizes))}" if sizes else ""
    return f"it is a stack of layers: use {' or '.join(map(str, depths))} of them{smaller}"


def closest_axis(axis: str, axes: Iterable[str]) -> str:
    """Returns a question that names the axis that was probably intended, or an empty text.

    Example:
        >>> from shardwise._mesh import closest_axis
        >>> closest_axis("modle", ["data", "model"])
        "did you mean 'model'? "
    """
    import difflib

    close = difflib.get_close_matches(str(axis), list(axes), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _nearest(axis: str, shape: Sequence[int], spec: P, sizes: Mapping[str, int]) -> str | None:
    """Returns help that names the axis that was probably intended, if the array allows one."""
    import difflib

    close = difflib.get_close_matches(axis, list(sizes))
    fits = [near for near in close if not _worse(shape, spec, {axis: near}, sizes)]
    has = f"the mesh has {', '.join(sizes)}"
    if fits:
        return f"did you mean {fits[0]!r}? {has}"
    if close:
        return f"the closest is {close[0]!r}, which does not fit shape {tuple(shape)}; {has}"
    return None
