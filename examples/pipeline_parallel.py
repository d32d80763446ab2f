"""Pipeline parallelism: a stack of blocks split by depth, next to a data and a tensor axis.

python examples/pipeline_parallel.py           simulated on one device
python examples/pipeline_parallel.py --real    the same body on eight devices
"""

import sys

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw

LAYERS, WIDTH, HIDDEN = 8, 16, 32


class Block(nnx.Module):
    """An MLP with a residual connection; if its hidden units are split, `axis` sums over them."""

    def __init__(self, rngs, axis=None):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)
        self.axis = axis

    def __call__(self, x):
        out = self.down(nnx.gelu(self.up(self.norm(x))))
        return x + (out if self.axis is None else jax.lax.psum(out, self.axis))


@nnx.split_rngs(splits=LAYERS)
@nnx.vmap(in_axes=(0, None), out_axes=0)
def make(rngs, axis):
    return Block(rngs, axis)


def plain(state, x):
    graphdef = nnx.graphdef(make(nnx.Rngs(0), None))
    return jax.lax.scan(lambda h, s: (nnx.merge(graphdef, s)(h), None), x, state)[0]


def main(real=False):
    """Returns the largest difference from the plain stack, including gradients."""
    axes = "stage=2,data=2,model=2"
    mesh = sw.mesh(axes, on="cpu:8" if real else "none")
    graphdef, state = nnx.split(make(nnx.Rngs(0), "model"))

    def body(state, x):
        """One device: half of the depth, half of the hidden units, half of the batch."""
        pipe = sw.pipeline(nnx.merge(graphdef, state), axis="stage", microbatches=4)
        print(pipe.timetable())
        return pipe(x)

    specs = nnx.State(
        {
            "norm": {"scale": P("stage")},
            "up": {"kernel": P("stage", None, "model")},
            "down": {"kernel": P("stage", "model", None)},
        }
    )
    how = {"mesh": mesh, "in_specs": (specs, P("data")), "out_specs": P("data")}
    run = jax.jit((jax.shard_map if real else sw.simulate)(body, **how))
    x = jax.random.normal(jax.random.key(1), (16, WIDTH))

    def grads(fn):
        return jax.value_and_grad(lambda s, x: jnp.sum(jnp.sin(fn(s, x))), (0, 1))(state, x)

    apart = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), grads(run), grads(plain))
    return float(max(jax.tree.leaves(apart)))


if __name__ == "__main__":
    print(f"differs from the plain stack by at most {main('--real' in sys.argv):.1e}")
