"""Sums over all devices, step by step: `--until` steps, or forever.

At step 5, process `--fail` raises an error, process `--leave` raises `SystemExit(3)`, and process
`--exit` calls `sys.exit(3)`. With `--plain`, only shardwise's exit handler names a lost process.
"""

import argparse
import contextlib
import os
import sys
import time

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise._processes import naming_lost_process
from shardwise._processes.joining import distributed

parser = argparse.ArgumentParser()
parser.add_argument("--until", type=int, default=10**9)
parser.add_argument("--fail", type=int)
parser.add_argument("--leave", type=int)
parser.add_argument("--exit", type=int)
parser.add_argument("--timeout", type=float, default=30)
parser.add_argument("--start", type=float, default=300)
parser.add_argument("--plain", action="store_true")
options = parser.parse_args()

here = distributed(timeout_seconds=options.timeout, start_seconds=options.start)
assert distributed() == here
print(f"place {here}")
print(f"pid {here.index} {os.getpid()}")

size = jax.device_count()
mesh = jax.make_mesh((size,), ("data",), axis_types=(AxisType.Auto,))
values = np.arange(4 * size, dtype=np.float32)
x = jax.make_array_from_callback(
    values.shape, NamedSharding(mesh, P("data")), lambda index: values[index]
)
total = jax.jit(
    jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
)

for step in range(options.until):
    if step == 5 and options.fail == here.index:
        raise ValueError("this process raised an error")
    if step == 5 and options.leave == here.index:
        print("leaves")
        raise SystemExit(3)
    if step == 5 and options.exit == here.index:
        with contextlib.suppress(SystemExit):
            sys.exit(4)  # caught: this is not its exit status
        sys.exit(3)
    with contextlib.nullcontext() if options.plain else naming_lost_process(f"step {step}"):
        result = total(x).block_until_ready()
    if step == 9:
        print(f"sum {np.asarray(result).tolist()}")
    elif step > 9:
        time.sleep(0.01)  # forever, but without using all cores
