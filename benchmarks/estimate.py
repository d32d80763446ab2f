"""Compares `sw.estimate` with `sw.compile`, on layouts of eight models for GPUs and TPUs.

    python benchmarks/estimate.py compile rows.jsonl    # layouts without compiled figures; needs shardwise[gpu,tpu]
    python benchmarks/estimate.py estimate rows.jsonl   # the other side of all rows, again
    python benchmarks/estimate.py table rows.jsonl

For each layout: CPU seconds of `sw.estimate` (measured), and how far its step time, peak memory and bytes per axis are
from those of the compiled program. For each model, Kendall's tau of the two rankings by step time, counting pairs of
layouts that are more than 5% apart. The models in `HELD_OUT` were compiled after the estimate was finished. Further
arguments, such as `MLP v5p`, leave the rows whose names contain them all.
"""

import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise import models

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "step_time"))
import models as networks  # noqa: E402 - of the step-time benchmark, which measures them
import recipes  # noqa: E402


def decoder(batch, **config):
    sizes = models.Config(**{"scan": True, "remat": "nothing_saveable"} | config)
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


def mlp(compute_dtype="bfloat16"):
    return sw.Recipe(
        model=lambda: Mlp(nnx.Rngs(0)),
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.adam(1e-3),
        batch=jax.ShapeDtypeStruct((8192, 4096), "float32"),
        compute_dtype=compute_dtype,
    )


