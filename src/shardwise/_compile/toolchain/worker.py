"""Compiles one program for chips that are not here; run as a process of its own.

    python _compile_worker.py REQUEST.json FOLDER PID

A process, since the compilers read the environment, print to the terminal, take a lock, and end
the process on inputs that they do not foresee. It imports JAX and nothing of Shardwise: what it
reaches of JAX's private names is in the table of `_jax/private.py` too, which words the error.
"""

import importlib
import json
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # no accelerator is looked for
    "TPU_SKIP_MDS_QUERY": "1",  # nor a metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process dies on the first one's lock
}


class Missing(Exception):
    """The installed JAX does not have a private name that compiling needs."""

    def __init__(self, name: str, why: str):
        """Takes the dotted name, and what Python says of it."""
        super().__init__(why)
        self.name = name


def reach(module: str, name: str) -> Any:
    """Returns a name of a module that JAX may move."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Missing(f"{module}.{name}", str(error)) from error


def _ask(executable: Any, method: str) -> Any:
    """Returns what an undocumented method of an executable returns."""
    try:
        asked = getattr(executable, method)
    except AttributeError as error:
        raise Missing(f"jaxlib._jax.LoadedExecutable.{method}", str(error)) from error
    return asked()


def main(request_path: str, folder: str) -> None:
    """Writes `result.json`, and `hlo.txt` where there is a program."""
    request = json.loads(Path(request_path).read_text())
    try:
        result = _result(request, folder)
    except Missing as error:
        result = {"missing": error.name, "why": str(error)}
    _write(folder, result)


def _result(request: dict[str, Any], folder: str) -> dict[str, Any]:
    try:
        devices = arranged(topology_devices(request), request["mesh"])
    except Missing:
        raise
    except Exception as error:
        return {"topology_error": str(error)}
    module = Path(request["module"]).read_bytes()
    dump = Path(folder, "dump")
    try:
        done = compiled(module, devices, with_dump(request["options"], dump))
    except Missing:
        raise
    except Exception as error:
        return {"error": str(error), "status": status_of(error)}
    Path(folder, "hlo.txt").write_text(hlo_text(done))
    return {"memory": memory_stats(done), "alive": alive_at_peak(dump)}


def status_of(error: BaseException) -> str:
    """Returns XLA's name of what went wrong, such as `RESOURCE_EXHAUSTED`, if XLA raised it."""
    return getattr(error, "error_code_string", "")


def _write(folder: str, result: dict[str, Any]) -> None:
    Path(folder, "result.json").write_text(json.dumps(result))


def memory_stats(executable: Any) -> dict[str, int]:
    """Returns what a compiler says of an executable's memory, in bytes by name, if anything."""
    stats = _ask(executable, "get_compiled_memory_stats")
    if stats is None:
        return {}
    return {name: int(getattr(stats, name)) for name in dir(stats) if name.endswith("_bytes")}


def hlo_text(executable: Any) -> str:
    """Returns the optimised program of an executable."""
    (module,) = _ask(executable, "hlo_modules")
    return module.to_string()


