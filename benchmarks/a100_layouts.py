"""Compares modelled step times with 244 measured Megatron layouts of GPT on A100s.

    python benchmarks/a100_layouts.py layers layers.json     # compiles one program for each shape
    python benchmarks/a100_layouts.py table layers.json

`a100_layouts.csv` holds layouts that vTrain (VIA-Research/vTrain) measured on nodes of 8 A100s. For
each distinct width, heads, sequence, micro batch and tensor size, a scanned GPT is compiled for the
A100s of one tensor group, and priced by the same pricer as `sw.compile(…).time`: the body of its
loops is one layer, the rest is embedding, head and loss. Layers, stages of a pipeline, the
data-parallel all-reduce and the optimizer are then added up here.
"""

import argparse
import csv
import dataclasses
import json
import pathlib
import re
import statistics

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._chips import parse_chips
from shardwise._hlo import parse_hlo
from shardwise._time.links import gpu_seconds
from shardwise._time.result import Machine

ROWS = [
    {name: float(value) for name, value in row.items()}
    for row in csv.DictReader((pathlib.Path(__file__).parent / "a100_layouts.csv").open())
]
VOCAB = 51_200
PEAK = 312e12
SHAPE = ("width", "heads", "sequence", "micro_batch", "tensor")
LAYERS = 4


