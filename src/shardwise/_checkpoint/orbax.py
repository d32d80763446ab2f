"""Where Orbax is called: a step's directory written whole or not at all, and read in shards.

The one module that imports Orbax, and imported only when a checkpoint is written or read: with
TensorStore it takes seconds, and planning needs neither.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from .._jax import commit_future
from .step_files import write_sizes

# Small enough that a process which needs part of a chunk reads little more than its part.
_CHUNK_BYTES = 2**22
_AT_ONCE_BYTES = 2**27


class FilesHandler(ocp.AsyncCheckpointHandler):
    """Writes small text files, whose texts are made in the background, on the first process."""

    async def async_save(self, directory: Any, args: FilesSave) -> list[ocp.Future]:  # pyright: ignore[reportIncompatibleMethodOverride] - Orbax passes args by name
        """Returns what stands for the files being written."""

        async def write() -> None:
            # Made by every process: what one raises, all raise, and none waits for another.
            texts = {name: make_text() for name, make_text in args.files.items()}
            if jax.process_index() == 0:
                for name, text in texts.items():
                    (directory / name).write_text(text)

        return [commit_future()(write(), name="files")]

    def save(self, directory: Any, args: FilesSave) -> None:
        """Writes the files at once."""
        for name, make_text in args.files.items():
            (directory / name).write_text(make_text())

    def restore(self, directory: Any, args: Any = None) -> dict[str, str]:
        """Returns the files' texts by name."""
        return {path.name: path.read_text() for path in directory.iterdir()}


@ocp.args.register_with_handler(FilesHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class FilesSave(ocp.args.CheckpointArgs):
    """The files to write: for each name, a function that makes its text."""

    files: Mapping[str, Callable[[], str]]


class AllEnded:
    """Ends when each of some futures has, and then raises what the first failing one raised.

    Orbax stops waiting at the first that fails: the others would go on writing into a directory
    that is about to be removed.
    """

    def __init__(self, futures: Sequence[ocp.Future]):
        """Names the futures."""
        self._futures = futures

    def result(self, timeout: float | None = None) -> None:
        """Waits for all of them."""
        until = None if timeout is None else time.monotonic() + timeout
        failed: list[Exception] = []
        for one in self._futures:
            try:
                one.result(None if until is None else max(0.0, until - time.monotonic()))
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def cancel(self) -> None:
        """Cancels all of them."""
        for one in self._futures:
            one.cancel()


class StepHandler(ocp.CompositeCheckpointHandler):
    """Writes a step's arrays and files, and fails when none of them is being written any more."""

    async def async_save(self, directory: Any, args: Any) -> list[ocp.Future]:  # pyright: ignore[reportIncompatibleMethodOverride] - Orbax passes args by name
        """Returns what stands for everything being written."""
        return [AllEnded(await super().async_save(directory, args) or [])]

    def finalize(self, directory: Any) -> None:
        """Writes the sizes of the files when all of them are there, before the step appears."""
        super().finalize(directory)
        write_sizes(Path(directory))


@ocp.args.register_with_handler(StepHandler, for_save=True, for_restore=True)
class StepSave(ocp.args.Composite):
    """What a step consists of, by name."""


class Writer:
    """Saves asynchronously, one step at a time."""

    def __init__(self) -> None:
        """Starts no thread before the first save."""
        commit_future()  # were it not there, that is said before anything is written
        handler = StepHandler(
            # Trained weights hardly compress, and compressing them takes most of a save.
            state=ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False),
            about=FilesHandler(),
        )
        # Made in the background, a directory that cannot be made would be waited for by threads
        # that keep the process from ending for five minutes.
        options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        self._checkpointer = ocp.AsyncCheckpointer(handler, async_options=options)

    def save(self, directory: Path, arrays: Any, files: Mapping[str, Callable[[], str]]) -> None:
        """Begins to save; returns as soon as the arrays may be given away.

        Args:
            directory: the step's directory, which appears when all of it is written.
            arrays: a pytree of arrays.
            files: small files by name; their texts are made in the background.
        """
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), arrays)
        with _quiet():
            self._checkpointer.save(
                directory,
                args=StepSave(
                    state=ocp.args.PyTreeSave(arrays, save_args=save_args),
                    about=FilesSave(files),
                ),
            )

    def wait(self) -> None:
        """Returns when everything is committed, or raises what went wrong."""
        with _quiet():
            self._checkpointer.wait_until_finished()

    def close(self) -> None:
        """Ends its threads."""
        self._checkpointer.close()


def read_arrays(directory: Path, abstract: Any) -> Any:
    """Returns the arrays under a directory, each process reading its own shards.

    Args:
        directory: where the arrays of a step are.
        abstract: a pytree of `jax.ShapeDtypeStruct`s with shardings.
    """

    def one(leaf: Any) -> Any:
        return ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=True
        )

    # What is read at one time is held twice: so little of it, and yet enough for one shard.
    shards = (leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(abstract))
    sizes = zip(shards, jax.tree.leaves(abstract), strict=True)
    largest = max(math.prod(shape) * leaf.dtype.itemsize for shape, leaf in sizes)
    at_once: Any = max(_AT_ONCE_BYTES, 2 * largest) / 1e9  # a number of GB, whole or not
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, restore_concurrent_gb=at_once)
    args = ocp.args.PyTreeRestore(abstract, restore_args=jax.tree.map(one, abstract))
    # Before the first read: those beside one that fails may end before it is known here.
    _ignore_stragglers()
    with _quiet():
        try:
            with contextlib.closing(ocp.Checkpointer(handler)) as checkpointer:
                return checkpointer.restore(directory, args=args)
        except Exception as error:
            told = str(error).partition(" [tensorstore_spec")[0]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            gc.collect()
    raise OSError(told)


def _ignore_stragglers() -> None:
    """Keeps reads beside one that failed from printing their own tracebacks.

    They end whenever they end, after Orbax has closed its event loop, so the hooks stay.
    """
    if not isinstance(sys.unraisablehook, _Unraisable):
        sys.unraisablehook = _Unraisable(sys.unraisablehook)
    logger = logging.getLogger("asyncio")
    if _is_no_straggler not in logger.filters:
        logger.addFilter(_is_no_straggler)


class _Unraisable:
    """Ignores what Orbax's coroutines raise when nobody awaits them; passes on all else."""

    def __init__(self, before: Callable[[Any], None]):
        self._before = before

    def __call__(self, unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        if "orbax" in getattr(code, "co_filename", ""):
            return
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and "loop is closed" in str(error)):
            self._before(unraisable)


def _is_no_straggler(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not ("never retrieved" in text and ("orbax" in text or "tensorstore" in text))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax from warning of what is meant here, such as a restore onto another mesh."""
    loggers = {"absl": logging.CRITICAL, "asyncio": logging.CRITICAL}
    before = {name: logging.getLogger(name).level for name in loggers}
    for name, level in loggers.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