class RingBlock(nnx.Module):
    """A block whose attention runs around the ring of the axis `seq`."""

    def __init__(self, width, rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        qkv = self.qkv(self.norms[0](x)).reshape(*x.shape[:2], 3, -1, 128)
        q, k, v = (qkv[:, :, i] for i in range(3))
        mixed = sw.sequence_parallel_attention(q, k, v, axis="seq", causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Ring(nnx.Module):
    def __init__(self, width, layers, rngs):
        self.embed = nnx.Embed(32000, width, rngs=rngs)
        self.blocks = nnx.List([RingBlock(width, rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, 32000, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def ring(width=1024, layers=2, batch=(16, 8192)):
    def loss(model, batch):
        logits = model(batch["tokens"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    shape = jax.ShapeDtypeStruct(batch, "int32")
    return sw.Recipe(
        model=lambda: Ring(width, layers, nnx.Rngs(0)),
        loss=loss,
        optimizer=optax.adamw(1e-4),
        batch={"tokens": shape, "labels": shape},
        batch_spec=P("data", "seq"),
        compute_dtype="bfloat16",
    )


def encoder_decoder():
    def loss(model, batch):
        logits = model(batch["source"], batch["target"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    shape = jax.ShapeDtypeStruct((64, 512), "int32")
    return sw.Recipe(
        model=lambda: networks.EncoderDecoder(32128, 1024, 16, 3, nnx.Rngs(0), dropout=0.0),
        loss=loss,
        optimizer=optax.adamw(1e-4),
        batch={"source": shape, "target": shape, "labels": shape},
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
    "ring": ring,
    "ResNet-26": lambda: recipes.images(
        lambda: networks.ResNet((2, 2, 2, 2), nnx.Rngs(0)), 256, 224, **recipes.BF16
    ),
    "ConvNeXt": lambda: recipes.images(
        lambda: networks.ConvNext(192, 6, 1000, nnx.Rngs(0)), 256, 224, **recipes.BF16
    ),
}  # fmt: skip
HELD_OUT = {
    "3B-like, 6 layers": lambda: decoder(
        (32, 2048), layers=6, width=3072, hidden=8192, heads=24, kv_heads=8, vocab=64000
    ),
    "unrolled": lambda: decoder(
        (32, 2048), layers=3, width=1536, hidden=6144, heads=12, vocab=50304, scan=False, remat=None
    ),
    # After the second round of rules (sequence parallelism, bfloat16 on TPUs).
    "ring, wider": lambda: ring(width=1536, layers=1, batch=(32, 4096)),
    "MLP, float32": lambda: mlp(compute_dtype=None),
}
# After the third round (tiles of scattered sums, peaks of loops, convolutions).
HELD_OUT |= {
    "decoder, odd sizes": lambda: decoder(
        (16, 1536), layers=7, width=1792, hidden=4864, heads=14, kv_heads=2, vocab=49152
    ),
    "ViT": lambda: recipes.vit(256, 224, 16, 1024, 16, 6, **recipes.BF16),
    "encoder-decoder": encoder_decoder,
    "experts, more": lambda: decoder(
        (32, 1024), layers=3, width=1536, hidden=1024, heads=12, vocab=24576, experts=16,
        capacity=1.5,
    ),
    "wide ResNet": lambda: recipes.images(
        lambda: networks.WideResNet(((160, 3), (320, 3), (640, 3)), nnx.Rngs(0)), 512, 32,
        **recipes.BF16,
    ),
}  # fmt: skip
PLAIN = [
    ("data=16", "fsdp"),
    ("data=4,model=4", "fsdp+tensor"),
    ("data=16", "dp"),
    ("data=2,model=8", "fsdp+tensor"),
]
EXPERTS = [
    ("data=2,expert=8", "fsdp, experts over expert"),
    ("data=4,expert=4", "fsdp, experts over expert"),
]
STAGES = [("pipe=4,data=4", "fsdp+pipeline"), ("pipe=2,data=8", "fsdp+pipeline")]
LAYOUTS = {
    "8B-like, 8 layers": [*PLAIN, *STAGES],
    "1B-like": [*PLAIN, STAGES[0]],
    "experts": [*PLAIN, *EXPERTS],
    "ring": [("data=4,seq=4", "fsdp"), ("data=2,seq=8", "fsdp")],
    "ResNet-26": [("data=16", "fsdp")],
    "ConvNeXt": [("data=16", "fsdp")],
}
HELD_OUT_LAYOUTS = [PLAIN[0], PLAIN[1], ("data=8,model=2", "fsdp+tensor"), PLAIN[3]]
HELD_OUT_LATER = {
    "ring, wider": [("data=8,seq=2", "fsdp"), ("data=4,seq=4", "fsdp")],
    "MLP, float32": [("data=8,model=2", "fsdp+tensor")],
    "decoder, odd sizes": [("data=16", "fsdp"), ("data=8,model=2", "fsdp+tensor")],
    "ViT": [("data=16", "fsdp"), ("data=4,model=4", "fsdp+tensor")],
    "encoder-decoder": [("data=8,model=2", "fsdp+tensor")],
    "experts, more": [("data=2,expert=8", "fsdp, experts over expert")],
    "wide ResNet": [("data=16", "fsdp")],
}
CHIPS = ["h100:2x8", "v5p:2x2x4"]


def points(words=()):
    """Yields the key of each row."""
    for model in (*MODELS, *HELD_OUT):
        layouts = LAYOUTS.get(model, PLAIN)
        if model in HELD_OUT:
            layouts = HELD_OUT_LATER.get(model, HELD_OUT_LAYOUTS)
        for mesh, strategy in layouts:
            for on in CHIPS:
                if all(word in f"{model} {mesh} {strategy} {on}" for word in words):
                    yield model, mesh, strategy, on


def called_with(batch):
    """Returns what the model itself is given of a batch."""
    if isinstance(batch, dict):
        return {name: array for name, array in batch.items() if name != "labels"}
    return batch[0] if isinstance(batch, tuple) else batch


def prepared(key):
    """Returns the recipe and the layout of a row."""
    model, mesh, strategy, on = key
    recipe = {**MODELS, **HELD_OUT}[model]()
    rules, _, experts = strategy.partition(", experts over ")
    layout = sw.layout(
        recipe.model,
        sw.mesh(mesh, on=on),
        rules,
        logical={"experts": experts} if experts else None,
        inputs=called_with(recipe.batch) if "tensor" in strategy else None,
    )
    return recipe, layout


def sent(found):
    return {axis: sum(b for _, b in kinds.values()) for axis, kinds in found.by_axis.items()}


def compiled(key):
    recipe, layout = prepared(key)
    found = sw.compile(recipe, layout, show=False)
    if found.time is None or found.memory is None:
        raise ValueError(found.verdict)
    return {"seconds": found.time.seconds, "peak": found.memory.peak, "sent": sent(found)}


def estimated(key):
    recipe, layout = prepared(key)
    start = time.process_time()
    found = sw.estimate(recipe, layout)
    took = time.process_time() - start
    return {"seconds": found.seconds, "peak": found.peak_bytes, "sent": sent(found), "took": took}


def read(path):
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        found = [json.loads(line) for line in file]
    return {tuple(row["key"]): row for row in found}


def fill(path, side, words):
    """Fills in one side of the rows: what is not compiled yet, or all that is estimated."""
    work = compiled if side == "compiled" else estimated
    for key in points(words):
        rows = read(path)  # again: another process may fill in the other side
        row = rows.setdefault(key, {"key": key})
        if side == "compiled" and side in row:
            continue
        try:
            made = work(key)
        except (ValueError, RuntimeError) as error:  # does not fit, or is refused
            made = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        rows = read(path)
        rows.setdefault(key, {"key": key})[side] = made
        with open(f"{path}.new", "w") as file:
            file.writelines(json.dumps(rows[k]) + "\n" for k in points() if k in rows)
        os.replace(f"{path}.new", path)
        print(*key, made, flush=True)


def off(row, name):
    return row["estimated"][name] / row["compiled"][name] - 1


def tau(rows):
    """Returns Kendall's tau of the layouts of one model, without near ties; None if all are."""
    pairs = [
        (r["estimated"]["seconds"], r["compiled"]["seconds"])
        for r in rows
        if "seconds" in r["compiled"]
    ]
    signs = [
        1 if (a[0] - b[0]) * (a[1] - b[1]) > 0 else -1
        for i, a in enumerate(pairs)
        for b in pairs[:i]
        if max(a[1], b[1]) > 1.05 * min(a[1], b[1])
    ]
    return sum(signs) / len(signs) if signs else None


def table(path, words):
    rows = read(path)
    rows = [
        rows[key] for key in points(words) if {"compiled", "estimated"} <= rows.get(key, {}).keys()
    ]
    good = [r for r in rows if "error" not in r["compiled"] and "error" not in r["estimated"]]
    print("| model | mesh | strategy | chips | time | peak | bytes by axis |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        head = " | ".join(row["key"])
        if row not in good:
            print(f"| {head} | {row['compiled'].get('error') or row['estimated']['error']} | | |")
            continue
        mine, theirs = row["estimated"], row["compiled"]
        seconds = "not compiled"
        if "seconds" in theirs:
            seconds = f"{theirs['seconds'] * 1e3:.1f} ms, {off(row, 'seconds'):+.1%}"
        axes = ", ".join(
            f"{axis} {mine['sent'].get(axis, 0) / size - 1:+.1%}" if size else f"{axis} of 0"
            for axis, size in sorted(theirs["sent"].items())
        )
        extra = [axis for axis in mine["sent"] if axis not in theirs["sent"]]
        axes += "".join(f", {axis}: only estimated" for axis in extra)
        print(
            f"| {head} | {mine['seconds'] * 1e3:.1f} of {seconds} "
            f"| {mine['peak'] / 2**30:.2f} of {theirs['peak'] / 2**30:.2f} GiB, {off(row, 'peak'):+.1%} | {axes} |"
        )
    print()
    for on in CHIPS:
        for title, names in (("rows that were looked at", MODELS), ("held out", HELD_OUT)):
            some = [row for row in good if row["key"][3] == on and row["key"][0] in names]
            if some:
                print(f"{on}, {len(some)} {title}:")
                summary(some)
    for model in (*MODELS, *HELD_OUT):
        for on in CHIPS:
            found = tau([r for r in good if (r["key"][0], r["key"][3]) == (model, on)])
            if found is not None:
                print(f"{model} on {on}: tau {found:+.2f}")
    took = sorted(row["estimated"]["took"] for row in good)
    print(f"CPU seconds of an estimate: median {took[len(took) // 2]:.1f}, most {took[-1]:.1f}")


def summary(rows):
    for title, name in (("time", "seconds"), ("peak", "peak")):
        errors = [abs(off(row, name)) for row in rows if name in row["compiled"]]
        if not errors:
            continue
        within = sum(error <= 0.1 for error in errors)
        print(
            f"  {title}: mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}, {within} of {len(errors)} within 10%"
        )
    ratios = [
        row["estimated"]["sent"].get(axis, 0) / size - 1
        for row in rows
        for axis, size in row["compiled"]["sent"].items()
        if size
    ]
    close = sum(abs(ratio) <= 0.05 for ratio in ratios)
    print(f"  bytes: {close} of {len(ratios)} axes within 5%, worst {max(map(abs, ratios)):.1%}")


if __name__ == "__main__":
    command, path, *words = sys.argv[1:]
    if command == "table":
        table(path, words)
    else:
        fill(path, {"compile": "compiled", "estimate": "estimated"}[command], words)
