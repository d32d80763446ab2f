"""Trains a small model on all devices of all processes; prints the losses of the first process.

`fit.py DIRECTORY MESH STEPS [--slow] [--timed]`
"""

import json
import os
import sys
import time

import shardwise as sw

here = sw.distributed(timeout_seconds=10)
print(f"pid {here.index} {os.getpid()}", flush=True)

import jax
import numpy as np
import optax
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))


def make():
    return Net(nnx.Rngs(0))


class Slowly:
    """Samples that take a while to read, so that a signal arrives in the middle of a run."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows["x"])

    def __getitem__(self, index):
        if "--slow" in sys.argv:
            time.sleep(0.01)
        return {name: rows[int(index)] for name, rows in self.rows.items()}


directory, axes, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
rng = np.random.default_rng(0)
rows = {"x": rng.normal(size=(96, 16)).astype("float32")}
rows["y"] = rows["x"][:, :4] * 2
recipe = sw.Recipe(
    model=make,
    loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(),
    optimizer=optax.adamw(1e-2),
    batch={
        "x": jax.ShapeDtypeStruct((32, 16), "float32"),
        "y": jax.ShapeDtypeStruct((32, 4), "float32"),
    },
    ema=0.9,
)
layout = sw.layout(make, sw.mesh(axes), sw.fsdp("data", min_bytes=0))
checkpoints = sw.Checkpoints(directory, every=5)
if "--timed" in sys.argv:  # a save is always due, so that the test does not depend on the clock
    checkpoints = sw.Checkpoints(directory, keep=None, minutes=1e-9)
state = sw.fit(
    recipe,
    layout,
    sw.data(Slowly(rows)),
    steps=steps,
    checkpoints=checkpoints,
    logs=f"{directory}/logs",
    log_every=1,
)
if here.index == 0:
    total = {
        path: float(np.abs(np.asarray(x)).sum())
        for path, x in state.ema.items()
        if x.is_fully_addressable
    }
    print(json.dumps({"step": int(state.step), "ema": total}), flush=True)
