"""What a save writes: the tensors, the leaves that each is made of, and where it is in which file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._check import Finding, Findings, make_finding
from .._nnx import AbstractModel, Leaf
from .files import DTYPES, dtype_name, open_folder
from .naming import Bound, NameMap, Names, read_names
from .preflight import WeightsError, model_names, piece_of, required_leaves, wanted_dtype
from .regions import CannotView, Piece, volume


@dataclasses.dataclass(slots=True)
class Output:
    """A tensor that is written.

    Attributes:
        key: its key.
        shape: its shape.
        dtype: its dtype.
        pieces: the leaves that it is made of, by number, each with its piece.
        file: the number of its file.
        start: its first byte in the file.
    """

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: list[tuple[int, Piece]]
    file: int = 0
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def own_config(model: AbstractModel) -> Mapping[str, Any] | None:
    root: Any = model.modules[()]
    method: Any = getattr(root, "weight_config", None)
    found: Any = method() if callable(method) else None
    return found


def outputs_of(
    model: AbstractModel, leaves: Sequence[Leaf], names: Any, dtype: Any, like: Any
) -> list[Output]:
    """Returns the tensors to write, in the order of the leaves.

    Raises:
        WeightsError: they are not the model's weights, each element once.
    """
    given = read_names(names) if isinstance(names, str | os.PathLike) else names
    given = model_names(model, None) if given is None else given
    required = required_leaves(model, leaves)
    found: list[Finding] = []
    outputs: dict[str, Output] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    if like is not None:
        shapes = {key: tensor.shape for key, tensor in open_folder(like).tensors.items()}
    keys = _keys(leaves, given, shapes if like is not None else None, required)
    for leaf, own in zip(leaves, keys, strict=True):
        if leaf.follows is not None and not own:
            what = "a part of a quantised array" if leaf.follows.is_scale else "an adapter"
            raise ValueError(
                f"{leaf.path} is {what}, for which the names have no key: save the plain model, which "
                f"sw.merge_adapters(model, make) returns, or give names= that have its keys"
            )
    for number, leaf in enumerate(leaves):
        filled: list[Piece] = []
        if any(dim == 0 for dim in leaf.shape) or not (keys[number] or number in required):
            continue
        for key, bound in keys[number]:
            try:
                stored = shapes.get(key) or _stored_shape(bound, leaf.shape)
                piece = piece_of(stored, bound, leaf.shape)
            except CannotView as error:
                found.append(make_finding("SW604", key, f"it cannot be made of {leaf.path}: {error}",
                                          "correct the name", repr(bound.name)))  # fmt: skip
                continue
            if any(piece.box == other.box for other in filled):
                continue  # another name of the same place, as for tied weights
            filled.append(piece)
            wanted = wanted_dtype(leaf, dtype)
            row = outputs.setdefault(key, Output(key, stored, wanted, []))
            if row.shape != stored or row.dtype != wanted:
                found.append(
                    make_finding("SW604", key, f"its parts disagree: {row.dtype}{list(row.shape)} and "
                                 f"{wanted}{list(stored)}", "correct the names")
                )  # fmt: skip
            row.pieces.append((number, piece))
        if sum(volume(piece.box) for piece in filled) != leaf.size:
            found.append(
                make_finding(
                    "SW602",
                    leaf.path,
                    f"{len(filled)} keys have {sum(volume(p.box) for p in filled)} of its "
                    f"{leaf.size} elements",
                    "add a name for it",
                )
            )
    for row in outputs.values():
        if dtype_name(row.dtype) is None:
            found.append(make_finding("SW605", row.key, f"{row.dtype} has no place in a .safetensors "
                                      f"file", f"give dtype=, one of {', '.join(map(str, DTYPES.values()))}"))  # fmt: skip
        elif sum(volume(piece.box) for _, piece in row.pieces) != math.prod(row.shape):
            found.append(make_finding("SW604", row.key, "no leaf fills all of it",
                                      "add names for its other parts"))  # fmt: skip
    if found:
        raise WeightsError(Findings(tuple(found)))
    return list(outputs.values())


def _keys(
    leaves: Sequence[Leaf],
    names: Names | None,
    like: Mapping[str, Any] | None,
    required: set[int],
) -> list[list[tuple[str, Bound]]]:
    """Returns the keys of each leaf.

    Raises:
        ValueError: the names cannot be turned round.
    """
    own = NameMap({} if names is None else names)
    if names is None:
        own = NameMap(lambda key: key)
        return [
            [(leaf.path, own.find(leaf.path)[0][1][0])] if number in required else []
            for number, leaf in enumerate(leaves)
        ]
    if like is not None:
        places = {leaf.path: number for number, leaf in enumerate(leaves)}
        found: list[list[tuple[str, Bound]]] = [[] for _ in leaves]
        for key in like:
            for _, bounds in own.find(key)[:1]:
                for bound in bounds:
                    number = places.get(bound.path, places.get(bound.path.removesuffix(".value")))
                    if number is not None and not bound.name.tie:
                        found[number].append((key, bound))
        return found
    if own.entries is None:
        raise ValueError(
            "names is a function, which cannot be turned round: give like=, a checkpoint with the "
            "keys to write"
        )
    return [list(own.keys_for(leaf.path, leaf.shape)) for leaf in leaves]


def _stored_shape(bound: Bound, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the tensor that a name turns into its part of a leaf.

    Raises:
        ValueError: the name does not say it.
    """
    name = bound.name
    if name.stored is not None:
        return name.stored
    rest = list(shape[len(bound.index) :])
    for entry, size in zip(name.at or (), list(rest), strict=False):
        rest.remove(size) if isinstance(entry, int) else None
    sizes = [
        entry[1] - entry[0] if isinstance(entry, tuple) else size
        for entry, size in zip(
            [e for e in (name.at or ()) if not isinstance(e, int)] + [None] * len(rest),
            rest,
            strict=False,
        )
    ]
    if (
        name.view is not None
        or name.split is not None
        or (name.reshape is not None and len(name.permute or ()) != len(sizes))
    ):
        raise ValueError(
            f"the name {name!r} does not say which shape is stored: give it stored=, or give like=, a "
            f"checkpoint with the same shapes"
        )
    if name.permute is None:
        return tuple(sizes)
    return tuple(sizes[name.permute.index(dim)] for dim in range(len(sizes)))


def arrange(outputs: Sequence[Output], limit: float) -> list[list[Output]]:
    """Returns the tensors of each file, and sets where each is."""
    files: list[list[Output]] = [[]]
    size = 0
    for row in outputs:
        if files[-1] and size + row.nbytes > limit:
            files.append([])
            size = 0
        row.file, row.start = len(files) - 1, size
        files[-1].append(row)
        size += row.nbytes
    return files


def header_of(rows: Sequence[Output]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for row in rows:
        table[row.key] = {
            "dtype": dtype_name(row.dtype),
            "shape": list(row.shape),
            "data_offsets": [row.start, row.start + row.nbytes],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    return struct.pack("<Q", len(text)) + text
