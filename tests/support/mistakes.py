"""Plausible wrong solutions of the exercises of `shardwise learn`, and the expected messages."""

import jax
import jax.numpy as jnp
import solutions
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw


def jitted_then_put(make, layout):
    graphdef = nnx.split(nnx.eval_shape(make))[0]
    state = jax.jit(lambda: nnx.split(make())[1])()
    return nnx.merge(graphdef, jax.device_put(state, layout.shardings))


def replicated(make, layout):
    graphdef = nnx.split(nnx.eval_shape(make))[0]
    return nnx.merge(graphdef, jax.jit(lambda: nnx.split(make())[1])())


def other_seed(make, layout):
    model = solutions.init_sharded(make, layout)
    model.up.kernel[...] = jnp.zeros_like(model.up.kernel[...])
    return model


def no_rescaling(a, b):
    return jnp.maximum(a[0], b[0]), a[1] + b[1], a[2] + b[2]


def nan_where_masked(a, b):
    largest = jnp.maximum(a[0], b[0])
    s, t = jnp.exp(a[0] - largest), jnp.exp(b[0] - largest)
    return largest, s * a[1] + t * b[1], s[:, None] * a[2] + t[:, None] * b[2]


def gathered(sent):
    everything = jax.lax.all_gather(sent, "expert", axis=1, tiled=True)
    own = sent.shape[0] // jax.lax.axis_size("expert")
    start = jax.lax.axis_index("expert") * own
    return jax.lax.dynamic_slice_in_dim(everything, start, own, axis=0)


def bias_in_the_sum(w, x):
    hidden = jax.nn.relu(x @ w["up"] + w["up_bias"])
    return jax.lax.psum(hidden @ w["down"] + w["down_bias"], "model")


def no_psum(w, x):
    return jax.nn.relu(x @ w["up"] + w["up_bias"]) @ w["down"] + w["down_bias"]


def gathered_mlp(w, x):
    hidden = jax.nn.relu(x @ w["up"] + w["up_bias"])
    parts = jax.lax.all_gather(hidden @ w["down"], "model")
    return jax.lax.pmean(parts.sum(axis=0), "model") + w["down_bias"]


def local_moments(x):
    return (x - x.mean(axis=0)) / x.std(axis=0)


def all_axes(x):
    mean = jax.lax.pmean(x.mean(axis=0), ("data", "model"))
    return x - mean


def reduced_whole(w, x):
    whole = jax.lax.all_gather(w, "data", tiled=True)
    local = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(whole)
    total = jax.lax.psum(local, "data")
    start = jax.lax.axis_index("data") * w.shape[0]
    return jax.lax.dynamic_slice_in_dim(total, start, w.shape[0], axis=0)


def one_hop_more(x, n):
    total = moving = x
    for _ in range(n):
        moving = jax.lax.ppermute(moving, "ring", [(i, (i + 1) % n) for i in range(n)])
        total = total + moving
    return total


def axis_swapped(shape, spec, mesh, device):
    spec = P(*(e[::-1] if isinstance(e, tuple) else e for e in spec))
    return solutions.held(shape, spec, mesh, device)


