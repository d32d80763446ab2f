"""Times eight simulated devices against `jax.shard_map` on eight virtual CPU devices.

The body is a two-layer tensor-parallel MLP with gradients; both are jitted and run in turn.

    python benchmarks/simulate.py [--repeats 20]
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

SIZES = [(64, 256, 1024), (256, 512, 2048), (1024, 1024, 4096)]
IN_SPECS = (P(None, "model"), P("model", None), P())


def body(up, down, x):
    """Returns the loss, and the gradients of this device's shards."""

    def loss(up, down):
        out = jax.lax.psum(jax.nn.gelu(x @ up) @ down, "model")
        return jnp.mean(jnp.square(out - x))

    return jax.value_and_grad(loss, argnums=(0, 1))(up, down)


def seconds(fn, *args):
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    jax.config.update("jax_num_cpu_devices", 8)
    import shardwise as sw

    mesh = sw.mesh("model=8")
    how = {"in_specs": IN_SPECS, "out_specs": (P(), IN_SPECS[:2])}
    print(f"jax {jax.__version__}, {repeats} repeats in turn, medians")
    print("batch x width x hidden   real ms   simulated ms   ratio   trace+lower ratio")
    for batch, width, hidden in SIZES:
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = [(width, hidden), (hidden, width), (batch, width)]
        arrays = [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, shapes, strict=True)]
        placed = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, IN_SPECS, strict=True)
        ]
        real = jax.jit(jax.shard_map(body, mesh=mesh, **how))
        simulated = jax.jit(sw.simulate(body, mesh="model=8", **how))
        one = jax.block_until_ready(real(*placed))
        two = jax.block_until_ready(simulated(*arrays))
        assert jax.tree.all(
            jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, rtol=1e-4, atol=1e-5)), one, two)
        )
        times = [(seconds(real, *placed), seconds(simulated, *arrays)) for _ in range(repeats)]
        r, s = (statistics.median(t) for t in zip(*times, strict=True))
        traces = [
            (
                seconds(jax.jit(jax.shard_map(body, mesh=mesh, **how)).lower, *placed),
                seconds(jax.jit(sw.simulate(body, mesh="model=8", **how)).lower, *arrays),
            )
            for _ in range(min(repeats, 7))
        ]
        tr, ts = (statistics.median(t) for t in zip(*traces, strict=True))
        name = f"{batch} x {width} x {hidden}"
        print(
            f"{name:24} {r * 1e3:7.2f} {s * 1e3:14.2f} {s / r:7.2f} {ts / tr:19.2f}"
            f"  ({tr * 1e3:.0f} and {ts * 1e3:.0f} ms)"
        )


if __name__ == "__main__":
    main()
