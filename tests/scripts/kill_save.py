"""Saves repeatedly in a child process that is killed at a random moment, many times.

Arguments: the directory, how many kills, a seed. Modules are imported once, before the forks; no
backend is started here. Each child first restores every listed step, compares it bitwise with what
should have been saved, and continues from the newest, like a run that was killed.
Prints one JSON object at the end.
"""

import gc
import json
import os
import random
import signal
import sys
import time
import traceback

import jax

jax.config.update("jax_num_cpu_devices", 2)

import numpy as np
import optax
import orbax.checkpoint  # noqa: F401 - imported once, before the forks that save with it
from flax import nnx

import shardwise as sw
from shardwise import _public  # noqa: F401 - also once: what `sw` loads lazily
from shardwise._step.blueprint import make_blueprint

SHAPE = (256, 512)
directory, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
# All children compile the same programs. None is killed before that, so the cache stays intact.
jax.config.update("jax_compilation_cache_dir", f"{directory}-compiled")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


class Two(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jax.numpy.zeros(SHAPE))
        self.b = nnx.Param(jax.numpy.zeros(SHAPE))


def state_at(plan, step):
    """Returns a state that is a known function of the step, with all arrays different."""
    leaves, treedef = jax.tree.flatten(plan.abstract)
    arrays = [
        (np.arange(x.size).reshape(x.shape) % 1000 + 7 * i + step).astype(x.dtype)
        for i, x in enumerate(leaves)
    ]
    places = [x.sharding for x in leaves]
    return jax.tree.unflatten(treedef, jax.device_put(arrays, places))


def run(ready, endless):
    recipe = sw.Recipe(
        model=Two,
        loss=lambda model, x: (model.a.sum() + model.b.sum()) * x.mean(),
        optimizer=optax.adam(1e-3),
        batch=jax.ShapeDtypeStruct((2, 4), "float32"),
    )
    layout = sw.layout(Two, sw.mesh("data=2", on="cpu:2"), sw.fsdp("data", min_bytes=0))
    plan = make_blueprint(recipe, layout)
    checkpoints = sw.Checkpoints(directory, keep=1)
    steps = checkpoints.steps()
    for step in steps:
        restored = checkpoints.restore(recipe, layout, step=step)
        pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(state_at(plan, step)), strict=True)
        for got, want in pairs:
            assert np.asarray(got).tobytes() == np.asarray(want).tobytes(), step
        assert checkpoints.about(step)["position"] == 10 * step
    step = steps[-1] if steps else 0
    first = step
    while True:
        step += 1
        checkpoints.save(step, state_at(plan, step), position=10 * step, layout=layout)
        checkpoints.wait()
        if not endless:
            os.write(ready, f"{first}\n".encode())
            return checkpoints.close()
        if step == first + 1:  # compiled and written once: from now on a save is always in progress
            os.write(ready, f"{first}\n".encode())


def start(endless):
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        with os.fdopen(reading) as lines:
            text = lines.readline()
        return child, text
    try:
        run(writing, endless)
    except BaseException:
        traceback.print_exc()
        os._exit(3)
    os._exit(0)


def is_saving():
    return os.path.isdir(directory) and any("tmp" in name for name in os.listdir(directory))


gc.freeze()  # so that children do not scan, and copy, everything that was imported
rng = random.Random(seed)
found = {"kills": 0, "newest": [], "half": 0, "deleting": 0}
for _ in range(kills):
    child, text = start(endless=True)
    if text:
        # Half of the kills wait for a save to begin: on a busy machine, few others would hit one.
        waits, until = rng.random() < 0.5, time.monotonic() + 5
        while waits and not is_saving() and time.monotonic() < until:
            time.sleep(0.0005)
        time.sleep(rng.uniform(0.0, 0.03 if waits else 0.1))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not text or os.WTERMSIG(status) != signal.SIGKILL:
        sys.exit(f"a child ended by itself: {status}")
    found["kills"] += 1
    found["newest"].append(int(text))
    names = os.listdir(directory) if os.path.isdir(directory) else []
    found["half"] += is_saving()
    found["deleting"] += any(name.startswith(".") for name in names)
child, text = start(endless=False)
_, status = os.waitpid(child, 0)
found["last"] = [os.waitstatus_to_exitcode(status), int(text)]
found["left"] = sorted(os.listdir(directory))
print(json.dumps(found))
