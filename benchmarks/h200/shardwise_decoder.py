"""Times the training step of a 1.2B decoder with Shardwise on one GPU.

The step is `sw.train_step` of `shardwise.models.Decoder`. Prints one JSON line:

    python shardwise_decoder.py --batch 16
"""

import argparse
import json
import statistics
import time

import jax
import numpy as np
import optax
from flax import nnx

import shardwise as sw
from shardwise import models

PEAK = 989e12  # dense bf16, H100/H200 SXM


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--remat", default=None, help="a policy for each block")
    parser.add_argument("--option", nargs="*", default=[], help="XLA options, name=value")
    args = parser.parse_args()
    config = models.Config(
        layers=args.layers,
        width=args.width,
        hidden=args.hidden,
        heads=args.heads,
        vocab=args.vocab,
    )

    def make():
        return models.Decoder(config, rngs=nnx.Rngs(0))

    recipe = sw.Recipe(
        model=make,
        loss=models.next_token_loss,
        optimizer=optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1),
        batch=jax.ShapeDtypeStruct((args.batch, args.seq), "int32"),
        compute_dtype="bfloat16",
        remat={"blocks.*": args.remat} if args.remat else None,
        compiler_options={
            name: {"true": True, "false": False}.get(value, value)
            for name, value in (option.split("=") for option in args.option)
        },
    )
    layout = sw.layout(make, sw.mesh("data=1"), "dp")
    step, state = sw.train_step(recipe, layout), sw.train_state(recipe, layout)
    tokens = np.random.default_rng(0).integers(args.vocab, size=(args.batch, args.seq))
    batch = jax.device_put(tokens.astype("int32"), step.blueprint.batch.sharding)
    start = time.perf_counter()
    state, metrics = step(state, batch)
    first = float(metrics["loss"])
    compile_s = time.perf_counter() - start
    ends, before = [], metrics
    for _ in range(args.warmup + args.steps + 1):
        state, metrics = step(state, batch)
        jax.block_until_ready(before)  # at most one step is queued behind the running one
        ends.append(time.perf_counter())
        before = metrics
    jax.block_until_ready(metrics)
    times = np.diff(ends)[args.warmup :]
    ms = statistics.median(times) * 1e3
    count = sum(leaf.bytes // leaf.dtype.itemsize for leaf in layout.leaves)
    words = args.batch * args.seq
    flops = (6 * count + 6 * args.layers * args.seq * args.width) * words
    stats = jax.local_devices()[0].memory_stats() or {}
    line = {
        "name": f"shardwise{' remat=' + args.remat if args.remat else ''} {' '.join(args.option)}",
        "ms": round(ms, 2),
        "wall_ms": round(float(np.mean(times)) * 1e3, 2),
        "mfu": round(flops / ms * 1e3 / PEAK * 100, 2),
        "gib": round(stats.get("peak_bytes_in_use", 0) / 2**30, 1),
        "compile_s": round(compile_s, 1),
        "params": count,
        "loss": [round(first, 4), round(float(metrics["loss"]), 4)],
        "jax": jax.__version__,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
