"""Joining processes: the same script on one process, on N of one machine, and on a cluster."""

from __future__ import annotations

import math
import os
import re
import socket
import time
import warnings
from dataclasses import replace
from typing import Any

import jax

from .._base import public
from .._jax import (
    MissingInternal,
    backend_has_started,
    bind_gloo,
    cluster_kinds,
    distributed_state,
)
from .elastic import keep_pulse
from .peer_watch import WATCHES, PeerWatch
from .peers import Processes

_REQUIRED = ("SHARDWISE_COORDINATOR", "SHARDWISE_PROCESSES", "SHARDWISE_PROCESS")
_CLUSTERS = {
    "SlurmCluster": "Slurm",
    "OmpiCluster": "Open MPI",
    "GkeTpuCluster": "Cloud TPU",
    "GceTpuCluster": "Cloud TPU",
    "K8sCluster": "Kubernetes",
}


@public
def distributed(*, timeout_seconds: float = 30, start_seconds: float = 300) -> Processes:
    """Joins the processes of the run, and returns this process's index and their number.

    Call it before anything else that uses JAX. The same script then runs as one process, as the
    processes that `shardwise launch` starts, and on a cluster that JAX detects (Slurm, Open MPI,
    Kubernetes, Cloud TPU). JAX's distributed runtime is started if there is more than one process.
    Further calls return the same result. When another process dies or stops responding, this one
    names it on stderr and exits with code 75, at most `timeout_seconds` plus 10 seconds later.

    Args:
        timeout_seconds: how long a process may be unresponsive before it counts as dead.
        start_seconds: how long to wait for all processes to join.

    Raises:
        ValueError: a backend has already started, the environment variables are inconsistent, or
            the coordinator cannot be reached.

    Example:
        >>> import shardwise as sw
        >>> here = sw.distributed()
        >>> here.index, here.count, here.found
        (0, 1, 'one process')
    """
    for name, value in (("timeout_seconds", timeout_seconds), ("start_seconds", start_seconds)):
        if not (math.isfinite(value) and value >= 1):
            raise ValueError(f"{name} must be a finite number of at least 1, got {value!r}")
    if WATCHES:
        return WATCHES[0].processes
    if jax.distributed.is_initialized():
        state = distributed_state()
        processes = Processes(
            state.process_id,
            state.num_processes,
            "jax.distributed.initialize",
            state.coordinator_address,
        )
    elif any(name in os.environ for name in _REQUIRED):
        processes = _launched()
    else:
        processes = _in_cluster()
    if processes.count == 1:
        keep_pulse(timeout_seconds)
        return replace(processes, coordinator=None)
    watch = PeerWatch(processes, timeout_seconds)
    if not jax.distributed.is_initialized():
        _require_no_backend()
        # JAX aborts in C++ if the others do not join: that must be explained too.
        watch.guard(f"not all {processes.count} processes joined within {start_seconds:g} s")
        _initialize(processes, timeout_seconds, start_seconds)
        address = distributed_state().coordinator_address
        watch.processes = replace(processes, coordinator=address)
    watch.begin()
    WATCHES.append(watch)
    return watch.processes


def distributed_address() -> str | None:
    """Returns the address of process 0; None if there is one process."""
    return distributed_state().coordinator_address if jax.distributed.is_initialized() else None


def _launched() -> Processes:
    """Returns this process as `shardwise launch` set it up, and configures its devices."""
    present = [name for name in _REQUIRED if name in os.environ]
    if missing := [name for name in _REQUIRED if name not in present]:
        raise ValueError(
            f"{' and '.join(present)} {_is(present)} set, but {' and '.join(missing)} "
            f"{_is(missing)} not: shardwise launch sets all of {', '.join(_REQUIRED)}"
        )
    address = os.environ["SHARDWISE_COORDINATOR"]
    if not re.fullmatch(r".+:\d+", address):
        raise ValueError(f"SHARDWISE_COORDINATOR must be host:port, got {address!r}")
    count, index = (
        _integer(name, least) for name, least in zip(_REQUIRED[1:], (1, 0), strict=True)
    )
    if index >= count:
        raise ValueError(
            f"SHARDWISE_PROCESS must be less than SHARDWISE_PROCESSES ({count}), got {index}"
        )
    if "SHARDWISE_DEVICES" in os.environ:
        devices = _integer("SHARDWISE_DEVICES", 1)
        if _config("jax_num_cpu_devices") != devices:
            _require_no_backend()
            jax.config.update("jax_num_cpu_devices", devices)
        if not os.environ.get("JAX_PLATFORMS") and not backend_has_started():
            jax.config.update("jax_platforms", "cpu")
    return Processes(index, count, "shardwise launch", address)


