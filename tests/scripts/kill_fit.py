"""Trains until it is done or stopped by a signal. Arguments: directory, steps, mode.

`slowly` takes a moment for each batch, `stuck` waits forever for the sixth, `quick` does neither.
"""

import sys
import time

import jax
import numpy as np
import optax
from flax import nnx

import shardwise as sw

SAMPLES = np.random.default_rng(0).normal(size=(100, 8)).astype("float32")


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.up = nnx.Linear(8, 16, use_bias=False, rngs=rngs)  # BatchNorm would remove it again
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def loss(model, x):
    return ((model(x) - x) ** 2).mean()


RECIPE = sw.Recipe(
    model=Net,
    loss=loss,
    optimizer=optax.adamw(1e-2),
    batch=jax.ShapeDtypeStruct((16, 8), "float32"),
    accumulate=2,
    ema=0.9,
)


def layout_on(axes="data=4", count=4):
    return sw.layout(Net, sw.mesh(axes, on=f"cpu:{count}"), sw.fsdp("data", min_bytes=0))


def data(**more):
    return sw.data(SAMPLES, seed=3, **more)


def stuck():
    yield from [SAMPLES[:16]] * 5
    time.sleep(600)


def slow(sample):
    time.sleep(0.002)
    return sample


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    directory, steps, how = sys.argv[1:]
    given = {"slowly": data(transform=slow), "stuck": stuck(), "quick": data()}[how]
    checkpoints = sw.Checkpoints(directory)
    sw.fit(
        RECIPE,
        layout_on(),
        given,
        steps=int(steps),
        checkpoints=checkpoints,
        logs=directory + "-logs",
        log_every=1,
    )
    print("done")
