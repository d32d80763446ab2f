"""Launching: runs N processes of one command on this machine, and waits for all of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

GRACE_SECONDS = 10.0
"""How long the others have between SIGTERM and SIGKILL when one process has failed."""

_FORWARDED = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
)
# How a process exits when another one was lost, with and without shardwise: never the root cause.
_CONSEQUENCES = (75, -signal.SIGABRT)
# Gloo writes such a line for each device and group of devices; nobody needs them.
_NOISE = b"[Gloo] Rank "
_PROGRESS_SECONDS = 10.0
_LONGEST_LINE = 1 << 20
POLL_SECONDS = 0.05


def launch(command: Sequence[str], processes: int, devices: int | None = None) -> int:
    """Runs N local processes of one command, and returns their exit code.

    The processes join each other with `shardwise.distributed()`. Output is forwarded line by line,
    prefixed with the index of the process: `[1] step 20`. SIGINT, SIGTERM, SIGHUP and SIGUSR1 are
    forwarded to all. When a process fails, it is named, the others get SIGTERM, and SIGKILL 10
    seconds later. A second SIGINT or SIGTERM does the same. No process is left running.

    Args:
        command: the program and its arguments.
        processes: how many to start.
        devices: virtual CPU devices per process; None leaves the devices as they are.

    Returns:
        0 if all processes exit with 0, else the code of the first failure; 128 + n if signal n
        killed it.

    Raises:
        ValueError: the program does not exist, or a number is less than 1; nothing is started.

    Example:
        >>> import sys
        >>> from shardwise._processes import launch
        >>> launch([sys.executable, "-c", "import os; os.environ['SHARDWISE_PROCESS']"], 2)
        0
    """
    program = require_program(command)
    require_count("processes", processes)
    if devices is not None:
        require_count("devices", devices)
    asked: list[int] = []
    output = Output()
    children: list[subprocess.Popen[bytes]] = []
    pumps: list[threading.Thread] = []
    with signals_noted(asked):
        try:
            place = {"SHARDWISE_COORDINATOR": f"127.0.0.1:{free_port()}"}
            for index in range(processes):
                child = start(program, command, environment_of(place, index, processes, devices))
                children.append(child)
            # Only now: none of our threads may run while a child is being forked.
            pumps += started_pumps(children, output)
            return _wait(children, asked, output)
        finally:
            for child in children:
                end(child)
            for pump in pumps:
                # A grandchild in its own session may keep the pipe open forever.
                pump.join(timeout=2)


def _wait(children: list[subprocess.Popen[bytes]], asked: list[int], output: Output) -> int:
    """Waits until all children have exited or time is up, and returns the exit code of the run."""
    code, ends, deadline = 0, 0, float("inf")
    received: set[int] = set()
    running = dict(enumerate(children))
    while running and time.monotonic() < deadline:
        while asked:
            number = signal.Signals(asked.pop(0))
            signal_all(running.values(), number)
            received.add(number)
            ends += number in (signal.SIGINT, signal.SIGTERM)
            if ends > 1 and not code:
                # JAX treats SIGTERM as a preemption notice: it need not end the process.
                code = 128 + number
                output.say(f"received a second {number.name}; terminating all processes")
        ended = {i: end(child) for i, child in running.items() if has_ended(child)}
        running = {i: child for i, child in running.items() if i not in ended}
        failed = {i: status for i, status in ended.items() if status}
        if failed and not code:
            # Several may have exited since the last poll: name the cause, not its consequences.
            index = min(failed, key=lambda i: failed[i] in _CONSEQUENCES)
            status = failed[index]
            code = 128 - status if status < 0 else status
            if code - 128 in received:  # it did as it was asked, which is not a failure
                output.say(f"stopped by {signal.Signals(code - 128).name}")
            else:
                output.say(f"process {index} {how(status)}{_others(len(running))}")
        elif output.closed and not code:
            code = 128 + signal.SIGPIPE
        if code and deadline == float("inf"):
            signal_all(running.values(), signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS
        time.sleep(POLL_SECONDS)
    if running:
        names = ", ".join(map(str, running))
        noun = "process" if len(running) == 1 else "processes"
        output.say(
            f"{noun} {names} did not exit within {GRACE_SECONDS:.0f} s of SIGTERM; sending SIGKILL"
        )
    return code


def how(status: int) -> str:
    if status > 0:
        return f"exited with code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def started_pumps(
    children: Sequence[subprocess.Popen[bytes]], output: Output
) -> list[threading.Thread]:
    """Returns the threads that forward what the children write."""
    pumps = [
        threading.Thread(target=output.pump, args=(index, pipe, into), daemon=True)
        for index, child in enumerate(children)
        for pipe, into in ((child.stdout, sys.stdout), (child.stderr, sys.stderr))
    ]
    for pump in pumps:
        pump.start()
    return pumps


def _others(count: int) -> str:
    return "" if not count else "; terminating the other" + (f" {count}" if count > 1 else "")


def require_program(command: Sequence[str]) -> str:
    if isinstance(command, str) or not command:
        raise ValueError(
            f"the command must be a non-empty list of a program and its arguments, got "
            f"{command!r}: give a list such as ['python', 'train.py']"
        )
    program = shutil.which(command[0])
    if program is None:
        raise ValueError(
            f"the program {command[0]!r} is neither on the PATH nor an executable file: "
            f"run a Python script as 'python {command[0]}'"
        )
    return program


def require_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"the number of {name} must be a positive integer, got {value!r}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment_of(
    place: dict[str, str], index: int, processes: int, devices: int | None
) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SHARDWISE_")}
    own = {"SHARDWISE_PROCESSES": str(processes), "SHARDWISE_PROCESS": str(index)}
    if devices is not None:
        own["SHARDWISE_DEVICES"] = str(devices)
    return inherited | place | own | {"PYTHONUNBUFFERED": "1"}


def start(
    program: str, command: Sequence[str], environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(command),
            executable=program,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Its own session: Ctrl-C in a terminal reaches it only once, through us.
            start_new_session=True,
            preexec_fn=_end_with_parent(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"{shlex.join(command)!r} could not be started: {error}") from error


def _end_with_parent() -> Callable[[], None] | None:
    """Returns a function for the child that asks the kernel for SIGKILL when this process dies.

    It runs between fork and exec, where a lock that another thread held is never released. So it
    takes none: it makes two system calls, through objects that already exist. Nothing is
    imported, logged or opened, and the C library makes its own allocator usable after a fork. The
    alternatives are worse: a program in between (`setpriv`, or Python) would have to pass on
    signals, the locale and exec errors unchanged, and asking after exec is too late if the
    launcher is killed before that.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()
    pr_set_pdeathsig, sigkill = ctypes.c_int(1), ctypes.c_int(signal.SIGKILL)

    def ask() -> None:
        prctl(pr_set_pdeathsig, sigkill)
        # The parent may have died before the call above.
        if os.getppid() != parent:
            os._exit(1)

    return ask


