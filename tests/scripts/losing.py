"""Two processes save after each step; process 1 raises, or is killed at the start of a save.

`losing.py DIRECTORY raise|kill`. Process 0 prints the addresses that it listens on.
"""

import os
import signal
import sys

import shardwise as sw

here = sw.distributed(timeout_seconds=15)

import jax
import numpy as np
import optax
from flax import nnx

from shardwise._checkpoint import checkpoints as module

directory, mode = sys.argv[1:]
begin = module.digests
saves = []


def listening():
    """Returns the local addresses of this process's sockets that listen."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(table) as rows:
            for row in list(rows)[1:]:
                fields = row.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                    yield fields[1].partition(":")[0]


def digests(arrays):
    saves.append(1)
    if here.index == 1 and len(saves) == 3 and mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if here.index == 0 and len(saves) == 2:
        print("listens on", *listening(), flush=True)
    return begin(arrays)


class Rows:
    reads = 0

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        self.reads += 1
        if here.index == 1 and len(saves) >= 3 and mode == "raise":
            raise OSError("the file is away")
        return np.ones(16, "float32")


def make():
    return nnx.Linear(16, 4, rngs=nnx.Rngs(0))


module.digests = digests
recipe = sw.Recipe(
    model=make,
    loss=lambda model, x: (model(x) ** 2).mean(),
    optimizer=optax.adam(1e-2),
    batch=jax.ShapeDtypeStruct((32, 16), "float32"),
)
layout = sw.layout(make, sw.mesh("data=4", on="cpu:4"), sw.fsdp("data", min_bytes=0))
checkpoints = sw.Checkpoints(directory, every=1)
try:
    sw.fit(recipe, layout, sw.data(Rows()), steps=400, show=False, checkpoints=checkpoints)
except sw.LostProcess:
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGTERM)  # as the launcher may, before this is printed
    raise
