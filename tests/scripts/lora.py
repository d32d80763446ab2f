"""Fine-tunes adapters in one of several processes: the base quantised as it is loaded, and merged."""

import functools
import json
import sys

import shardwise as sw

sw.distributed()
import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx

source, target = sys.argv[1:3]


class Mlp(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.up = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(32, 16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def make(**options):
    provider = qwix.LoraProvider(module_path=".*", rank=4, alpha=8.0, **options)
    return qwix.apply_lora_to_model(Mlp(0), provider, jnp.ones((1, 16)), rngs=nnx.Rngs(1))


recipe = sw.Recipe(
    model=functools.partial(make, weight_qtype="int8"),
    loss=lambda model, x: ((model(x) - x) ** 2).mean(),
    optimizer=optax.sgd(0.1),
    batch=jax.ShapeDtypeStruct((16, 16), "float32"),
    wrt=nnx.LoRAParam,
)
# Both axes cross processes: every scale is computed of shards of both.
layout = sw.layout(recipe, sw.mesh("data=2,model=4"), "fsdp+tensor")
if jax.process_count() == 1:
    sw.save_weights(Mlp(7), source)
model = sw.load(recipe.model, layout, source)
data = sw.data(np.random.default_rng(0).normal(size=(64, 16)).astype("float32"))
store = sw.Checkpoints(f"{target}-run", trained_only=True)
options = {"show": False, "log_every": 1, "checkpoints": store}
sw.fit(recipe, layout, data, steps=2, model=model, **options)
state = sw.fit(recipe, layout, data, steps=4, model=model, logs=f"{target}-logs", **options)
merged = sw.merge_adapters(state.to_model(recipe.model), lambda: Mlp(0))
sw.save_weights(merged, target)
if jax.process_index() == 0:
    rows = map(json.loads, open(f"{target}-logs/metrics.jsonl"))
    print(json.dumps([row["loss"] for row in rows if "loss" in row]))
