"""Measures the peak memory of a move between layouts against its plan, and its time against JAX's.

    python benchmarks/transfer.py [--mebibytes 1024]

Eight virtual CPU devices are one process, so what is measured is the sum over devices: the highest
resident memory of the process during the move, above what it had before. The rival moves the same
arrays with `jax.device_put`, all at once. The process starts itself again with an allocator that returns
freed memory at once, or what is measured would be what glibc keeps.
"""

import argparse
import os
import sys
import time

if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
    freed = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **freed})

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)

from flax import nnx  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import shardwise as sw  # noqa: E402


def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def run(make, old, new, limit=None):
    """Returns the planned and the measured growth in bytes, and seconds."""
    model = sw.init(make, old)
    jax.block_until_ready(nnx.state(model))
    plan = sw.transfer(old, new, limit=limit)
    before = memory("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    began = time.perf_counter()
    moved = sw.shard(model, new, limit=plan.peak_bytes, donate=True)
    jax.block_until_ready(nnx.state(moved))
    seconds = time.perf_counter() - began
    return plan, memory("VmHWM") - before, seconds


def rival(make, old, new):
    model = sw.init(make, old)
    state = nnx.state(model)
    jax.block_until_ready(state)
    before = memory("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    began = time.perf_counter()
    jax.block_until_ready(jax.device_put(state, new.shardings))
    return memory("VmHWM") - before, time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mebibytes", type=int, default=1024)
    total = parser.parse_args().mebibytes * 2**20
    rows = total // 8 // 4 // 4096

    class Model(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Param(jnp.ones((rows, 4096))) for _ in range(8)])

    mesh, grid = sw.mesh("x=8", on="cpu:8"), sw.mesh("a=2,b=4", on="cpu:8")
    cases = {
        "rows to columns": ((mesh, P("x")), (mesh, P(None, "x"))),
        "rows to a grid": ((mesh, P("x")), (grid, P("b", "a"))),
        "rows to replicated": ((mesh, P("x")), (mesh, P())),
        "replicated to rows": ((mesh, P()), (mesh, P("x"))),
    }
    print(
        "| move | limit | planned | measured | measured/planned | time/device_put | device_put grows by |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, sides in cases.items():
        old, new = (sw.layout(Model, where, {"**": spec}) for where, spec in sides)
        least = sw.transfer(old, new)
        for limit in (None, least.peak_bytes - (least.peak_bytes - least.before) // 50):
            try:
                run(Model, old, new, limit)  # compiles
                plan, grown, seconds = run(Model, old, new, limit)
            except ValueError:
                continue
            theirs, other = rival(Model, old, new)
            planned = 8 * plan.peak_bytes
            held = 8 * plan.before
            print(
                f"| {name} | {'none' if limit is None else f'{8 * limit / 2**20:.0f} MiB'} "
                f"| {planned / 2**20:.0f} MiB | {(held + grown) / 2**20:.0f} MiB "
                f"| {(held + grown) / planned:.3f} | {seconds / other:.2f} "
                f"| {theirs / 2**20:.0f} MiB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