def with_dump(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the options, with which the compiler also writes down where its buffers are."""
    return {"xla_dump_to": str(folder), **options}


def alive_at_peak(folder: Path) -> list[tuple[str, str, int]] | None:
    """Returns the temporaries that share a device's main memory when they take most of it.

    Each is the name of its value, `fusion.3{1}`, with its type and its bytes; no two overlap. None
    where the compiler did not write down its buffers.

    Args:
        folder: what the compiler has dumped; it is removed.
    """
    try:
        (assignment,) = folder.glob("*-buffer-assignment.txt")
        ranges = folder / assignment.name.replace("-buffer-assignment.txt", "-live-range.txt")
        return _alive_at_peak(assignment.read_text(), ranges.read_text())
    except (OSError, ValueError):
        return None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_VALUE = re.compile(r" value: <\d+ (\S+) @0> \(size=(\d+),offset=(\d+)\): (.*)")
_RANGE = re.compile(r"    (\S+):(\d+)-(\d+)")


def _alive_at_peak(assignment: str, ranges: str) -> list[tuple[str, str, int]]:
    living = {m[1]: (int(m[2]), int(m[3])) for m in map(_RANGE.fullmatch, ranges.split("\n")) if m}
    if not living:
        raise ValueError("no live ranges")
    # By when they are alive: allocation, offset, size, name and type.
    values: list[tuple[int, int, tuple[int, int, int, str, str]]] = []
    allocation, temporary = 0, False
    for line in assignment.split("\n"):
        if line.startswith("allocation "):
            allocation += 1
            # Other colours are other memories, such as the one on a TPU's chip.
            temporary = "preallocated-temp" in line and ", color" not in line
        elif temporary and (value := _VALUE.fullmatch(line)):
            name = value[1] if value[1].endswith("}") else value[1] + "{}"
            if name not in living:
                raise ValueError(f"no live range of {name}")
            held = (allocation, int(value[3]), int(value[2]), name, value[4])
            values.append((*living[name], held))
    best: tuple[int, list[Any]] = (0, [])
    for most, moment in _fullest(values):
        if most <= best[0]:
            break  # those that share bytes only make it less
        apart = _apart([held for start, end, held in values if start <= moment <= end])
        total = sum(held[2] for held in apart)
        if total > best[0]:
            best = (total, apart)
    return [(name, kind, size) for _, _, size, name, kind in best[1]]


def _fullest(values: list[tuple[int, int, Any]]) -> list[tuple[int, int]]:
    """Returns the bytes of all that is alive at each moment at which something begins, most first."""
    changes: list[tuple[int, int, int]] = []
    for start, end, held in values:
        changes += [(start, 0, held[2]), (end, 1, -held[2])]
    now, found = 0, {}
    for moment, _, change in sorted(changes):
        now += change
        if change > 0:
            found[moment] = now
    return sorted(((now, moment) for moment, now in found.items()), reverse=True)


def _apart(alive: list[tuple[int, int, int, str, str]]) -> list[tuple[int, int, int, str, str]]:
    """Returns those that overlap no other: of values that share their bytes, the largest."""
    kept: list[tuple[int, int, int, str, str]] = []
    ends: dict[int, int] = {}
    for held in sorted(alive, key=lambda held: (held[0], held[1], -held[2])):
        allocation, offset, size = held[:3]
        if offset >= ends.get(allocation, 0):
            kept.append(held)
            ends[allocation] = offset + size
    return kept


def topology_devices(request: dict[str, Any]) -> list[Any]:
    """Returns compile-only devices of the topology that is asked for."""
    if request["platform"] == "cpu":
        import jax

        count = 1
        for size in request["mesh"]:
            count *= size
        jax.config.update("jax_num_cpu_devices", count)
        return list(jax.devices("cpu"))
    if request["platform"] == "tpu":
        options = request["topology_options"]
        return list(_topology(request["topology"], platform="tpu", **options).devices)
    config = known_fields(request["target_config"], request["topology"])
    return list(_gpu_topology(config, request["topology"]).devices)


def _gpu_topology(config: str, topology: str) -> Any:
    return _topology(platform="cuda", target_config=config, topology=topology)


def _topology(*args: Any, **options: Any) -> Any:
    return reach("jax.experimental.topologies", "get_topology_desc")(*args, **options)


def known_fields(config: str, topology: str) -> str:
    """Returns the description of a GPU without the fields that this version does not know.

    The compiler does not say which one it stumbled over, so it is asked about each by itself.
    """
    if _parses(config, topology):
        return config
    lines = config.splitlines()
    single = [i for i, line in enumerate(lines) if re.match(r"  \w+: ", line)]
    rest = [line for i, line in enumerate(lines) if i not in single]
    start = next(i for i, line in enumerate(rest) if line.endswith("{")) + 1
    known = [
        lines[i]
        for i in single
        if _parses("\n".join([*rest[:start], lines[i], *rest[start:]]), topology)
    ]
    return "\n".join([*rest[:start], *known, *rest[start:]])


def _parses(config: str, topology: str) -> bool:
    try:
        _gpu_topology(config, topology)
    except Missing:
        raise
    except Exception as error:
        # Its status, INVALID_ARGUMENT, is that of a topology which is none, too.
        return "Failed to parse" not in str(error)
    return True


def arranged(devices: list[Any], shape: list[int]) -> list[Any]:
    """Returns the devices in the order of the mesh that JAX would make of them."""
    from jax.experimental import mesh_utils

    try:
        made = mesh_utils.create_device_mesh(shape, devices)
    except NotImplementedError:  # the axes are no products of the torus's: `sw.mesh` does the same
        made = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return list(made.flat)


def compiled(module: bytes, devices: list[Any], options: dict[str, Any]) -> Any:
    """Returns the executable that the target's own compiler makes of a StableHLO module."""
    import numpy as np

    get_compile_options = reach("jax.extend.backend", "get_compile_options")
    make_ir_context = reach("jax._src.interpreters.mlir", "make_ir_context")
    device_list = reach("jaxlib._jax", "DeviceList")
    ir_module = reach("jaxlib.mlir.ir", "Module")
    order = np.array([[device.id for device in devices]])
    given = get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=order,
        env_options_overrides=options,
    )
    with make_ir_context():
        parsed = ir_module.parse(module)
        client = devices[0].client
        there = device_list(tuple(devices))
        # Devices that are here load what they compile; compile-only ones cannot.
        only = "CompileOnly" in type(client).__name__
        return (client.compile if only else client.compile_and_load)(parsed, there, given)


def _end_with(parent: int, folder: str) -> None:
    """Ends this process, and removes its folder, when the one that asked for it is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    asked_by = (int(sys.argv[3]), sys.argv[2])
    threading.Thread(target=_end_with, args=asked_by, daemon=True).start()
    os.environ.update(_ENVIRONMENT)
    main(*sys.argv[1:3])