# Each: the exercise, a plausible wrong solution, a part of the message, and a part of the hint.
WRONG = {
    "params only": (
        "leaf_shapes",
        lambda model: {
            ".".join(map(str, p)): v.shape
            for p, v in nnx.to_flat_state(nnx.state(model, nnx.Param))
        },
        "it has no key 'norm.mean'",
        "nnx.split(model)[1] is the state",
    ),
    "paths as tuples": (
        "leaf_shapes",
        lambda model: {p: v.shape for p, v in nnx.to_flat_state(nnx.split(model)[1])},
        "it has no key 'bias'",
        "flat_state",
    ),
    "None for whole": (
        "spec_tree",
        lambda state: jax.tree.map(
            lambda x: {2: P(None, "model"), 1: P("model")}.get(x.ndim), state
        ),
        "it does not have the state's structure: it is a State with 2 leaves, and the state is a "
        "State with 3",
        "jax.tree.map(pick, state)",
    ),
    "a dict of specs": (
        "spec_tree",
        lambda state: {"kernel": P(None, "model"), "bias": P("model")},
        "it is a dict with 2 leaves, and the state is a State with 2",
        "keeps the structure",
    ),
    "rows": (
        "spec_tree",
        lambda state: jax.tree.map(lambda x: P("model") if x.ndim else P(), state),
        "the value at 'kernel' is P('model'), expected P(None, 'model')",
        "ndim",
    ),
    "names without an axis left out": (
        "resolve",
        lambda names, rules: P(*(rules[n] for n in names if n and rules[n])),
        "it is P('model'), expected P(None, 'model')",
        "one entry for each dim",
    ),
    "the last entry": (
        "bias_spec",
        lambda spec, kernel_ndim, bias_ndim: P(*spec[-1:]),
        "it is P('model'), expected P()",
        "Pad it with None",
    ),
    "a short spec": (
        "shard_shape",
        lambda shape, spec, mesh: tuple(
            size // (mesh.shape[axis] if axis else 1)
            for size, axis in zip(shape, spec, strict=False)
        ),
        "it has 1 item, expected 2",
        "a dim without an entry in the spec is not split",
    ),
    "rounded up": (
        "shard_shape",
        lambda shape, spec, mesh: tuple(
            -(-size // solutions.math.prod(mesh.shape[a] for a in axes))
            for size, axes in zip(shape, solutions.axes_of(spec, len(shape)), strict=True)
        ),
        "it is (2, 16), expected None",
        "6 rows cannot be split 4 ways",
    ),
    "floats": (
        "shard_shape",
        lambda shape, spec, mesh: tuple(
            size / solutions.math.prod(mesh.shape[a] for a in axes)
            for size, axes in zip(shape, solutions.axes_of(spec, len(shape)), strict=True)
        ),
        "item 0 is the float 8.0, expected the int 8",
        "",
    ),
    "four bytes each": (
        "device_bytes",
        lambda shape, dtype, spec, mesh: solutions.device_bytes(shape, "float32", spec, mesh),
        "it is 128, expected 64",
        "itemsize",
    ),
    "the pieces": (
        "copies",
        lambda spec, mesh: mesh.size // solutions.copies(spec, mesh),
        "it is 1, expected 8",
        "hold the same",
    ),
    "the minor axis first": (
        "held",
        axis_swapped,
        "item 0, item 0, is 4, expected 2",
        "the first is the major one",
    ),
    "division only": (
        "first_spec",
        lambda shape, specs, mesh: next(
            (
                spec
                for spec in specs
                if all(
                    size % solutions.math.prod(mesh.shape.get(a, 1) for a in axes) == 0
                    for size, axes in zip(shape, solutions.axes_of(spec, len(shape)), strict=False)
                )
            ),
            None,
        ),
        "it is P(None, 'model'), expected P('model')",
        "too long for an array of one dim",
    ),
    "the whole at once": (
        "split_and_join",
        lambda f, x, n: f(x),
        "expected",
        "one piece at a time",
    ),
    "one's own rows": (
        "standardise",
        local_moments,
        "of 32 numbers differ",
        "the mean of the local rows is not the mean of all rows",
    ),
    "an axis that may not be there": ("standardise", all_axes, "model", "pmean"),
    "no psum": (
        "tensor_mlp",
        no_psum,
        "devices-disagree: P() says that all devices along axis 'model' hold the same value",
        "its own hidden units",
    ),
    "the bias n times": (
        "tensor_mlp",
        bias_in_the_sum,
        "of 32 numbers differ",
        "added once by each device",
    ),
    "a gather": (
        "tensor_mlp",
        gathered_mlp,
        "it runs the collectives all_gather ×1, psum ×1; the exercise allows psum ×1",
        "",
    ),
    "pmean of a sum": (
        "mean_gradient",
        lambda w, x: jax.lax.pmean(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), "data"),
        "(3 of 3 numbers differ)",
        "a pmean after it changes nothing",
    ),
    "once too often": ("ring_sum", one_hop_more, "each device sends 96 bytes", "n - 1 hops"),
    "psum": (
        "ring_sum",
        lambda x, n: jax.lax.psum(x, "ring"),
        "it runs the collectives psum ×1; the exercise allows ppermute ×6",
        "",
    ),
    "made for real": (
        "abstract_bytes",
        lambda make: sum(x.nbytes for x in jax.tree.leaves(nnx.state(make()))),
        "the model is built outside of any trace: a full array of shape (8, 32), 1.0 KiB, would be on",
        "nnx.eval_shape",
    ),
    "whole, then moved": (
        "init_sharded",
        lambda make, layout: sw.shard(make(), layout),
        "outside of any trace",
        "",
    ),
    "jitted, then moved": (
        "init_sharded",
        jitted_then_put,
        "was on one device before it was moved to its shards",
        "",
    ),
    "jitted, and left": (
        "init_sharded",
        replicated,
        "down.kernel is on one device, planned P(None, 'model')",
        "",
    ),
    "other values": ("init_sharded", other_seed, "the value at 'up.kernel' is 0", "seed"),
    "the state": (
        "init_sharded",
        lambda make, layout: nnx.state(solutions.init_sharded(make, layout)),
        "it is a State, expected the model",
        "",
    ),
    "specs as written": (
        "not_as_planned",
        lambda layout, model: sorted(
            ".".join(map(str, path))
            for path, v in nnx.to_flat_state(nnx.split(model)[1])
            if v[...].sharding.spec != layout[".".join(map(str, path))].spec
        ),
        "it has 3 items, expected 1",
        "is_equivalent_to",
    ),
    "always Adam": (
        "training_bytes",
        lambda layout, tx: 3 * layout.bytes_per_device,
        "expected",
        "a count of 4 bytes",
    ),
    "all of it": (
        "step_bytes",
        lambda shapes, n, how: sum(8 * solutions.math.prod(s) for s in shapes),
        "it is 256, expected 192",
        "(n-1)/n",
    ),
    "reduced whole": (
        "fsdp_gradient",
        reduced_whole,
        "each device sends 288 bytes (modelled; collectives: all_gather ×1, psum ×1); the exercise "
        "allows 192",
        "psum_scatter",
    ),
    "of all ticks": (
        "bubble",
        lambda s, m, r: (s - 1) / (m * r + s - 1),
        "it is 0.2727272727272727, expected 0.375",
        "",
    ),
    "no rescaling": ("join_softmax", no_rescaling, "item 1 is", "rescaled"),
    "nan": ("join_softmax", nan_where_masked, "item 1 is nan at index (2,), expected 0", "is nan"),
    "gathered": (
        "exchange",
        gathered,
        "it runs the collectives all_gather ×1; the exercise allows all_to_all ×1",
        "",
    ),
    "split and joined along the same dim": (
        "exchange",
        lambda sent: jax.lax.all_to_all(sent, "expert", 0, 0, tiled=True),
        "it has shape (32, 2, 2), expected (8, 8, 2)",
        "concatenate what each device sends",
    ),
}
