"""Compiles a lowered program, here or by a process of its own, and remembers what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh

from ._chips import Target
from ._compile_worker import arranged, compiled, memory_stats, topology_devices
from ._compilers import require_compiler
from ._ending import undone
from ._gpu_target import target_config
from ._terminal import working
from ._words import option

_WORKER = Path(__file__).with_name("_compile_worker.py")
_MOST_CACHED = 200


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
        cached: whether it was compiled before.
    """

    hlo: str
    stats: dict[str, int]
    refused: str
    noise: str
    seconds: float
    cached: bool = False


def compile_here(lowered: Any, mesh: Mesh, options: Mapping[str, Any]) -> Program:
    """Returns what the compiler of a mesh's devices makes of a program, in this process.

    JAX's own cache of compilations is passed by: what it has kept says nothing of what the
    compiler printed, and has the lines of whoever compiled it first.

    Raises:
        CompileError: it refused it for another reason than memory.
    """
    start, refused, done = time.monotonic(), "", None
    module = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    with captured_stderr() as noise:
        try:
            done = compiled(module, list(mesh.devices.flat), dict(options))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise CompileError(f"the compiler refused the step: {_first(error)}") from error
            refused = str(error)
    if done is None:
        return Program("", {}, refused, noise(), time.monotonic() - start)
    stats = memory_stats(done)
    (made,) = done.hlo_modules()
    return Program(made.to_string(), stats, "", noise(), time.monotonic() - start)


def compile_absent(
    module: bytes,
    target: Target | None,
    mesh: Mapping[str, int],
    options: Mapping[str, Any],
    same: str,
    *,
    show: bool = True,
) -> Program:
    """Returns what the compiler of chips that are not here makes of a program.

    Args:
        module: StableHLO, as bytecode.
        target: the chips; None for as many CPU devices, which need not be here either.
        mesh: the sizes of the mesh's axes, in order.
        options: of XLA, by name.
        same: a text that is the same for the same program, by which it is remembered.
        show: whether to say on the terminal that it is at work.

    Raises:
        ValueError: the compiler is not installed.
        CompileError: it refused the topology, or the program for another reason than memory.
    """
    request = {**_topology(target), "mesh": list(mesh.values()), "options": dict(options)}
    versions = {"jax": jax.__version__}
    if target is not None:
        versions |= require_compiler(target).versions
    worker = _WORKER.read_text()
    key = hashlib.sha256(same.encode())
    key.update(json.dumps([request, versions, worker], sort_keys=True, default=str).encode())
    place = cache_folder() / key.hexdigest()[:32]
    with contextlib.suppress(OSError, ValueError, KeyError):
        return _read(place)
    with (
        tempfile.TemporaryDirectory(prefix="shardwise-") as name,
        undone(lambda: shutil.rmtree(name, ignore_errors=True)),
    ):
        folder = Path(name)
        (folder / "module").write_bytes(module)
        (folder / "request.json").write_text(
            json.dumps({**request, "module": str(folder / "module")}, default=str)
        )
        start = time.monotonic()
        words = f"compiling for {math.prod(mesh.values())} devices of {target or 'the CPU'}"
        code, noise = _run(folder, words if show else "")
        seconds = time.monotonic() - start
        result = _result(folder, code, noise, target)
        hlo = folder / "hlo.txt"
        program = Program(
            hlo=hlo.read_text() if hlo.exists() else "",
            stats=result.get("memory", {}),
            refused=result.get("error", ""),
            noise=noise,
            seconds=seconds,
        )
    _write(place, program)
    return program


def _topology(target: Target | None) -> dict[str, Any]:
    """Returns what the worker must know of the chips."""
    if target is None:
        return {"platform": "cpu"}
    options: dict[str, Any] = {}
    request: dict[str, Any] = {
        "platform": target.platform,
        "topology": str(target),
        "topology_options": options,
    }
    if target.platform == "gpu":
        hosts, gpus = target.topology
        # As on real hosts, where each is a domain of NVLink by itself.
        request |= {"topology": f"{hosts}x1x{gpus}", "target_config": target_config(target)}
    elif target.chip.name == "v4":
        # As in the cloud, where the two cores of a chip are one device.
        options["chip_config_name"] = "megacore"
    if target.platform == "tpu" and math.prod(target.topology) <= 2:
        # Less than a whole host, which older versions must be told.
        options["chips_per_host_bounds"] = (*target.topology, 1)[:3]
    return request