@contextlib.contextmanager
def signals_noted(asked: list[int]) -> Iterator[None]:
    """Appends signals to forward to `asked`; those that are ignored (nohup) stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted = [s for s in _FORWARDED if signal.getsignal(s) not in (signal.SIG_IGN, None)]
    before = {s: signal.signal(s, lambda number, frame: asked.append(number)) for s in noted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_all(children: Iterable[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for child in children:
        _signal_group(child, number)


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def has_ended(child: subprocess.Popen[bytes]) -> bool:
    # Left unreaped, so that its pid, which is also its process group, cannot be reused.
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end(child: subprocess.Popen[bytes]) -> int:
    """Kills a child and its process group if it is still running, and returns its status."""
    if child.returncode is None:
        _signal_group(child, signal.SIGKILL)
    return child.wait()


class Output:
    """Forwards the output of all processes, line by line, prefixed with their indices."""

    def __init__(self) -> None:
        self.closed = False
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        self._write(sys.stderr, f"shardwise: {text}\n".encode())

    def pump(self, index: int, pipe: Any, into: TextIO) -> None:
        """Forwards one pipe in complete lines until it is closed."""
        partial, shown = b"", time.monotonic()
        with pipe:
            while chunk := os.read(pipe.fileno(), 65536):
                *lines, partial = (partial + chunk).split(b"\n")
                now = time.monotonic()
                if partial and (
                    len(partial) > _LONGEST_LINE
                    or (b"\r" in partial and now - shown > _PROGRESS_SECONDS)
                ):
                    # A progress bar may not end its line for hours: show its state now and then.
                    lines, partial, shown = [*lines, partial], b"", now
                self._lines(index, lines, into)
        self._lines(index, [partial] if partial else [], into)

    def _lines(self, index: int, lines: list[bytes], into: TextIO) -> None:
        # What a terminal would show: whatever follows the last carriage return.
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        shown = [line for line in shown if not line.startswith(_NOISE)]
        if shown:
            self._write(into, b"".join(b"[%d] %s\n" % (index, line) for line in shown))

    def _write(self, into: TextIO, data: bytes) -> None:
        with self._lock:
            try:
                into.flush()
                if hasattr(into, "buffer"):
                    into.buffer.write(data)
                else:
                    into.write(data.decode(errors="replace"))
                into.flush()
            except (BrokenPipeError, ValueError):
                # The reader is gone (`| head`). Python would complain about it again at exit.
                self.closed = True
                with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), into.fileno())
