"""Calls Orbax: writes a step's directory completely or not at all, and reads it in shards.

This is the only module that imports Orbax, and it is imported only when a checkpoint is written or
read: importing Orbax and TensorStore takes seconds, and planning needs neither.
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
from .step_files import write_new, write_sizes

# Small enough that a process that needs part of a chunk reads little more than that part.
_CHUNK_BYTES = 2**22
_AT_ONCE_BYTES = 2**27


class FilesHandler(ocp.AsyncCheckpointHandler):
    """Writes small text files on the first process; their texts are computed in the background."""

    async def async_save(self, directory: Any, args: FilesSave) -> list[ocp.Future]:  # pyright: ignore[reportIncompatibleMethodOverride] - Orbax passes args by name
        """Returns a future for the files being written."""

        async def write() -> None:
            # Computed by every process: all raise the same error, and none waits for another.
            texts = {name: make_text() for name, make_text in args.files.items()}
            if jax.process_index() == 0:
                for name, text in texts.items():
                    write_new(Path(directory) / name, text)

        return [commit_future()(write(), name="files")]

    def save(self, directory: Any, args: FilesSave) -> None:
        """Writes the files at once."""
        for name, make_text in args.files.items():
            write_new(Path(directory) / name, make_text())

    def restore(self, directory: Any, args: Any = None) -> dict[str, str]:
        """Returns the files' texts by name."""
        return {path.name: path.read_text() for path in directory.iterdir()}


@ocp.args.register_with_handler(FilesHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class FilesSave(ocp.args.CheckpointArgs):
    """The files to write: for each name, a function that returns its text."""

    files: Mapping[str, Callable[[], str]]


class AllEnded:
    """Waits for all of some futures, and then raises the error of the first that failed.

    Orbax stops waiting at the first failure: the others would keep writing to a directory that is
    about to be removed.
    """

    def __init__(self, futures: Sequence[ocp.Future]):
        """Takes the futures to wait for."""
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
    """Writes a step's arrays and files; fails only once none of them is still being written."""

    async def async_save(self, directory: Any, args: Any) -> list[ocp.Future]:  # pyright: ignore[reportIncompatibleMethodOverride] - Orbax passes args by name
        """Returns a future for everything being written."""
        return [AllEnded(await super().async_save(directory, args) or [])]

    def finalize(self, directory: Any) -> None:
        """Writes the file sizes once all files exist, before the step appears."""
        super().finalize(directory)
        write_sizes(Path(directory))


@ocp.args.register_with_handler(StepHandler, for_save=True, for_restore=True)
class StepSave(ocp.args.Composite):
    """The items of a step, by name."""


class Writer:
    """Saves asynchronously, one step at a time."""

    def __init__(self) -> None:
        """Starts no thread before the first save."""
        commit_future()  # if it is missing, fail before anything is written
        handler = StepHandler(
            # Trained weights hardly compress, and compression would take most of the time.
            state=ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False),
            about=FilesHandler(),
        )
        # If directories were created in the background and that failed, threads would wait for them
        # and keep the process from exiting for five minutes.
        options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        self._checkpointer = ocp.AsyncCheckpointer(handler, async_options=options)
        self._stragglers: _Stragglers | None = None
        self._quiet = contextlib.ExitStack()

    def save(self, directory: Path, arrays: Any, files: Mapping[str, Callable[[], str]]) -> None:
        """Starts to save, and returns as soon as the arrays may be donated.

        Args:
            directory: the step's directory, which appears once it is completely written.
            arrays: a pytree of arrays.
            files: small files by name; their texts are computed in the background.
        """
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), arrays)
        # Before the first write: others may end before the failure of one is known here.
        self._stragglers = _ignore_stragglers()
        # Until it is waited for: what fails in the background is raised then, and logged before.
        self._quiet.enter_context(_quiet())
        with self._failing_quietly():
            self._checkpointer.save(
                directory,
                args=StepSave(
                    state=ocp.args.PyTreeSave(arrays, save_args=save_args),
                    about=FilesSave(files),
                ),
            )

    def wait(self) -> None:
        """Waits until everything is committed, or raises the error of the save."""
        with _quiet(), self._failing_quietly():
            self._checkpointer.wait_until_finished()
        self._quiet.close()
        if self._stragglers is not None:
            self._stragglers.put_back()

    @contextlib.contextmanager
    def _failing_quietly(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            if self._stragglers is not None:
                self._stragglers.expected = True
            _collect_quietly()
            self._quiet.pop_all()  # other threads of this save may fail later, and say so then
            raise

    def close(self) -> None:
        """Stops its threads."""
        try:
            with _quiet():
                self._checkpointer.close()
        finally:
            self._quiet.close()


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

    # Data being read is in memory twice, so limit it, but allow at least one shard.
    shards = (leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(abstract))
    sizes = zip(shards, jax.tree.leaves(abstract), strict=True)
    largest = max(math.prod(shape) * leaf.dtype.itemsize for shape, leaf in sizes)
    at_once: Any = max(_AT_ONCE_BYTES, 2 * largest) / 1e9  # in GB, may be fractional
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, restore_concurrent_gb=at_once)
    args = ocp.args.PyTreeRestore(abstract, restore_args=jax.tree.map(one, abstract))
    # Before the first read: others may end before the failure of one is known here.
    stragglers = _ignore_stragglers()
    with _quiet():
        try:
            with contextlib.closing(ocp.Checkpointer(handler)) as checkpointer:
                read = checkpointer.restore(directory, args=args)
            stragglers.put_back()
            return read
        except Exception as error:
            stragglers.expected = True
            message = str(error).partition(" [tensorstore_spec")[0]
        _collect_quietly()
    raise OSError(message)


