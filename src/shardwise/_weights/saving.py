"""Saving: a model's shards as a folder of `.safetensors` files, as Hugging Face has them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from flax import nnx

from .._base import cleaned_up_on_signal, public, show_bytes
from .._check import Finding, Findings, make_finding
from .._nnx import AbstractModel, Leaf, abstract_model, leaves_of
from .._processes import exchange, together
from .folder import CONFIG, INDEX, open_folder
from .header import DTYPES, dtype_name
from .naming import Bound, NameMap, Names, read_names
from .portions import box_of
from .preflight import WeightsError, model_names, piece_of, required_leaves, wanted_dtype
from .reading import MOST_BUFFERS, Reader, Shard, block_elements, scatters_of
from .regions import Block, CannotView, Piece, blocks_of, join_boxes, loops_of, strides_of, volume

_WAITING_BYTES = 128 * 2**20


@dataclasses.dataclass(slots=True)
class _Output:
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


@public
def save_weights(
    model: nnx.Module,
    path: str | os.PathLike[str],
    *,
    names: Names | str | os.PathLike[str] | None = None,
    dtype: Any = None,
    like: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Writes a model's weights as a folder of `.safetensors` files, with an index.

    Each process writes the bytes of its own shards, and no array is gathered. The folder appears
    when it is complete: what fails before leaves nothing behind. `sw.load` of it gives the same
    bits.

    Args:
        model: a model with arrays on any devices.
        path: a folder that does not exist or is empty; or a name ending in `.safetensors`, for
            one file. All processes must see the same files.
        names: as for `sw.load`; here they are turned round, from a leaf to its key.
        dtype: the dtype of floating-point tensors; by default those of the leaves.
        like: a checkpoint whose keys and shapes the new one gets, for names that cannot be turned
            round (functions, and patterns with more than groups).
        config: what `config.json` has; by default what the model's method `weight_config` returns,
            if it has one.
        max_file_bytes: the most bytes of tensors in one file, unless one tensor is larger.

    Raises:
        WeightsError: a leaf has no key, or two have the same place; nothing is written.
        ValueError: there is something at this path, or a name cannot be turned round.

    Example:
        >>> import os, tempfile, shardwise as sw
        >>> from flax import nnx
        >>> folder = tempfile.mkdtemp() + "/weights"
        >>> sw.save_weights(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), folder)
        >>> os.listdir(folder)
        ['model.safetensors']
    """
    place = os.path.abspath(os.fspath(path))
    single = place.endswith(".safetensors")
    with together(f"preparing to save weights to {place}"):
        _require_free(place)
        abstract = abstract_model(model)
        leaves = leaves_of(abstract, {})
        arrays = jax.tree.leaves(nnx.split(model)[1])
        outputs = _outputs(abstract, leaves, names, dtype, like)
        files = _arrange(outputs, math.inf if single else max_file_bytes)
        about = config if config is not None else _own_config(abstract)
        parts = [_header(rows) for rows in files]
        for rows, head in zip(files, parts, strict=True):
            for row in rows:
                row.start += len(head)
    token = exchange("naming the new weights", uuid.uuid4().hex[:8])[0]
    partial = os.path.join(os.path.dirname(place), f".{os.path.basename(place)}.{token}.partial")
    paths = _file_names(partial, len(files), single)
    first = jax.process_index() == 0
    remove = (lambda: _remove(partial)) if first else (lambda: None)
    with cleaned_up_on_signal(remove):
        try:
            with together(f"making {partial}"):
                if first:
                    _create(partial, single, paths, parts, files)
            with together(f"writing the weights to {partial}"):
                _write(paths, outputs, leaves, arrays)
            with together(f"completing {place}"):
                if first:
                    _complete(partial, place, single, paths, files, about)
        except BaseException:
            remove()
            raise


def _require_free(place: str) -> None:
    if os.path.isdir(place) and not os.listdir(place):
        return
    if os.path.lexists(place):
        raise ValueError(f"{place} exists already: give the path of a new folder, or remove it")
    if not os.path.isdir(os.path.dirname(place)):
        raise ValueError(f"{place} cannot be written: there is no folder {os.path.dirname(place)}")


def _own_config(model: AbstractModel) -> Mapping[str, Any] | None:
    root: Any = model.modules[()]
    method: Any = getattr(root, "weight_config", None)
    found: Any = method() if callable(method) else None
    return found


def _outputs(
    model: AbstractModel, leaves: Sequence[Leaf], names: Any, dtype: Any, like: Any
) -> list[_Output]:
    """Returns the tensors to write, in the order of the leaves.

    Raises:
        WeightsError: they are not the model's weights, each element once.
    """
    given = read_names(names) if isinstance(names, str | os.PathLike) else names
    given = model_names(model, None) if given is None else given
    required = required_leaves(model, leaves)
    found: list[Finding] = []
    outputs: dict[str, _Output] = {}
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
            row = outputs.setdefault(key, _Output(key, stored, wanted, []))
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


def _arrange(outputs: Sequence[_Output], limit: float) -> list[list[_Output]]:
    """Returns the tensors of each file, and sets where each is."""
    files: list[list[_Output]] = [[]]
    size = 0
    for row in outputs:
        if files[-1] and size + row.nbytes > limit:
            files.append([])
            size = 0
        row.file, row.start = len(files) - 1, size
        files[-1].append(row)
        size += row.nbytes
    return files


def _header(rows: Sequence[_Output]) -> bytes:
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


