"""Correct solutions of every exercise of `shardwise learn`."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def leaf_shapes(model):
    state = nnx.split(model)[1]
    return {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}


def spec_tree(state):
    by_rank = {2: P(None, "model"), 1: P("model")}
    return jax.tree.map(lambda leaf: by_rank.get(leaf.ndim, P()), state)


def resolve(names, rules):
    return P(*(rules[name] or None if name else None for name in names))


def bias_spec(kernel_spec, kernel_ndim, bias_ndim):
    entries = [*kernel_spec, *[None] * (kernel_ndim - len(kernel_spec))]
    return P(*entries[-bias_ndim:])


def axes_of(spec, ndim):
    entries = [*spec, *[None] * (ndim - len(spec))]
    return [(e,) if isinstance(e, str) else (e or ()) for e in entries]


def shard_shape(shape, spec, mesh):
    sizes = []
    for size, axes in zip(shape, axes_of(spec, len(shape)), strict=True):
        ways = math.prod(mesh.shape[axis] for axis in axes)
        if size % ways:
            return None
        sizes.append(size // ways)
    return tuple(sizes)


def device_bytes(shape, dtype, spec, mesh):
    return math.prod(shard_shape(shape, spec, mesh)) * jnp.dtype(dtype).itemsize


def copies(spec, mesh):
    used = {axis for axes in axes_of(spec, len(spec)) for axis in axes}
    return math.prod(size for axis, size in mesh.shape.items() if axis not in used)


def held(shape, spec, mesh, device):
    found = []
    for size, axes in zip(shape, axes_of(spec, len(shape)), strict=True):
        index = 0
        for axis in axes:
            index = index * mesh.shape[axis] + device[axis]
        step = size // math.prod(mesh.shape[axis] for axis in axes)
        found.append((index * step, (index + 1) * step))
    return tuple(found)


def first_spec(shape, specs, mesh):
    for spec in specs:
        axes = [axis for entry in axes_of(spec, len(spec)) for axis in entry]
        known = all(axis in mesh.shape for axis in axes) and len(axes) == len(set(axes))
        if known and len(spec) <= len(shape) and shard_shape(shape, spec, mesh) is not None:
            return spec
    return None


def split_and_join(f, x, n):
    rows = x.shape[0] // n
    pieces = [jax.lax.dynamic_slice_in_dim(x, i * rows, rows, axis=0) for i in range(n)]
    return jnp.concatenate([f(piece) for piece in pieces])


def standardise(x):
    mean = jax.lax.pmean(x.mean(axis=0), "data")
    variance = jax.lax.pmean(((x - mean) ** 2).mean(axis=0), "data")
    return (x - mean) / jnp.sqrt(variance)


def tensor_mlp(w, x):
    hidden = jax.nn.relu(x @ w["up"] + w["up_bias"])
    return jax.lax.psum(hidden @ w["down"], "model") + w["down_bias"]


def mean_gradient(w, x):
    return jax.grad(lambda w: jax.lax.pmean(jnp.mean((x @ w) ** 2), "data"))(w)


def ring_sum(x, n):
    total = moving = x
    for _ in range(n - 1):
        moving = jax.lax.ppermute(moving, "ring", [(i, (i + 1) % n) for i in range(n)])
        total = total + moving
    return total


def abstract_bytes(make):
    leaves = jax.tree.leaves(nnx.split(nnx.eval_shape(make))[1])
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def init_sharded(make, layout):
    graphdef = nnx.split(nnx.eval_shape(make))[0]
    state = jax.jit(lambda: nnx.split(make())[1], out_shardings=layout.shardings)()
    return nnx.merge(graphdef, state)


def not_as_planned(layout, model):
    found = []
    for path, variable in nnx.to_flat_state(nnx.split(model)[1]):
        path, array = ".".join(map(str, path)), variable[...]
        planned = NamedSharding(layout.mesh, layout[path].spec)
        if not array.sharding.is_equivalent_to(planned, array.ndim):
            found.append(path)
    return sorted(found)


def training_bytes(layout, tx):
    return layout.bytes_per_device + layout.for_optimizer(tx).bytes_per_device


def step_bytes(shapes, n, how):
    # A gather and a reduce-scatter send as much as an all-reduce, by the ring model.
    return sum(2 * (n - 1) * (4 * math.prod(shape)) // n for shape in shapes)


def fsdp_gradient(w, x):
    def loss(w):
        return jnp.sum((x @ jax.lax.all_gather(w, "data", tiled=True)) ** 2)

    return jax.grad(loss)(w)


def bubble(stages, microbatches, rounds):
    return (stages - 1) / (microbatches * rounds)


def join_softmax(a, b):
    largest = jnp.maximum(a[0], b[0])
    shift = jnp.where(largest == -jnp.inf, 0.0, largest)
    scales = [jnp.exp(part[0] - shift) for part in (a, b)]
    total = sum(s * part[1] for s, part in zip(scales, (a, b), strict=True))
    weighted = sum(s[:, None] * part[2] for s, part in zip(scales, (a, b), strict=True))
    return largest, total, weighted


def exchange(sent):
    return jax.lax.all_to_all(sent, "expert", split_axis=0, concat_axis=1, tiled=True)
