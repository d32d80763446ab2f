"""Compiles a lowered program, here or by a process of its own, and remembers what came of it."""

from __future__ import annotations

import contextlib
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
from collections.abc import Mapping
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
    alive_at_peak,
    arranged,
    compiled,
    hlo_text,
    memory_stats,
    status_of,
    topology_devices,
    with_dump,
)

_WORKER = Path(__file__).with_name("worker.py")


@public
class CompileError(ValueError):
    """The compiler refused the program, or the chips."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What a compiler made.

    Attributes:
        hlo: the optimised HLO, or nothing where the compiler gave none.
        stats: its memory statistics by name, in bytes.
        refused: why it will not run, in the compiler's words, or nothing.
        noise: what the compiler printed.
        seconds: how long it took.
        alive: the temporaries that are alive together when they take most of the memory, each by
            its value's name, type and bytes; None where the compiler did not say.
        cached: whether it was compiled before.
    """

    hlo: str
    stats: dict[str, int]
    refused: str
    noise: str
    seconds: float
    alive: list[tuple[str, str, int]] | None = None
    cached: bool = False


def compile_here(lowered: Any, mesh: Mesh, options: Mapping[str, Any]) -> Program:
    """Returns what the compiler of a mesh's devices makes of a program, in this process.

    JAX's own cache of compilations is passed by: what it has kept says nothing of what the
    compiler printed, and has the lines of whoever compiled it first.

    Raises:
        CompileError: it refused it for another reason than memory.
    """
    try:
        return _compiled_here(lowered, mesh, options)
    except Missing as error:
        raise missing(error.name, error) from error


def _compiled_here(lowered: Any, mesh: Mesh, options: Mapping[str, Any]) -> Program:
    start, refused, done = time.monotonic(), "", None
    module = module_bytes(lowered.compiler_ir("stablehlo"))
    with compiler_noise() as noise, tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        dump = Path(folder, "dump")
        try:
            done = compiled(module, list(mesh.devices.flat), with_dump(dict(options), dump))
        except jax.errors.JaxRuntimeError as error:
            if status_of(error) != "RESOURCE_EXHAUSTED":
                raise CompileError(f"the compiler refused the step: {_first(error)}") from error
            refused = str(error)
        alive = alive_at_peak(dump)
    if done is None:
        return Program("", {}, refused, noise(), time.monotonic() - start)
    stats = memory_stats(done)
    return Program(hlo_text(done), stats, "", noise(), time.monotonic() - start, alive)


def compile_absent(
    module: bytes,
    chips: Chips | None,
    mesh: Mapping[str, int],
    options: Mapping[str, Any],
    same: str,
    *,
    show: bool = True,
) -> Program:
    """Returns what the compiler of chips that are not here makes of a program.

    Args:
        module: StableHLO, as bytecode.
        chips: the chips; None for as many CPU devices, which need not be here either.
        mesh: the sizes of the mesh's axes, in order.
        options: of XLA, by name.
        same: a text that is the same for the same program, by which it is remembered.
        show: whether to say on the terminal that it is at work.

    Raises:
        ValueError: the compiler is not installed.
        CompileError: it refused the topology, or the program for another reason than memory.
    """
    request = {**_topology(chips), "mesh": list(mesh.values()), "options": dict(options)}
    versions = {name: version_of(name) for name in ("shardwise", "jax", "jaxlib")}
    if chips is not None:
        versions |= require_compiler(chips).versions
    worker = _WORKER.read_text()
    digest = hashlib.sha256(same.encode())
    told = [FORMAT, request, versions, worker]
    digest.update(json.dumps(told, sort_keys=True, default=str).encode())
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
            alive=result.get("alive"),
        )
        if not (program.hlo or program.refused):
            raise CompileError(
                f"the compiler for {chips or 'the CPU'} gave no program, and no reason: see whether "
                f"{tempfile.gettempdir()} has room"
            )
    _keep(key, program, show)
    return program


