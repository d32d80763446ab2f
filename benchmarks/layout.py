"""Compares layout and check with `nnx.eval_shape` alone: time, memory, and growth with the leaves.

    python benchmarks/layout.py

Ratios are medians of interleaved runs in one process; memory comes from fresh processes (measured).
"""

import argparse
import functools
import os
import statistics
import subprocess
import sys
import time

import jax
import llama
from flax import nnx
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import shardwise as sw

MESHES = {"70B": "data=64,model=4", "405B": "data=512,model=8"}


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(ours, rival, repeats):
    """Returns the median seconds of both, run in turn."""
    ours(), rival()
    pairs = [(timed(ours), timed(rival)) for _ in range(repeats)]
    return tuple(statistics.median(times) for times in zip(*pairs, strict=True))


def plan(make, mesh, rules, **kwargs):
    return sw.check(sw.layout(make, mesh, rules, **kwargs))


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_child(name, what):
    """Prints how much resident memory building the abstract model, or planning it, added."""
    make = llama.make(name)
    mesh = sw.mesh(MESHES[name], on="none")
    nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    before = resident_bytes()
    if what == "eval_shape":
        kept = nnx.eval_shape(make)
    else:
        kept = sw.layout(make, mesh, "fsdp+tensor")
        sw.check(kept)
    print(resident_bytes() - before)
    return kept


def memory(name):
    """Returns the resident bytes that planning adds beyond `nnx.eval_shape`."""
    found = {}
    for what in ("eval_shape", "plan"):
        command = [sys.executable, __file__, "--memory", name, what]
        found[what] = int(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )
    return found["plan"] - found["eval_shape"]


class Many(nnx.Module):
    """A model with many small leaves, to see how the cost grows."""

    def __init__(self, layers):
        """Makes two leaves per layer, without random numbers, so that they are cheap to make."""
        zeros = nnx.initializers.zeros_init()
        self.layers = nnx.List(
            [nnx.Linear(64, 128, kernel_init=zeros, rngs=nnx.Rngs(0)) for _ in range(layers)]
        )


def growth(counts):
    """Yields the number of leaves, and the seconds of layout and check without `nnx.eval_shape`."""
    mesh = sw.mesh("data=64,model=4", on="none")
    rules = [{"**.kernel": P(None, "model")}, sw.fsdp("data", min_bytes=0)]
    for count in counts:
        abstract = nnx.eval_shape(lambda count=count: Many(count // 2))
        seconds = min(timed(functools.partial(plan, abstract, mesh, rules)) for _ in range(2))
        yield count, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory", nargs=2, metavar=("MODEL", "WHAT"))
    args = parser.parse_args()
    if args.memory:
        memory_child(*args.memory)
        return
    console = Console(width=140)
    table = Table(
        "model", "mesh", "rules", "leaves", "eval_shape s", "layout+check s", "ratio", "extra MB"
    )
    for name, axes in MESHES.items():
        make, mesh = llama.make(name), sw.mesh(axes, on="none")
        extra = memory(name)
        for rules in (None, "fsdp", "fsdp+tensor"):
            ours, rival = interleaved(
                lambda make=make, mesh=mesh, rules=rules: plan(make, mesh, rules),
                lambda make=make: nnx.eval_shape(make),
                args.repeats,
            )
            leaves = len(sw.layout(make, mesh).leaves)
            table.add_row(
                name, axes, str(rules), str(leaves), f"{rival:.2f}", f"{ours:.2f}",
                f"{ours / rival:.2f}", f"{extra / 1e6:.1f}" if rules == "fsdp+tensor" else "",
            )  # fmt: skip
    console.print(table)
    # With inputs= the forward pass is traced too, so the baseline includes that trace.
    make, mesh = llama.make("70B"), sw.mesh(MESHES["70B"], on="none")
    tokens = jax.ShapeDtypeStruct((64, 4096), "int32")
    graphdef, state = nnx.split(nnx.eval_shape(make))

    def trace():
        nnx.eval_shape(make)
        jax.make_jaxpr(lambda s, t: nnx.merge(graphdef, s)(t))(state, tokens)

    ours, rival = interleaved(
        lambda: plan(make, mesh, "fsdp+tensor", inputs=tokens), trace, max(1, args.repeats // 2)
    )
    print(
        f"70B with inputs= (forward pass traced): {ours:.2f} s, {ours / rival:.2f} times eval_shape + make_jaxpr ({rival:.2f} s)"
    )
    table = Table("leaves", "layout+check s", "microseconds per leaf")
    for count, seconds in growth((500, 5_000, 50_000)):
        table.add_row(f"{count:,}", f"{seconds:.2f}", f"{1e6 * seconds / count:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
