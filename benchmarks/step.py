"""Times a training step against a hand-written `jax.jit` step and the `nnx.jit` loop of Flax's guide.

    python benchmarks/step.py --repeats 5

All three run in turn in one process, on eight virtual CPU devices: a decoder, where compute
dominates, and a tiny model, where dispatch does. Times are ratios to the hand-written step
(measured); memory is what XLA reserves on a device (compiled).
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise import models


def tiny():
    return nnx.Linear(32, 32, rngs=nnx.Rngs(0))


def tiny_loss(model, x):
    return (model(x) ** 2).mean()


def decoder():
    config = models.Config(layers=2, width=256, hidden=1024, heads=8, vocab=1024)
    return models.Decoder(config, rngs=nnx.Rngs(0))


CASES = {
    "decoder": (decoder, models.next_token_loss, jax.ShapeDtypeStruct((16, 128), "int32"), 4),
    "tiny": (tiny, tiny_loss, jax.ShapeDtypeStruct((8, 32), "float32"), 300),
}


def hand_written(make, loss, tx, layout, sharding):
    """Returns the step and its state as an expert would write them with `jax.jit`."""
    graphdef, params = nnx.split(sw.init(make, layout))
    places = jax.tree.map(lambda x: x.sharding, params)
    moments = jax.tree.unflatten(
        jax.tree.structure(jax.eval_shape(tx.init, params)),
        jax.tree.leaves(layout.for_optimizer(tx).shardings),
    )

    @functools.partial(
        jax.jit,
        in_shardings=(places, moments, sharding),
        out_shardings=(places, moments, NamedSharding(layout.mesh, P())),
        donate_argnums=(0, 1),
    )
    def step(params, state, batch):
        value, grads = jax.value_and_grad(lambda p: loss(nnx.merge(graphdef, p), batch))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = (params, jax.jit(tx.init, out_shardings=moments)(params))

    def run(state, batch):
        params, opt, value = step(*state, batch)
        return (params, opt), value

    return run, state, step


def flax_guide(make, loss, tx, layout, donate):
    """Returns the step of Flax's guide: an `nnx.Optimizer` and `nnx.jit`."""
    model = sw.init(make, layout)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @functools.partial(nnx.jit, donate_argnums=(0, 1) if donate else ())
    def step(model, optimizer, batch):
        value, grads = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, grads)
        return value

    def run(state, batch):
        return state, step(*state, batch)

    return run, (model, optimizer)


def measure(name, repeats):
    make, loss, abstract, count = CASES[name]
    tx = optax.adamw(1e-3)
    mesh = sw.mesh("data=2,model=4" if name == "decoder" else "data=8", on="cpu:8")
    rules = "tensor" if name == "decoder" else "dp"
    layout = sw.layout(make, mesh, rules, inputs=abstract)
    recipe = sw.Recipe(model=make, loss=loss, optimizer=tx, batch=abstract)
    step = sw.train_step(recipe, layout)
    sharding = step.blueprint.batch.sharding
    if abstract.dtype == jnp.int32:
        host = np.random.default_rng(0).integers(1024, size=abstract.shape).astype("int32")
    else:
        host = np.ones(abstract.shape, "float32")
    batch = jax.device_put(host, sharding)
    hand, hand_state, hand_jitted = hand_written(make, loss, tx, layout, sharding)
    guide, guide_state = flax_guide(make, loss, tx, layout, donate=False)
    donating, donating_state = flax_guide(make, loss, tx, layout, donate=True)
    state = sw.train_state(recipe, layout)
    ours = _peak(step.jitted.lower(step.blueprint.abstract, step.blueprint.batch))
    theirs = _peak(hand_jitted.lower(*hand_state, batch))

    def shardwise(state, batch):
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    runs = {
        "hand-written jax.jit": [hand, hand_state],
        "shardwise": [shardwise, state],
        "nnx.jit of the guide": [guide, guide_state],
        "the same, donating": [donating, donating_state],
    }
    times = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for rival, pair in runs.items():
            run, current = pair
            start = time.perf_counter()
            for _ in range(count):
                current, value = run(current, batch)
            jax.block_until_ready(value)
            pair[1] = current
            if turn:  # the first turn compiles
                times[rival].append((time.perf_counter() - start) / count)
    base = times["hand-written jax.jit"]
    print(f"{name}: {statistics.median(base) * 1e3:.2f} ms per step, hand-written")
    for rival, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found, base, strict=True))
        print(f"  {rival:22} {ratio:6.3f} of the time (measured)")
    print(f"  {'shardwise':22} {ours / theirs:6.3f} of the memory (compiled, {ours} bytes)")


def _peak(lowered):
    memory = lowered.compile().memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    args = parser.parse_args()
    for name in args.cases:
        measure(name, args.repeats)


if __name__ == "__main__":
    main()