def _file_names(folder: str, count: int, single: bool) -> list[str]:
    if single:
        return [folder]
    if count == 1:
        return [os.path.join(folder, "model.safetensors")]
    names = (f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count))
    return [os.path.join(folder, name) for name in names]


def _create(
    partial: str,
    single: bool,
    paths: Sequence[str],
    heads: Sequence[bytes],
    files: Sequence[Sequence[_Output]],
) -> None:
    """Makes the files, each with its header and its size."""
    if not single:
        os.mkdir(partial)
    for path, head, rows in zip(paths, heads, files, strict=True):
        with open(path, "xb") as file:
            file.write(head)
            size = len(head) + sum(row.nbytes for row in rows)
            file.truncate(size)
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, size))
            except OSError as error:
                if error.errno != 95:  # EOPNOTSUPP: found out by writing
                    raise ValueError(
                        f"{path} cannot be written: {error.strerror} ({show_bytes(size)})"
                    ) from error


def _complete(
    partial: str,
    place: str,
    single: bool,
    paths: Sequence[str],
    files: Sequence[Sequence[_Output]],
    config: Mapping[str, Any] | None,
) -> None:
    """Adds the index and the config, and gives the folder its name."""
    if not single:
        if len(files) > 1:
            listed = {
                row.key: os.path.basename(path)
                for path, rows in zip(paths, files, strict=True)
                for row in rows
            }
            total = sum(row.nbytes for rows in files for row in rows)
            index = {"metadata": {"total_size": total}, "weight_map": listed}
            _write_json(os.path.join(partial, INDEX), index)
        if config is not None:
            _write_json(os.path.join(partial, CONFIG), config)
        _sync(partial)
    _require_free(place)
    os.rename(partial, place)
    _sync(os.path.dirname(place))


def _write_json(path: str, value: Any) -> None:
    with open(path, "x", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: str) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _remove(partial: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(partial)
    shutil.rmtree(partial, ignore_errors=True)


def _write(
    paths: Sequence[str], outputs: Sequence[_Output], leaves: Sequence[Leaf], arrays: Sequence[Any]
) -> None:
    """Writes the shards of this process."""
    by_leaf: list[list[tuple[_Output, Piece]]] = [[] for _ in leaves]
    for row in outputs:
        for number, piece in row.pieces:
            by_leaf[number].append((row, piece))
    with contextlib.ExitStack() as stack:
        fds = []
        for path in paths:
            fds.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
            stack.callback(os.close, fds[-1])
        pool = stack.enter_context(ThreadPoolExecutor(Reader.workers, "shardwise-weights"))
        for rows, array in zip(by_leaf, arrays, strict=True):
            for shards in _batches(array) if rows else ():
                reads = [
                    pool.submit(_write_block, fds[row.file], row, block, piece, scatters)
                    for row, piece in rows
                    if (scatters := scatters_of(piece, shards))
                    for box in join_boxes(scatter.box for scatter in scatters)
                    for loop in loops_of(piece, box)
                    for block in blocks_of(
                        loop, strides_of(piece), piece.view.offset, 0,
                        block_elements(piece, [scatters[0].box], row.dtype.itemsize, scatters[0].shard.dtype != row.dtype),
                    )
                ]  # fmt: skip
                for read in reads:
                    read.result()
        for fd in fds:
            os.fsync(fd)


def _batches(array: Any) -> Iterator[list[Shard]]:
    """Yields the shards of an array that this process writes, few at a time."""
    if not isinstance(array, jax.Array):
        array = jax.numpy.asarray(array)
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    if not shards:
        return
    size = max(1, shards[0].data.nbytes)
    on_cpu = shards[0].device.platform == "cpu"  # where there is nothing to copy
    many = len(shards) if on_cpu else max(1, _WAITING_BYTES // size)
    for start in range(0, len(shards), many):
        found = []
        for shard in shards[start : start + many]:
            data = np.ascontiguousarray(np.asarray(shard.data))
            flat = data.reshape(-1).view(np.uint8)
            found.append(Shard(box_of(shard.index, array.shape), flat, data.dtype))
        yield found


def _write_block(
    fd: int, row: _Output, block: Block, piece: Piece, scatters: Sequence[Any]
) -> None:
    size = row.dtype.itemsize
    copies = [copy for scatter in scatters for copy in scatter.within(block)]
    segments: list[tuple[int, memoryview]] | None = []
    for copy in copies:
        found = copy.segments(strides_of(piece), block, row.dtype)
        if found is None:
            segments = None
            break
        segments += found
    if segments is not None:
        segments.sort(key=lambda pair: pair[0])
        number = 0
        for first, count in block.extents:
            buffers = []
            while number < len(segments) and segments[number][0] < first + count:
                buffers.append(segments[number][1])
                number += 1
            _drain(fd, buffers, row.start + first * size)
        return
    staged = np.empty(block.elements * size, np.uint8)
    for copy in copies:
        copy.write(staged, block, row.dtype)
    for number, (first, count) in enumerate(block.extents):
        part = staged.data[number * block.pitch * size :][: count * size]
        _drain(fd, [part], row.start + first * size)


def _drain(fd: int, buffers: list[memoryview], offset: int) -> None:
    """Writes buffers one after the other."""
    first = 0
    while first < len(buffers):
        count = os.pwritev(fd, buffers[first : first + MOST_BUFFERS], offset)
        offset += count
        while first < len(buffers) and count >= len(buffers[first]):
            count -= len(buffers[first])
            first += 1
        if count:
            buffers[first] = buffers[first][count:]
