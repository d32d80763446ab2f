"""Compares what `sw.search` picks on one H200 with the best of all that it can choose from.

    python benchmarks/search/h200.py predict predicted.json     # on any machine with shardwise[gpu]
    python benchmarks/search/h200.py measure measured.json [MODEL]   # on the H200
    python benchmarks/search/h200.py table predicted.json measured.json

The choices are the remat policy of the blocks and the accumulation, for a fixed global batch. Each
choice is run in a separate process; one that runs out of memory counts as not fitting. Regret is how
much slower the pick is than the fastest of all measured choices.
"""

import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardwise as sw
from shardwise import models
from shardwise._search.space import Choice, with_choice

REMATS = (None, "dots_with_no_batch_dims_saveable", "nothing_saveable")
PARTS = (1, 2, 4, 8)


class Block(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Vision(nnx.Module):
    def __init__(self, rngs, width=1024, layers=8):
        self.patches = nnx.Conv(3, width, (16, 16), (16, 16), rngs=rngs)
        self.blocks = nnx.List([Block(width, 16, rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, 1000, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def vision_loss(model, batch):
    logits = model(batch["image"])
    labels = batch["label"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def decoder(batch, **sizes):
    config = models.Config(**sizes)
    return sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adamw(1e-4),
        batch=jax.ShapeDtypeStruct(batch, "int32"),
        compute_dtype="bfloat16",
    )


MODELS = {
    "decoder 2048, 16 layers, 64x2048": lambda: decoder(
        (64, 2048), layers=16, width=2048, hidden=8192, heads=16, vocab=32000, scan=True
    ),
    "decoder 1024, 12 layers, 32x4096": lambda: decoder(
        (32, 4096), layers=12, width=1024, hidden=4096, heads=16, vocab=50304
    ),
    "vision 1024, 8 layers, 512": lambda: sw.Recipe(
        model=lambda: Vision(nnx.Rngs(0)),
        loss=vision_loss,
        optimizer=optax.adamw(1e-4),
        batch={
            "image": jax.ShapeDtypeStruct((512, 224, 224, 3), "float32"),
            "label": jax.ShapeDtypeStruct((512,), "int32"),
        },
        compute_dtype="bfloat16",
    ),
}


def predict(path):
    found = {}
    for name, make in MODELS.items():
        start = time.perf_counter()
        result = sw.search(make(), "h200:1x1", compile=3)
        found[name] = {
            "took": time.perf_counter() - start,
            "best": [result.best.remat, result.best.accumulate],
            "rows": [
                [c.remat, c.accumulate, c.seconds, c.peak_bytes, c.fits, c.label]
                for c in result.candidates
            ],
            "notes": list(result.notes),
        }
        print(name, found[name]["best"], result, sep="\n", flush=True)
    with open(path, "w") as file:
        json.dump(found, file, indent=1)


def measure(path, only=""):
    found = {}
    for name in MODELS:
        if only not in name:
            continue
        for remat in REMATS:
            for parts in PARTS:
                run = [sys.executable, __file__, "one", name, str(remat), str(parts)]
                try:
                    done = subprocess.run(run, capture_output=True, text=True, timeout=90)
                    last = done.stdout.strip().splitlines()
                    row = json.loads(last[-1]) if last else {"error": done.stderr[-300:]}
                except subprocess.TimeoutExpired:
                    row = {"error": "took more than 90 s"}
                found.setdefault(name, []).append([str(remat), parts, row])
                print(name, remat, parts, row, flush=True)
                with open(path, "w") as file:
                    json.dump(found, file, indent=1)


def one(name, remat, parts):
    recipe = MODELS[name]()
    pattern = "blocks.*" if "vision" in name else ""
    choice = Choice("", (("data", 1),), "dp", None if remat == "None" else remat, int(parts))
    recipe = with_choice(recipe, choice, pattern)
    layout = sw.layout(recipe.model, sw.mesh("data=1"))
    rng = np.random.default_rng(0)

    def filled(leaf):
        if np.issubdtype(leaf.dtype, np.integer):
            return jnp.asarray(rng.integers(0, 900, leaf.shape, leaf.dtype))
        return jnp.asarray(rng.standard_normal(leaf.shape, "float32"))

    try:
        batch = jax.tree.map(filled, recipe.batch)
        state = sw.train_state(recipe, layout)
        step = sw.train_step(recipe, layout)
        rounds = []
        for number in range(6):
            start = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            if number > 1:
                rounds.append(time.perf_counter() - start)
        peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
        print(json.dumps({"seconds": float(np.median(rounds)), "peak": peak}))
    except RuntimeError as error:  # out of memory
        print(json.dumps({"error": f"{type(error).__name__}: {str(error)[:120]}"}))


def table(predicted, measured):
    with open(predicted) as a, open(measured) as b:
        asked, run = json.load(a), json.load(b)
    print("| model | remat | parts | measured | predicted | peak, measured | |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, rows in run.items():
        known = {(str(r), p): (s, peak, label) for r, p, s, peak, _, label in asked[name]["rows"]}
        best = min(row["seconds"] for _, _, row in rows if "seconds" in row)
        pick = [str(asked[name]["best"][0]), asked[name]["best"][1]]
        for remat, parts, row in rows:
            guess = known.get((remat, parts))
            modelled = f"{guess[0] * 1e3:.1f} ms, {guess[2]}" if guess else "not looked at"
            mark = "picked" if [remat, parts] == pick else ""
            if "seconds" not in row:
                text = "does not fit" if "RESOURCE" in row["error"] else row["error"][:60]
                print(f"| {name} | {remat} | {parts} | {text} | {modelled} | | {mark} |")
                continue
            mark += ", fastest" if row["seconds"] == best else ""
            print(
                f"| {name} | {remat} | {parts} | {row['seconds'] * 1e3:.1f} ms | {modelled} "
                f"| {row['peak'] / 2**30:.1f} GiB | {mark.strip(', ')} |"
            )
        chosen = [row for remat, parts, row in rows if [remat, parts] == pick]
        if chosen and "seconds" in chosen[0]:
            print(f"\n{name}: regret {chosen[0]['seconds'] / best - 1:.1%}\n")
        else:
            print(f"\n{name}: the pick {pick} was not measured or does not fit\n")


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    {"predict": predict, "measure": measure, "table": table, "one": one}[sys.argv[1]](*sys.argv[2:])
