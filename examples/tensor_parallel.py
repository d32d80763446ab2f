"""Tensor parallelism by hand: a column-parallel and a row-parallel Linear, with a single psum.

python examples/tensor_parallel.py           simulated on one device
python examples/tensor_parallel.py --real    the same body on eight devices
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardwise as sw


def init(key, width=16, hidden=64):
    up, down = jax.random.split(key)
    return {
        "up": {
            "kernel": jax.random.normal(up, (width, hidden)) / width**0.5,
            "bias": jnp.zeros(hidden),
        },
        "down": {
            "kernel": jax.random.normal(down, (hidden, width)) / hidden**0.5,
            "bias": jnp.zeros(width),
        },
    }


# The columns of the first layer and the rows of the second are split: each device has its own
# hidden units.
SPECS = {
    "up": {"kernel": P(None, "model"), "bias": P("model")},
    "down": {"kernel": P("model", None), "bias": P()},
}


def mlp(params, x):
    """The MLP on one device: its own hidden units, then the sum over all devices."""
    hidden = jax.nn.gelu(x @ params["up"]["kernel"] + params["up"]["bias"])
    part = hidden @ params["down"]["kernel"]
    # The bias is added once, after the sum, not once by each device.
    return jax.lax.psum(part, "model") + params["down"]["bias"]


def plain(params, x):
    hidden = jax.nn.gelu(x @ params["up"]["kernel"] + params["up"]["bias"])
    return hidden @ params["down"]["kernel"] + params["down"]["bias"]


def main(real=False):
    """Returns the largest difference from the same MLP on one device, including gradients."""
    specs = {"in_specs": (SPECS, P("data")), "out_specs": P("data")}
    mesh = sw.mesh("data=2,model=4", on="cpu:8" if real else "none")
    run = (jax.shard_map if real else sw.simulate)(mlp, mesh=mesh, **specs)

    params, x = init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (8, 16))
    if not real:
        print(run.trace(params, x))
        local = run.shards(params, x)[1, 3].inputs[0]
        print("device data=1,model=3 holds", jax.tree.map(jnp.shape, local))
    run = jax.jit(run)

    def grads(fn):
        return jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(fn(p, x))), (0, 1))(params, x)

    apart = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), grads(run), grads(plain))
    return float(max(jax.tree.leaves(apart)))


if __name__ == "__main__":
    print(f"differs from one device by at most {main('--real' in sys.argv):.1e}")
