"""Data: Grain pipelines whose order depends only on the seed; each process reads its part."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._base import count, either, public
from .._layout import Layout
from .._nnx import Recipe
from .._step import (
    Blueprint,
    Bound,
    local_spans,
    make_blueprint,
    named_batch,
    require_integers,
    row_bounds,
)
from .train import Putter

_INT32 = np.iinfo("int32")


@public
def data(
    source: Any,
    *,
    length: int | None = None,
    dtype: Any = None,
    shuffle: bool = True,
    seed: int = 0,
    epochs: int | None = None,
    transform: Callable[[Any], Any] | None = None,
    prefetch: int = 2,
) -> Data:
    """Returns samples to train on, in an order that depends only on the seed.

    Whatever the mesh and the number of processes, batch b has the same samples in the same
    order; each process reads only those that its devices hold. Each epoch is shuffled
    differently, and a batch may span the end of one epoch and the start of the next.

    Args:
        source: a token file (`.npy`, or raw numbers with `dtype`); an array, or a pytree of
            arrays with the same number of rows; or anything with `len` and `[i]`, such as a Grain
            `MapDataset` or data source.
        length: the number of tokens per sample, to cut a file or a one-dimensional array of tokens
            into int32 samples without overlap. A shorter remainder at the end is dropped.
        dtype: the dtype of a raw token file.
        shuffle: whether to shuffle the samples.
        seed: the seed of the order.
        epochs: how many times to go through the samples; None repeats them forever. Samples at the
            very end that do not fill a batch are dropped.
        transform: a function applied to each sample after it is read.
        prefetch: how many batches to read ahead.

    Raises:
        ValueError: the source is none of these, or is empty.

    Example:
        >>> import numpy as np, shardwise as sw
        >>> tokens = sw.data(np.arange(1000), length=10)
        >>> len(tokens)
        100
    """
    if prefetch < 1:
        raise ValueError(f"prefetch must be a positive integer, got {prefetch}")
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs must be a positive integer or None, got {epochs}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2**32 - 1, as Grain requires, got {seed}")
    samples = _samples(source, length, dtype)
    if len(samples) < 1:
        raise ValueError("the data has no samples")
    return Data(samples, shuffle, seed, epochs, transform, prefetch)


@public
@dataclasses.dataclass(frozen=True, eq=False)
class Data:
    """Samples and their order. Made by `sw.data`; `len` is the number of samples."""

    samples: Any
    shuffle: bool
    seed: int
    epochs: int | None
    transform: Callable[[Any], Any] | None
    prefetch: int

    def __len__(self) -> int:
        """Returns the number of samples in one epoch."""
        return len(self.samples)

    def batches(self, recipe: Recipe, layout: Layout, *, position: int = 0) -> Batches:
        """Returns an iterator over global batches, placed according to the layout.

        Args:
            recipe: the recipe, which defines the shape of a batch.
            layout: the layout, which defines how a batch is split and over which processes.
            position: how many samples have already been read.
        """
        return self.on(make_blueprint(recipe, layout), position=position)

    def on(
        self, blueprint: Blueprint, *, position: int = 0, bounds: Sequence[Bound] = ()
    ) -> Batches:
        """Returns the same for an existing blueprint, checking integers against `bounds`."""
        return Batches(self, blueprint, position, bounds)


class Batches(Iterator[Any]):
    """An iterator over global batches.

    Attributes:
        position: how many samples the batches returned so far had; saved in checkpoints.
    """

    def __init__(
        self, data: Data, blueprint: Blueprint, position: int, bounds: Sequence[Bound] = ()
    ):
        """Starts to read ahead."""
        import grain

        if position < 0:
            raise ValueError(f"position must be a non-negative integer, got {position}")
        self.size = _batch_size(blueprint.batch)
        self.position = position
        if len(data) < self.size:
            raise ValueError(
                f"the data has {count(len(data), 'sample')}, fewer than one batch of {self.size}, so a "
                f"batch would repeat samples: give more data, or a recipe with a smaller batch"
            )
        self._put = Putter(blueprint)

        def in_order(source: Any) -> Any:
            dataset = grain.MapDataset.source(source)
            if data.shuffle:
                dataset = dataset.shuffle(seed=data.seed)
            return dataset.repeat(data.epochs)

        dataset = in_order(_Transformed(data.samples, data.transform))
        # The index of each sample in the source, for errors.
        numbers = in_order(range(len(data)))
        parts = _Parts(dataset, numbers, blueprint, self.size, position, bounds)
        if len(parts) < 1:
            raise ValueError(
                f"the data has {max(len(dataset) - position, 0)} samples left of {len(dataset)}, fewer "
                f"than one batch of {self.size}: give more epochs, or epochs=None"
            )
        options = grain.ReadOptions(num_threads=data.prefetch, prefetch_buffer_size=data.prefetch)
        self._read = iter(grain.MapDataset.source(parts).to_iter_dataset(options))
        self._ahead: collections.deque[Any] = collections.deque()
        self._most = data.prefetch

    def __next__(self) -> Any:
        """Returns the next batch, on its devices."""
        # Placement is asynchronous, so the next batch is transferred while a step computes.
        while len(self._ahead) < self._most:
            try:
                self._ahead.append(self._put(_raised(next(self._read))))
            except StopIteration:
                break
        if not self._ahead:
            raise StopIteration
        self.position += self.size
        return self._ahead.popleft()


class _Transformed:
    """A source with each sample transformed. Grain would skip a sample that is None."""

    def __init__(self, samples: Any, transform: Callable[[Any], Any] | None):
        self.samples, self.transform = samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        sample = self.samples[index]
        if sample is None:
            raise ValueError(
                f"sample {int(index)} of the data is None: a source must have a sample for each "
                f"index below its len; a filtered dataset has gaps"
            )
        if self.transform is None:
            return sample
        sample = self.transform(sample)
        if sample is None:
            raise ValueError(
                f"transform returned None for sample {int(index)}: it must return the sample"
            )
        return sample


class _Parts:
    """This process's part of each batch, stacked, as a Grain data source."""

    def __init__(
        self,
        dataset: Any,
        numbers: Any,
        blueprint: Blueprint,
        size: int,
        position: int,
        bounds: Sequence[Bound],
    ):
        self.dataset, self.numbers, self.size, self.position = dataset, numbers, size, position
        self.planned, self.bounds = blueprint.batch, row_bounds(bounds, blueprint.batch)
        self.spans = [local_spans(leaf) for leaf in jax.tree.leaves(self.planned)]
        self.treedef = jax.tree.structure(self.planned)
        self.rows = sorted({row for spans in self.spans for row in _indices(spans[0])})

    def __len__(self) -> int:
        return max(len(self.dataset) - self.position, 0) // self.size

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._part(index)
        except Exception as error:
            # If raised here, Grain would add a paragraph about its own frames.
            return _Failed(error)

    def _part(self, index: Any) -> Any:
        first = self.position + int(index) * self.size
        samples = [self.dataset[first + row] for row in self.rows]
        stacked = jax.tree.map(_stack, *samples)
        if jax.tree.structure(stacked) != self.treedef:
            return stacked  # reported when the batch is placed
        self._require_shapes(stacked)
        require_integers(
            stacked,
            self.planned,
            self.bounds,
            lambda row: int(self.numbers[first + self.rows[row]]),
        )
        flat = [
            _box(x, spans, self.rows)
            for x, spans in zip(jax.tree.leaves(stacked), self.spans, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, flat)

    def _require_shapes(self, stacked: Any) -> None:
        """Raises if a sample has the wrong shape; once cut for this process, it is hard to tell."""
        for (name, x), want in zip(
            named_batch(stacked), jax.tree.leaves(self.planned), strict=True
        ):
            if x.shape[1:] != want.shape[1:]:
                raise ValueError(
                    f"a sample does not match the recipe: its {name} has shape {x.shape[1:]}, wanted "
                    f"{want.shape[1:]}, since a batch is {want.dtype}{list(want.shape)}"
                )


@dataclasses.dataclass(frozen=True)
class _Failed:
    error: Exception


def _raised(part: Any) -> Any:
    if isinstance(part, _Failed):
        raise part.error
    return part


def _stack(*xs: Any) -> np.ndarray:
    arrays = [np.asarray(x) for x in xs]
    shapes = {x.shape for x in arrays}
    if len(shapes) > 1:
        raise ValueError(f"the samples of a batch have different shapes: {sorted(shapes)[:4]}")
    return np.stack(arrays)


def _box(x: np.ndarray, spans: Sequence[Any], rows: Sequence[int]) -> np.ndarray:
    """Returns this process's part of complete rows."""
    for dim, parts in enumerate(spans):
        kept = _indices(parts)
        if dim == 0:
            kept = [rows.index(row) for row in kept] if kept != rows else range(len(rows))
        if len(kept) < x.shape[dim]:
            x = np.take(x, list(kept), axis=dim)
    return x


def _indices(spans: Any) -> list[int]:
    return [i for start, stop in spans for i in range(start, stop)]


def _batch_size(planned: Any) -> int:
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(planned) if leaf.shape}
    if len(sizes) != 1 or any(not leaf.shape for leaf in jax.tree.leaves(planned)):
        raise ValueError(
            f"the leaves of the recipe's batch have {sorted(sizes)} samples (dim 0): sw.data needs "
            f"the same number of samples in every leaf"
        )
    return sizes.pop()


