"""Run logs: metrics are read a little late, checked, shown and written to files."""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from .._base import show_bytes, show_count, show_seconds, tell_error
from .._compile import step_machine
from .._estimate import Estimate, estimate
from .._layout import Layout
from .._nnx import Recipe
from .._step import Blueprint, NotFinite, named_batch

_FLUSH_SECONDS = 10.0  # for TensorBoard's file: each flush waits for the disk
_SETTLED = 20  # steps after which the time of a step is compared with what is modelled
_LATE = 2  # steps: reading a metric waits for its step, so the devices always have work queued


class RunLog:
    """Reads each step's metrics, shows them, and writes them to files.

    Args:
        blueprint: what is run.
        steps: the last step of the run.
        first: the step that the run resumes from, or 0.
        logs: where to write `metrics.jsonl` and TensorBoard's event files, or None.
        every: how often to write them, and to print lines, in steps.
        show: whether to show anything.
        expected: returns what a step is modelled to take on these devices, if that is known.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        *,
        steps: int,
        first: int,
        logs: Path | None,
        every: int,
        show: bool,
        expected: Callable[[], Estimate | None] = lambda: None,
    ):
        """Opens the files and draws the bar."""
        self.steps, self.first, self.every = steps, first, every
        self.unit, self.amount = _unit(blueprint)
        self._blueprint = blueprint
        self._pending: collections.deque[tuple[int, Any]] = collections.deque()
        self._last = time.perf_counter()
        self._recent: collections.deque[float] = collections.deque(maxlen=50)
        self._done = first
        self._expected, self._compared = expected, False
        self._paused = 0.0
        self._show = show and jax.process_index() == 0
        self._bar = None
        first_process = jax.process_index() == 0
        self._files = _Files(logs, first, self.warn) if logs is not None and first_process else None
        self._bar = _bar(first, steps) if self._show and sys.stderr.isatty() else None

    def __enter__(self) -> RunLog:
        """Starts the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stops the bar and closes the files."""
        if self._bar is not None:
            self._bar.stop()
        if self._files is not None:
            self._files.close()

    def add(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Takes a step's metrics, and reads those from two steps earlier.

        Raises:
            NotFinite: the loss is NaN or infinite.
        """
        self._pending.append((step, metrics))
        while len(self._pending) > _LATE:
            self._read(*self._pending.popleft())

    def catch_up(self) -> None:
        """Reads all pending metrics; waits for the devices."""
        while self._pending:
            self._read(*self._pending.popleft())

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._show:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Prints a line even if progress is not shown."""
        # stderr may be a file on a full disk: not a reason to stop the run.
        with contextlib.suppress(OSError):
            if self._bar is not None:
                self._bar.console.print(text, highlight=False, markup=False)
            else:
                tell_error(text)

    def note(self, step: int, values: Mapping[str, float]) -> None:
        """Writes and prints other metrics, such as those of an evaluation."""
        if self._files is not None:
            self._files.write(step, values)
        self.say(f"step {step}  " + "  ".join(f"{k} {v:.4g}" for k, v in values.items()))

    @contextlib.contextmanager
    def pause(self) -> Any:
        """Excludes the time spent inside from the step time."""
        began = time.perf_counter()
        yield
        self._paused += time.perf_counter() - began

    def _read(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        values = {name: np.asarray(value) for name, value in metrics.items()}
        loss = float(values["loss"])
        now = time.perf_counter()
        seconds = max(now - self._last - self._paused, 1e-9)
        self._last, self._paused, self._done = now, 0.0, step
        if step > self.first + 1:  # the first step includes compilation
            self._recent.append(seconds)
        row = {name: float(v) for name, v in values.items() if v.size == 1}
        row |= {"step_seconds": seconds, f"{self.unit}_per_second": self.amount / seconds}
        due = step % self.every == 0 or step in (self.first + 1, self.steps)
        if self._files is not None and (due or not math.isfinite(loss)):
            self._files.write(step, row)
        if not math.isfinite(loss):
            raise NotFinite(f"the loss is {loss} at step {step}")
        if len(self._recent) == _SETTLED:
            self._compare()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, status=self._status(row))
        elif due:
            self.say(f"step {step}/{self.steps}  {self._status(row)}")

    def _compare(self) -> None:
        """Says once how the run's step time compares with what is modelled for its devices."""
        if self._compared or not self._show:
            return
        self._compared = True
        text = compared(self._expected(), float(np.median(self._recent)))
        if text:
            self.say(text)

    def _status(self, row: Mapping[str, float]) -> str:
        loss, memory = f"loss {row['loss']:.4g}", _memory(self._blueprint)
        if not self._recent:
            # Extrapolating the first step's time would predict a compilation for every step.
            return f"{loss}  {show_seconds(row['step_seconds'])} with compilation  {memory}"
        # A mean over many steps: single times are noisy, since metrics are read in bursts.
        mean = sum(self._recent) / len(self._recent)
        left = int(mean * (self.steps - self._done))
        hours = f"{left // 3600}:{left // 60 % 60:02}" if left >= 3600 else f"{left // 60}"
        # Memory comes last, since a narrow terminal cuts off the end.
        return (
            f"{loss}  {show_seconds(mean)}  {show_count(self.amount / mean)} {self.unit}/s  "
            f"ETA {hours}:{left % 60:02}  {memory}"
        )


