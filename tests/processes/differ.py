"""Trains on all processes, of which the second one differs: `differ.py DIRECTORY MODE`.

Prints how it ended. The modes are another learning rate, seed, loss, data or directory, a restore
or a read that fails, and a copy of a weight that changes on one device.
"""

import os
import sys

import shardwise as sw

here = sw.distributed(timeout_seconds=15)

import jax
import numpy as np
import optax
from flax import nnx

directory, mode = sys.argv[1:]
odd = here.index == 1
rate = 2e-2 if odd and mode == "rate" else 1e-2
seed = 1 if odd and mode == "seed" else 0
power = 4 if odd and mode == "loss" else 2
if odd and mode == "directory":
    directory += "-of-its-own"


def make():
    return nnx.Linear(16, 4, rngs=nnx.Rngs(seed))


class Rows:
    """Samples of which one cannot be read by one process."""

    def __init__(self):
        self.x = np.random.default_rng(odd and mode == "data").normal(size=(96, 16))
        self.reads = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.reads += 1
        if odd and mode == "read" and self.reads > 60:
            raise OSError("the file is away")
        return self.x[int(index)].astype("float32")


recipe = sw.Recipe(
    model=make,
    loss=lambda model, x: (model(x) ** power).mean(),
    optimizer=optax.adam(rate),
    batch=jax.ShapeDtypeStruct((32, 16), "float32"),
)
layout = sw.layout(make, sw.mesh("data=4"), "dp")


class Corrupting(sw.Checkpoints):
    """Changes one device's copy when a checkpoint is restored, as a bit that flips would."""

    def restore(self, recipe, layout, *, step=None):
        if odd and mode == "restore":
            raise sw.CheckpointError("its disk is away")
        state = super().restore(recipe, layout, step=step)
        if odd and mode == "corrupt":
            kernel = state.model["kernel"]
            parts = [shard.data for shard in kernel.addressable_shards]
            parts[-1] = parts[-1].at[3, 2].add(1e-6)
            state.model["kernel"] = jax.make_array_from_single_device_arrays(
                kernel.shape, kernel.sharding, parts
            )
        return state


if mode in ("directory", "restore", "corrupt"):
    sw.fit(
        recipe,
        layout,
        sw.data(Rows()),
        steps=2,
        show=False,
        checkpoints=sw.Checkpoints(sys.argv[1]),
    )
steps = 3 if odd and mode == "arguments" else 4
try:
    sw.fit(
        recipe,
        layout,
        sw.data(Rows()),
        steps=steps,
        show=False,
        checkpoints=Corrupting(directory),
    )
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    if mode == "exit":
        sys.exit(4)
    raise
print("went on to the end", flush=True)
os.sync()
