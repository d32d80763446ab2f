"""Ring attention: the sequence is split, keys and values go round, and no device holds them all.

python examples/ring_attention.py           simulated on one device
python examples/ring_attention.py --real    the same body on eight devices
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardwise as sw

BATCH, LENGTH, HEADS, KEY_HEADS, DIM = 2, 64, 8, 2, 16


def attention(query, key, value):
    """Attention on one device: its part of the sequence, its heads, its rows of the batch."""
    return sw.sequence_parallel_attention(query, key, value, axis="seq", causal=True)


def plain(query, key, value):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def main(real=False):
    """Returns the largest difference from attention on one device, including gradients."""
    spec = P("data", "seq", "model")
    how = {"in_specs": (spec, spec, spec), "out_specs": spec}
    mesh = sw.mesh("data=1,seq=4,model=2", on="cpu:8" if real else "none")
    run = (jax.shard_map if real else sw.simulate)(attention, mesh=mesh, **how)

    keys = jax.random.split(jax.random.key(0), 3)
    heads = (HEADS, KEY_HEADS, KEY_HEADS)
    arrays = tuple(
        jax.random.normal(k, (BATCH, LENGTH, h, DIM)) for k, h in zip(keys, heads, strict=True)
    )
    if not real:
        print(run.trace(*arrays))
    run = jax.jit(run)

    def grads(fn):
        return jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(3 * fn(*a))), (0, 1, 2))(*arrays)

    apart = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), grads(run), grads(plain))
    return float(max(jax.tree.leaves(apart)))


if __name__ == "__main__":
    print(f"differs from one device by at most {main('--real' in sys.argv):.1e}")
