"""Compares the collectives of compiled steps with those derived by hand.

    python benchmarks/collectives.py

Compiles a two-layer MLP with data parallelism, FSDP and tensor parallelism for eight absent GPUs
and eight absent TPUs, and a pipeline of four stages on the CPU. Bytes are what one device sends
(ring model).
"""

import jax
import optax
from flax import nnx

import shardwise as sw

WIDTH, HIDDEN, ROWS = 256, 1024, 8192
KERNEL = WIDTH * HIDDEN * 4
TPU_CHIPS, GPUS = "v5e:2x4", "h100:1x8"


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class Stages(nnx.Module):
    def __init__(self, rngs):
        self.stack = nnx.vmap(
            lambda key: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(key))
        )(jax.random.split(rngs.params(), 4))

    def __call__(self, x):
        return sw.pipeline(self.stack, axis="stage", microbatches=8)(x)


def ring(size, devices):
    return 2 * (devices - 1) * size // devices


def found(compiled):
    table = {}
    for row in compiled.collectives:
        key = f"{row.kind} over {','.join(row.axes)}"
        count, sent = table.get(key, (0, 0))
        table[key] = (count + row.arrays * row.times, sent + row.total_bytes)
    return table


def step(make, axes, on, rules, rows=ROWS):
    batch = jax.ShapeDtypeStruct((rows, WIDTH), "float32")
    recipe = sw.Recipe(
        model=make,
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        batch=batch,
    )
    return sw.compile(recipe, sw.layout(make, sw.mesh(axes, on=on), rules, inputs=batch))


def main():
    def make():
        return Mlp(nnx.Rngs(0))

    sw.mesh("stage=4", on="cpu:4")  # before anything else starts a backend with one device
    fsdp = sw.fsdp("data", min_bytes=0)
    for on in (GPUS, TPU_CHIPS):
        # A TPU multiplies in bfloat16, and gathers in bfloat16 too.
        gathered = 2 * 7 * KERNEL // 8 // (2 if on == TPU_CHIPS else 1)
        cases = {
            "data parallel": ("data=8", "dp", ring(2 * KERNEL + 4, 8)),
            "FSDP": ("data=8", fsdp, gathered + 2 * 7 * KERNEL // 8 + ring(4, 8)),
            "tensor": ("data=1,model=8", sw.tensor("model"), ring(ROWS * WIDTH * 4, 8)),
        }
        for name, (axes, rules, by_hand) in cases.items():
            table = found(step(make, axes, on, rules))
            total = sum(sent for _, sent in table.values())
            same = "equal" if total == by_hand else f"DIFFERS by {total - by_hand:+}"
            print(f"{on}  {name}: by hand {by_hand:,} B, compiled {total:,} B: {same}; {table}")
    table = found(step(lambda: Stages(nnx.Rngs(0)), "stage=4", "cpu:4", {"**": jax.P("stage")}))
    ticks = 8 + 4 - 1
    sent = table["collective-permute over stage"]
    by_hand = (2 * ticks, 2 * ticks * ROWS // 8 * WIDTH * 4)
    print(
        f"cpu:4  pipeline: by hand {by_hand}, compiled {sent}: {'equal' if sent == by_hand else 'DIFFERS'}"
    )


if __name__ == "__main__":
    main()
