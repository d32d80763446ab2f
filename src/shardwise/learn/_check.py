"""Checking a user's file: a process of its own judges it, and is watched."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from .._base import public
from ._exercise import Exercise, Lesson
from ._judge import Outcome, late
from ._lessons import find_lesson

# The process stops itself at the limit and says at which line; this is for one that cannot.
_GRACE_SECONDS = 5.0
_START_SECONDS = 120.0


@public
@dataclasses.dataclass(frozen=True, slots=True)
class Marks:
    """What came of a lesson's exercises.

    Attributes:
        lesson: the lesson.
        file: the user's file.
        outcomes: one for each exercise that was checked, in order.
    """

    lesson: Lesson
    file: str
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> int:
        """How many exercises passed."""
        return sum(outcome.status == "passed" for outcome in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain data, which `shardwise learn check --format json` prints."""
        return {
            "lesson": self.lesson.number,
            "title": self.lesson.title,
            "page": self.lesson.page,
            "file": self.file,
            "passed": self.passed,
            "exercises": [dataclasses.asdict(outcome) for outcome in self.outcomes],
        }


@public
def check(lesson: int, file: str, *, only: str | None = None, seconds: float = 60.0) -> Marks:
    """Returns what the exercises of a lesson say of the functions in a file.

    The file is run by a process of its own, on eight virtual CPU devices.

    Args:
        lesson: its number.
        file: the user's.
        only: the name of one exercise; all of the lesson if None.
        seconds: that one exercise may take, all its cases together.

    Raises:
        ValueError: there is no such lesson, exercise or file, or importing the file failed.

    Example:
        >>> import pathlib, tempfile
        >>> from shardwise import learn
        >>> file = pathlib.Path(tempfile.mkdtemp(), "mine.py")
        >>> _ = file.write_text("def bubble(s, m, r): return (s - 1) / (m * r)")
        >>> learn.check(5, str(file), only="bubble").passed
        1
    """
    found = find_lesson(lesson)
    wanted = list(found.exercises) if only is None else [found.exercise(only)]
    if not seconds > 0:
        raise ValueError(f"the limit is {seconds:g} s: give a time above 0")
    path = Path(file)
    if path.is_dir():
        raise ValueError(f"{file} is a folder: name the file with your functions")
    if not path.is_file():
        raise ValueError(
            f"{file} does not exist: shardwise learn start {lesson} {file} writes a skeleton"
        )
    if path.suffix != ".py":
        raise ValueError(f"{file} is no module: its name must end in .py")
    outcomes: list[Outcome] = []
    # One that hangs or ends its process takes only itself along: the rest get another process.
    while len(outcomes) < len(wanted):
        outcomes += _run(found, str(path.resolve()), wanted[len(outcomes) :], seconds)
    return Marks(found, file, tuple(outcomes))


def _run(lesson: Lesson, file: str, wanted: list[Exercise], seconds: float) -> list[Outcome]:
    """Returns the outcomes of one process: at least one."""
    names = [exercise.name for exercise in wanted]
    command = [sys.executable, "-P", "-m", "shardwise.learn._worker", file, str(lesson.number)]
    process = subprocess.Popen(
        [*command, str(seconds), *names],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout is not None and process.stderr is not None
    rows: queue.Queue[dict[str, Any] | None] = queue.Queue()
    readers = {
        process.stdout: threading.Thread(target=_read, args=(process.stdout, rows), daemon=True),
        process.stderr: threading.Thread(target=_copy, args=(process.stderr,), daemon=True),
    }
    for reader in readers.values():
        reader.start()
    outcomes: list[Outcome] = []
    now: str | None = None  # None while it starts, empty while it imports the file
    try:
        while len(outcomes) < len(wanted):
            limit = _START_SECONDS if now is None else seconds + _GRACE_SECONDS
            try:
                row = rows.get(timeout=limit)
            except queue.Empty:
                if not now:
                    raise ValueError(f"importing {_name(file)}: {late(limit)}") from None
                return [*outcomes, _stopped(lesson, now, "timeout", late(seconds))]
            if row is None:
                text = _ended(process.wait())
                if not now:
                    raise ValueError(f"importing {_name(file)} {text}")
                return [*outcomes, _stopped(lesson, now, "ended", f"it {text}")]
            if "failed" in row:
                raise ValueError(f"importing {_name(file)} failed: {row['failed']}")
            if "begin" in row:
                now = row["begin"]
            if "outcome" in row:
                outcomes.append(Outcome(**row["outcome"]))
    finally:
        process.kill()
        process.wait()
        for pipe, reader in readers.items():
            # Not for ever: a process that the user's file started may hold the pipe.
            reader.join(timeout=1.0)
            if not reader.is_alive():
                pipe.close()
    return outcomes


def _read(lines: IO[bytes], rows: queue.Queue[dict[str, Any] | None]) -> None:
    for line in lines:
        rows.put(json.loads(line))
    rows.put(None)  # the process has ended


def _copy(lines: IO[bytes]) -> None:
    """Writes what the user's file prints to this process's stderr."""
    for line in lines:
        sys.stderr.write(line.decode(errors="replace"))
        sys.stderr.flush()


def _stopped(lesson: Lesson, name: str, status: str, message: str) -> Outcome:
    number = lesson.number_of(lesson.exercise(name))
    return Outcome(number, name, status, message=message)


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended the process with status {code}"
    return f"ended the process by {signal.Signals(-code).name}"


def _name(file: str) -> str:
    return os.path.basename(file)
