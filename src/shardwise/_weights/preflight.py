"""Before a load: compares the keys of a checkpoint with the leaves of a model. No tensor is read."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from .._base import count, either, option, public, show_bytes
from .._check import Allow, Finding, Findings, LayoutError, check, make_finding, matched, sift
from .._layout import Layout, require_layout
from .._nnx import AbstractModel, Leaf, Recipe, abstract_model, plain_path, quantiser
from .files import DTYPES, Folder, Tensor, open_folder
from .naming import Bound, NameMap, Names, read_names
from .portions import read_bytes
from .reading import Reader, Source
from .regions import Box, CannotView, Piece, meet, place, view_of, volume

# Leaves that a checkpoint must have; others, such as random keys, are initialised.
_REQUIRED = (nnx.Param, nnx.BatchStat)
_NEAREST = 20  # findings that name the nearest path; looking for it is slow


def _name_help() -> str:
    form = either("allow={'SW601': …} skips", "--allow SW601:PATTERN skips")
    return f"add a name for it; if it is not needed, map it to None, or {form} keys"


@public
class WeightsError(LayoutError):
    """Raised when weights cannot be loaded or saved as asked. `findings` has every reason."""


@public
@dataclasses.dataclass(frozen=True)
class WeightsPreflight:
    """What loading a checkpoint would find, from its headers alone. Made by `sw.check_weights`.

    Attributes:
        path: the checkpoint.
        findings: keys without a leaf, leaves without a key, wrong shapes and dtypes, damaged files.
        tensors: how many tensors the checkpoint has.
        total_bytes: their bytes (exact).
        read_bytes: for each process, the bytes that it reads (exact); none if there are errors. Of
            absent chips, the hosts of GPUs are known; others count as one process.
        in_flight_bytes: the most bytes that a process has in memory besides its shards.
        initialised: the paths of leaves that no key goes to and that are initialised instead, such
            as random keys.
    """

    path: str
    findings: Findings
    tensors: int
    total_bytes: int
    read_bytes: Mapping[int, int]
    in_flight_bytes: int
    initialised: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Returns the findings and the bytes."""
        lines = [str(self.findings)]
        if self.findings.errors:
            return lines[0]
        sizes = self.read_bytes.values()
        each = "one process" if len(sizes) == 1 else f"each of {len(sizes)} processes"
        most = "" if len(set(sizes)) <= 1 else "at most "
        lines.append(
            f"{self.path}: {count(self.tensors, 'tensor')}, {show_bytes(self.total_bytes)}; {each} "
            f"reads {most}{show_bytes(max(sizes, default=0))} (exact)"
        )
        if self.initialised:
            more = ", …" if len(self.initialised) > 3 else ""
            lines.append(
                f"not in the checkpoint, initialised: {', '.join(self.initialised[:3])}{more} "
                f"({count(len(self.initialised), 'leaf', 'leaves')})"
            )
        return "\n".join(lines)

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is read for each leaf.

    Attributes:
        leaves: the leaves, in the order of the state.
        sources: the pieces of each leaf; none if it is initialised.
        dtypes: the dtype that each leaf is loaded as.
        quantised: the values that are read as floating-point numbers and then quantised, by number,
            each with its scale and zero point by role.
        preflight: the findings and the bytes.
    """

    leaves: tuple[Leaf, ...]
    sources: tuple[tuple[Source, ...], ...]
    dtypes: tuple[np.dtype, ...]
    quantised: Mapping[int, Mapping[str, int]]
    preflight: WeightsPreflight


@public
def check_weights(
    make: Any,
    layout: Layout,
    path: str | os.PathLike[str],
    *,
    names: Names | str | os.PathLike[str] | None = None,
    dtype: Any = None,
    allow: Allow | None = None,
) -> WeightsPreflight:
    """Returns what loading a checkpoint into a layout would find, without reading a tensor.

    Args:
        make: a function without arguments that returns the model, a model, or a recipe.
        layout: its layout, on any mesh: the chips need not be present.
        path: as for `sw.load`.
        names: as for `sw.load`.
        dtype: as for `sw.load`.
        allow: path patterns by code of findings that are intentional, as for `sw.check`.

    Raises:
        LayoutError: the layout has errors, or belongs to another model.

    Example:
        >>> import tempfile, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        >>> folder = tempfile.mkdtemp() + "/weights"
        >>> sw.save_weights(make(), folder)
        >>> layout = sw.layout(make, sw.mesh("data=64", on="none"), "fsdp")
        >>> found = sw.check_weights(make, layout, folder)
        >>> found.findings.summary, found.total_bytes
        ('no findings', 2176)
    """
    require_layout(layout)
    model = make.model if isinstance(make, Recipe) else make
    abstract = abstract_model(model, layout.mesh)
    own = matched(layout, abstract.state)
    check(layout).raise_if_errors()  # otherwise there are no shards to count the bytes of
    return plan_load(abstract, own, path, names=names, dtype=dtype, allow=allow).preflight


def plan_load(
    model: AbstractModel,
    layout: Layout,
    path: str | os.PathLike[str],
    *,
    names: Names | str | os.PathLike[str] | None = None,
    dtype: Any = None,
    allow: Allow | None = None,
) -> LoadPlan:
    """Returns what is read for each leaf, and everything that is wrong.

    Args:
        model: the abstract model.
        layout: its layout as returned by `matched`.
        path: the checkpoint.
        names: the names.
        dtype: the dtype of floating-point leaves.
        allow: findings that are intentional.
    """
    folder = open_folder(path)
    name_map = NameMap(_names(model, names, folder.config, layout.leaves))
    dtypes = [wanted_dtype(leaf, dtype) for leaf in layout.leaves]
    parts = _quantised_parts(model, layout.leaves)
    found: list[Finding] = [make_finding(f.code, f.path, f.fact, f.help) for f in folder.faults]
    sources, wrong, quantised = _assign(folder, layout.leaves, dtypes, parts, name_map, found)
    made = {part for number in quantised for part in parts[number].values()}
    # Where a file is missing or damaged, everything that it has would be missing too.
    is_all = not any(fault.code in ("SW607", "SW608") for fault in folder.faults)
    for number, pieces in enumerate(sources):
        if number not in wrong:
            found += _overlaps(layout.leaves[number], pieces, is_all=is_all)
    if is_all:
        found += _missing(model, layout.leaves, sources, wrong | made)
    findings = sift(found, allow)
    preflight = WeightsPreflight(
        os.fspath(path),
        findings,
        len(folder.tensors),
        folder.total_bytes,
        {} if findings.errors else read_bytes(layout, sources, dtypes),
        Reader.in_flight_bytes,
        tuple(
            leaf.path
            for number, leaf in enumerate(layout.leaves)
            if not sources[number] and number not in made
        ),
    )
    kept = {number: parts[number] for number in sorted(quantised)}
    return LoadPlan(layout.leaves, tuple(map(tuple, sources)), tuple(dtypes), kept, preflight)


def _quantised_parts(model: AbstractModel, leaves: Sequence[Leaf]) -> dict[int, dict[str, int]]:
    """Returns the values that can be quantised here, each with its scale and zero point."""
    numbers = {leaf.path: number for number, leaf in enumerate(leaves)}
    found: dict[int, dict[str, int]] = {}
    for number, leaf in enumerate(leaves):
        if leaf.follows is not None and leaf.follows.is_scale:
            values = numbers[leaf.follows.base]
            if values in found or quantiser(leaves[values], model) is not None:
                found.setdefault(values, {})[leaf.follows.role] = number
    return found


def piece_of(tensor_shape: Sequence[int], bound: Bound, shape: Sequence[int]) -> Piece:
    """Returns a tensor as a piece of a leaf.

    Raises:
        CannotView: the name's transform does not fit.
    """
    name = bound.name
    return _piece(
        tuple(tensor_shape), tuple(shape), name.view, name.split, name.permute, name.reshape,
        name.at, bound.index,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _piece(
    stored: tuple[int, ...], shape: tuple[int, ...], view: Any, split: Any, permute: Any,
    reshape: Any, at: Any, index: tuple[int, ...],
) -> Piece:  # fmt: skip
    seen = view_of(stored)
    seen = seen if view is None else seen.reshape(view)
    seen = seen if split is None else seen.split(*split)
    seen = seen if permute is None else seen.permute(permute)
    seen = seen if reshape is None else seen.reshape(reshape)
    return place(seen, shape, index, at or ())


def _names(model: AbstractModel, names: Any, config: Any, leaves: Sequence[Leaf]) -> Names:
    if isinstance(names, str | os.PathLike):
        return read_names(names)
    found = model_names(model, config) if names is None else names
    if found is not None:
        return found
    paths = leaf_places(leaves)
    return lambda key: key if key in paths else None


def model_names(model: AbstractModel, config: Mapping[str, Any] | None) -> Names | None:
    """Returns the names that a model has itself: what its method `weight_names` returns."""
    root: Any = model.modules[()]
    method: Any = getattr(root, "weight_names", None)
    found: Any = method(config) if callable(method) else None
    return found


def required_leaves(model: AbstractModel, leaves: Sequence[Leaf]) -> set[int]:
    """Returns the numbers of the leaves that a checkpoint must have."""
    required = {keys for keys, variable in model.variables if isinstance(variable, _REQUIRED)}
    return {
        number
        for number, leaf in enumerate(leaves)
        if any(leaf.keys[:depth] in required for depth in range(len(leaf.keys) + 1))
    }


def wanted_dtype(leaf: Leaf, dtype: Any) -> np.dtype:
    """Returns the dtype that a leaf is loaded or saved as.

    Raises:
        ValueError: `dtype` is not a floating-point dtype.
    """
    if dtype is None or not jnp.issubdtype(leaf.dtype, np.floating):
        # Random keys have a dtype that NumPy does not know; they are never read.
        return leaf.dtype
    try:
        found = np.dtype(getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        found = np.dtype(object)
    if found not in DTYPES.values() or not jnp.issubdtype(found, np.floating):
        raise ValueError(
            f"{option('dtype', dtype)} is not a floating-point dtype: give bfloat16 or another"
        )
    return found


def _assign(
    folder: Folder,
    leaves: Sequence[Leaf],
    dtypes: list[np.dtype],
    parts: Mapping[int, Mapping[str, int]],
    names: NameMap,
    found: list[Finding],
) -> tuple[list[list[Source]], set[int], set[int]]:
    """Returns the pieces of each leaf, the leaves whose keys are wrong, and those to quantise.

    Adds what is wrong, and sets the dtypes of the last.
    """
    places = leaf_places(leaves)
    quantised: set[int] = set()
    sources: list[list[Source]] = [[] for _ in leaves]
    asked = 0
    lossy: set[int] = set()
    wrong: set[int] = set()
    for key, tensor in folder.tensors.items():
        matches = names.find(key)
        if not matches:
            found.append(
                make_finding("SW601", key, f"no name matches this key of {tensor}", _name_help())
            )
            continue
        if len(matches) > 1 and len({bound for _, bound in matches}) > 1:
            patterns = " and ".join(repr(pattern) for pattern, _ in matches[:3])
            found.append(
                make_finding(
                    "SW601",
                    key,
                    f"{count(len(matches), 'pattern')} match it and disagree: {patterns}",
                    "make the patterns disjoint",
                )
            )
            continue
        for bound in matches[0][1]:
            number = places.get(bound.path, places.get(bound.path.removesuffix(".value")))
            if number is None:
                near = []
                if asked < _NEAREST:
                    near = difflib.get_close_matches(bound.path, places, n=1)
                    asked += 1
                found.append(
                    make_finding(
                        "SW601",
                        key,
                        f"its name is {bound.path}, which is not a leaf of the model",
                        f"the nearest leaf is {near[0]}" if near else _name_help(),
                    )
                )
                continue
            leaf = leaves[number]
            try:
                if bound.name.stored not in (None, tensor.shape):
                    raise CannotView(f"its stored shape must be {bound.name.stored}")
                piece = piece_of(tensor.shape, bound, leaf.shape)
            except CannotView as error:
                found.append(
                    make_finding(
                        "SW604",
                        key,
                        f"{tensor} does not fit {leaf.path} of shape {leaf.shape}: {error}",
                        "correct the name, or build the model with the sizes of this checkpoint",
                        repr(bound.name),
                    )
                )
                wrong.add(number)
                continue
            if bound.name.tie:
                continue
            if number in parts and _kind(tensor.numpy_dtype) == "float":
                quantised.add(number)
                dtypes[number] = leaves[parts[number]["scale"]].dtype
            problem = _cast_finding(tensor, leaf, dtypes[number])
            if problem is not None and problem.code == "SW605":
                found.append(problem)
                wrong.add(number)
                continue
            if problem is not None and number not in lossy:
                lossy.add(number)
                found.append(problem)
            sources[number].append(Source(tensor, piece))
    return sources, wrong, quantised


def leaf_places(leaves: Sequence[Leaf]) -> dict[str, int]:
    """Returns the number of each leaf by its path, and by that which it has without adapters."""
    places = {plain_path(leaf): number for number, leaf in enumerate(leaves) if leaf.keys}
    return places | {leaf.path: number for number, leaf in enumerate(leaves)}


def _cast_finding(tensor: Tensor, leaf: Leaf, wanted: Any) -> Finding | None:
    have = tensor.numpy_dtype
    if have == wanted:
        return None
    kinds = [_kind(have), _kind(wanted)]
    if have is None or kinds[0] != kinds[1] or kinds[0] in ("", "bool", "complex"):
        return make_finding(
            "SW605",
            tensor.key,
            f"the checkpoint has {tensor}, but {leaf.path} is {wanted}{list(leaf.shape)}",
            "quantised weights need a model of that dtype"
            if kinds[1] == "float"
            else "build the model with the dtype of the checkpoint",
        )
    if _holds(have, wanted):
        return None
    return make_finding(
        "SW606",
        leaf.path,
        f"the checkpoint has {tensor.dtype}, and is rounded to {wanted}",
        "build the model with the dtype of the checkpoint, if that is not intentional",
    )


def _kind(dtype: Any) -> str:
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return ""
    kinds = {
        "float": np.floating,
        "int": np.integer,
        "bool": np.bool_,
        "complex": np.complexfloating,
    }
    return next((k for k, kind in kinds.items() if jnp.issubdtype(dtype, kind)), "")


def _holds(have: np.dtype, wanted: np.dtype) -> bool:
    """Returns whether every value of one dtype is a value of another."""
    if _kind(have) == "int":
        return np.can_cast(have, wanted)
    one, other = ml_dtypes.finfo(have), ml_dtypes.finfo(wanted)
    return one.nmant <= other.nmant and one.maxexp <= other.maxexp and one.minexp >= other.minexp


def _overlaps(leaf: Leaf, pieces: Sequence[Source], *, is_all: bool) -> Iterator[Finding]:
    """Yields keys that fill the same part of a leaf and, of all keys, parts that none fills."""
    if not pieces:
        return
    clashes = list(_clashes(sorted(pieces, key=lambda s: s.piece.box), 0))
    for one, other in clashes:
        yield make_finding(
            "SW603",
            leaf.path,
            f"{one.tensor.key} and {other.tensor.key} both fill {_show_box(leaf, one.piece.box)}",
            "map one of them to None, or mark it with tie=True if it repeats the other",
        )
    filled = sum(volume(source.piece.box) for source in pieces)
    if is_all and not clashes and filled != leaf.size:
        fill = "fills" if len(pieces) == 1 else "fill"
        yield make_finding(
            "SW604",
            leaf.path,
            f"{count(len(pieces), 'key')} {fill} {filled} of its {leaf.size} elements"
            f"{_first_hole(leaf, pieces)}",
            "the checkpoint has fewer layers or experts than the model, or a name is missing",
        )


def _clashes(pieces: Sequence[Source], dim: int) -> Iterator[tuple[Source, Source]]:
    """Yields pairs of pieces that share elements, by dividing them dim by dim."""
    if dim == len(pieces[0].piece.box):
        first = pieces[0]
        for number, one in enumerate(pieces):
            for other in pieces[:number]:
                if first is not one and meet(one.piece.box, other.piece.box) is not None:
                    yield other, one
                    break
        return
    groups: list[list[Source]] = []
    end = -1
    for source in sorted(pieces, key=lambda s: s.piece.box[dim]):
        start, stop = source.piece.box[dim]
        if start >= end:
            groups.append([])
        groups[-1].append(source)
        end = max(end, stop)
    for group in groups:
        if len(group) > 1:
            yield from _clashes(group, dim + 1)


def _first_hole(leaf: Leaf, pieces: Sequence[Source]) -> str:
    """Returns the first index that nothing fills, where each piece is at one index of a stack."""
    for dim in range(len(leaf.shape)):
        filled = {source.piece.box[dim] for source in pieces}
        if all(stop - start == 1 for start, stop in filled) and len(filled) < leaf.shape[dim]:
            hole = next(i for i in range(leaf.shape[dim]) if (i, i + 1) not in filled)
            return f": none fills index {hole} of dim {dim}"
    return ""


def _show_box(leaf: Leaf, box: Box) -> str:
    if volume(box) == leaf.size:
        return "all of it"
    shown = (
        ":"
        if (start, stop) == (0, size)
        else str(start)
        if stop - start == 1
        else f"{start}:{stop}"
        for (start, stop), size in zip(box, leaf.shape, strict=True)
    )
    return f"[{', '.join(shown)}]"


def _missing(
    model: AbstractModel,
    leaves: Sequence[Leaf],
    sources: Sequence[Sequence[Source]],
    wrong: set[int],
) -> Iterator[Finding]:
    required = required_leaves(model, leaves)
    for number, leaf in enumerate(leaves):
        if leaf.follows is not None and not leaf.follows.is_scale:
            continue  # an adapter starts anew
        if not sources[number] and number in required and number not in wrong:
            yield make_finding(
                "SW602",
                leaf.path,
                f"no key of the checkpoint goes to this leaf, {leaf.dtype}{list(leaf.shape)}",
                either(
                    "add a name for it; allow={'SW602': …} initialises leaves instead",
                    "add a name for it; --allow SW602:PATTERN initialises leaves instead",
                ),
            )