def _config(name: str) -> Any:
    return getattr(jax.config, name)  # documented by JAX, but missing from its type


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _integer(name: str, least: int) -> int:
    text = os.environ[name]
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {text!r}")
    return int(text)


def _in_cluster() -> Processes:
    """Returns this process in the cluster that JAX detects, using JAX's own list of clusters."""
    with warnings.catch_warnings():
        if "JOB_COMPLETION_INDEX" not in os.environ:
            # Without the kubernetes package JAX warns in every pod, even outside a job.
            warnings.simplefilter("ignore")
        try:
            kinds = [c for c in cluster_kinds() if not c.opt_in_only_method]
            kind = next((c for c in kinds if c.is_env_present()), None)
            if kind is not None:
                name = str(_CLUSTERS.get(kind.__name__, kind.__name__))
                # The shell of an salloc is a step with one task, however many the job has.
                alone = name == "Slurm" and os.environ.get("SLURM_STEP_NUM_TASKS") == "1"
                count = 1 if alone else kind.get_process_count()
                return Processes(kind.get_process_id() if count > 1 else 0, count, name)
        except MissingInternal:
            raise
        except Exception as error:
            raise ValueError(
                f"JAX detected a cluster, but its settings could not be read: {error}"
            ) from error
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if os.environ.get(name, "1") != "1":
            raise ValueError(
                f"{name} is {os.environ[name]}, but JAX {jax.__version__} detects no cluster here, "
                f"so each process would run on its own: start them with srun or shardwise launch"
            )
    if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS is {address}, but no cluster was detected, so the number of "
            f"processes is unknown: set {', '.join(_REQUIRED)} instead"
        )
    return Processes(0, 1, "one process")


def _require_no_backend() -> None:
    if backend_has_started():
        raise ValueError(
            "a JAX backend has already started, so processes can no longer be joined: call "
            "sw.distributed() first, before creating arrays or calling jax.devices()"
        )


def _initialize(processes: Processes, timeout_seconds: float, start_seconds: float) -> None:
    if _config("jax_cpu_collectives_implementation") is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    arguments: dict[str, Any] = {
        "heartbeat_timeout_seconds": math.ceil(timeout_seconds),
        "initialization_timeout": math.ceil(start_seconds),
    }
    if address := processes.coordinator:
        _require_address(processes, address, start_seconds)
        has_devices = "JAX_LOCAL_DEVICE_IDS" in os.environ or "SHARDWISE_DEVICES" in os.environ
        arguments |= {
            "coordinator_address": address,
            # Everything is known: ignore the variables of a cluster that the launcher runs in.
            "cluster_detection_method": "deactivate",
            "num_processes": processes.count,
            "process_id": processes.index,
            # By default JAX listens on every interface of this machine.
            "coordinator_bind_address": address if address.startswith("127.0.0.1:") else None,
            # One accelerator per process, as JAX does under Slurm and Open MPI.
            "local_device_ids": None if has_devices else [processes.index],
        }
        if address.startswith("127.0.0.1:"):
            bind_gloo("127.0.0.1")  # likewise
    try:
        jax.distributed.initialize(**arguments)
    except Exception as error:
        raise ValueError(
            f"process {processes.index} of {processes.count} ({processes.found}) could not start "
            f"JAX's distributed runtime: {error}"
        ) from error


def _require_address(processes: Processes, address: str, start_seconds: float) -> None:
    """Checks for what would make JAX abort the process: a port in use, an unreachable host."""
    host, _, port = address.rpartition(":")
    if processes.index == 0:
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1" if host == "127.0.0.1" else "", int(port)))
        except OSError as error:
            raise ValueError(
                f"process 0 cannot listen on port {port} of {address}: {error}"
            ) from error
        return
    deadline = time.monotonic() + start_seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"process {processes.index} of {processes.count} could not reach the "
                    f"coordinator, process 0 at {address}, within {start_seconds:g} s: {error}"
                ) from error
        time.sleep(0.1)
