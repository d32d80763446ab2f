"""Loads weights in one of several processes, says what it read, and saves them again."""

import json
import os
import sys

import shardwise as sw

sw.distributed()
import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

source, target, wrong = sys.argv[1:4]


class Two(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(16, 4096, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4096, 16, use_bias=False, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


TURNED = {r"(\w+)\.weight": sw.Name(r"\1.kernel", permute=(1, 0))}
rules = {"up.kernel": P(None, "x"), "down.kernel": P("y", "x")}
layout = sw.layout(Two, sw.mesh("x=4,y=2"), rules)
if wrong == "missing":
    if jax.process_index() == 1:
        source += "-that-is-not-here"
    sw.load(Two, layout, source, names=TURNED)
before = int(open("/proc/self/io").read().split("rchar: ")[1].split()[0])
seen = []
model = sw.load(Two, layout, source, names=TURNED, progress=lambda *n: seen.append(n))
rows = {
    name: [
        [
            [list(i.indices(n)[:2]) for i, n in zip(s.index, x.shape, strict=True)],
            np.asarray(s.data).tolist(),
        ]
        for s in x.addressable_shards
    ]
    for name, x in (("up", model.up.kernel[...]), ("down", model.down.kernel[...]))
}
planned = sw.check_weights(Two, layout, source, names=TURNED).read_bytes
sw.save_weights(model, target, names=TURNED, max_file_bytes=300_000)

# Moved from here, leaf by leaf: over XLA's collectives, since the arrays span processes.
turned = sw.layout(Two, sw.mesh("x=4,y=2"), {"up.kernel": P("x", "y"), "down.kernel": P("y")})
resident = sum(x[...].addressable_data(0).nbytes for x in (model.up.kernel, model.down.kernel))
try:
    sw.shard(model, turned, limit=resident)
    refused = ""
except ValueError as error:
    refused = str(error)
before = [model.up.kernel[...], model.down.kernel[...]]
moved = sw.shard(model, turned, limit=4 * resident, donate=True)
after = [moved.up.kernel[...], moved.down.kernel[...]]
expected = sw.load(Two, turned, source, names=TURNED)
move = {
    "refused": refused,
    "freed": [x.is_deleted() for x in before],
    "findings": sw.audit(turned, moved).summary,
    "equal": [
        all(
            np.array_equal(a.data, b.data) and a.index == b.index
            for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True)
        )
        for x, y in zip(after, (expected.up.kernel[...], expected.down.kernel[...]), strict=True)
    ],
}
place = f"{target}.{jax.process_index()}.json"
with open(place, "w") as file:
    json.dump(
        {
            "rows": rows,
            "seen": seen,
            "planned": {str(k): v for k, v in planned.items()},
            "move": move,
        },
        file,
    )
print("done", os.getpid())
