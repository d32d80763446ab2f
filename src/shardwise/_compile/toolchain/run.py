"""Compiles a lowered program, in this process or in another, and caches the result."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ..._base import cleaned_up_on_signal, option, public, working
from ..._chips import Chips
from ..._jax import missing, module_bytes
from .cache import FORMAT, cache_folder, read_entry, write_entry
from .gpu import target_config
from .installed import require_compiler, version_of
from .noise import compiler_noise, start_backends
from .worker import (
    Missing,
    arranged,
    compiled,
    dumped_lifetimes,
    dumped_program,
    hlo_text,
    memory_stats,
    status_of,
    topology_devices,
    with_dump,
)

_WORKER = Path(__file__).with_name("worker.py")
# Variables of the environment that change what the compilers make of a program.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_SETTINGS = (
    "JAX_OPTIMIZATION_LEVEL", "JAX_MEMORY_FITTING_LEVEL", "JAX_EXEC_TIME_OPTIMIZATION_EFFORT",
    "JAX_MEMORY_FITTING_EFFORT", "JAX_ENABLE_REMAT_OPT_PASS", "JAX_XLA_PROFILE_VERSION",
    "JAX_USE_SHARDY_PARTITIONER", "TPU_MEGACORE",
)  # fmt: skip
# JAX adds it to the environment itself, at a moment that differs.
_ADDED = "--xla_tpu_use_enhanced_launch_barrier=true"


# Is given the process of each compiler that this thread starts.
_watcher: contextvars.ContextVar[Callable[[subprocess.Popen[Any]], Any] | None]
_watcher = contextvars.ContextVar("_watcher", default=None)


@contextlib.contextmanager
def watched_compilers(watch: Callable[[subprocess.Popen[Any]], Any]) -> Iterator[None]:
    """Within the block, `watch` is given each compiler's process that this thread starts.

    It may kill it, or raise, which kills it too.
    """
    token = _watcher.set(watch)
    try:
        yield
    finally:
        _watcher.reset(token)


@public
class CompileError(ValueError):
    """The compiler rejected the program or the chips."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """The result of a compiler.

    Attributes:
        hlo: the optimised HLO, or empty if the compiler returned none; of a rejected program, what
            the compiler had dumped.
        stats: its memory statistics by name, in bytes.
        refused: why the compiler rejected it, in its own words, or empty.
        noise: what the compiler printed.
        seconds: how long it took.
        lifetimes: when each temporary is alive, as `dumped_lifetimes` says; None if the compiler
            does not report it.
        cached: whether it comes from the cache.
    """

    hlo: str
    stats: dict[str, int]
    refused: str
    noise: str
    seconds: float
    lifetimes: dict[str, Any] | None = None
    cached: bool = False


def compile_here(lowered: Any, mesh: Mesh, options: Mapping[str, Any]) -> Program:
    """Returns a program compiled for the devices of a mesh, in this process.

    JAX's own compilation cache is bypassed: its entries lack what the compiler printed, and have
    the source lines of whoever compiled them first.

    Raises:
        CompileError: the compiler rejected it for a reason other than memory.
    """
    try:
        return _compiled_here(lowered, mesh, options)
    except Missing as error:
        raise missing(error.name, error) from error


def _compiled_here(lowered: Any, mesh: Mesh, options: Mapping[str, Any]) -> Program:
    start, refused, hlo, done = time.monotonic(), "", "", None
    module = module_bytes(lowered.compiler_ir("stablehlo"))
    with compiler_noise() as noise, tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        dump = Path(folder, "dump")
        try:
            done = compiled(module, list(mesh.devices.flat), with_dump(dict(options), dump))
        except jax.errors.JaxRuntimeError as error:
            if status_of(error) != "RESOURCE_EXHAUSTED":
                raise CompileError(f"the compiler rejected the step: {_first(error)}") from error
            refused, hlo = str(error), dumped_program(dump)
        lifetimes = dumped_lifetimes(dump)
    if done is None:
        return Program(hlo, {}, refused, noise(), time.monotonic() - start, lifetimes)
    stats = memory_stats(done)
    return Program(hlo_text(done), stats, "", noise(), time.monotonic() - start, lifetimes)


def compile_absent(
    module: bytes,
    chips: Chips | None,
    mesh: Mapping[str, int],
    options: Mapping[str, Any],
    same: str,
    *,
    show: bool = True,
) -> Program:
    """Returns a program compiled for absent chips.

    Args:
        module: StableHLO, as bytecode.
        chips: the chips; None for as many CPU devices, which need not exist either.
        mesh: the sizes of the mesh's axes, in order.
        options: XLA options, by name.
        same: a text that identifies the program in the cache.
        show: whether to show on the terminal that the compiler is running.

    Raises:
        ValueError: the compiler is not installed.
        CompileError: it rejected the topology, or the program for a reason other than memory.
    """
    request = {**_topology(chips), "mesh": list(mesh.values()), "options": dict(options)}
    if chips is not None and chips.slices > 1:
        request["slices"] = list(chips.slices_by_axis(tuple(mesh.values())))
    versions = {name: version_of(name) for name in ("shardwise", "jax", "jaxlib")}
    if chips is not None:
        versions |= require_compiler(chips).versions
    worker = _WORKER.read_text()
    digest = hashlib.sha256(same.encode())
    parts = [FORMAT, request, versions, worker, _environment()]
    digest.update(json.dumps(parts, sort_keys=True, default=str).encode())
    key = digest.hexdigest()[:32]
    kept = _kept(key)
    if kept is not None:
        return kept
    with (
        tempfile.TemporaryDirectory(prefix="shardwise-") as name,
        cleaned_up_on_signal(lambda: shutil.rmtree(name, ignore_errors=True)),
    ):
        folder = Path(name)
        (folder / "module").write_bytes(module)
        (folder / "request.json").write_text(
            json.dumps({**request, "module": str(folder / "module")}, default=str)
        )
        start = time.monotonic()
        words = f"compiling for {math.prod(mesh.values())} devices of {chips or 'the CPU'}"
        code, noise = _run(folder, words if show else "")
        seconds = time.monotonic() - start
        result = _result(folder, code, noise, chips)
        hlo = folder / "hlo.txt"
        program = Program(
            hlo=hlo.read_text() if hlo.exists() else "",
            stats=result.get("memory", {}),
            refused=result.get("error", ""),
            noise=noise,
            seconds=seconds,
            lifetimes=result.get("lifetimes"),
        )
        if not (program.hlo or program.refused):
            raise CompileError(
                f"the compiler for {chips or 'the CPU'} returned neither a program nor an error: check "
                f"that {tempfile.gettempdir()} has free space"
            )
    _keep(key, program, show)
    return program


def _environment() -> dict[str, Any]:
    """Returns what the environment adds to a program's identity."""
    found: dict[str, Any] = {name: os.environ[name] for name in _SETTINGS if name in os.environ}
    for name in _FLAGS:
        # Of two equal flags the last counts, so their order is kept.
        flags = [flag for flag in os.environ.get(name, "").split() if flag != _ADDED]
        for place, flag in enumerate(flags):
            if not flag.startswith("-"):  # a file of flags
                with contextlib.suppress(OSError):
                    flags[place] = Path(flag).read_text(errors="replace")
        if flags:
            found[name] = flags
    return found


