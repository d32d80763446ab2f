"""Watching a run: its metrics read a little late, checked, shown and written."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from ._batch import named_batch
from ._step import Blueprint
from ._table import show_bytes, show_count, show_seconds

_LATE = 2  # steps: reading a metric waits for its step, so the devices always have work queued


class NotFinite(FloatingPointError):
    """The loss, or the state, became NaN or infinite."""


class Watch:
    """Reads each step's metrics, shows them, and writes them to files.

    Args:
        plan: what is run.
        steps: where the run ends.
        first: the step that it begins after.
        logs: where to write `metrics.jsonl` and TensorBoard's event files, or None.
        every: how often they are written, and lines printed, in steps.
        show: whether to show anything.
    """

    def __init__(
        self, plan: Blueprint, *, steps: int, first: int, logs: Path | None, every: int, show: bool
    ):
        """Opens the files and draws the bar."""
        self.steps, self.first, self.every = steps, first, every
        self.unit, self.amount = _unit(plan)
        self._plan = plan
        self._pending: collections.deque[tuple[int, Any]] = collections.deque()
        self._last = time.perf_counter()
        self._recent: collections.deque[float] = collections.deque(maxlen=50)
        self._done = first
        self._paused = 0.0
        self._show = show and jax.process_index() == 0
        self._files = _Files(logs, first) if logs is not None and jax.process_index() == 0 else None
        self._bar = _bar(first, steps) if self._show and sys.stderr.isatty() else None

    def __enter__(self) -> Watch:
        """Starts the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends the bar and closes the files."""
        if self._bar is not None:
            self._bar.stop()
        if self._files is not None:
            self._files.close()

    def add(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Takes a step's metrics, and reads those of two steps before.

        Raises:
            NotFinite: its loss is NaN or infinite.
        """
        self._pending.append((step, metrics))
        while len(self._pending) > _LATE:
            self._read(*self._pending.popleft())

    def catch_up(self) -> None:
        """Reads all metrics that were taken; waits for the devices."""
        while self._pending:
            self._read(*self._pending.popleft())

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._show:
            print(text, file=sys.stderr, flush=True)

    def note(self, step: int, values: Mapping[str, float]) -> None:
        """Writes and prints metrics of another kind, such as an evaluation's."""
        if self._files is not None:
            self._files.write(step, values)
        self.say(f"step {step}  " + "  ".join(f"{k} {v:.4g}" for k, v in values.items()))

    @contextlib.contextmanager
    def pause(self) -> Any:
        """Leaves what is done within out of the step time."""
        began = time.perf_counter()
        yield
        self._paused += time.perf_counter() - began

    def _read(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        values = {name: np.asarray(value) for name, value in metrics.items()}
        loss = float(values["loss"])
        now = time.perf_counter()
        seconds = max(now - self._last - self._paused, 1e-9)
        self._last, self._paused, self._done = now, 0.0, step
        if step > self.first + 1:  # the first one compiles
            self._recent.append(seconds)
        row = {name: float(v) for name, v in values.items() if v.size == 1}
        row |= {"step_seconds": seconds, f"{self.unit}_per_second": self.amount / seconds}
        due = step % self.every == 0 or step in (self.first + 1, self.steps)
        if self._files is not None and (due or not math.isfinite(loss)):
            self._files.write(step, row)
        if not math.isfinite(loss):
            raise NotFinite(f"the loss is {loss} at step {step}")
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, told=self._told(row))
        elif due:
            self.say(f"step {step}/{self.steps}  {self._told(row)}")

    def _told(self, row: Mapping[str, float]) -> str:
        # The mean of many: single times are those of the reading, which goes in bursts.
        mean = sum(self._recent) / len(self._recent) if self._recent else row["step_seconds"]
        left = int(mean * (self.steps - self._done))
        hours = f"{left // 3600}:{left // 60 % 60:02}" if left >= 3600 else f"{left // 60}"
        # Memory comes last: a narrow terminal cuts the end off.
        return (
            f"loss {row['loss']:.4g}  {show_seconds(mean)}  {show_count(self.amount / mean)} "
            f"{self.unit}/s  ETA {hours}:{left % 60:02}  {_memory(self._plan)}"
        )


class _Files:
    def __init__(self, logs: Path, first: int):
        # Its import is slow, and a run without logs needs none of it.
        from tensorboardX import SummaryWriter

        logs.mkdir(parents=True, exist_ok=True)
        self._lines = (logs / "metrics.jsonl").open("a", encoding="utf-8")
        # Steps after the one that was restored were never saved: TensorBoard drops them.
        self._board = SummaryWriter(str(logs), purge_step=first + 1 if first else None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # JSON has no NaN, and TensorBoard shows none.
        finite = {name: x if math.isfinite(x) else None for name, x in values.items()}
        self._lines.write(json.dumps({"step": step, "time": time.time(), **finite}) + "\n")
        self._lines.flush()
        for name, value in finite.items():
            if value is not None:
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._lines.close()
        self._board.close()


def _bar(first: int, steps: int) -> Progress:
    steps_told = TextColumn(
        "step {task.completed}/{task.total}",
        table_column=Column(no_wrap=True, min_width=len(f"step {steps}/{steps}")),
    )
    told = TextColumn("{task.fields[told]}", table_column=Column(no_wrap=True, ratio=1))
    console = Console(stderr=True)
    columns = [steps_told, BarColumn(16), told] if console.width > 100 else [steps_told, told]
    bar = Progress(*columns, console=console, expand=True)
    bar.add_task("train", total=steps, completed=first, told="compiling")
    return bar


def _unit(plan: Blueprint) -> tuple[str, int]:
    """Returns what is counted, tokens or samples, and how many one step has."""
    leaves = [leaf for _, leaf in named_batch(plan.batch) if leaf.shape]
    tokens = [x for x in leaves if len(x.shape) == 2 and np.issubdtype(x.dtype, np.integer)]
    if tokens:
        return "tokens", math.prod(tokens[0].shape)
    return "samples", leaves[0].shape[0] if leaves else 1


def _memory(plan: Blueprint) -> str:
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return f"{show_bytes(stats['peak_bytes_in_use'])}/device (measured)"
    held = plan.layout.bytes_per_device + plan.optimizer.bytes_per_device
    return f"{show_bytes(held)}/device (exact)"
