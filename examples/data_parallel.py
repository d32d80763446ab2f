"""Data parallelism by hand: every device has its rows of the batch, and gradients are averaged.

python examples/data_parallel.py           simulated on one device
python examples/data_parallel.py --real    the same body on eight devices
"""

import sys

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 32, rngs=rngs)
        self.down = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def step(model, x, y):
    """One step of gradient descent on one device, where x and y are its own rows."""
    # Each device gets its own copy of the model, so that its gradient is that of its own rows.
    own = jax.lax.pcast(model, "data", to="varying")
    value, grads = jax.value_and_grad(loss)(own, x, y)
    value, grads = jax.lax.pmean((value, grads), "data")
    return jax.tree.map(lambda p, g: p - 0.1 * g, model, grads), value


def main(real=False):
    """Returns the largest difference from the same training without a mesh."""
    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": (P(), P())}
    mesh = sw.mesh("data=8", on="cpu:8" if real else "none")
    run = (jax.shard_map if real else sw.simulate)(step, mesh=mesh, **specs)

    model = plain = Mlp(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (64, 8))
    y = jnp.sum(jnp.sin(x), axis=1, keepdims=True)
    if not real:
        print(run.trace(model, x, y))

    run = jax.jit(run)
    for _ in range(5):
        model, value = run(model, x, y)
        grads = jax.grad(loss)(plain, x, y)
        plain = jax.tree.map(lambda p, g: p - 0.1 * g, plain, grads)
        print(f"loss {value:.4f}")
    apart = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), model, plain)
    return float(max(jax.tree.leaves(apart)))


if __name__ == "__main__":
    print(f"differs from one device by at most {main('--real' in sys.argv):.1e}")