class Block(nnx.Module):
    """One layer of GPT: LayerNorm, plain attention, an MLP of four times the width with GELU."""

    def __init__(self, width, heads, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        make = nnx.initializers.normal(0.02)
        depth = width // heads
        self.qkv = nnx.Param(make(rngs.params(), (width, 3, heads, depth)))
        self.out = nnx.Param(make(rngs.params(), (heads, depth, width)))
        self.up = nnx.Param(make(rngs.params(), (width, 4 * width)))
        self.down = nnx.Param(make(rngs.params(), (4 * width, width)))

    def __call__(self, x):
        q, k, v = jnp.moveaxis(jnp.einsum("bld,dcnh->blcnh", self.norm1(x), self.qkv[...]), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
        x = x + jnp.einsum("blnh,nhd->bld", mixed, self.out[...])
        return x + nnx.gelu(self.norm2(x) @ self.up[...]) @ self.down[...]


class Gpt(nnx.Module):
    """GPT with a tied head; its layers are scanned."""

    def __init__(self, width, heads, sequence, rngs, recompute):
        make = nnx.initializers.normal(0.02)
        self.embed = nnx.Param(make(rngs.params(), (VOCAB, width)))
        self.place = nnx.Param(make(rngs.params(), (sequence, width)))

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def stack(rngs):
            return Block(width, heads, rngs)

        self.blocks = stack(rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.recompute = recompute

    def __call__(self, tokens):
        graphdef, state = nnx.split(self.blocks)

        def body(x, state):
            run = lambda state, x: nnx.merge(graphdef, state)(x)  # noqa: E731
            if self.recompute:
                run = jax.checkpoint(run, policy=jax.checkpoint_policies.nothing_saveable)
            return run(state, x), None

        x = self.embed[...][tokens] + self.place[...].astype(self.embed[...].dtype)
        x = jax.lax.scan(body, x, state)[0]
        return self.norm(x) @ self.embed[...].T


RULES = {
    "embed": P("tensor", None),
    "blocks.qkv": P(None, None, None, "tensor", None),
    "blocks.out": P(None, "tensor", None, None),
    "blocks.up": P(None, None, "tensor"),
    "blocks.down": P(None, "tensor", None),
}


def loss(model, tokens):
    logits = model(tokens).astype(jnp.float32)
    targets = jnp.roll(tokens, -1, axis=1)
    places = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
    picked = jnp.sum(jnp.where(places == targets[..., None], logits, 0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def cluster(devices):
    """Returns A100s in nodes of 8, with the network that vTrain states."""
    chips = parse_chips(f"a100:{max(1, devices // 8)}x{min(8, devices)}")
    # 800 Gb/s between nodes, half of what the shipped table assumes.
    slower = dataclasses.replace(chips.chip, network_bytes_per_second=100e9 / 8)
    return dataclasses.replace(chips, chip=slower)


def price(width, heads, sequence, micro, tensor, recompute):
    """Returns the seconds of one layer, and of everything else, of one micro batch."""
    recipe = sw.Recipe(
        model=lambda: Gpt(width, heads, sequence, nnx.Rngs(0), recompute),
        loss=loss,
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((micro, sequence), "int32"),
        compute_dtype="bfloat16",
    )
    mesh = sw.mesh(f"data=1,tensor={tensor}", on=str(cluster(tensor)))
    compiled = sw.compile(recipe, sw.layout(recipe.model, mesh, RULES), show=False)
    machine = Machine(cluster(tensor), {"data": 1, "tensor": tensor})

    def seconds(layers):
        trips = re.sub(
            r'(known_trip_count"?:\s*\{\s*"?n"?:\s*"?)\d+', rf"\g<1>{layers}", compiled.hlo
        )
        return machine.throttled(parse_hlo(trips)).seconds

    short, long = seconds(LAYERS), seconds(3 * LAYERS)
    layer = (long - short) / (2 * LAYERS)
    return {"layer": layer, "rest": short - LAYERS * layer}


def parameters(row):
    return row["layers"] * 12 * row["width"] ** 2 + VOCAB * row["width"]


def flops(row):
    """Returns the operations of a step without recomputation, attention unmasked as Megatron's."""
    tokens = row["global_batch"] * row["sequence"]
    attention = 12 * row["layers"] * row["width"] * row["sequence"] * tokens
    return 6 * parameters(row) * tokens + attention


def step(row, found, launch):
    """Returns the seconds of a step: layers, pipeline, gradients, optimizer.

    Args:
        row: the layout.
        found: the seconds of one layer and of the rest of a micro batch.
        launch: the least seconds that one layer takes, since PyTorch launches its kernels one by
            one.
    """
    stages, data, tensor = int(row["pipeline"]), int(row["data"]), int(row["tensor"])
    micros = row["global_batch"] / data / row["micro_batch"]
    layer = max(found["layer"], launch)
    devices = stages * data * tensor
    chips = cluster(devices)
    stage = layer * row["layers"] / stages
    hand = 0.0
    if stages > 1:
        # Megatron puts the stages furthest apart: neighbours are on other nodes if there are any.
        size = 2 * row["micro_batch"] * row["sequence"] * row["width"]
        pair = [0, data * tensor]
        hand = 2 * gpu_seconds(chips, "collective-permute", size, [pair]).seconds
    slowest = stage + hand + found["rest"] / (2 if stages > 1 else 1)
    total = (micros + stages - 1) * slowest
    held = parameters(row) / stages / tensor
    if data > 1:
        group = [i * tensor for i in range(data)]
        total += gpu_seconds(chips, "all-reduce", 4 * held, [group]).seconds
    # Adam on float32 copies: 28 bytes read and written for each parameter.
    return total + 28 * held / (0.85 * chips.chip.hbm_bytes_per_second)


def key_of(row):
    return "/".join(str(int(row[name])) for name in SHAPE)


def table(found, launch):
    def recomputed(row):
        return row["devices"] > 8

    rows = [row for row in ROWS if f"{key_of(row)}/{int(recomputed(row))}" in found]
    by = {}
    for row in rows:
        one = found[f"{key_of(row)}/{int(recomputed(row))}"]
        measured = row["measured_ms"] / 1e3
        row["mfu"] = flops(row) / measured / row["devices"] / PEAK
        for name, floor in (("plain", 0.0), ("launched", launch)):
            row[name] = step(row, one, floor) / measured - 1
        by.setdefault(int(row["devices"]), []).append(row)
    usual = statistics.median(row["mfu"] for row in rows)
    for row in rows:
        row["null"] = row["mfu"] / usual - 1
    print(
        "| devices | rows | mean error | signed | without the launches | the null's |\n"
        + "| --- " * 6
        + "|"
    )
    for devices, some in [*sorted(by.items()), ("all", rows)]:
        mean = {
            name: statistics.mean(abs(row[name]) for row in some)
            for name in ("launched", "plain", "null")
        }
        signed = statistics.mean(row["launched"] for row in some)
        print(
            f"| {devices} | {len(some)} | {mean['launched']:.1%} | {signed:+.1%} | "
            f"{mean['plain']:.1%} | {mean['null']:.1%} |"
        )
    names = ("devices", "global_batch", "micro_batch", "width", "layers", "tensor", "data",
             "pipeline", "measured_ms")  # fmt: skip
    print(
        "\n| " + " | ".join(names) + " | error | the null's |\n" + "| --- " * (len(names) + 2) + "|"
    )
    for row in sorted(rows, key=lambda row: -abs(row["launched"]))[:20]:
        print(
            "| "
            + " | ".join(f"{row[name]:g}" for name in names)
            + f" | {row['launched']:+.0%} | {row['null']:+.0%} |"
        )
    missing = len(ROWS) - len(rows)
    if missing:
        print(f"\n{missing} rows are not modelled: their layer is not compiled.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("layers", "table"))
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--launch", type=float, default=3.4e-3, help="least seconds of a layer")
    parser.add_argument("--most", type=int, default=1000, help="how many shapes to compile")
    options = parser.parse_args()
    found = json.loads(options.file.read_text()) if options.file.exists() else {}
    if options.what == "table":
        table(found, options.launch)
        return
    shapes = {}
    for row in ROWS:
        # What a run on several nodes keeps would not fit without recomputation.
        shapes.setdefault(f"{key_of(row)}/{int(row['devices'] > 8)}", 0)
        shapes[f"{key_of(row)}/{int(row['devices'] > 8)}"] += 1
    for key in sorted(shapes, key=lambda key: -shapes[key]):
        if key in found or not options.most:
            continue
        options.most -= 1
        *sizes, recompute = map(int, key.split("/"))
        found[key] = price(*sizes, bool(recompute))
        options.file.write_text(json.dumps(found, indent=1))
        print(key, shapes[key], found[key], flush=True)


if __name__ == "__main__":
    main()
