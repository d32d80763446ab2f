"""Runs the zoo from layout to restore on all devices of all processes; prints the losses.

All its models but one are parts of one: one program of a step, one checkpoint. `zoo.py DIRECTORY`
"""

import json
import sys
from pathlib import Path

import shardwise as sw

if __name__ == "__main__":
    here = sw.distributed(timeout_seconds=20)
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import numpy as np
import optax
from flax import nnx
from models import ZOO

# A helper with arrays has its model built three times for each trace: it is a model of its own.
APART = ["helper"]
GROUPS = [[name for name in ZOO if name not in APART], APART]


class Zoo(nnx.Module):
    """Models as parts of one."""

    def __init__(self, names):
        for name in names:
            setattr(self, name.replace(" ", "_"), ZOO[name][0]())


def loss(model, batch):
    """Returns the sum of all losses, and each of them."""
    each = {
        name: ZOO[name][1](getattr(model, name.replace(" ", "_")), rows)
        for name, rows in batch.items()
    }
    return sum(each.values()), each


def batch_like(leaf):
    rng = np.random.default_rng(0)
    if leaf.dtype == np.int32:
        return rng.integers(0, 64, leaf.shape).astype("int32")
    return rng.normal(size=leaf.shape).astype(leaf.dtype)


def split(make):
    return sw.layout(make, sw.mesh("data=8"), sw.fsdp("data", min_bytes=0))


def recipe_of(make, loss, batch):
    return sw.Recipe(model=make, loss=loss, optimizer=optax.sgd(1e-3), batch=batch)


def given(name):
    """A model that exists on this process is moved onto devices of all."""
    make, loss, shape = ZOO[name]
    layout = split(make)
    assert not sw.audit(layout, sw.shard(make(), layout)).errors
    state = sw.train_state(recipe_of(make, loss, shape), layout, model=make())
    assert not sw.audit(layout, state.to_model(make)).errors


def losses(directory=None):
    """Returns the losses of each model: two steps, and one more, after a restore if saved."""
    found = {}
    for number, names in enumerate(GROUPS):
        found |= losses_of(names, directory and f"{directory}/{number}")
    return found


def losses_of(names, directory):
    def make():
        return Zoo(names)

    shapes = {name: ZOO[name][2] for name in names}
    recipe, layout = recipe_of(make, loss, shapes), split(make)
    state, step = sw.train_state(recipe, layout), sw.train_step(recipe, layout)
    assert not sw.audit(layout, state.to_model(make)).errors
    batch = {name: batch_like(shape) for name, shape in shapes.items()}
    found = {name: [] for name in names}
    for number in range(3):
        if number == 2 and directory:
            checkpoints = sw.Checkpoints(directory)
            checkpoints.save(2, state)
            checkpoints.close()
            state = checkpoints.restore(recipe, layout)
        state, metrics = step(state, batch)
        for name in names:
            found[name].append(float(metrics[name]))
    return found


if __name__ == "__main__":
    given("oddments")
    found = losses(sys.argv[1])
    if here.index == 0:
        print(json.dumps({"losses": found}), flush=True)
