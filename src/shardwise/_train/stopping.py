"""Signals: a run that is asked to stop finishes the current step, the same on all processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._base import public
from .._processes import LostProcess, end_named


@public
class Stopped(SystemExit):
    """A run was stopped by a signal, after completing a step.

    If uncaught, it ends the process with the signal's exit status (143 for SIGTERM).

    Attributes:
        step: the last completed step.
        signal: the signal's name.
        status: the exit status.
    """

    def __init__(self, step: int, number: int):
        """Stores the step and the signal."""
        self.status = 128 + number
        super().__init__(self.status)
        self.step, self.signal = step, signal.Signals(number).name

    def __str__(self) -> str:
        """Returns what happened."""
        return f"stopped by {self.signal} after step {self.step}"


class Stopping:
    """A context in which SIGTERM and SIGINT are recorded, and SIGUSR1 requests a profile.

    A second SIGINT interrupts at once. Outside the main thread, where Python cannot handle
    signals, nothing changes.

    Attributes:
        profile: whether a profile was requested; the reader resets it.
        grows: whether more processes are offered, to go on with after the next checkpoint.
    """

    def __init__(self, mesh: Mesh, offered: Callable[[], bool] = lambda: False):
        """Installs no handlers yet; `offered` returns whether more processes are offered."""
        self.profile = False
        self.grows = False
        self._offered = offered
        self._seen = 0
        self._before: dict[int, Any] = {}
        self._agree = Agreement(mesh) if jax.process_count() > 1 else None

    def __enter__(self) -> Stopping:
        """Installs the signal handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        """Restores the previous handlers, after pending messages between processes have arrived."""
        if self._agree is not None and (error[0] is None or issubclass(error[0], Stopped)):
            self._agree.settle()
        lost = error[0] is not None and issubclass(error[0], LostProcess)
        for number, handler in self._before.items():
            if lost and number == signal.SIGTERM and handler is signal.SIG_DFL:
                handler = end_named
            # None is a handler that was not installed from Python and cannot be restored.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @property
    def noted(self) -> int:
        """The signal that this process received, or 0."""
        return self._seen

    def asked(self) -> int:
        """Returns the recorded signal, or 0; the same on all processes.

        Called once per step, so that all processes learn of a signal at the same step.
        """
        mine = 2 * self._seen + bool(self._offered())
        found = mine if self._agree is None else self._agree.highest(mine)
        self.grows = self.grows or found % 2 == 1
        return found // 2

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.profile = True
        elif number == signal.SIGINT and self._seen == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            self._seen = number


class Agreement:
    """The maximum of a number over all processes, a few steps late and without waiting."""

    def __init__(self, mesh: Mesh):
        """Compiles nothing yet."""
        devices = np.array(sorted(mesh.devices.flat, key=lambda d: d.id))
        flat = Mesh(devices, ("device",))
        self._each = NamedSharding(flat, P("device"))
        self._highest = jax.jit(lambda x: x.max(), out_shardings=NamedSharding(flat, P()))
        self._shape = (flat.size,)
        self._pending: list[jax.Array] = []

    def highest(self, mine: int) -> int:
        """Returns the maximum from two calls ago, or 0; all processes must call it together."""
        local = np.full(len(self._each.addressable_devices), mine, "int32")
        values = jax.make_array_from_process_local_data(self._each, local, self._shape)
        self._pending.append(self._highest(values))
        # Two steps late on every process, so that nothing waits for the devices.
        return int(np.asarray(self._pending.pop(0))) if len(self._pending) > 2 else 0

    def settle(self) -> None:
        """Waits for pending work: a process must not exit in the middle of a collective."""
        jax.block_until_ready(self._pending)
        self._pending.clear()