def _collect_quietly() -> None:
    """Frees what nothing awaits any more after a failure, without a warning for each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        gc.collect()


def _ignore_stragglers() -> _Stragglers:
    """Keeps concurrent reads from printing tracebacks of their own after one has failed."""
    hook = sys.unraisablehook
    if not isinstance(hook, _Stragglers):
        hook = sys.unraisablehook = _Stragglers(hook)
    logger = logging.getLogger("asyncio")
    if _is_not_straggler not in logger.filters:
        logger.addFilter(_is_not_straggler)
    return hook


class _Stragglers:
    """Ignores what reads raise when nothing awaits them any more; passes on all other errors.

    It is a hook for the process, since that is where they arrive: Orbax closes its event loop at
    the first read that fails, and TensorStore's threads, which end at any time, then call a closed
    loop, once for each read. So the hook stays installed after a failed restore, and only then.
    """

    def __init__(self, before: Callable[[Any], None]):
        self._before = before
        self.expected = False

    def put_back(self) -> None:
        """Gives the hook back, if no read has failed and nobody has set another since."""
        if not self.expected and sys.unraisablehook is self:
            sys.unraisablehook = self._before
            logging.getLogger("asyncio").removeFilter(_is_not_straggler)

    def __call__(self, unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        if "orbax" in getattr(code, "co_filename", ""):
            return
        error = unraisable.exc_value
        # From C++, so without an object: a loop of the user's own that is closed too early is
        # called by an object of the user's.
        from_cpp = unraisable.object is None and unraisable.err_msg is None
        if not (from_cpp and isinstance(error, RuntimeError) and "loop is closed" in str(error)):
            self._before(unraisable)


def _is_not_straggler(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not ("never retrieved" in text and ("orbax" in text or "tensorstore" in text))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences Orbax's warnings about what is intentional here, such as changing the mesh.

    It filters Orbax's own records: the level of absl's logger belongs to the user, who may be
    logging from another thread.
    """
    filters = {"absl": _is_not_orbax, "asyncio": _is_not_straggler}
    added = [
        (logger, one)
        for logger, one in ((logging.getLogger(name), one) for name, one in filters.items())
        if one not in logger.filters
    ]
    for logger, one in added:
        logger.addFilter(one)
    try:
        yield
    finally:
        for logger, one in added:
            logger.removeFilter(one)


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname or record.levelno >= logging.CRITICAL
