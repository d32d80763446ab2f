"""Measures memory and time of `sw.init` on eight virtual CPU devices against two alternatives.

    python benchmarks/init.py

The alternatives are a hand-written `jax.jit(..., out_shardings=...)` and an eager init followed by
`jax.device_put`. Memory is the growth of the peak resident set in a fresh process (measured). Times
are medians of interleaved runs in one process, including compilation.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import threading
import time

import jax
from flax import nnx
from jax.sharding import NamedSharding
from rich.console import Console
from rich.table import Table

import shardwise as sw

WIDTH, HIDDEN, LAYERS = 1024, 4096, 32


class Layer(nnx.Module):
    """The seven kernels of a decoder layer, 64 MiB in total."""

    def __init__(self, rngs):
        """Makes the kernels."""

        def linear(a, b):
            return nnx.Linear(a, b, use_bias=False, rngs=rngs)

        self.q, self.k = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.v, self.o = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.gate, self.up = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN)
        self.down = linear(HIDDEN, WIDTH)


class Stack(nnx.Module):
    """A deep model in which every leaf is split eight ways."""

    def __init__(self, rngs):
        """Makes the layers."""
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])


def make():
    return Stack(nnx.Rngs(0))


def plan():
    return sw.layout(make, sw.mesh("data=8", on="cpu:8"), sw.fsdp("data"))


def ours(layout):
    return nnx.state(sw.init(make, layout))


def by_hand(layout):
    abstract = nnx.eval_shape(make)
    shardings = jax.tree.map(
        lambda _, spec: NamedSharding(layout.mesh, spec), nnx.state(abstract), layout.specs
    )
    return jax.jit(lambda: nnx.state(make()), out_shardings=shardings)()


def eager(layout):
    return jax.device_put(nnx.state(make()), layout.shardings)


WAYS = {"sw.init": ours, "jax.jit by hand": by_hand, "eager, then device_put": eager}


def peak(way):
    """Returns the bytes by which the peak resident set of this process grew."""
    layout = plan()
    small = sw.layout(
        lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), layout.mesh, sw.fsdp("data", min_bytes=0)
    )
    sw.init(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), small)  # starts threads and allocators
    before = resident()
    highest, stop = [before], threading.Event()

    def watch():
        while not stop.is_set():
            highest.append(resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    state = jax.block_until_ready(WAYS[way](layout))
    stop.set()
    watcher.join()
    del state
    return max(highest) - before


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def seconds(way, layout):
    jax.clear_caches()
    start = time.perf_counter()
    jax.block_until_ready(WAYS[way](layout))
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak")
    args = parser.parse_args()
    if args.peak:
        print(peak(args.peak))
        return
    layout = plan()
    assert layout.bytes_per_device * 8 == layout.total_bytes
    peaks = {}
    for way in WAYS:
        runs = [
            int(subprocess.check_output([sys.executable, __file__, "--peak", way], text=True))
            for _ in range(min(3, args.repeats))
        ]
        peaks[way] = statistics.median(runs)
    times = {way: [] for way in WAYS}
    for _ in range(args.repeats):
        for way in WAYS:
            times[way].append(seconds(way, layout))
    hand = statistics.median(times["jax.jit by hand"])
    table = Table("way", "peak extra / model bytes", "time / by hand", "seconds")
    for way in WAYS:
        median = statistics.median(times[way])
        table.add_row(
            way, f"{peaks[way] / layout.total_bytes:.2f}", f"{median / hand:.2f}", f"{median:.2f}"
        )
    print(f"model: {layout.total_bytes / 2**20:.0f} MiB, {len(layout.leaves)} leaves, data=8")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
