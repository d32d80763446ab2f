"""Repeatedly saves its own steps to a directory that other processes save to as well.

Arguments: the directory, the first step, how many tries. Waits for a line on stdin before it
starts, so that all start at once. Prints one JSON object: the steps that `wait` reported as saved,
and the error messages of the others.
"""

import json
import sys

import jax

jax.config.update("jax_num_cpu_devices", 2)

import optax
from flax import nnx

import shardwise as sw

directory, first, tries = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def make():
    return nnx.Linear(64, 32, rngs=nnx.Rngs(0))


recipe = sw.Recipe(
    model=make,
    loss=lambda model, x: model(x).mean(),
    optimizer=optax.adam(1e-2),
    batch=jax.ShapeDtypeStruct((8, 64), "float32"),
)
layout = sw.layout(make, sw.mesh("data=2", on="cpu:2"), sw.fsdp("data", min_bytes=0))
state = sw.train_state(recipe, layout)
warm = sw.Checkpoints(f"{directory}-{first}")  # compiles what a save needs
warm.save(0, state)
warm.close()
print("ready", flush=True)
sys.stdin.readline()
found = {"saved": [], "refused": []}
for step in range(first, first + tries):
    checkpoints = sw.Checkpoints(directory, keep=None)
    try:
        checkpoints.save(step, state)
        checkpoints.wait()
        assert step in checkpoints.steps()
        checkpoints.close()
        found["saved"].append(step)
    except sw.CheckpointError as error:
        found["refused"].append(str(error))
        checkpoints.close()
print(json.dumps(found))