def _topology(chips: Chips | None) -> dict[str, Any]:
    """Returns what the worker must know about the chips."""
    if chips is None:
        return {"platform": "cpu"}
    options: dict[str, Any] = {}
    request: dict[str, Any] = {
        "platform": chips.platform,
        "topology": str(chips.one_slice),
        "topology_options": options,
    }
    if chips.platform == "gpu":
        hosts, gpus = chips.topology
        # As on real machines, where each host is its own NVLink domain.
        request |= {"topology": f"{hosts}x1x{gpus}", "target_config": target_config(chips)}
    elif chips.chip.name == "v4":
        # As in the cloud, where the two cores of a chip are one device.
        options["chip_config_name"] = "megacore"
    if chips.slices > 1:
        options["num_slices"] = chips.slices
    if chips.platform == "tpu" and math.prod(chips.topology) <= 2:
        # Older versions need to know that this is less than one host.
        options["chips_per_host_bounds"] = (*chips.topology, 1)[:3]
    return request


def absent_mesh(chips: Chips, mesh: AbstractMesh) -> Mesh:
    """Returns a mesh of compile-only devices in this process.

    For programs that are partitioned by Python functions, such as cuDNN's attention, and cannot be
    passed to another process.

    Raises:
        ValueError: the compiler is not installed, or does not know the topology.
    """
    require_compiler(chips)
    start_backends()  # which also finds the plugins
    with compiler_noise():
        try:
            devices = topology_devices(_topology(chips))
            sizes = tuple(mesh.shape.values())
            slices = list(chips.slices_by_axis(sizes)) if chips.slices > 1 else None
            ordered = arranged(devices, list(sizes), slices)
        except Missing as error:
            raise missing(error.name, error) from error
        except Exception as error:
            raise CompileError(
                f"{option('on', str(chips))} is not a topology that the compiler of {chips.chip.name} "
                f"knows: {_first(error)}"
            ) from error
    shaped = np.array(ordered).reshape(tuple(mesh.shape.values()))
    return Mesh(shaped, mesh.axis_names, axis_types=mesh.axis_types)


