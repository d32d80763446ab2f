"""The processes of a run, and whether one on this host is still running."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

import jax

from .._base import public


@public
@dataclass(frozen=True, slots=True)
class Processes:
    """This process among the processes of the run, and how that was found out.

    Attributes:
        index: the index of this process, from 0.
        count: the number of processes.
        found: where this came from: "one process", "shardwise launch", "Slurm", "Open MPI", ...
        coordinator: the address of process 0, where JAX's distributed runtime was started.
    """

    index: int
    count: int
    found: str
    coordinator: str | None = None

    @property
    def local_devices(self) -> int:
        """The number of devices of this process; the first access starts the backend."""
        return jax.local_device_count()

    @property
    def devices(self) -> int:
        """The number of devices of all processes; the first access starts the backend."""
        return jax.device_count()

    def __str__(self) -> str:
        where = f"{self.found}, coordinator {self.coordinator}" if self.coordinator else self.found
        here = f"{self.local_devices} of {self.devices} {jax.default_backend()} devices"
        return f"process {self.index} of {self.count} ({where}): {here}"


def pid_space() -> str:
    """Returns a name that two processes share if each can see the other's pid."""
    space = socket.gethostname()
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as boot:
        space += f" {boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return space


def is_dead(pid: int) -> bool:
    """Returns whether a process of this host has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # A killed process stays a zombie until its parent reads its exit code.
            return stat.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except FileNotFoundError:
        return os.path.isdir("/proc/self") or not _exists(pid)
    except OSError:
        return False


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
