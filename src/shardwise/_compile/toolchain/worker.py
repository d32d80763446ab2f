"""Compiles one program for absent chips; runs as its own process.

    python _compile_worker.py REQUEST.json FOLDER PID

A process, since the compilers read the environment, print to the terminal, take a lock, and abort
on unexpected inputs. It imports JAX but not Shardwise: the private names of JAX that it uses are
also in the table of `_jax/private.py`, which has the error message.
"""

import functools
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
    "JAX_PLATFORMS": "cpu",  # do not look for an accelerator
    "TPU_SKIP_MDS_QUERY": "1",  # nor for a metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # cuDNN without the rest of CUDA is enough to compile
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise a second process fails on the lock of the first
}


class Missing(Exception):
    """The installed JAX does not have a private name that compiling needs."""

    def __init__(self, name: str, why: str):
        """Takes the dotted name and Python's error message."""
        super().__init__(why)
        self.name = name


def reach(module: str, name: str) -> Any:
    """Returns a name from a module, which JAX may move."""
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
    """Writes `result.json`, and `hlo.txt` if there is a program."""
    request = json.loads(Path(request_path).read_text())
    try:
        result = _result(request, folder)
    except Missing as error:
        result = {"missing": error.name, "why": str(error)}
    _write(folder, result)


def _result(request: dict[str, Any], folder: str) -> dict[str, Any]:
    try:
        devices = arranged(topology_devices(request), request["mesh"], request.get("slices"))
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
        program = dumped_program(dump)
        if program:
            Path(folder, "hlo.txt").write_text(program)
        return {
            "error": str(error),
            "status": status_of(error),
            "lifetimes": dumped_lifetimes(dump),
        }
    Path(folder, "hlo.txt").write_text(hlo_text(done))
    return {"memory": memory_stats(done), "lifetimes": dumped_lifetimes(dump)}


def status_of(error: BaseException) -> str:
    """Returns XLA's status, such as `RESOURCE_EXHAUSTED`, if XLA raised the error."""
    return getattr(error, "error_code_string", "")


def _write(folder: str, result: dict[str, Any]) -> None:
    Path(folder, "result.json").write_text(json.dumps(result))


def memory_stats(executable: Any) -> dict[str, int]:
    """Returns an executable's memory statistics, in bytes by name, if the compiler has any."""
    stats = _ask(executable, "get_compiled_memory_stats")
    if stats is None:
        return {}
    return {name: int(getattr(stats, name)) for name in dir(stats) if name.endswith("_bytes")}


def hlo_text(executable: Any) -> str:
    """Returns the optimised program of an executable."""
    (module,) = _ask(executable, "hlo_modules")
    return module.to_string()


def with_dump(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the options, extended so that the compiler also dumps its buffer assignment."""
    return {"xla_dump_to": str(folder), **options}


def dumped_program(folder: Path) -> str:
    """Returns the optimised program of a dump, or nothing if the compiler did not come that far.

    The TPU compiler dumps it, with its buffers, before it rejects it for its memory.
    """
    try:
        (path,) = folder.glob("*.after_optimizations.txt")
        return path.read_text()
    except (OSError, ValueError):
        return ""


def dumped_lifetimes(folder: Path) -> dict[str, Any] | None:
    """Returns when each temporary in a device's main memory is alive.

    `sequence` has the names of instructions in the order in which they run, one to a line, with what
    they call before them. `values` has a row for each temporary: its name, `fusion.3{1}`, its type
    and bytes, the first and the last place of the sequence at which it is alive, its allocation, and
    its offset there. None if the compiler did not dump its buffers.

    Args:
        folder: the compiler's dump; it is removed.
    """
    try:
        (path,) = folder.glob("*-buffer-assignment.txt")
        ranges = folder / path.name.replace("-buffer-assignment.txt", "-live-range.txt")
        return lifetimes_of(path.read_text(), ranges.read_text())
    except (OSError, ValueError):
        return None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# A value that a loop carries is a "phi": without these, what only a loop's body reads seems freed.
_VALUE = re.compile(r" value: <\d+ (\S+)(?: \(phi\))? @0> \(size=(\d+),offset=(\d+)\): (.*)")
_RANGE = re.compile(r"    (\S+):(\d+)-(\d+)")
_SEQUENCE = re.compile(r"^    \d+:(\S+)$", re.M)


def lifetimes_of(assignment: str, ranges: str) -> dict[str, Any]:
    """Returns the lifetimes that two files of a dump have.

    Raises:
        ValueError: there are none, or none of a temporary.
    """
    living = {m[1]: (int(m[2]), int(m[3])) for m in map(_RANGE.fullmatch, ranges.split("\n")) if m}
    if not living:
        raise ValueError("no live ranges")
    values: list[list[Any]] = []
    allocation, temporary = 0, False
    for line in assignment.split("\n"):
        if line.startswith("allocation "):
            allocation += 1
            # Other colours are other memories, such as a TPU's on-chip memory.
            temporary = "preallocated-temp" in line and ", color" not in line
        elif temporary and (value := _VALUE.fullmatch(line)):
            name = value[1] if value[1].endswith("}") else value[1] + "{}"
            if name not in living:
                raise ValueError(f"no live range of {name}")
            size, offset = int(value[2]), int(value[3])
            values.append([name, value[4], size, *living[name], allocation, offset])
    return {"sequence": "\n".join(_SEQUENCE.findall(ranges)), "values": values}


def topology_devices(request: dict[str, Any]) -> list[Any]:
    """Returns compile-only devices of the requested topology."""
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

    The compiler does not say which field it rejects, so each is tried on its own.
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


def arranged(devices: list[Any], shape: list[int], slices: list[int] | None = None) -> list[Any]:
    """Returns the devices in the order of the mesh that JAX would make of them.

    Args:
        devices: the devices.
        shape: the sizes of the mesh's axes.
        slices: how many TPU slices each axis is split over, if there are several.
    """
    from jax.experimental import mesh_utils

    make = functools.partial(mesh_utils.create_device_mesh, shape, devices)
    if slices:
        inside = [size // n for size, n in zip(shape, slices, strict=True)]
        make = functools.partial(mesh_utils.create_hybrid_device_mesh, inside, slices, devices)
    try:
        made = make()
    except NotImplementedError:  # the axes do not match the torus: `sw.mesh` does the same
        made = make(allow_split_physical_axes=True)
    return list(made.flat)


def compiled(module: bytes, devices: list[Any], options: dict[str, Any]) -> Any:
    """Returns the executable of a StableHLO module, compiled by the chips' own compiler."""
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
        # Present devices load what they compile; compile-only ones cannot.
        only = "CompileOnly" in type(client).__name__
        return (client.compile if only else client.compile_and_load)(parsed, there, given)


def _end_with(parent: int, folder: str) -> None:
    """Ends this process and removes its folder when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    asked_by = (int(sys.argv[3]), sys.argv[2])
    threading.Thread(target=_end_with, args=asked_by, daemon=True).start()
    os.environ.update(_ENVIRONMENT)
    main(*sys.argv[1:3])
