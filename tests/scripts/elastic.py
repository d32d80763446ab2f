"""Trains a small model elastically, with what its losses must then be.

`elastic.py DIRECTORY STEPS SECONDS`: so long for each sample.
"""

import os
import sys
import time

import jax
import numpy as np
import optax
from flax import nnx

import shardwise as sw

COPIES, CHECKPOINTS, BATCH, SAMPLES = 4, 10, 24, 240


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.up = nnx.Linear(12, 48, rngs=rngs)
        self.norm = nnx.BatchNorm(48, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(48, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))


RECIPE = sw.Recipe(
    model=Net,
    loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(),
    optimizer=optax.adamw(1e-3),
    batch={
        "x": jax.ShapeDtypeStruct((BATCH, 12), "float32"),
        "y": jax.ShapeDtypeStruct((BATCH, 4), "float32"),
    },
    ema=0.9,
)


def data_of(seconds=0.0):
    rows = {"x": np.random.default_rng(0).normal(size=(SAMPLES, 12)).astype("float32")}
    rows["y"] = rows["x"][:, :4] * 2

    def wait(sample):
        time.sleep(seconds)
        return sample

    return sw.data(rows, seed=7, transform=wait if seconds else None)


def layout_on(mesh):
    return sw.layout(Net, mesh, sw.fsdp("data", min_bytes=0))


def final(segments, processes):
    """Returns what is left of the steps from where processes took over, when some were repeated."""
    kept = []
    for first, count in [(0, processes), *segments]:
        kept = [(s, c) for s, c in kept if s < first] + [(first, count)]
    return kept


def losses_on(segments, processes, last):
    """Yields each step and its loss in one process that was on the same meshes from the same steps."""
    from shardwise._elastic import scaled

    kept = final(segments, processes)
    data, state, steps = data_of(), None, {}
    for (first, count), after in zip(kept, [*(s for s, _ in kept[1:]), last], strict=True):
        if count not in steps:
            layout = layout_on(sw.mesh(f"data={count}", on=f"cpu:{count}"))
            steps[count] = sw.train_step(scaled(RECIPE, layout, count, processes), layout)
        step = steps[count]
        if state is None:
            state = sw.train_state(RECIPE, step.blueprint.layout)
        else:
            state = jax.tree.map(jax.device_put, state, step.blueprint.shardings)
        batches = data.on(step.blueprint, position=first * BATCH)
        for number in range(first + 1, after + 1):
            state, metrics = step(state, next(batches))
            yield number, float(metrics["loss"])


def train(directory, steps, seconds):
    here = sw.distributed(timeout_seconds=6)
    print(f"pid {here.index} {os.getpid()} {here.count}", flush=True)
    sw.fit(
        RECIPE,
        layout_on(sw.mesh("data=-1")),
        data_of(seconds),
        steps=steps,
        checkpoints=sw.Checkpoints(directory, every=CHECKPOINTS),
        logs=f"{directory}/logs",
        log_every=1,
        elastic=True,
        copies_every=COPIES,
    )


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