def _samples(source: Any, length: int | None, dtype: Any) -> Any:
    if isinstance(source, str | os.PathLike):
        if length is None:
            raise ValueError(
                f"the token file {source} must be cut into samples: "
                + either(
                    "give length=, the number of tokens per sample",
                    "give --length N, the number of tokens per sample",
                )
            )
        source = _open(Path(source), dtype)
    if length is not None:
        return _Windows(source, length)
    if isinstance(source, np.ndarray | jax.Array | Mapping | tuple):
        return _Rows(source)
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise ValueError(
            f"the data has type {type(source).__name__}: give a token file, arrays, or a source "
            f"with len and [i]"
        )
    return source


def _open(path: Path, dtype: Any) -> np.ndarray:
    if not path.is_file():
        raise ValueError(f"the token file {path} does not exist")
    if path.suffix != ".npy" and dtype is None:
        raise ValueError(
            f"the token file {path} has no header with its dtype: "
            + either("give dtype=, such as 'uint16'", "give --dtype, such as uint16")
        )
    try:
        if path.suffix == ".npy":
            return np.load(path, mmap_mode="r")
        return np.memmap(path, dtype=dtype, mode="r")
    except Exception as error:
        # NumPy parses the header of a .npy file as Python: tokens, literals, whatever fails in them.
        raise ValueError(f"the token file {path} cannot be read: {error}") from error


