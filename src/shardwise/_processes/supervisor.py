"""Launching a run that goes on without the processes that it loses, and grows again."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows, where nothing else of this works either
    fcntl = None

from . import launcher
from .elastic import AGAIN_EXIT_CODE, COPIES, Elastic
from .peer_watch import LOST_EXIT_CODE

# After a process was killed, the others are of no use; but their last lines are worth reading.
_FAREWELL_SECONDS = 0.5
# How often in a row processes may be lost before a step is finished.
_FRUITLESS = 5
_PREFIX = "shardwise-elastic-"
_STOPS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class _Slot:
    """A place for a process: what a host is on a cluster."""

    number: int
    back_at: float = 0.0


@dataclass
class _End:
    """How a round ended: with an exit code, or with what was lost."""

    code: int | None = None
    lost: list[int] = field(default_factory=list)
    how: str = ""
    grows: bool = False


def launch_elastic(
    command: Sequence[str],
    processes: int,
    devices: int | None = None,
    *,
    least: int | None = None,
    back_seconds: float = 60.0,
    as_hosts: bool = False,
) -> int:
    """Runs N local processes like `launch`, and goes on when some of them are lost.

    When a process is killed, stops responding, or is sent SIGTERM on its own, the others are ended
    and started again, as many as the run can go on with; `sw.fit(…, elastic=True)` then continues on the
    smaller mesh. Once `back_seconds` have passed, the place of a lost process may be used again: the run
    saves its next checkpoint and is started again with more processes. A process that exits with
    an error ends the run, since it would do so again.

    Args:
        command: the program and its arguments.
        processes: how many to start.
        devices: virtual CPU devices per process; None leaves the devices as they are.
        least: how many processes the run must be able to go on with; None for as few as fit.
        back_seconds: when the place of a lost process may be used again.
        as_hosts: whether each process stands for a host: with it, what it held in memory is lost.

    Returns:
        0 if all processes exit with 0, else the code of the failure that ended the run.

    Raises:
        ValueError: the program does not exist, or a number does not fit; nothing is started.

    Example:
        >>> import sys
        >>> from shardwise._processes import launch_elastic
        >>> launch_elastic([sys.executable, "-c", "pass"], 2)
        0
    """
    program = launcher.require_program(command)
    launcher.require_count("processes", processes)
    if devices is not None:
        launcher.require_count("devices", devices)
    if least is not None:
        launcher.require_count("processes to go on with", least)
        if least > processes:
            raise ValueError(
                f"the run cannot go on with at least {least} processes, since it has {processes}: "
                f"give a minimum of 1 to {processes}"
            )
    if not (math.isfinite(back_seconds) and back_seconds >= 0):
        raise ValueError(
            f"the seconds until a process is back must be a finite number of at least 0, "
            f"got {back_seconds!r}"
        )
    with _folder() as folder:
        elastic = Elastic(folder, processes, least, 0)
        run = _Run(program, command, devices, elastic, back_seconds, as_hosts)
        with launcher.signals_noted(run.asked):
            return run.until_done()


class _Run:
    def __init__(
        self,
        program: str,
        command: Sequence[str],
        devices: int | None,
        elastic: Elastic,
        back_seconds: float,
        as_hosts: bool,
    ) -> None:
        self.program, self.command, self.devices = program, command, devices
        self.elastic, self.back_seconds, self.as_hosts = elastic, back_seconds, as_hosts
        self.slots = [_Slot(number) for number in range(elastic.most)]
        self.asked: list[int] = []
        self.output = launcher.Output()
        self.lost_at: float | None = None
        self.beat: tuple[int, float] = (0, 0.0)

    def until_done(self) -> int:
        """Starts all processes, again and again, until the run has ended; returns its exit code."""
        fruitless = 0
        slots = self.slots
        while True:
            end = self._round(slots)
            self.elastic.ask_to_grow(False)
            if end.code is not None:
                return end.code
            if end.grows:
                self.lost_at = None
                slots = self._next(slots)
                self.output.say(
                    f"a checkpoint was saved; starting again with {len(slots)} of "
                    f"{self.elastic.most} processes"
                )
            else:
                self.lost_at = time.monotonic()
                fruitless = 0 if self.elastic.first_step() is not None else fruitless + 1
                if fruitless == _FRUITLESS:
                    self.output.say(
                        f"{end.how}; processes were lost {fruitless} times in a row before a step was "
                        f"finished, so the run ends"
                    )
                    return LOST_EXIT_CODE
                for index in end.lost:
                    self._lose(slots[index])
                found = self._wait_for_enough(end.how)
                if found is None:
                    return 128 + self.asked[-1]
                slots = found
                self.output.say(
                    f"{end.how}; starting again with {len(slots)} of {self.elastic.most} processes"
                )
            self.elastic = replace(self.elastic, round=self.elastic.round + 1)

    def _lose(self, slot: _Slot) -> None:
        slot.back_at = time.monotonic() + self.back_seconds
        if self.as_hosts:
            shutil.rmtree(self._memory(slot), ignore_errors=True)

    def _memory(self, slot: _Slot) -> Path:
        return self.elastic.folder / (f"memory-{slot.number}" if self.as_hosts else "memory")

    def _next(self, before: Sequence[_Slot]) -> list[_Slot]:
        """Returns the places of the next round, or none if too few are left."""
        now = time.monotonic()
        # Those that did not fail come first.
        ready = sorted(
            (s for s in self.slots if s.back_at <= now), key=lambda s: (s.back_at, s.number)
        )
        sizes = [size for size in self.elastic.sizes() if size <= len(ready)]
        return sorted(ready[: max(sizes, default=0)], key=lambda s: s.number)

    def _wait_for_enough(self, how: str) -> list[_Slot] | None:
        """Returns the places of the next round as soon as there are enough; None if stopped."""
        said = False
        while not (found := self._next(())):
            if any(number in _STOPS for number in self.asked):
                return None
            if not said:
                self.output.say(
                    f"{how}; too few are left to go on, so it waits until one may be started again"
                )
                said = True
            time.sleep(launcher.POLL_SECONDS)
        return found

    def _round(self, slots: Sequence[_Slot]) -> _End:
        """Runs all processes once."""
        children: list[subprocess.Popen[bytes]] = []
        pumps: list[threading.Thread] = []
        place = {"SHARDWISE_COORDINATOR": f"127.0.0.1:{launcher.free_port()}"}
        try:
            for index, slot in enumerate(slots):
                memory = self._memory(slot)
                memory.mkdir(mode=0o700, exist_ok=True)
                given = place | self.elastic.variables() | {COPIES: str(memory)}
                environment = launcher.environment_of(given, index, len(slots), self.devices)
                children.append(launcher.start(self.program, self.command, environment))
            pumps += launcher.started_pumps(children, self.output)
            return self._supervise(children, len(slots))
        finally:
            for child in children:
                launcher.end(child)
            for pump in pumps:
                pump.join(timeout=2)

    def _supervise(self, children: Sequence[subprocess.Popen[bytes]], count: int) -> _End:
        """Waits until all have exited, or those that have not are lost too."""
        running = dict(enumerate(children))
        statuses: dict[int, int] = {}  # in the order in which they ended
        received: list[signal.Signals] = []
        deadline, silent = math.inf, False
        while running and time.monotonic() < deadline:
            while self.asked:
                number = signal.Signals(self.asked.pop(0))
                launcher.signal_all(running.values(), number)
                received += [number] if number in _STOPS else []
                if len(received) == 2:
                    self.output.say(f"received a second {number.name}; terminating all processes")
                    launcher.signal_all(running.values(), signal.SIGTERM)
                    deadline = time.monotonic() + launcher.GRACE_SECONDS
            for index in [i for i, child in running.items() if launcher.has_ended(child)]:
                statuses[index] = launcher.end(running.pop(index))
            failed = [status for status in statuses.values() if status]
            if failed and not received:
                grace = _FAREWELL_SECONDS if _killed(failed) else launcher.GRACE_SECONDS
                deadline = min(deadline, time.monotonic() + grace)
                if running and set(running) <= self.elastic.lost():
                    break
            elif failed and deadline == math.inf:
                deadline = time.monotonic() + launcher.GRACE_SECONDS
            if self.output.closed:
                return _End(code=128 + signal.SIGPIPE)
            self._look(count)
            if silent := count == 1 and bool(running) and self._is_silent():
                break
            time.sleep(launcher.POLL_SECONDS)
        alone = {*running} if silent else set[int]()
        return self._judged(statuses, {*running}, received, alone)

    def _is_silent(self) -> bool:
        """Returns whether the only process has stopped responding, which no other can notice."""
        pulse, now = self.elastic.pulse(), time.monotonic()
        if pulse is None:
            return False
        seconds, beat = pulse
        if beat != self.beat[0]:
            self.beat = beat, now
        return now - self.beat[1] > seconds

    def _look(self, count: int) -> None:
        """Says when the run goes on after a loss, and offers more processes once there are more."""
        if self.lost_at is not None and (step := self.elastic.first_step()) is not None:
            seconds = time.monotonic() - self.lost_at
            self.output.say(f"step {step} finished {seconds:.1f} s after the loss (measured)")
            self.lost_at = None
        if count < self.elastic.most and not self.elastic.is_asked_to_grow():
            if len(self._next(())) > count:
                self.elastic.ask_to_grow(True)

    def _judged(
        self,
        statuses: dict[int, int],
        unended: set[int],
        received: Sequence[signal.Signals],
        alone: set[int],
    ) -> _End:
        """Returns how a round ended, from the exit statuses of its processes."""
        failed = {i: status for i, status in statuses.items() if status}
        if received:
            status = next(iter(failed.values()), -received[0] if unended else 0)
            code = 128 - status if status < 0 else status
            if status == AGAIN_EXIT_CODE:  # the signal reached it after it had decided
                code = 128 + received[0]
            self.output.say(f"stopped by {received[0].name}")
            return _End(code=code)
        if not failed and not unended:
            return _End(code=0)
        killed = [i for i, status in failed.items() if _killed([status])]
        # What else crashes then, such as XLA in the middle of a collective, is a consequence.
        lost = {i for i in killed if failed[i] in (-signal.SIGKILL, failed[killed[0]])}
        silent = self.elastic.lost() & unended | alone
        leaving = {i for i, status in failed.items() if status in (143, 130)}
        if lost or silent or leaving:
            # How they ended is also how the others may have failed.
            parts = [f"process {i} {launcher.how(failed[i])}" for i in sorted(lost)]
            parts += [f"process {i} stopped responding" for i in sorted(silent)]
            parts += [f"process {i} was asked to stop and has saved" for i in sorted(leaving)]
            return _End(lost=sorted(lost | silent | leaving), how="; ".join(parts))
        if AGAIN_EXIT_CODE in failed.values():
            return _End(grows=True)
        for i, status in failed.items():
            if status > 0 and status != LOST_EXIT_CODE:
                self.output.say(f"process {i} {launcher.how(status)}, which ends the run")
                return _End(code=status)
        aborted = [i for i, status in failed.items() if status == -signal.SIGABRT][:1]
        if aborted:
            return _End(lost=aborted, how=f"process {aborted[0]} was killed by SIGABRT")
        return _End(how="the processes lost each other")


def _killed(statuses: Sequence[int]) -> bool:
    """Returns whether one was killed by a signal other than that of an abort() of JAX."""
    return any(status < 0 and status != -signal.SIGABRT for status in statuses)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Returns a new folder in memory, for this user alone, that lasts as long as the context."""
    shared = Path("/dev/shm")
    root = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    _sweep(root)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    try:
        with (folder / "owner").open("xb") as owner:
            if fcntl is not None:
                fcntl.flock(owner, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if sys.exc_info()[0] is None and folder.exists():
            print(f"shardwise: {folder} could not be removed", file=sys.stderr)


def _sweep(root: Path) -> None:
    """Removes what launchers of this user that were killed have left in memory."""
    if fcntl is None:
        return
    for old in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if old.is_symlink() or old.stat().st_uid != os.getuid():
                continue
            with (old / "owner").open("rb") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old, ignore_errors=True)
