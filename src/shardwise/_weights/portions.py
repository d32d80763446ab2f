"""What each process has of a leaf, and how many bytes it reads for that."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding

from .._layout import Layout
from .._mesh import chips_of, spec_axes
from .._nnx import Leaf
from .reading import Source, wanted_bytes
from .regions import Box, Piece


def read_bytes(
    layout: Layout, sources: Sequence[Sequence[Source]], dtypes: Sequence[Any]
) -> dict[int, int]:
    """Returns, for each process, the bytes that it reads."""
    mesh, processes = layout.mesh, [0]
    if isinstance(mesh, Mesh):
        processes = sorted({device.process_index for device in mesh.devices.flat})
    elif (chips := chips_of(mesh)) is not None and chips.chip.platform == "gpu":
        processes = list(range(chips.topology[0]))
    totals = np.zeros(len(processes), np.int64)
    boxes: dict[Any, list[list[Box]]] = {}
    known: dict[Any, np.ndarray] = {}
    for leaf, pieces, dtype in zip(layout.leaves, sources, dtypes, strict=True):
        shaped = (leaf.shape, leaf.spec)
        if shaped not in boxes:
            boxes[shaped] = _boxes_of(leaf, mesh, processes)
        for source in pieces:
            view, box = source.piece.view, list(source.piece.box)
            for dim in range(len(box)):
                # Any other index of a stack that is not split reads as many bytes.
                if box[dim][1] - box[dim][0] == 1 and leaf.shard_shape[dim] == leaf.shape[dim]:
                    box[dim] = (0, 1)
            key = (*shaped, dtype, source.tensor.dtype, view, tuple(box))
            if key not in known:
                moved = Source(source.tensor, Piece(view, tuple(box)))
                known[key] = np.array(
                    [wanted_bytes([moved], own, dtype) for own in boxes[shaped]], np.int64
                )
            totals += known[key]
    return dict(zip(processes, totals.tolist(), strict=True))


def _boxes_of(leaf: Leaf, mesh: Any, processes: Sequence[int]) -> list[list[Box]]:
    """Returns the distinct parts of a leaf that each process has."""
    if not isinstance(mesh, Mesh):
        every = device_boxes(leaf)
        each = len(every) // len(processes)
        hosts = (every[i : i + each] for i in range(0, len(every), each))
        return [list(dict.fromkeys(boxes)) for boxes in hosts]
    found: dict[int, dict[Box, None]] = {process: {} for process in processes}
    indices = NamedSharding(mesh, leaf.spec).devices_indices_map(leaf.shape)
    for device, index in indices.items():
        found[device.process_index][box_of(index, leaf.shape)] = None
    return [list(found[process]) for process in processes]


def _axes(leaf: Leaf) -> list[tuple[str, ...]]:
    """Returns the axes that each dim is split over."""
    found = spec_axes(leaf.spec)
    return [*found, *[()] * (leaf.ndim - len(found))]


def device_boxes(leaf: Leaf) -> list[Box]:
    """Returns the part of a leaf on each device of its mesh, in the mesh's order."""
    names = list(leaf.sizes)
    parts = list(zip(leaf.shard_shape, _axes(leaf), strict=True))
    found = []
    for place in itertools.product(*(range(leaf.sizes[name]) for name in names)):
        at = dict(zip(names, place, strict=True))
        box = []
        for size, axes in parts:
            number = 0
            for axis in axes:
                number = number * leaf.sizes[axis] + at[axis]
            box.append((number * size, (number + 1) * size))
        found.append(tuple(box))
    return found


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns an index of a shard as a box."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
