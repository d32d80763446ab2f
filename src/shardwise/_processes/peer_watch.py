"""A thread that watches the other processes of a run, and names the one that was lost."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, cast

import jax

from .._base import visible
from .._jax import distributed_state
from .elastic import AGAIN_EXIT_CODE, tell_lost
from .peers import Processes, is_dead, pid_space

LOST_EXIT_CODE = 75
"""The exit code of a process that exits because another one was lost."""

MARGIN_SECONDS = 10.0
"""Every other process has named a loss and exited within `timeout_seconds` plus this."""

_GRACE_SECONDS = 3.0
_LEAVE_SECONDS = 0.3
# How long threads that are not daemons may still run in a process that has failed.
_THREAD_SECONDS = 1.0
# What Gloo, NCCL and the coordination service say, after XLA's status, when a peer is gone. On the
# CPU the error is a JaxRuntimeError or, with one device per process, a ValueError. Nothing else
# identifies it: a ValueError has no status, and that of Gloo's errors, INTERNAL or UNKNOWN, is not
# specific. A wrong guess only costs time, since a loss must be found before it is reported.
# A step that is dispatched after a collective failed finds its state donated, and no other reason.
_PEER_GONE = re.compile(
    r"[A-Z_]+: .*(gloo|nccl|connection|socket|heartbeat|peer|deadline|unavailable)"
    r"|this state was donated",
    re.I | re.S,
)


@dataclass(frozen=True, slots=True)
class Loss:
    """Which processes are lost, how ("was lost", "failed"), and what is known about it."""

    lost: tuple[int, ...]
    verb: str
    why: str


class PeerWatch:
    """What this process knows about the others: their hosts, last heartbeats, and losses.

    JAX's own heartbeats, sent from C++, decide which process is dead. Those here, through the
    coordinator's key-value store, only find its name in time: JAX does not pass it to Python
    before it aborts the process.
    """

    def __init__(self, processes: Processes, timeout_seconds: float) -> None:
        self.processes = processes
        self._timeout = timeout_seconds
        # All heartbeats arrive at process 0: a thousand processes must not overload it.
        self._interval = max(min(timeout_seconds / 10, 1.0), processes.count / 500)
        self._pid = os.getpid()
        self._starting = ""
        self._peers: dict[int, tuple[str, int, str]] = {}
        self._heard: dict[int, tuple[str, float]] = {}
        self._quiet: tuple[int, ...] = ()
        self._done: tuple[int, ...] = ()
        self.inside_since = math.inf
        self._answered = time.monotonic()
        self._leaving = False
        self._raised = False
        self._loss: Loss | None = None
        self._named = False
        self._naming = threading.RLock()
        self._stopped = threading.Event()
        self.failure: BaseException | None = None
        self.agreed: BaseException | None = None
        self.status: Any = None
        self._code: int | None = None

    def guard(self, starting: str = "") -> None:
        """Installs a handler that reports losses: JAX calls abort() when a process is lost."""
        self._starting = starting
        if os.name != "posix":
            return
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        # Python's own handlers wait for the main thread, and abort() does not wait for them.
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_abort)
        self._libc = libc
        self._before = libc.signal(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p))

    def begin(self) -> None:
        """Announces this process to the others, and starts to monitor them."""
        if not hasattr(self, "_handler"):
            self.guard()
        self._starting = ""
        who = json.dumps([socket.gethostname(), os.getpid(), pid_space()])
        _store().key_value_set(f"shardwise/process/{self.processes.index}", who)
        atexit.register(self._leave)
        # Imported first, because it registers a hook of the same kind, which waits for its threads.
        importlib.import_module("concurrent.futures.thread")
        cast(Any, threading)._register_atexit(self._leave_threads)
        _note_exits(self)
        thread = threading.Thread(target=self._run, name="shardwise-watch", daemon=True)
        state = distributed_state()
        shut_down = state.shutdown

        def shut_down_all() -> None:
            # JAX's runtime first: the watch may have to explain how it ends. A thread that is
            # still in its C++ code when Python exits is killed there, and the process with it.
            state.shutdown = shut_down
            try:
                shut_down()
            finally:
                self._stopped.set()
                thread.join(timeout=10)
                if hasattr(self, "_libc"):
                    self._libc.signal(signal.SIGABRT, self._before)

        state.shutdown = shut_down_all
        thread.start()

    def find_for(self, error: Any) -> Loss | None:
        """Returns the loss behind an XLA error, or None if the error is about something else."""
        return self.find(self._timeout) if _PEER_GONE.match(str(error)) else None

    def find(self, wait_seconds: float) -> Loss | None:
        """Returns the loss as soon as one is known, or None after `wait_seconds`."""
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                loss = self._look(quiet_seconds=5 * self._interval)
            except jax.errors.JaxRuntimeError as error:
                reason = str(error).splitlines()[0]
                loss = Loss(
                    (0,), "was lost", f"it is the coordinator and does not respond: {reason}"
                )
            if loss or time.monotonic() >= deadline:
                return loss
            time.sleep(self._interval / 4)

    def settle(self, loss: Loss, during: str, error: str = "") -> str:
        """Publishes the loss to all other processes, and returns a message that names it."""
        self._raised, self._loss = True, loss
        self._publish(loss)
        tell_lost(self.processes.index, loss.lost)
        return self._message(loss, during, error)

    def end_lost(self) -> None:
        """Exits as for the loss that was raised in this process, and names it first."""
        if self._loss is not None:
            self._report(self._loss, ask=False)
        self._end(LOST_EXIT_CODE)

    def _message(self, loss: Loss, during: str = "", error: str = "", *, ask: bool = True) -> str:
        names = [self.name_of(index, ask=ask) for index in loss.lost]
        known = "; ".join(filter(None, (loss.why, error)))
        return (
            f"{', '.join(names)} {loss.verb}{during and ' during ' + during}: {known}. "
            f"Resume from the last checkpoint."
        )

    def name_of(self, index: int, *, ask: bool = True) -> str:
        """Returns a process's name, with its pid and host if they are known or can be looked up."""
        if ask and index not in self._peers:
            with contextlib.suppress(Exception):
                self._meet(_store())
        host, pid, _ = self._peers.get(index, ("", 0, ""))
        where = f" (pid {pid} on host {host})" if host else ""
        return f"process {index} of {self.processes.count}{where}"

    def _meet(self, store: Any) -> None:
        for key, who in store.key_value_dir_get("shardwise/process/"):
            self._peers[_last(key)] = tuple(json.loads(who))

    def _publish(self, loss: Loss) -> None:
        # The store may be gone with process 0: then JAX aborts all others by itself.
        with contextlib.suppress(Exception):
            key = f"shardwise/notice/{self.processes.index}"
            _store().key_value_set(key, json.dumps(asdict(loss)), True)

    def _run(self) -> None:
        beat = 0
        while jax.distributed.is_initialized() and not self._stopped.is_set():
            loss = None
            # If the store fails, the coordinator is lost: JAX aborts the process for that.
            with contextlib.suppress(Exception):
                if not self._leaving:
                    beat += 1
                    _store().key_value_set(
                        f"shardwise/beat/{self.processes.index}", str(beat), True
                    )
                loss = self._look(quiet_seconds=None)
                self._answered = time.monotonic()
            if loss and not self._raised:
                self._report(loss)
                # The main thread may know it too, and be about to exit in its own way.
                time.sleep(_GRACE_SECONDS)
                if not self._raised:
                    self._end(LOST_EXIT_CODE)
            self._stopped.wait(self._interval)

    def _look(self, quiet_seconds: float | None) -> Loss | None:
        """Returns the current loss; silence counts as one after `quiet_seconds`, unless None."""
        store = _store()
        if len(self._peers) < self.processes.count:
            self._meet(store)
        # Before the notices: a process that exits because of a loss writes its notice first.
        dead = self._dead_on_this_host()
        if quiet_seconds is not None or self.processes.index == 0 or dead:
            self._count_beats(store)
        if self.processes.index == 0:
            done = tuple(i for i, (beat, _) in self._heard.items() if beat == "done")
            state = (self._silent_for(self._timeout / 2), done)
            if state != (self._quiet, self._done):
                store.key_value_set("shardwise/notice/state", json.dumps(state), True)
        notices = dict(store.key_value_dir_get("shardwise/notice/"))
        state = json.loads(notices.pop("shardwise/notice/state", "[[], []]"))
        self._quiet, self._done = map(tuple, state)
        for notice in map(json.loads, notices.values()):
            # It may be about this process, if another one considered it lost.
            if self.processes.index not in notice["lost"]:
                return Loss(tuple(notice["lost"]), notice["verb"], notice["why"])
        dead = tuple(i for i in dead if self._heard.get(i, ("", 0))[0] != "done")
        if dead:
            return Loss(dead, "was lost", "it is no longer running on this host")
        if self._done and time.monotonic() - self.inside_since > self._timeout:
            return Loss(
                self._done, "ended", f"process {self.processes.index} is still waiting for it"
            )
        silent = self._silent_for(quiet_seconds) if quiet_seconds is not None else ()
        return Loss(silent, "was lost", "it no longer sends heartbeats") if silent else None

    def _dead_on_this_host(self) -> tuple[int, ...]:
        space = pid_space()
        return tuple(i for i, (_, pid, at) in self._peers.items() if at == space and is_dead(pid))

    def _count_beats(self, store: Any) -> None:
        now = time.monotonic()
        for key, beat in store.key_value_dir_get("shardwise/beat/"):
            if self._heard.get(_last(key), ("", 0))[0] != beat:
                self._heard[_last(key)] = (beat, now)

    def _silent_for(self, seconds: float) -> tuple[int, ...]:
        now = time.monotonic()
        others = ((i, *heard) for i, heard in self._heard.items() if i != self.processes.index)
        return tuple(i for i, beat, at in others if beat != "done" and now - at > seconds)

    def _report(self, loss: Loss, *, ask: bool = True) -> None:
        """Writes the loss to stderr, once, bypassing Python's buffers."""
        # Formatted before the lock is taken, so that it is held only for a write.
        me = f"Process {self.processes.index} exits with code {LOST_EXIT_CODE}."
        text = f"shardwise: {self._message(loss, ask=ask)} {me}\n"
        locked = self._naming.acquire(timeout=_GRACE_SECONDS)
        if not self._named:
            os.write(2, visible(text).encode())
            self._named, self._loss = True, loss
            tell_lost(self.processes.index, loss.lost)
        if locked:
            self._naming.release()

    def _end(self, code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)

    def _leave_threads(self) -> None:
        """Exits if this process failed and a thread keeps it from exiting.

        Python waits for threads before it calls `_leave`. One that commits a save waits for all
        processes, so the others would wait for this one too, and be taken for the cause.
        """
        if os.getpid() != self._pid or not self._has_failed():
            return
        deadline = time.monotonic() + _THREAD_SECONDS
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    cast(Any, atexit)._run_exitfuncs()  # ends with `_leave`
                    return

    def _has_failed(self) -> bool:
        return (
            self._raised
            or getattr(sys, "last_value", None) is not None
            or _exit_code(self.status) not in _ENDED
        )

    def _leave(self) -> None:
        """Exits at once if this process failed: JAX would wait for the others first."""
        self._leaving = True
        error: Any = getattr(sys, "last_value", None)
        if not jax.distributed.is_initialized() or os.getpid() != self._pid:
            return
        code = 1 if error is not None else _exit_code(self.status)
        if code in _ENDED and not self._raised:
            with contextlib.suppress(Exception):
                _store().key_value_set(f"shardwise/beat/{self.processes.index}", "done", True)
            return
        if self.agreed is not None and (error or self.failure or self.agreed) is self.agreed:
            self._leave_agreed(code)
        if not self._raised:
            error = error or self.failure
            loss = self.find_for(error)
            if loss is None:
                text = f"{type(error).__name__}: {error}" if error else f"exit status {code}"
                loss = Loss((self.processes.index,), "failed", " ".join(text.split()))
            else:
                code = LOST_EXIT_CODE
                self._report(loss)
            self.settle(loss, "")
        else:
            code = LOST_EXIT_CODE
        if self.processes.index == 0:
            # The store ends with process 0, and JAX would abort the others before they read why.
            time.sleep(2 * self._interval + 0.5)
        self._end(code)

    def _leave_agreed(self, code: int) -> None:
        """Exits with a failure that all processes know; the coordinator exits last."""
        self._code = code
        with contextlib.suppress(Exception):
            _store().key_value_set(f"shardwise/left/{self.processes.index}", "left", True)
            if self.processes.index == 0:
                for index in range(self.processes.count):
                    _store().blocking_key_value_get(f"shardwise/left/{index}", 5000)
                time.sleep(_LEAVE_SECONDS)
        self._end(code)

    def _on_abort(self, number: int) -> None:
        """Names the loss for which JAX called abort(); any other abort() proceeds as usual.

        Running Python in a signal handler is safe here for these reasons. SIGABRT is raised by the
        thread that calls abort(), so nothing is interrupted at a random place: it is as if that
        thread, one of JAX's in C++, called this function. jaxlib's own hook for this,
        `missed_heartbeat_callback`, does not work: in 0.10 as in 0.12, a Python function there
        ends the process with `std::bad_cast`, and `jax.distributed` passes none. Every wait here is
        bounded: that for a lock which is held for one write by `_GRACE_SECONDS`, that for a
        connection by a second. The store is not queried, since JAX's thread may hold its locks.
        Only the GIL is unbounded: if another thread never releases it, this process hangs as it
        would without this handler, and its launcher kills it.
        """
        me, loss = self.processes.index, self._loss
        if os.getpid() == self._pid:
            if self._code is not None:
                os._exit(self._code)
            if self._starting:
                os.write(2, f"shardwise: process {me} exits: {self._starting}.\n".encode())
                os._exit(LOST_EXIT_CODE)
            # All processes abort at once, so one that is dead by now need not be the lost one:
            # that check comes last.
            if loss is None and (quiet := tuple(i for i in self._quiet if i != me)):
                loss = Loss(quiet, "was lost", f"it sent no heartbeat for {self._timeout:g} s")
            if loss is None and self._done:
                # JAX waited for all to exit: those still running are not lost, and those that
                # have exited are the cause.
                loss = Loss(self._done, "ended", "JAX timed out waiting for the others to exit")
            if loss is None and me and self._coordinator_is_gone():
                loss = Loss((0,), "was lost", "it is the coordinator and does not respond")
            if loss is None and (dead := self._dead_on_this_host()):
                loss = Loss(dead, "was lost", "it is no longer running on this host")
        if loss:
            self._report(loss, ask=False)
            os._exit(LOST_EXIT_CODE)
        # Restore and run the previous handler, such as faulthandler's; then abort() proceeds.
        self._libc.signal(signal.SIGABRT, self._before)
        getattr(self._libc, "raise")(signal.SIGABRT)

    def _coordinator_is_gone(self) -> bool:
        if time.monotonic() - self._answered > self._timeout / 2:
            return True
        host, _, port = (self.processes.coordinator or ":0").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
        except OSError:
            return True
        return False


def _note_exits(watch: PeerWatch) -> None:
    """Records the status of `sys.exit` for the watch: Python does not expose it at exit."""

    class Exit(SystemExit):
        def __del__(self) -> None:
            try:
                sys._getframe(1)  # it was caught, and the program continues
            except ValueError:
                watch.status = self.code

    def exit_noted(status: Any = None, /) -> NoReturn:
        raise Exit(status)

    sys.exit = exit_noted


# A run that a signal stopped ended normally, on all processes at once.
_ENDED = (0, AGAIN_EXIT_CODE, 128 + signal.SIGINT, 128 + signal.SIGTERM)


def _exit_code(status: Any) -> int:
    return 0 if status is None else status if isinstance(status, int) else 1


# JAX's runtime exists once per process and cannot be left, so the same holds for its watch.
WATCHES: list[PeerWatch] = []


def _store() -> Any:
    return distributed_state().client


def _last(key: str) -> int:
    return int(key.rpartition("/")[2])