class _Windows:
    """Tokens cut into samples."""

    def __init__(self, tokens: Any, length: int):
        if getattr(tokens, "ndim", None) != 1 or not np.issubdtype(tokens.dtype, np.integer):
            shown = f"{getattr(tokens, 'dtype', type(tokens).__name__)}"
            raise ValueError(
                f"length={length} needs a one-dimensional array of integers, got {shown} of shape "
                f"{getattr(tokens, 'shape', '?')}"
            )
        if length < 1 or len(tokens) < length:
            raise ValueError(f"length={length} cannot cut {len(tokens)} tokens into samples")
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: Any) -> np.ndarray:
        start = int(index) * self.length
        sample = np.asarray(self.tokens[start : start + self.length])
        if not np.can_cast(sample.dtype, "int32"):
            wrong = np.flatnonzero((sample < _INT32.min) | (sample > _INT32.max))
            if wrong.size:
                raise ValueError(
                    f"token {sample[wrong[0]]} at index {start + wrong[0]} does not fit int32"
                )
        return sample.astype("int32")


class _Rows:
    """The rows of arrays that all have the same number of them."""

    def __init__(self, arrays: Any):
        self.arrays = jax.tree.map(np.asarray, arrays)
        counts = {x.shape[0] if x.ndim else -1 for x in jax.tree.leaves(self.arrays)}
        if len(counts) != 1 or -1 in counts:
            shapes = jax.tree.map(lambda x: x.shape, self.arrays)
            raise ValueError(
                f"arrays of samples must have the same number of rows (dim 0), got {shapes}"
            )
        self.count: int = counts.pop()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        return jax.tree.map(lambda x: x[int(index)], self.arrays)


class _Replayed(Iterator[Any]):
    """Batches from any iterable, advanced to where a run left off."""

    def __init__(self, batches: Any, blueprint: Blueprint, position: int, bounds: Sequence[Bound]):
        self.size = max(
            (x.shape[0] for x in jax.tree.leaves(blueprint.batch) if x.shape), default=1
        )
        self.position = position
        self._put = Putter(blueprint, bounds)
        self._rest = iter(batches)
        for _ in range(position // self.size):
            next(self._rest, None)

    def __next__(self) -> Any:
        batch = self._put(next(self._rest))
        self.position += self.size
        return batch


def open_batches(
    data: Any, blueprint: Blueprint, position: int, bounds: Sequence[Bound] = ()
) -> Batches | _Replayed:
    """Returns the batches after `position` samples, from a `Data` or any iterable of batches.

    Integers outside `bounds` are an error when their batch is read.

    Raises:
        ValueError: the data is neither.
    """
    if isinstance(data, Data):
        return data.on(blueprint, position=position, bounds=bounds)
    if not hasattr(data, "__iter__"):
        raise ValueError(
            f"the data has type {type(data).__name__}: give sw.data(…), or an iterable of batches"
        )
    return _Replayed(data, blueprint, position, bounds)
