"""Data: Grain pipelines whose order depends on the seed alone, each process reading its part."""

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
    whole_rows,
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
    """Returns samples to train on, in an order that depends on the seed alone.

    Whatever the mesh and the number of processes, batch b has the same samples in the same
    places; each process reads only those that its devices hold. Each epoch has an order of its
    own, and batches go on over the end of one.

    Args:
        source: a file of tokens (`.npy`, or raw numbers with `dtype`); an array, or a pytree of
            arrays with as many rows; or anything with `len` and `[i]`, such as a Grain
            `MapDataset` or a source of Grain's.
        length: cuts tokens into samples of so many, without overlap, as int32; for a file, or
            an array of one dim.
        dtype: the dtype of a raw file of tokens.
        shuffle: whether samples are shuffled.
        seed: the order's seed.
        epochs: how often each sample is seen; without end if None.
        transform: applied to each sample after it is read.
        prefetch: how many batches are read ahead.

    Raises:
        ValueError: the source is none of these, or has no sample.

    Example:
        >>> import numpy as np, shardwise as sw
        >>> tokens = sw.data(np.arange(1000), length=10)
        >>> len(tokens)
        100
    """
    if prefetch < 1:
        raise ValueError(f"prefetch={prefetch} would never read a batch: give 1 or more")
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs={epochs} would see no sample: give 1 or more, or None")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} is no seed of Grain's: give a number from 0 to 2**32 - 1")
    samples = _samples(source, length, dtype)
    if len(samples) < 1:
        raise ValueError("the data has no sample")
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
        """Returns an iterator over global batches, placed as the layout says.

        Args:
            recipe: says what one batch is.
            layout: says how it is split, and over which processes.
            position: how many samples were read before.
        """
        return self.on(make_blueprint(recipe, layout), position=position)

    def on(
        self, blueprint: Blueprint, *, position: int = 0, bounds: Sequence[Bound] = ()
    ) -> Batches:
        """Returns the same for a blueprint that is made already, its integers within bounds."""
        return Batches(self, blueprint, position, bounds)


