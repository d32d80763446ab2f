"""Compares `sw.estimate` with `sw.compile`, on layouts of six models for GPUs and TPUs.

    python benchmarks/estimate.py rows.jsonl        # appends a row for each layout; needs shardwise[gpu,tpu]
    python benchmarks/estimate.py table rows.jsonl

For each layout: seconds of `sw.estimate` (measured), and how far its step time, peak memory and bytes per axis are from
those of the compiled program. For each model, Kendall's tau of the two rankings by step time.
"""

import json
import os
import sys
import time

import jax
import optax
from flax import nnx

import shardwise as sw
from shardwise import models


def decoder(batch, **config):
    sizes = models.Config(scan=True, remat="nothing_saveable", **config)
    return sw.Recipe(
        model=lambda: models.Decoder(sizes, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adamw(1e-4),
        batch=jax.ShapeDtypeStruct(batch, "int32"),
        compute_dtype="bfloat16",
    )


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4096, 4096, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def mlp():
    return sw.Recipe(
        model=lambda: Mlp(nnx.Rngs(0)),
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.adam(1e-3),
        batch=jax.ShapeDtypeStruct((8192, 4096), "float32"),
        compute_dtype="bfloat16",
    )


MODELS = {
    "8B-like, 8 layers": lambda: decoder(
        (32, 4096), layers=8, width=4096, hidden=14336, heads=32, kv_heads=8, vocab=32000
    ),
    "1B-like": lambda: decoder(
        (64, 2048), layers=16, width=2048, hidden=8192, heads=16, vocab=32000
    ),
    "small": lambda: decoder((64, 1024), layers=8, width=1024, hidden=4096, heads=16, vocab=32000),
    "long": lambda: decoder((16, 8192), layers=4, width=2048, hidden=8192, heads=16, vocab=32000),
    "experts": lambda: decoder(
        (32, 1024), layers=4, width=1024, hidden=2048, heads=16, vocab=32000, experts=8,
        capacity=1.25,
    ),
    "MLP": mlp,
}  # fmt: skip
LAYOUTS = [
    ("data=16", "fsdp"),
    ("data=4,model=4", "fsdp+tensor"),
    ("data=16", "dp"),
    ("data=2,model=8", "fsdp+tensor"),
]
CHIPS = ["h100:2x8", "v5p:2x2x4"]


def rows(path):
    done = set()
    if os.path.exists(path):
        with open(path) as file:
            done = {tuple(json.loads(line)["key"]) for line in file}
    for model, make in MODELS.items():
        for mesh, strategy in LAYOUTS:
            for on in CHIPS:
                if (model, mesh, strategy, on) in done:
                    continue
                recipe = make()
                where = sw.mesh(mesh, on=on)
                inputs = recipe.batch if "tensor" in strategy else None
                layout = sw.layout(recipe.model, where, strategy, inputs=inputs)
                row = {"key": [model, mesh, strategy, on]}
                try:
                    start = time.perf_counter()
                    found = sw.estimate(recipe, layout)
                    row["took"] = time.perf_counter() - start
                    compiled = sw.compile(recipe, layout, show=False)
                    if compiled.time is None:
                        raise ValueError(compiled.verdict)
                    row |= {
                        "seconds": [found.seconds, compiled.time.seconds],
                        "peak": [found.peak_bytes, compiled.memory.peak],
                        "axes": {
                            axis: [
                                sum(b for _, b in kinds.values())
                                for kinds in (found.by_axis.get(axis, {}), compiled.by_axis.get(axis, {}))
                            ]
                            for axis in {*found.by_axis, *compiled.by_axis}
                        },
                    }  # fmt: skip
                except (ValueError, RuntimeError) as error:  # does not fit, or is refused
                    row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
                with open(path, "a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)


def table(path):
    with open(path) as file:
        found = [json.loads(line) for line in file]
    print("| model | mesh | strategy | chips | estimated in | time | peak | bytes by axis |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in found:
        if "error" in row:
            print(f"| {' | '.join(row['key'])} | | {row['error']} | | |")
            continue
        seconds, peak = row["seconds"], row["peak"]
        axes = ", ".join(
            f"{axis} {a / b - 1:+.0%}" if b else f"{axis} {a} B of 0"
            for axis, (a, b) in row["axes"].items()
        )
        print(
            f"| {' | '.join(row['key'])} | {row['took']:.1f} s | {seconds[0] * 1e3:.1f} of "
            f"{seconds[1] * 1e3:.1f} ms, {seconds[0] / seconds[1] - 1:+.0%} | {peak[0] / peak[1] - 1:+.0%} "
            f"| {axes} |"
        )
    good = [row for row in found if "error" not in row]
    for name, pick in (("time", "seconds"), ("peak", "peak")):
        off = [abs(row[pick][0] / row[pick][1] - 1) for row in good]
        print(f"\n{name}: mean error {sum(off) / len(off):.1%}, worst {max(off):.1%}")
    for model in MODELS:
        for on in CHIPS:
            pairs = [r["seconds"] for r in good if (r["key"][0], r["key"][3]) == (model, on)]
            signs = [
                (a[0] - b[0]) * (a[1] - b[1]) > 0 for i, a in enumerate(pairs) for b in pairs[:i]
            ]
            if signs:
                print(f"{model} on {on}: tau {2 * sum(signs) / len(signs) - 1:+.2f}")


if __name__ == "__main__":
    table(sys.argv[2]) if sys.argv[1] == "table" else rows(sys.argv[1])
