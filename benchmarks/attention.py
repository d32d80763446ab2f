"""Measures the memory of ring attention on one device as the axis grows, as compiled by XLA.

Forward and backward, float32, causal, compiled for virtual CPU devices; nothing is run.

    python benchmarks/attention.py [--length 8192]
"""

from __future__ import annotations

import argparse

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=8192)
    length = parser.parse_args().length
    jax.config.update("jax_num_cpu_devices", 8)
    import shardwise as sw

    shape = jax.ShapeDtypeStruct((1, length, 8, 64), "float32")
    print(f"jax {jax.__version__}, length {length}, 8 heads of 64; compiled bytes on one device")
    print("devices   arguments MiB   temporaries MiB   total / one device")
    first = None
    for devices in (1, 2, 4, 8):
        mesh = sw.mesh({"seq": devices}, on=f"cpu:{devices}")
        sharding = NamedSharding(mesh, P(None, "seq"))

        def loss(*args, mesh=mesh):
            return sw.sequence_parallel_attention(*args, axis="seq", causal=True, mesh=mesh).sum()

        step = jax.jit(jax.grad(loss, (0, 1, 2)), in_shardings=sharding, out_shardings=sharding)
        memory = step.lower(shape, shape, shape).compile().memory_analysis()
        arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        total = arguments + temporaries
        first = first or total
        print(
            f"{devices:7} {arguments / 2**20:15.1f} {temporaries / 2**20:17.1f} {total / first:20.2f}"
        )


if __name__ == "__main__":
    main()
