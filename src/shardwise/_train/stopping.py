"""Signals: a run that is asked to stop finishes its step first, on all processes at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._base import public


@public
class Stopped(SystemExit):
    """A run was asked to stop by a signal, and did so after a whole step.

    Uncaught, it ends the process with the status that the signal means (143 for SIGTERM).

    Attributes:
        step: the last step that was taken.
        signal: the signal's name.
        status: the exit status.
    """

    def __init__(self, step: int, number: int):
        """Keeps the step and the signal."""
        self.status = 128 + number
        super().__init__(self.status)
        self.step, self.signal = step, signal.Signals(number).name

    def __str__(self) -> str:
        """Returns what happened."""
        return f"stopped by {self.signal} after step {self.step}"


class Stopping:
    """While entered, SIGTERM and SIGINT are noted, and SIGUSR1 asks for a profile.

    A second SIGINT interrupts at once. Outside the main thread, where Python takes no signals,
    nothing is changed.

    Attributes:
        profile: whether a profile was asked for; the reader sets it back.
    """

    def __init__(self, mesh: Mesh):
        """Takes no signal yet."""
        self.profile = False
        self._seen = 0
        self._before: dict[int, Any] = {}
        self._agree = Agreement(mesh) if jax.process_count() > 1 else None

    def __enter__(self) -> Stopping:
        """Takes the signals."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        """Gives them back, when what the processes still tell each other has arrived."""
        if self._agree is not None and (error[0] is None or issubclass(error[0], Stopped)):
            self._agree.settle()
        for number, handler in self._before.items():
            # None stands for a handler that was not set from Python and cannot be put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @property
    def noted(self) -> int:
        """The signal that this process got, or 0."""
        return self._seen

    def asked(self) -> int:
        """Returns the signal that was noted, or 0; on many processes the same on all of them.

        Called once a step: every process learns at the same step that one of them was asked.
        """
        return self._seen if self._agree is None else self._agree.highest(self._seen)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.profile = True
        elif number == signal.SIGINT and self._seen == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            self._seen = number


class Agreement:
    """The highest number that any process has given, some steps late and without waiting."""

    def __init__(self, mesh: Mesh):
        """Compiles nothing yet."""
        devices = np.array(sorted(mesh.devices.flat, key=lambda d: d.id))
        flat = Mesh(devices, ("device",))
        self._each = NamedSharding(flat, P("device"))
        self._highest = jax.jit(lambda x: x.max(), out_shardings=NamedSharding(flat, P()))
        self._shape = (flat.size,)
        self._pending: list[jax.Array] = []

    def highest(self, mine: int) -> int:
        """Returns the highest number of two calls ago, or 0; all processes call it alike."""
        local = np.full(len(self._each.addressable_devices), mine, "int32")
        given = jax.make_array_from_process_local_data(self._each, local, self._shape)
        self._pending.append(self._highest(given))
        # Two steps late, on every process alike: the devices need not be waited for.
        return int(np.asarray(self._pending.pop(0))) if len(self._pending) > 2 else 0

    def settle(self) -> None:
        """Waits for what is under way: a process must not end in the middle of a collective."""
        jax.block_until_ready(self._pending)
        self._pending.clear()
