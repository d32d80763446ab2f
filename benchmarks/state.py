"""Compares the planned bytes of state on one device with those of compiled steps for absent chips.

    python benchmarks/state.py

Compares parameters, optimizer state and batch, computed from the layout (exact), with the argument
bytes of the training step as the TPU and GPU compilers compile it (compiled), with tensor, FSDP,
expert and sequence axes.
"""

import argparse
import dataclasses

import jax
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise import models

SMALL = models.Config(
    layers=2, width=1024, hidden=4096, heads=8, kv_heads=4, vocab=8192, scan=True,
    remat="nothing_saveable",
)  # fmt: skip
EXPERTS = dataclasses.replace(SMALL, experts=8, chosen=2, hidden=2048, capacity=1.25)
BY_NAME = {"experts": "expert", "embed": "data", "mlp": None, "heads": None}
# Name, config, mesh, chips, rules of the layout, spec of the batch.
POINTS = [
    ("fsdp", SMALL, "data=8", "v4:2x2x2", "fsdp", None),
    ("fsdp", SMALL, "data=16", "v5e:4x4", "fsdp", None),
    ("fsdp", SMALL, "data=64", "v5p:4x4x4", "fsdp", None),
    ("fsdp", SMALL, "data=8", "tpu7x:2x2x1", "fsdp", None),
    ("fsdp", SMALL, "data=8", "a100:1x8", "fsdp", None),
    ("fsdp", SMALL, "data=64", "h100:8x8", "fsdp", None),
    ("fsdp", SMALL, "data=16", "b200:2x8", "fsdp", None),
    ("tensor", SMALL, "data=2,model=4", "v5p:2x2x2", "tensor", None),
    ("tensor", SMALL, "data=4,model=4", "v6e:4x4", "tensor", None),
    ("tensor", SMALL, "data=2,model=4", "h200:1x8", "tensor", None),
    ("fsdp+tensor", SMALL, "data=8,model=4", "v5p:2x4x4", "fsdp+tensor", None),
    ("fsdp+tensor", SMALL, "data=4,model=4", "v5e:4x4", "fsdp+tensor", None),
    ("fsdp+tensor", SMALL, "data=4,model=4", "h100:2x8", "fsdp+tensor", None),
    ("fsdp+tensor", SMALL, "data=8,model=4", "b200:4x8", "fsdp+tensor", None),
    ("experts", EXPERTS, "data=2,expert=4", "v5p:2x2x2", BY_NAME, P(("data", "expert"))),
    ("experts", EXPERTS, "data=2,expert=8", "v6e:4x4", BY_NAME, P(("data", "expert"))),
    ("experts", EXPERTS, "data=2,expert=4", "h100:1x8", BY_NAME, P(("data", "expert"))),
    ("sequence", SMALL, "data=2,sequence=4", "v5p:2x2x2", "fsdp", P("data", "sequence")),
    ("sequence", SMALL, "data=2,sequence=4", "h200:1x8", "fsdp", P("data", "sequence")),
    ("data", SMALL, "data=8", "v6e:2x4", "dp", None),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="points with this in their chips")
    args = parser.parse_args()
    worst = 0.0
    print("| layout | mesh | chips | state and batch (exact) | arguments (compiled) | difference |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, config, axes, on, rules, batch_spec in POINTS:
        if args.only not in on:
            continue
        recipe = sw.Recipe(
            model=lambda config=config: models.Decoder(config, rngs=nnx.Rngs(0)),
            loss=models.next_token_loss,
            optimizer=optax.adamw(1e-4),
            batch=jax.ShapeDtypeStruct((64, 512), "int32"),
            compute_dtype="bfloat16",
            batch_spec=batch_spec,
        )
        mesh = sw.mesh(axes, on=on)
        options = {"logical": rules} if isinstance(rules, dict) else {"rules": rules}
        layout = sw.layout(recipe.model, mesh, inputs=recipe.batch, **options)
        memory = sw.compile(recipe, layout).memory
        planned = memory.parameters + memory.optimizer + memory.batch
        difference = memory.arguments / planned - 1
        worst = max(worst, abs(difference))
        print(
            f"| {name} | {axes} | {on} | {planned:,} | {memory.arguments:,} | {difference:+.4%} |",
            flush=True,
        )
    print(f"\nlargest difference: {worst:.4%}")


if __name__ == "__main__":
    main()
