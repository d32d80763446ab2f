"""How long estimates of scanned Llama 3 70B and 405B take on many chips, and how much memory.

    taskset -c 0,1 python benchmarks/estimate_scale.py

For each layout: CPU seconds of `sw.estimate` (measured) the first time, with the trace of the model, and
the second time; then the most memory of the process above what it takes with JAX and Flax imported.
"""

import dataclasses
import time

import jax
import optax
from flax import nnx

import shardwise as sw
from shardwise import models

POINTS = [
    ("llama3-70b", "v5p:4x8x8", "data=64,model=4", (256, 4096)),
    ("llama3-70b", "h100:32x8", "data=32,model=8", (256, 4096)),
    ("llama3-70b", "v5p:16x16x16", "data=1024,model=4", (1024, 4096)),
    ("llama3-405b", "v5p:16x16x16", "data=512,model=8", (1024, 4096)),
    ("llama3-405b", "h100:512x8", "data=512,model=8", (1024, 4096)),
]


def most_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def measured(recipe, layout):
    start = time.process_time()
    found = sw.estimate(recipe, layout)
    return time.process_time() - start, found


before = most_bytes()
print(f"JAX, Flax and Shardwise: {before / 2**20:.0f} MiB")
for name, on, mesh, batch in POINTS:
    config = dataclasses.replace(models.CONFIGS[name], scan=True, remat="nothing_saveable")
    recipe = sw.Recipe(
        model=lambda config=config: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adamw(1e-4),
        batch=jax.ShapeDtypeStruct(batch, "int32"),
        compute_dtype="bfloat16",
    )
    layout = sw.layout(recipe, sw.mesh(mesh, on=on), "fsdp+tensor")
    (first, _), (second, found) = measured(recipe, layout), measured(recipe, layout)
    print(
        f"{name} on {on}, {mesh}: {first:.2f} s, then {second:.2f} s of CPU; "
        f"{(most_bytes() - before) / 2**20:.0f} MiB more; {found.seconds:.2f} s a step"
    )