def _topology(chips: Chips | None) -> dict[str, Any]:
    """Returns what the worker must know of the chips."""
    if chips is None:
        return {"platform": "cpu"}
    options: dict[str, Any] = {}
    request: dict[str, Any] = {
        "platform": chips.platform,
        "topology": str(chips),
        "topology_options": options,
    }
    if chips.platform == "gpu":
        hosts, gpus = chips.topology
        # As on real hosts, where each is a domain of NVLink by itself.
        request |= {"topology": f"{hosts}x1x{gpus}", "target_config": target_config(chips)}
    elif chips.chip.name == "v4":
        # As in the cloud, where the two cores of a chip are one device.
        options["chip_config_name"] = "megacore"
    if chips.platform == "tpu" and math.prod(chips.topology) <= 2:
        # Less than a whole host, which older versions must be told.
        options["chips_per_host_bounds"] = (*chips.topology, 1)[:3]
    return request


def absent_mesh(chips: Chips, mesh: AbstractMesh) -> Mesh:
    """Returns a mesh of compile-only devices in this very process.

    For programs that are partitioned by Python functions, such as cuDNN's attention: those
    cannot be handed to another process.

    Raises:
        ValueError: the compiler is not installed, or does not know the topology.
    """
    require_compiler(chips)
    start_backends()  # and with them the plugins are found
    with compiler_noise():
        try:
            devices = topology_devices(_topology(chips))
            ordered = arranged(devices, list(mesh.shape.values()))
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
        # In a group of its own: an interrupt at the terminal is ours to pass on.
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
                code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return code, (folder / "noise").read_text(errors="replace")


def _kill(process: subprocess.Popen[Any]) -> None:
    """Ends the compiler's process, and waits until the system has forgotten it."""
    process.kill()
    # Not `process.wait`: whoever was interrupted may be within it, and has its lock.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, 0)


def _result(folder: Path, code: int, noise: str, chips: Chips | None) -> dict[str, Any]:
    """Returns what the worker wrote, or raises what it says in one sentence."""
    path = folder / "result.json"
    result = {}
    with contextlib.suppress(OSError, ValueError):  # none, or cut short
        result = json.loads(path.read_text())
    if "missing" in result:
        raise missing(result["missing"], result["why"])
    if "topology_error" in result and chips is not None:
        raise CompileError(
            f"{option('on', str(chips))} is not a topology that the compiler of {chips.chip.name} knows: "
            f"{_first(result['topology_error'])}"
        )
    if "error" in result and result["status"] != "RESOURCE_EXHAUSTED":
        raise CompileError(f"the compiler refused the step: {_first(result['error'])}")
    if not result:
        fatal = [line for line in noise.splitlines() if "Check failed" in line or "Error" in line]
        why = fatal[0].partition("] ")[2] or fatal[0] if fatal else noise.strip()[-300:]
        ended = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        raise CompileError(
            f"the compiler for {option('on', str(chips))} {ended}: {why or 'no word'}"
        )
    return result


def _first(error: Any) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:500] if lines else type(error).__name__


# What a kept program is made of; one of other names or types is another version's.
_FIELDS = {"hlo": str, "stats": dict, "refused": str, "noise": str, "seconds": float}
_KINDS = ({**_FIELDS, "alive": list}, {**_FIELDS, "alive": type(None)})

_said: set[str] = set()  # the folders that a note was printed of


def _kept(key: str) -> Program | None:
    """Returns the program that was kept under `key`, if it is as a compiler made it."""
    found = read_entry(cache_folder(), key)
    if found is None or {name: type(value) for name, value in found.items()} not in _KINDS:
        return None
    stats, alive = found["stats"], found["alive"]
    if not all(type(size) is int for size in stats.values()):
        return None
    if not all(
        isinstance(row, list) and [*map(type, row)] == [str, str, int] for row in alive or ()
    ):
        return None
    # No compiler ends without a program and without a word of why.
    return Program(**found, cached=True) if found["hlo"] or found["refused"] else None


def _keep(key: str, program: Program, show: bool) -> None:
    """Keeps a program for the next time; says once where that is impossible."""
    fields = dataclasses.asdict(program)
    del fields["cached"]
    folder = cache_folder()
    problem = write_entry(folder, key, fields)
    if problem and show and str(folder) not in _said:
        _said.add(str(folder))
        print(
            f"note: compilations are not kept, since {folder or 'the cache'} cannot be written: "
            f"{problem} (SHARDWISE_CACHE names another folder)",
            file=sys.stderr,
        )
