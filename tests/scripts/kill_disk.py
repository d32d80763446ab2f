"""Saves to a full or read-only disk, or counts what a restore reads, depending on its argument.

The first two mount a small file system, in a mount namespace of their own, as
`unshare --map-root-user --mount` makes it. Prints one JSON object.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000  # CLONE_NEWNS and CLONE_NEWUSER of unshare(2)


def own_mounts():
    """Moves this process, which has one thread as yet, into a namespace where it may mount."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS | NEW_USER):  # Python has it since 3.12
        sys.exit(f"no namespace: {os.strerror(ctypes.get_errno())}")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    # What is mounted here is not seen outside.
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


mode, directory = sys.argv[1:]
if mode != "read":
    own_mounts()

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw

size = 2048 if mode == "read" else 256
results = {}


class Big(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jax.numpy.ones((size, size)))
        self.v = nnx.Variable(jax.numpy.full((size, size), 2.0))

    def __call__(self, x):
        return x @ self.w


recipe = sw.Recipe(
    model=Big,
    loss=lambda model, x: model(x).mean(),
    optimizer=optax.adam(1e-2),
    batch=jax.ShapeDtypeStruct((8, size), "float32"),
)


def layout_of(axes, count, rules):
    return sw.layout(Big, sw.mesh(axes, on=f"cpu:{count}"), rules)


def attempt(name, action):
    try:
        action()
        results[name] = "ok"
    except sw.CheckpointError as error:
        results[name] = str(error).replace(directory, "DIR")


def save(checkpoints, step):
    checkpoints.save(step, state)
    checkpoints.wait()


def restores(checkpoints):
    restored = checkpoints.restore(recipe, layout)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def mount(*options):
    subprocess.run(["mount", *options, directory], check=True)


def bytes_read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


layout = layout_of("data=8", 8, {"*": P(None, "data")})
state = sw.train_state(recipe, layout)
checkpoints = sw.Checkpoints(directory, keep=None)
if mode == "read":
    save(checkpoints, 1)
    checkpoints.restore(recipe, layout)
    for name, target in {
        "the same": layout,
        "replicated": layout_of("data=8", 8, "dp"),
        "fewer": layout_of("data=4", 4, {"*": P(None, "data")}),
        "one": layout_of("data=1", 1, "dp"),
        "crosswise": layout_of("data=8", 8, {"*": P("data")}),
        "grid": layout_of("data=2,model=4", 8, {"*": P("data", "model")}),
    }.items():
        planned = checkpoints.preflight(recipe, target).read_bytes[0]
        before = bytes_read()
        checkpoints.restore(recipe, target)
        results[name] = [planned, bytes_read() - before]
if mode == "full":
    mount("-t", "tmpfs", "-o", "size=2m", "none")
    attempt("first", lambda: save(checkpoints, 1))
    attempt("full", lambda: save(checkpoints, 2))
    attempt("full again", lambda: save(checkpoints, 3))
    results["steps"] = checkpoints.steps()
    attempt("older", lambda: restores(checkpoints))
    mount("-o", "remount,size=20m")
    attempt("with room", lambda: save(checkpoints, 4))
    checkpoints.close()
    results["left"] = sorted(path.name for path in checkpoints.directory.iterdir())
if mode == "readonly":
    mount("-t", "tmpfs", "none")
    attempt("first", lambda: save(checkpoints, 1))
    checkpoints.close()  # the lock file, open for writing, would prevent the remount
    mount("-o", "remount,ro")
    attempt("read-only", lambda: save(checkpoints, 2))
    attempt("new run", lambda: save(sw.Checkpoints(directory), 3))
    attempt("below", lambda: save(sw.Checkpoints(directory + "/runs/a"), 4))
    results["steps"] = checkpoints.steps()
    attempt("older", lambda: restores(checkpoints))
    checkpoints.close()
results["ended_at"] = time.time()
print(json.dumps(results), flush=True)