def absent_mesh(target: Target, mesh: AbstractMesh) -> Mesh:
    """Returns a mesh of compile-only devices in this very process.

    For programs that are partitioned by Python functions, such as cuDNN's attention: those
    cannot be handed to another process.

    Raises:
        ValueError: the compiler is not installed, or does not know the topology.
    """
    require_compiler(target)
    with captured_stderr() as noise:
        jax.devices("cpu")  # the backends are started, and with them the plugins found
        try:
            devices = topology_devices(_topology(target))
            ordered = arranged(devices, list(mesh.shape.values()))
        except Exception as error:
            raise CompileError(
                f"{option('on', str(target))} is not a topology that the compiler of {target.chip.name} "
                f"knows: {_first(error)}"
            ) from error
    del noise
    shaped = np.array(ordered).reshape(tuple(mesh.shape.values()))
    return Mesh(shaped, mesh.axis_names, axis_types=mesh.axis_types)


def _run(folder: Path, words: str) -> tuple[int, str]:
    """Runs the worker; returns its exit code, and what it printed."""
    command = [sys.executable, str(_WORKER), str(folder / "request.json"), str(folder)]
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
            with undone(process.kill):
                code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return code, (folder / "noise").read_text(errors="replace")


def _result(folder: Path, code: int, noise: str, target: Target | None) -> dict[str, Any]:
    """Returns what the worker wrote, or raises what it says in one sentence."""
    path = folder / "result.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    if "topology_error" in result and target is not None:
        raise CompileError(
            f"{option('on', str(target))} is not a topology that the compiler of {target.chip.name} knows: "
            f"{_first(result['topology_error'])}"
        )
    if "error" in result and "RESOURCE_EXHAUSTED" not in result["error"]:
        raise CompileError(f"the compiler refused the step: {_first(result['error'])}")
    if not result:
        fatal = [line for line in noise.splitlines() if "Check failed" in line or "Error" in line]
        why = fatal[0].partition("] ")[2] or fatal[0] if fatal else noise.strip()[-300:]
        ended = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        raise CompileError(
            f"the compiler for {option('on', str(target))} {ended}: {why or 'no word'}"
        )
    return result


def _first(error: Any) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:500] if lines else type(error).__name__


def cache_folder() -> Path:
    """Returns where compilations are kept."""
    given = os.environ.get("SHARDWISE_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "shardwise" / "compiled"


def _read(place: Path) -> Program:
    found = json.loads((place / "program.json").read_text())
    hlo = gzip.decompress((place / "hlo.txt.gz").read_bytes()).decode()
    os.utime(place)
    return Program(hlo=hlo, **found, cached=True)


def _write(place: Path, program: Program) -> None:
    """Keeps a program; two processes that keep the same one do not meet."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=place.parent, prefix=".new-") as name,
            undone(lambda: shutil.rmtree(name, ignore_errors=True)),
        ):
            new = Path(name, "entry")
            new.mkdir()
            packed = gzip.compress(program.hlo.encode(), compresslevel=3)
            (new / "hlo.txt.gz").write_bytes(packed)
            fields = {
                name: getattr(program, name) for name in ("stats", "refused", "noise", "seconds")
            }
            (new / "program.json").write_text(json.dumps(fields))
            with contextlib.suppress(OSError):
                new.rename(place)
        kept = sorted(place.parent.glob("[0-9a-f]*"), key=lambda p: p.stat().st_mtime)
        for old in kept[:-_MOST_CACHED]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError:
        pass  # a cache that cannot be written is no reason to fail


@contextlib.contextmanager
def captured_stderr() -> Iterator[Any]:
    """Keeps what compilers print past Python's own stderr; yields a function that returns it."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        text: list[str] = []

        def noise() -> str:
            if not text:
                file.seek(0)
                text.append(file.read().decode(errors="replace"))
            return text[0]

        try:
            yield noise
        finally:
            os.dup2(before, 2)
            os.close(before)
            noise()
