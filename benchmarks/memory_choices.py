"""Measures what saves memory, and what it costs: chunks of the loss, saved names, host memory.

    python benchmarks/memory_choices.py predict    # for an H200 that need not be present
    python benchmarks/memory_choices.py measure    # on an H200

`predict` compiles each step for `h200:1x1`; `measure` runs it, each in a process of its own, since
a process remembers its peak.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time

BASE = {"layers": 8, "width": 2048, "hidden": 8192, "heads": 16, "kv_heads": 8, "vocab": 32_000}
WIDE = {**BASE, "layers": 4, "vocab": 256_000}
CASES = {
    "256,000 words, whole loss": (WIDE, (8, 2048), "nothing_saveable", {}),
    "256,000 words, 8 chunks": (WIDE, (8, 2048), "nothing_saveable", {"loss_chunks": 8}),
    "256,000 words, 32 chunks": (WIDE, (8, 2048), "nothing_saveable", {"loss_chunks": 32}),
    "1 × 65,536 tokens, nothing saved": (BASE, (1, 65536), "nothing_saveable", {"loss_chunks": 8}),
    "1 × 65,536 tokens, attention saved": (BASE, (1, 65536), "save:context", {"loss_chunks": 8}),
    "1 × 65,536 tokens, inputs offloaded": (
        BASE, (1, 65536), "save:context+offload:input", {"loss_chunks": 8},
    ),
    "1 × 65,536 tokens, q, k, v, up saved": (
        BASE, (1, 65536), "save:q,k,v,up,context", {"loss_chunks": 8},
    ),
    "optimizer on the device": (BASE, (8, 2048), "nothing_saveable", {}),
    "optimizer in host memory": (BASE, (8, 2048), "nothing_saveable", {"offload": "optimizer"}),
}  # fmt: skip


def recipe_of(name):
    import jax
    import optax
    from flax import nnx

    import shardwise as sw
    from shardwise import models

    sizes, batch, remat, more = CASES[name]
    config = models.Config(**sizes, remat=remat, scan=True)
    return sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adamw(1e-4),
        batch=jax.ShapeDtypeStruct(batch, "int32"),
        compute_dtype="bfloat16",
        **more,
    )


def predict(name):
    import shardwise as sw

    recipe = recipe_of(name)
    layout = sw.layout(recipe.model, sw.mesh("data=1", on="h200:1x1"), "dp")
    compiled = sw.compile(recipe, layout)
    return {
        "memory": dataclasses.asdict(compiled.memory),
        "seconds": compiled.time.seconds if compiled.time is not None else None,
    }


def measure(name):
    import jax
    import numpy as np

    import shardwise as sw

    recipe = recipe_of(name)
    layout = sw.layout(recipe.model, sw.mesh("data=1"), "dp")
    state, step = sw.train_state(recipe, layout), sw.train_step(recipe, layout)
    vocab = CASES[name][0]["vocab"]
    tokens = np.random.default_rng(0).integers(0, vocab, recipe.batch.shape).astype("int32")
    spent = []
    for _ in range(8):
        began = time.perf_counter()
        state, metrics = step(state, tokens)
        loss = float(metrics["loss"])
        spent.append(time.perf_counter() - began)
    stats = jax.devices()[0].memory_stats()
    return {
        "seconds": sorted(spent[2:])[len(spent[2:]) // 2],
        "peak": stats["peak_bytes_in_use"],
        "loss": loss,
    }


def main():
    what, *names = sys.argv[1:]
    if names:
        print(json.dumps({"predict": predict, "measure": measure}[what](names[0])))
        return
    environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    for name in CASES:
        ran = subprocess.run(
            [sys.executable, __file__, what, name],
            capture_output=True, text=True, env=environment, check=False, timeout=200,
        )  # fmt: skip
        shown = ran.stdout.strip().splitlines()[-1:] or [ran.stderr.strip()[-400:]]
        print(f"{name}: {shown[0]}", flush=True)


if __name__ == "__main__":
    main()
