"""Trains a small model on all devices of all processes, once or, one after the other, often.

`fit.py DIRECTORY MESH STEPS [DIRECTORY MESH STEPS …] [--slow] [--timed] [--zero2]`
"""

import os
import sys
import time

import shardwise as sw

if __name__ == "__main__":
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


def train(directory, axes, steps):
    """Trains until so many steps are done, from the newest checkpoint of the directory."""
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
    checkpoints = sw.Checkpoints(directory, every=5)
    if "--timed" in sys.argv:  # it is always late: who saves, and when, depends on no clock
        checkpoints = sw.Checkpoints(directory, keep=None, minutes=1e-9)
    rule = sw.zero2 if "--zero2" in sys.argv else sw.fsdp
    return sw.fit(
        recipe,
        sw.layout(make, sw.mesh(axes), rule("data", min_bytes=0)),
        sw.data(Slowly(rows)),
        steps=steps,
        checkpoints=checkpoints,
        logs=f"{directory}/logs",
        log_every=1,
    )


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    for directory, axes, steps in zip(given[::3], given[1::3], given[2::3], strict=True):
        train(directory, axes, int(steps))
