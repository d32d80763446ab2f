"""Saving: a model's shards as a folder of `.safetensors` files, as Hugging Face has them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from flax import nnx

from .._base import cleaned_up_on_signal, public, show_bytes
from .._nnx import Leaf, abstract_model, leaves_of
from .._processes import exchange, together
from .files import CONFIG, INDEX
from .naming import Names
from .outputs import Output, arrange, header_of, outputs_of, own_config
from .portions import box_of
from .reading import MOST_BUFFERS, Reader, Shard, block_elements, scatters_of
from .regions import Block, Piece, blocks_of, join_boxes, loops_of, strides_of

_WAITING_BYTES = 128 * 2**20


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
        outputs = outputs_of(abstract, leaves, names, dtype, like)
        files = arrange(outputs, math.inf if single else max_file_bytes)
        about = config if config is not None else own_config(abstract)
        parts = [header_of(rows) for rows in files]
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
    files: Sequence[Sequence[Output]],
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
    files: Sequence[Sequence[Output]],
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
    paths: Sequence[str], outputs: Sequence[Output], leaves: Sequence[Leaf], arrays: Sequence[Any]
) -> None:
    """Writes the shards of this process."""
    by_leaf: list[list[tuple[Output, Piece]]] = [[] for _ in leaves]
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


def _write_block(fd: int, row: Output, block: Block, piece: Piece, scatters: Sequence[Any]) -> None:
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
