"""What an elastic launcher and its processes tell each other: variables and small files."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "SHARDWISE_ELASTIC"
MOST = "SHARDWISE_ELASTIC_MOST"
LEAST = "SHARDWISE_ELASTIC_LEAST"
ROUND = "SHARDWISE_ELASTIC_ROUND"
COPIES = "SHARDWISE_COPIES"

AGAIN_EXIT_CODE = 76
"""The exit code of a process that asks to be started again, with another number of processes."""


@dataclass(frozen=True, slots=True)
class Elastic:
    """An elastic run, as one of its processes or its launcher sees it.

    Attributes:
        folder: where launcher and processes leave notes for each other.
        most: how many processes the run has when none is lost.
        least: how many it must be able to go on with; None for as few as fit.
        round: how often all processes were started, from 0.
    """

    folder: Path
    most: int
    least: int | None
    round: int

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that tell a process of it."""
        least = {} if self.least is None else {LEAST: str(self.least)}
        where = {FOLDER: str(self.folder), MOST: str(self.most), ROUND: str(self.round)}
        return where | least

    def plan(self, sizes: Sequence[int]) -> None:
        """Tells the launcher with how many processes the run can go on."""
        _write(self.folder / "sizes", sorted(sizes))

    def sizes(self) -> list[int]:
        """Returns with how many processes the run can go on; any number if it did not say."""
        found = _read(self.folder / "sizes")
        return found if found is not None else [*range(self.least or 1, self.most + 1)]

    def ask_to_grow(self, wanted: bool) -> None:
        """Asks the processes to save, and to exit to be started again with more of them."""
        if wanted:
            _write(self.folder / "grow", self.round)
        else:
            (self.folder / "grow").unlink(missing_ok=True)

    def is_asked_to_grow(self) -> bool:
        """Returns whether the launcher has more processes to offer."""
        return (self.folder / "grow").exists()

    def went_on(self, step: int) -> None:
        """Tells the launcher that this round has finished its first step."""
        _write(self.folder / f"went-on-{self.round}", step)

    def first_step(self) -> int | None:
        """Returns the first step that this round has finished, or None if it has not yet."""
        return _read(self.folder / f"went-on-{self.round}")

    def pulse(self) -> tuple[float, int] | None:
        """Returns the last pulse of a process that is alone, and after how long without one it is lost."""
        path = self.folder / f"pulse-{self.round}"
        seconds = _read(path)
        try:
            return None if seconds is None else (float(seconds), path.stat().st_mtime_ns)
        except OSError:
            return None

    def lost(self) -> set[int]:
        """Returns the processes of this round that others have named as lost."""
        found: set[int] = set()
        for path in self.folder.glob(f"lost-{self.round}-*"):
            # One that fails names itself: it is about to exit.
            found.update({*(_read(path) or ())} - {int(path.name.rpartition("-")[2])})
        return found


def elastic_run() -> Elastic | None:
    """Returns the elastic run that this process belongs to, or None.

    Example:
        >>> from shardwise._processes import elastic_run
        >>> elastic_run() is None
        True
    """
    if FOLDER not in os.environ:
        return None
    least = os.environ.get(LEAST)
    return Elastic(
        Path(os.environ[FOLDER]),
        int(os.environ[MOST]),
        None if least is None else int(least),
        int(os.environ[ROUND]),
    )


def tell_lost(me: int, lost: Sequence[int]) -> None:
    """Tells an elastic launcher, if there is one, which processes this one considers lost.

    It may be called from a handler of SIGABRT, so it does little.
    """
    if FOLDER in os.environ:
        name = f"lost-{os.environ[ROUND]}-{me}"
        with contextlib.suppress(OSError):
            _write(Path(os.environ[FOLDER]) / name, list(lost))


def keep_pulse(timeout_seconds: float) -> None:
    """Shows an elastic launcher, if there is one, that this process responds: no other watches it."""
    if FOLDER in os.environ:
        path = Path(os.environ[FOLDER]) / f"pulse-{os.environ[ROUND]}"
        _keep_beating(path, timeout_seconds)


@functools.cache
def _keep_beating(path: Path, timeout_seconds: float) -> None:
    _write(path, timeout_seconds)

    def beat() -> None:
        with contextlib.suppress(OSError):  # the launcher has ended
            while True:
                time.sleep(min(1.0, timeout_seconds / 6))
                os.utime(path)

    threading.Thread(target=beat, name="shardwise-pulse", daemon=True).start()


def _write(path: Path, value: Any) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.replace(path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
