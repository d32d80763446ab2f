"""Work beside the server's own thread: the newest question wins, long tasks can be cancelled."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from .._base import at_line_of


class Superseded(Exception):
    """A newer question was asked before the work on this one began."""


class Lane:
    """One thread, which works on the newest of what it is asked; a slider's moves never queue up."""

    def __init__(self, name: str):
        """Starts the thread."""
        self._next: tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None = None
        self._asked = threading.Condition()
        threading.Thread(target=self._run, name=f"shardwise-{name}", daemon=True).start()

    def ask(self, work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Returns the future of some work; that of work which has not begun raises Superseded."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._asked:
            before, self._next = self._next, (work, future)
            self._asked.notify()
        if before is not None:
            before[1].set_exception(Superseded())
        return future

    def _run(self) -> None:
        while True:
            with self._asked:
                self._asked.wait_for(lambda: self._next is not None)
                assert self._next is not None
                (work, future), self._next = self._next, None
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


class Cancelled(KeyboardInterrupt):
    """The page asked for an end; a search takes it as Ctrl-C, and returns what it knows by then."""


class Task:
    """Something that takes long: what it says, what it finds, and how it ended."""

    _numbers = itertools.count(1)

    def __init__(self, kind: str, query: str, work: Callable[[Task], dict[str, Any]]):
        """Starts the work in a thread."""
        self.number, self.kind, self.query = next(Task._numbers), kind, query
        self.lines: list[str] = []
        self.points: list[dict[str, Any]] = []
        self.result: dict[str, Any] | None = None
        self.error = ""
        self.cancelled = False
        self.began, self.ended = time.monotonic(), 0.0
        self._process: subprocess.Popen[Any] | None = None
        name = f"shardwise-{kind}"
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        """Adds a line of progress; raises if the task was cancelled."""
        self.lines.append(line)
        self.go_on()

    def find(self, point: dict[str, Any]) -> None:
        """Adds a point that a search found; raises if the task was cancelled."""
        self.points.append(point)
        self.go_on()

    def go_on(self) -> None:
        """Raises if the task was cancelled."""
        if self.cancelled:
            raise Cancelled

    def watch(self, process: subprocess.Popen[Any]) -> None:
        """Takes the compiler's process, which ends with the task."""
        self._process = process
        self.say(f"the compiler runs as process {process.pid}")

    def cancel(self) -> None:
        """Ends the work: the compiler's process at once, a search after its present candidate."""
        self.cancelled = True
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)

    def join(self, seconds: float) -> None:
        """Waits for the end."""
        self._thread.join(seconds)

    def to_dict(self, lines: int = 0, points: int = 0) -> dict[str, Any]:
        """Returns what there is beyond so many lines and points."""
        ended = self.ended
        return {
            "task": self.number,
            "kind": self.kind,
            "query": self.query,
            "lines": self.lines[lines:],
            "points": self.points[points:],
            "seconds": (ended or time.monotonic()) - self.began,
            "done": bool(ended),
            "cancelled": self.cancelled,
            "error": self.error if ended else "",
            "result": self.result if ended else None,
        }

    def _run(self, work: Callable[[Task], dict[str, Any]]) -> None:
        try:
            self.result = work(self)
        except Cancelled:
            self.error = "cancelled"
        except Exception as error:
            self.error = "cancelled" if self.cancelled else sentence(error)
        finally:
            self.ended = time.monotonic()


def sentence(error: BaseException) -> str:
    """Returns an error in one sentence, with the line of the user's code that raised it."""
    own = isinstance(error, ValueError) or type(error).__module__.startswith("shardwise")
    kind = "" if own else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}{at_line_of(error)}".split())[:2000]
