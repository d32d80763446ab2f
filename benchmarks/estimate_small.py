"""Compares `sw.estimate` with `sw.compile` on small steps of eight chips, one option at a time.

    python benchmarks/estimate_small.py h100:1x8 v5e:2x4    # needs shardwise[gpu,tpu]

The rules for "four parts" and "pipeline" on H100 were found with these steps; the rule for arrays beside a
TPU's cores was found with those of v5e: its rows are a fit.
"""

import sys

import jax
import optax
from flax import nnx

import shardwise as sw
from shardwise import models


def recipe(remat="nothing_saveable", optimizer=None, scan=True, config=(), **options):
    sizes = models.Config(
        layers=4, width=1024, hidden=2816, vocab=8192, heads=8, kv_heads=4, scan=scan, remat=remat,
        **dict(config),
    )  # fmt: skip
    return sw.Recipe(
        model=lambda: models.Decoder(sizes, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optimizer or optax.adamw(1e-4),
        batch=jax.ShapeDtypeStruct((32, 1024), "int32"),
        compute_dtype="bfloat16",
        **options,
    )


CASES = {
    "four parts": (recipe(accumulate=4), "data=8", "fsdp"),
    "loss in chunks": (recipe(loss_chunks=8), "data=8", "fsdp"),
    "optimizer offloaded": (recipe(offload="optimizer"), "data=8", "fsdp"),
    "activations offloaded": (recipe("offload:q,up"), "data=8", "fsdp"),
    "ZeRO 1": (recipe(), "data=8", "zero1"),
    "ZeRO 2": (recipe(), "data=8", "zero2"),
    "tensor, loss in chunks": (recipe(loss_chunks=4), "data=2,model=4", "fsdp+tensor"),
    "unrolled, nothing recomputed": (recipe(None, scan=False), "data=4,model=2", "fsdp+tensor"),
    "windows": (recipe(config={"window": 256, "period": 2}), "data=8", "fsdp"),
    "Adafactor": (recipe(optimizer=optax.adafactor(1e-3)), "data=8", "fsdp"),
    "Muon": (recipe(optimizer=optax.contrib.muon(1e-3)), "data=8", "fsdp"),
    "tied words": (recipe(config={"tied": True}), "data=8", "fsdp"),
    "pipeline": (recipe(), "pipe=4,data=2", "fsdp+pipeline"),
}


def sent(found):
    return sum(size for kinds in found.by_axis.values() for _, size in kinds.values())


def main(*chips):
    print("| step | chips | time | peak | bytes |\n| --- | --- | --- | --- | --- |")
    for on in chips:
        for name, (found, mesh, strategy) in CASES.items():
            inputs = found.batch if "tensor" in strategy else None
            layout = sw.layout(found.model, sw.mesh(mesh, on=on), strategy, inputs=inputs)
            mine, theirs = sw.estimate(found, layout), sw.compile(found, layout, show=False)
            off = (
                mine.seconds / theirs.time.seconds - 1,
                mine.peak_bytes / theirs.memory.peak - 1,
                sent(mine) / sent(theirs) - 1,
            )
            print(f"| {name} | {on} | {off[0]:+.0%} | {off[1]:+.0%} | {off[2]:+.0%} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
