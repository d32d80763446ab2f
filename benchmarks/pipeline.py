"""Times a pipeline with 4 stages and 16 microbatches against the plain stack on the same cores.

Both run the same microbatches through the same blocks, forward and backward, in turn: the plain
stack on one CPU device, the pipeline on four virtual ones. Both use all cores of this machine, so
four devices are no faster than one, and the unused work of idle stages takes core time like any
other. The pipeline is therefore expected to take

    (1 + bubble) x the time of the plain stack.

The number of cores that each kept busy (CPU seconds per second) is also printed: if the two differ,
the expectation is divided by their ratio.

    python benchmarks/pipeline.py [--repeats 7]
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

STAGES, MICROBATCHES, LAYERS, WIDTH, ROWS = 4, 16, 8, 512, 128


class Block(nnx.Module):
    """An MLP with a residual connection."""

    def __init__(self, rngs):
        """Makes its two layers."""
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        """Returns x plus the output of the MLP."""
        return x + self.down(nnx.relu(self.up(x)))


@nnx.split_rngs(splits=LAYERS)
@nnx.vmap(in_axes=0, out_axes=0)
def make(rngs):
    return Block(rngs)


def fold(state, rounds):
    """Returns the stack as (rounds, layers per round, ...), which the circular schedule takes."""
    if rounds is None:
        return state
    return jax.tree.map(lambda a: a.reshape(rounds, -1, *a.shape[1:]), state)


def seconds(fn, *args):
    """Returns the wall-clock seconds, and the CPU seconds of all cores together."""
    start, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(fn(*args))
    return time.perf_counter() - start, time.process_time() - cpu


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    jax.config.update("jax_num_cpu_devices", STAGES)
    import shardwise as sw

    mesh = sw.mesh({"stage": STAGES})
    graphdef, state = nnx.split(make(nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (MICROBATCHES * ROWS, WIDTH))

    def plain(state, x):
        def stack(x):
            return jax.lax.scan(lambda h, s: (nnx.merge(graphdef, s)(h), None), x, state)[0]

        return jax.lax.map(stack, x.reshape(MICROBATCHES, ROWS, WIDTH)).reshape(x.shape)

    print(f"jax {jax.__version__}, {repeats} repeats in turn, medians; (cores kept busy)")
    print("schedule      bubble        plain ms     pipeline ms   expected ms   measured/expected")
    for schedule, rounds in (("gpipe", None), ("circular", 2)):

        def split(state, x, schedule=schedule):
            stack = nnx.merge(graphdef, state)
            return sw.pipeline(
                stack, axis="stage", microbatches=MICROBATCHES, schedule=schedule, mesh=mesh
            )(x)

        spec = P("stage") if rounds is None else P(None, "stage")
        placed = jax.device_put(fold(state, rounds), NamedSharding(mesh, spec))
        batch = jax.device_put(x, NamedSharding(mesh, P()))
        timetable = sw.Timetable(STAGES, MICROBATCHES, rounds or 1)

        def step(fn):
            def run(state, x):
                return jax.grad(lambda s: jnp.mean(fn(s, x) ** 2))(state)

            return jax.jit(run)

        one, many = step(plain), step(split)
        seconds(one, state, x), seconds(many, placed, batch)
        times = [(*seconds(one, state, x), *seconds(many, placed, batch)) for _ in range(repeats)]
        u, u_cpu, p, p_cpu = (statistics.median(t) for t in zip(*times, strict=True))
        expected = (1 + timetable.bubble) * u * (u_cpu / u) / (p_cpu / p)
        print(
            f"{schedule:12} {100 * timetable.bubble:6.1f}% {u * 1e3:10.0f} ({u_cpu / u:.1f}) "
            f"{p * 1e3:9.0f} ({p_cpu / p:.1f}) {expected * 1e3:13.0f} {p / expected:19.2f}"
        )


if __name__ == "__main__":
    main()