class Batches(Iterator[Any]):
    """An iterator over global batches.

    Attributes:
        position: how many samples the batches that were taken had; saved in checkpoints.
    """

    def __init__(
        self, given: Data, blueprint: Blueprint, position: int, bounds: Sequence[Bound] = ()
    ):
        """Starts to read ahead."""
        import grain

        if position < 0:
            raise ValueError(f"position={position} is before the first sample: give 0 or more")
        self.size = _batch_size(blueprint.batch)
        self.position = position
        if len(given) < self.size:
            raise ValueError(
                f"the data has {count(len(given), 'sample')}, fewer than one batch of {self.size}, so "
                f"that a batch would have samples twice: give more data, or a recipe with a smaller "
                f"batch"
            )
        self._put = Putter(blueprint)

        def in_order(source: Any) -> Any:
            dataset = grain.MapDataset.source(source)
            if given.shuffle:
                dataset = dataset.shuffle(seed=given.seed)
            return dataset.repeat(given.epochs)

        dataset = in_order(_Transformed(given.samples, given.transform))
        # Where a sample stands in the source, for errors.
        numbers = in_order(range(len(given)))
        parts = _Parts(dataset, numbers, blueprint, self.size, position, bounds)
        if len(parts) < 1:
            raise ValueError(
                f"the data has {max(len(dataset) - position, 0)} samples left of {len(dataset)}, fewer "
                f"than one batch of {self.size}: give more epochs, or none"
            )
        options = grain.ReadOptions(num_threads=given.prefetch, prefetch_buffer_size=given.prefetch)
        self._read = iter(grain.MapDataset.source(parts).to_iter_dataset(options))
        self._ahead: collections.deque[Any] = collections.deque()
        self._most = given.prefetch

    def __next__(self) -> Any:
        """Returns the next batch, on its devices."""
        # Placing is asynchronous, so one batch ahead travels while a step computes.
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
    """A source with each sample transformed. Grain would take None for a sample to leave out."""

    def __init__(self, samples: Any, transform: Callable[[Any], Any] | None):
        self.samples, self.transform = samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        sample = self.samples[index]
        if sample is None:
            raise ValueError(
                f"sample {int(index)} of the data is None: a source must have a sample for each "
                f"index below its len; one that was filtered has gaps"
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
    """This process's part of each batch, stacked: a source of Grain's."""

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
        self.planned, self.bounds = blueprint.batch, whole_rows(bounds, blueprint.batch)
        self.spans = [local_spans(leaf) for leaf in jax.tree.leaves(self.planned)]
        self.treedef = jax.tree.structure(self.planned)
        held = {row for spans in self.spans for row in _indices(spans[0])}
        self.rows = sorted(held)

    def __len__(self) -> int:
        return max(len(self.dataset) - self.position, 0) // self.size

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._part(index)
        except Exception as error:
            # Raised here, it would carry a paragraph of Grain's about its own frames.
            return _Failed(error)

    def _part(self, index: Any) -> Any:
        first = self.position + int(index) * self.size
        samples = [self.dataset[first + row] for row in self.rows]
        stacked = jax.tree.map(_stack, *samples)
        if jax.tree.structure(stacked) != self.treedef:
            return stacked  # the placing says what is wrong
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
        """Refuses samples of another shape, here: what is cut for this process no longer shows it."""
        for (name, x), want in zip(
            named_batch(stacked), jax.tree.leaves(self.planned), strict=True
        ):
            if x.shape[1:] != want.shape[1:]:
                raise ValueError(
                    f"a sample is not the recipe's: its {name} has shape {x.shape[1:]}, wanted "
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
        raise ValueError(f"samples of one batch have different shapes: {sorted(shapes)[:4]}")
    return np.stack(arrays)


def _box(x: np.ndarray, spans: Sequence[Any], rows: Sequence[int]) -> np.ndarray:
    """Returns what this process holds of rows that were read whole."""
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
            f"the recipe's batch has leaves of {sorted(sizes)} samples (dim 0): data makes batches "
            f"whose leaves all have as many"
        )
    return sizes.pop()


def _samples(source: Any, length: int | None, dtype: Any) -> Any:
    if isinstance(source, str | os.PathLike):
        if length is None:
            raise ValueError(
                f"the file of tokens {source} is not cut into samples: "
                + either(
                    "give length=, the tokens of one sample",
                    "give --length N, the tokens of one sample",
                )
            )
        source = _open(Path(source), dtype)
    if length is not None:
        return _Windows(source, length)
    if isinstance(source, np.ndarray | jax.Array | Mapping | tuple):
        return _Rows(source)
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise ValueError(
            f"the data is a {type(source).__name__}: give a file of tokens, arrays, or a source "
            f"with len and [i]"
        )
    return source


def _open(path: Path, dtype: Any) -> np.ndarray:
    if not path.is_file():
        raise ValueError(f"the file of tokens {path} does not exist")
    if path.suffix != ".npy" and dtype is None:
        raise ValueError(
            f"the file of tokens {path} has no header that says its dtype: "
            + either("give dtype=, such as 'uint16'", "give --dtype, such as uint16")
        )
    try:
        if path.suffix == ".npy":
            return np.load(path, mmap_mode="r")
        return np.memmap(path, dtype=dtype, mode="r")
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"the file of tokens {path} cannot be read: {error}") from error


class _Windows:
    """Tokens cut into samples."""

    def __init__(self, tokens: Any, length: int):
        if getattr(tokens, "ndim", None) != 1 or not np.issubdtype(tokens.dtype, np.integer):
            shown = f"{getattr(tokens, 'dtype', type(tokens).__name__)}"
            raise ValueError(
                f"length={length} cuts one row of tokens, got {shown} of shape "
                f"{getattr(tokens, 'shape', '?')}: give integers of one dim"
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
                    f"token {sample[wrong[0]]} at index {start + wrong[0]} of the tokens does not "
                    f"fit int32"
                )
        return sample.astype("int32")


class _Rows:
    """The rows of arrays of the same length."""

    def __init__(self, arrays: Any):
        self.arrays = jax.tree.map(np.asarray, arrays)
        counts = {x.shape[0] if x.ndim else -1 for x in jax.tree.leaves(self.arrays)}
        if len(counts) != 1 or -1 in counts:
            shapes = jax.tree.map(lambda x: x.shape, self.arrays)
            raise ValueError(f"arrays of samples need as many rows (dim 0) each, got {shapes}")
        self.count: int = counts.pop()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        return jax.tree.map(lambda x: x[int(index)], self.arrays)


class _Replayed(Iterator[Any]):
    """Batches of any iterable, wound forward to where a run left off."""

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
    given: Any, blueprint: Blueprint, position: int, bounds: Sequence[Bound] = ()
) -> Batches | _Replayed:
    """Returns the batches after `position` samples, of a `Data` or of any iterable of batches.

    Integers out of `bounds` are refused when their batch is read.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(given, Data):
        return given.on(blueprint, position=position, bounds=bounds)
    if not hasattr(given, "__iter__"):
        raise ValueError(
            f"the data is a {type(given).__name__}: give sw.data(…), or an iterable of batches"
        )
    return _Replayed(given, blueprint, position, bounds)