def expected(recipe: Recipe, layout: Layout) -> Estimate | None:
    """Returns what a step is modelled to take on the devices of a layout; None if that is unknown."""
    if step_machine(layout.mesh) is None:
        return None
    try:
        return estimate(recipe, layout)
    except ValueError:
        return None  # only a comparison: the run does not depend on it


def compared(expected: Estimate | None, seconds: float) -> str:
    """Returns how a measured step time compares with the modelled one, with advice if it is slow."""
    if expected is None:
        return ""
    text = (
        f"a step takes {show_seconds(seconds)} (measured), "
        f"{show_seconds(expected.seconds)} were expected (modelled)"
    )
    if seconds <= expected.high:
        return text
    return (
        f"{text}: more than its bound of {show_seconds(expected.high)}. Look at whether the data "
        f"arrives in time (profile a step), whether shapes change between steps and recompile it "
        f"(JAX_LOG_COMPILES=1), and whether another process uses the devices"
    )


class _Files:
    """`metrics.jsonl` and TensorBoard's event file; a full disk does not stop the run.

    Both are written at once and by this thread: tensorboardX's own writer has a queue, and adding
    to it blocks forever if its thread has died because the disk was full.
    """

    def __init__(self, logs: Path, first: int, say: Callable[[str], None]):
        # Imported here because it is slow, and runs without logs do not need it.
        from tensorboardX.proto import event_pb2 as protocol
        from tensorboardX.record_writer import RecordWriter
        from tensorboardX.summary import scalar

        self._logs, self._say, self._said = logs, say, False
        events: Any = protocol  # generated at import, so pyright sees no names in it
        self._event, self._scalar = events.Event, scalar
        self._torn = False
        self._lines: Any = None
        self._board: Any = None
        with self._going_on():
            logs.mkdir(parents=True, exist_ok=True)
            # Unbuffered, so that data that could not be written is not retried at close.
            self._lines = (logs / "metrics.jsonl").open("ab", buffering=0)
        with self._going_on():
            name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
            self._board = RecordWriter(str(logs / name))
            self._flushed = time.monotonic()
            self._add(file_version="brain.Event:2")
            if first:
                # Makes TensorBoard drop steps after the restored one, which were never saved.
                start = events.SessionLog(status=events.SessionLog.START)
                self._add(step=first + 1, session_log=start)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # JSON has no NaN, and TensorBoard does not show it.
        finite = {name: x if math.isfinite(x) else None for name, x in values.items()}
        if self._lines is not None:
            row = json.dumps({"step": step, "time": time.time(), **finite}) + "\n"
            with self._going_on():
                data = ("\n" if self._torn else "").encode() + row.encode()
                self._torn = True  # until all of it is written
                self._torn = self._lines.write(data) != len(data)
                if self._torn:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._board is not None:
            try:
                for name, value in finite.items():
                    if value is not None:
                        self._add(step=step, summary=self._scalar(name, value))
                if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                    self._board.flush()
                    self._flushed = time.monotonic()
            except Exception as error:
                # A truncated record would make everything after it unreadable.
                board, self._board = self._board, None
                with contextlib.suppress(Exception):
                    board.close()
                self._report(error)

    def close(self) -> None:
        if self._lines is not None:
            with self._going_on():
                self._lines.close()
        if self._board is not None:
            with self._going_on():
                self._board.close()
        self._lines = self._board = None

    def _add(self, **event: Any) -> None:
        self._board.write(self._event(wall_time=time.time(), **event).SerializeToString())

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        if not self._said:
            self._said = True
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._say(
                f"logs cannot be written to {self._logs}: {why}; training continues without them"
            )


def require_logs(logs: Path) -> None:
    """Creates the log folder if needed, and tests that it is writable.

    Called before a run, so that a problem does not surface in the middle of it.

    Raises:
        ValueError: the folder cannot be written.
    """
    try:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "metrics.jsonl").open("ab").close()
    except OSError as error:
        why = error.strerror or str(error)
        if isinstance(error, FileExistsError | NotADirectoryError):
            why = "part of the path is a file"
        raise ValueError(f"logs cannot be written to {logs}: {why}") from error


def _bar(first: int, steps: int) -> Progress:
    step_column = TextColumn(
        "step {task.completed}/{task.total}",
        table_column=Column(no_wrap=True, min_width=len(f"step {steps}/{steps}")),
    )
    status_column = TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True, ratio=1))
    console = Console(stderr=True)
    columns = (
        [step_column, BarColumn(16), status_column]
        if console.width > 100
        else [step_column, status_column]
    )
    bar = Progress(*columns, console=console, expand=True)
    bar.add_task("train", total=steps, completed=first, status="compiling")
    return bar


def _unit(blueprint: Blueprint) -> tuple[str, int]:
    """Returns the unit of throughput, tokens or samples, and how many a step has."""
    leaves = [leaf for _, leaf in named_batch(blueprint.batch) if leaf.shape]
    tokens = [x for x in leaves if len(x.shape) == 2 and np.issubdtype(x.dtype, np.integer)]
    if tokens:
        return "tokens", math.prod(tokens[0].shape)
    return "samples", leaves[0].shape[0] if leaves else 1


def _memory(blueprint: Blueprint) -> str:
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return f"{show_bytes(stats['peak_bytes_in_use'])}/device (measured)"
    resident = blueprint.layout.bytes_per_device + blueprint.optimizer.bytes_per_device
    return f"{show_bytes(resident)}/device (exact)"
