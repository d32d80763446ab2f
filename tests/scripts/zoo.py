"""Runs the zoo from layout to restore on all devices of all processes; prints the losses.

`zoo.py DIRECTORY [NAME …]`
"""

import json
import sys
import traceback
from pathlib import Path

import shardwise as sw

here = sw.distributed(timeout_seconds=20)

import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from models import ZOO


def batch_like(leaf):
    rng = np.random.default_rng(0)
    if leaf.dtype == np.int32:
        return rng.integers(0, 64, leaf.shape).astype("int32")
    return rng.normal(size=leaf.shape).astype(leaf.dtype)


def one(name, directory):
    make, loss, shape = ZOO[name]
    recipe = sw.Recipe(model=make, loss=loss, optimizer=optax.sgd(1e-3), batch=shape)
    layout = sw.layout(make, sw.mesh("data=8"), sw.fsdp("data", min_bytes=0))
    state, step = sw.train_state(recipe, layout), sw.train_step(recipe, layout)
    assert not sw.audit(layout, state.to_model(make)).errors
    if name == "oddments":  # move a model from this process to the devices of all processes
        assert not sw.audit(layout, sw.shard(make(), layout)).errors
        given = sw.train_state(recipe, layout, model=make())
        assert not sw.audit(layout, given.to_model(make)).errors
    batch, losses = batch_like(shape), []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    if here.count > 1:  # one process only provides the expected losses
        checkpoints = sw.Checkpoints(directory / name.replace(" ", "-"))
        checkpoints.save(2, state)
        checkpoints.close()
        state = checkpoints.restore(recipe, layout)
    state, metrics = step(state, batch)
    return [*losses, float(metrics["loss"])]


found, failed = {}, {}
for name in sys.argv[2:] or ZOO:
    try:
        found[name] = one(name, Path(sys.argv[1]))
    except Exception as error:
        traceback.print_exc()
        failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
if here.index == 0:
    print(json.dumps({"losses": found, "failed": failed}), flush=True)
