"""Trains on two processes, the second of which differs: `differ.py DIRECTORY MODE,MODE [exit]`.

Prints how each mode ended, and raises the last one's error, or exits with status 4 given `exit`.
The modes are a different learning rate, seed, loss, data, directory or number of steps, a restore
or a read that fails, a replica of a weight that changes on one device, a directory that is not
shared or that one process sees late, and a mesh with too few devices.
"""

import sys

import shardwise as sw

here = sw.distributed(timeout_seconds=15)

import jax
import numpy as np
import optax
from flax import nnx

from shardwise._checkpoint import writer_lock
from shardwise._processes import agree

odd = here.index == 1
agree._STALE_SECONDS = 4.0
writer_lock._SHARED_SECONDS = 2.0


class Rows:
    """Samples, one of which cannot be read by one process."""

    def __init__(self, mode):
        self.x = np.random.default_rng(odd and mode == "data").normal(size=(96, 16))
        self.fails, self.reads = odd and mode == "read", 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.reads += 1
        if self.fails and self.reads > 60:
            raise OSError("the file is away")
        return self.x[int(index)].astype("float32")


class Corrupting(sw.Checkpoints):
    """Changes one device's replica when a checkpoint is restored, like a flipped bit."""

    def restore_onto(self, blueprint, **how):
        state = super().restore_onto(blueprint, **how)
        if odd:
            kernel = state.model["kernel"]
            parts = [shard.data for shard in kernel.addressable_shards]
            parts[-1] = parts[-1].at[3, 2].add(1e-6)
            state.model["kernel"] = jax.make_array_from_single_device_arrays(
                kernel.shape, kernel.sharding, parts
            )
        return state


class Away(sw.Checkpoints):
    """Cannot be read by one process."""

    def about(self, step=None):
        if odd:
            raise sw.CheckpointError("its disk is away")
        return super().about(step)


class Stale(sw.Checkpoints):
    """Shows a step to one process later than to the others, as a cached directory would."""

    looks = 0

    def steps(self):
        self.looks += 1
        return [] if odd and self.looks <= 2 else super().steps()


def run(mode, directory):
    seed, power = int(odd and mode == "seed"), 4 if odd and mode == "loss" else 2

    def make():
        return nnx.Linear(16, 4, rngs=nnx.Rngs(seed))

    recipe = sw.Recipe(
        model=make,
        loss=lambda model, x: (model(x) ** power).mean(),
        optimizer=optax.adam(2e-2 if odd and mode == "rate" else 1e-2),
        batch=jax.ShapeDtypeStruct((32, 16), "float32"),
    )
    if mode == "mesh":
        sw.mesh("data=2", on="cpu:2")
    layout = sw.layout(make, sw.mesh("data=4", on="cpu:4"), "dp")
    steps = 3 if odd and mode == "arguments" else 4
    if mode in ("directory", "restore", "corrupt", "stale"):
        first = sw.Checkpoints(directory)
        sw.fit(recipe, layout, sw.data(Rows(mode)), steps=2, show=False, checkpoints=first)
    if odd and mode in ("directory", "unshared"):
        directory += "-of-its-own"
    kind = {"corrupt": Corrupting, "restore": Away, "stale": Stale}.get(mode, sw.Checkpoints)
    sw.fit(
        recipe, layout, sw.data(Rows(mode)), steps=steps, show=False, checkpoints=kind(directory)
    )


for mode in sys.argv[2].split(","):
    try:
        run(mode, f"{sys.argv[1]}/{mode}")
        print(f"{mode}: ran to the end", flush=True)
    except Exception as error:
        print(f"{mode}: {type(error).__name__}: {error}", flush=True)
        last = error
        if mode in ("mesh", "restore", "read"):  # one of them alone ends all
            raise
if "exit" in sys.argv:
    sys.exit(4)
raise last