def _run(folder: Path, words: str) -> tuple[int, str]:
    """Runs the worker; returns its exit code, and what it printed."""
    command = [sys.executable, "-P", str(_WORKER), str(folder / "request.json"), str(folder)]
    command.append(str(os.getpid()))
    with (folder / "noise").open("wb") as noise, working(words, show=bool(words)):
        # In its own process group: this process forwards an interrupt at the terminal.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=noise,
            stderr=noise,
            cwd=folder,
            start_new_session=True,
        )
        try:
            with cleaned_up_on_signal(lambda: _kill(process)):
                watch = _watcher.get()
                if watch is not None:
                    watch(process)
                code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return code, (folder / "noise").read_text(errors="replace")


def _kill(process: subprocess.Popen[Any]) -> None:
    """Kills the compiler's process and reaps it."""
    process.kill()
    # Not `process.wait`: the interrupted code may be inside it, holding its lock.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, 0)


def _result(folder: Path, code: int, noise: str, chips: Chips | None) -> dict[str, Any]:
    """Returns what the worker wrote, or raises its error in one sentence."""
    path = folder / "result.json"
    result = {}
    with contextlib.suppress(OSError, ValueError):  # missing or truncated
        result = json.loads(path.read_text())
    if "missing" in result:
        raise missing(result["missing"], result["why"])
    if "topology_error" in result and chips is not None:
        raise CompileError(
            f"{option('on', str(chips))} is not a topology that the compiler of {chips.chip.name} knows: "
            f"{_first(result['topology_error'])}"
        )
    if "error" in result and result["status"] != "RESOURCE_EXHAUSTED":
        raise CompileError(f"the compiler rejected the step: {_first(result['error'])}")
    if not result:
        fatal = [line for line in noise.splitlines() if "Check failed" in line or "Error" in line]
        why = fatal[0].partition("] ")[2] or fatal[0] if fatal else noise.strip()[-300:]
        ended = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        raise CompileError(
            f"the compiler for {option('on', str(chips))} {ended}: {why or 'no output'}"
        )
    return result


def _first(error: Any) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:500] if lines else type(error).__name__


# The fields of a cached program; one with other names or types is from another version.
_FIELDS = {"hlo": str, "stats": dict, "refused": str, "noise": str, "seconds": float}
_KINDS = (
    {**_FIELDS, "lifetimes": dict},
    {**_FIELDS, "lifetimes": type(None)},
)
_LIFETIME = [str, str, int, int, int, int, int]

_noted: set[str] = set()  # the folders that a note was printed for


def _kept(key: str) -> Program | None:
    """Returns the cached program of `key`, if there is a valid one."""
    found = read_entry(cache_folder(), key)
    if found is None or {name: type(value) for name, value in found.items()} not in _KINDS:
        return None
    if not all(type(size) is int for size in found["stats"].values()):
        return None
    if not _are_lifetimes(found["lifetimes"]):
        return None
    # A compiler always returns a program or an error.
    return Program(**found, cached=True) if found["hlo"] or found["refused"] else None


def _are_lifetimes(found: dict[str, Any] | None) -> bool:
    if found is None:
        return True
    if {name: type(value) for name, value in found.items()} != {"sequence": str, "values": list}:
        return False
    return all(isinstance(row, list) and [*map(type, row)] == _LIFETIME for row in found["values"])


def _keep(key: str, program: Program, show: bool) -> None:
    """Caches a program; prints a note, once, if that is impossible."""
    fields = dataclasses.asdict(program)
    del fields["cached"]
    folder = cache_folder()
    problem = write_entry(folder, key, fields)
    if problem and show and str(folder) not in _noted:
        _noted.add(str(folder))
        print(
            f"note: compilations are not cached because {folder or 'the cache'} cannot be written: "
            f"{problem} (SHARDWISE_CACHE names another folder)",
            file=sys.stderr,
        )
