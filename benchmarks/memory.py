"""Compares the peak memory compiled without a GPU with the peak measured on an NVIDIA H200.

    python benchmarks/memory.py predict predicted.json     # on any machine, with shardwise[gpu]
    python benchmarks/memory.py measure measured.json      # on a machine with one H200
    python benchmarks/memory.py table predicted.json measured.json

Predicted is `sw.compile` for `on="h200:1x1"` (compiled). Measured is JAX's `peak_bytes_in_use`
after two steps of `sw.train_step` in a separate process. Both machines should have the same jaxlib
and, for cuDNN attention, the same cuDNN (`pip install nvidia-cudnn-cu13==…`).
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import optax
from flax import nnx

import shardwise as sw
from shardwise import models
from shardwise.examples import decoder

SMALL = models.Config(layers=12, width=768, hidden=3072, heads=12, vocab=32000)
MEDIUM = models.Config(layers=24, width=1024, hidden=4096, heads=16, vocab=32000)
LARGE = models.Config(layers=16, width=2048, hidden=8192, heads=16, vocab=32000)
XL = models.Config(layers=24, width=3072, hidden=8192, heads=24, vocab=32000)


def config_recipe(config, batch, **options):
    return sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adamw(1e-4),
        batch=jax.ShapeDtypeStruct(batch, "int32"),
        **{"compute_dtype": "bfloat16", **options},
    )


def flax_recipe(batch, **options):
    """A decoder made of Flax's own layers, with plain attention."""
    return sw.Recipe(
        model=decoder.make,
        loss=decoder.loss,
        optimizer=optax.adamw(1e-4),
        batch=jax.ShapeDtypeStruct(batch, "int32"),
        **options,
    )


def with_(config, **changes):
    return dataclasses.replace(config, **changes)


RECIPES = {
    "0.2B f32, plain attention": lambda: config_recipe(SMALL, (8, 1024), compute_dtype=None),
    "0.2B bf16": lambda: config_recipe(SMALL, (16, 1024)),
    "0.2B bf16, saving dots": lambda: config_recipe(
        with_(SMALL, remat="dots_saveable"), (16, 1024)
    ),
    "Flax's layers, bf16, plain attention": lambda: flax_recipe(
        (32, 512), compute_dtype="bfloat16"
    ),
    "Flax's layers, f32, EMA and clipping": lambda: flax_recipe((32, 512), ema=0.99, clip=1.0),
    "0.5B bf16, 4 parts": lambda: config_recipe(MEDIUM, (16, 1024), accumulate=4),
    "1.2B bf16": lambda: config_recipe(LARGE, (8, 2048)),
    "1.2B bf16, scanned, saving nothing": lambda: config_recipe(
        with_(LARGE, scan=True, remat="nothing_saveable"), (16, 2048)
    ),
    "2.9B bf16, saving dots, 2 parts": lambda: config_recipe(
        with_(XL, remat="dots_saveable"), (8, 2048), accumulate=2
    ),
}


def predict(name):
    recipe = RECIPES[name]()
    layout = sw.layout(recipe.model, sw.mesh("data=1", on="h200:1x1"))
    compiled = sw.compile(recipe, layout)
    attention = "cuDNN" if "__cudnn$fmha" in compiled.hlo else "plain"
    return {
        "peak": compiled.memory.peak,
        "parameters": sum(leaf.size for leaf in layout.leaves),
        "attention": attention,
        "seconds": compiled.seconds,
    }


def measure(name):
    recipe = RECIPES[name]()
    layout = sw.layout(recipe.model, sw.mesh("data=1"))
    state = sw.train_state(recipe, layout)
    jax.block_until_ready(state.model)
    before = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    step = sw.train_step(recipe, layout)
    batch = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), recipe.batch)
    for _ in range(2):
        state, metrics = step(state, batch)
        metrics["loss"].block_until_ready()
    return {
        "peak": jax.devices()[0].memory_stats()["peak_bytes_in_use"],
        "before": before,
        "loss": float(metrics["loss"]),
        "device": jax.devices()[0].device_kind,
    }


def each(what, path, names):
    """Runs every recipe in a separate process, and saves the results so far."""
    found = {}
    for name in names:
        command = [sys.executable, __file__, what, "--one", name]
        # One pool from the start: a growing pool hands out larger blocks than requested.
        environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            found[name] = {"error": (done.stderr.strip().splitlines() or ["?"])[-1]}
        else:
            found[name] = json.loads(lines[-1])
        print(name, found[name], flush=True)
        with open(path, "w") as file:
            json.dump({"jax": jax.__version__, "recipes": found}, file, indent=1)


def table(predicted, measured):
    with open(predicted) as one, open(measured) as two:
        plan, real = json.load(one), json.load(two)
    print(f"Predicted by jaxlib {plan['jax']}, measured under {real['jax']}.\n")
    print("| recipe | attention | parameters | predicted | measured | error |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, row in plan["recipes"].items():
        other = real["recipes"].get(name, {})
        if "peak" not in row or "peak" not in other:
            print(f"| {name} | | | {row.get('error', '')} | {other.get('error', '')} | |")
            continue
        error = row["peak"] / other["peak"] - 1
        print(
            f"| {name} | {row['attention']} | {row['parameters'] / 1e9:.2f} B "
            f"| {row['peak'] / 2**30:.3f} GiB | {other['peak'] / 2**30:.3f} GiB | {error:+.4%} |"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["predict", "measure", "table"])
    parser.add_argument("files", nargs="*")
    parser.add_argument("--one", help="run only this recipe, in this process")
    parser.add_argument("--only", default="", help="run recipes whose names contain this")
    args = parser.parse_args()
    run = {"predict": predict, "measure": measure}.get(args.what)
    if args.one:
        print(json.dumps(run(args.one)))
    elif run is None:
        table(*args.files)
    else:
        each(args.what, args.files[0], [name for name in RECIPES if args.only in name])


if __name__ == "__main__":
    main()
