"""Small training steps for chips that are not here, which several tests share: each compiles once."""

import functools

import jax
import optax
from flax import nnx

import shardwise as sw
from shardwise import models

ON = {"gpu": "h100:2x4", "tpu": "v5p:2x2x2"}
LAYERS = 6


def _decoder(scan):
    config = models.Config(
        vocab=4096, width=512, layers=LAYERS, heads=8, kv_heads=4, hidden=1536,
        scan=scan, remat="nothing_saveable" if scan else None,
    )  # fmt: skip
    return sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adamw(1e-3),
        batch=jax.ShapeDtypeStruct((32, 1024), "int32"),
    )


class Images(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        sizes = [3, 64, 64, 64]
        self.convs = nnx.List(
            [nnx.Conv(a, b, (3, 3), rngs=rngs) for a, b in zip(sizes, sizes[1:], strict=False)]
        )
        self.head = nnx.Linear(64, 1024, rngs=rngs)

    def __call__(self, x):
        for conv in self.convs:
            x = nnx.relu(conv(x))
        return self.head(x.mean((1, 2)))


def _images():
    return sw.Recipe(
        model=Images,
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.sgd(0.1, momentum=0.9),
        batch=jax.ShapeDtypeStruct((256, 64, 64, 3), "float32"),
    )


STEPS = {
    "scanned": (lambda: _decoder(True), "data=2,model=4", "fsdp+tensor"),
    "unrolled": (lambda: _decoder(False), "data=2,model=4", "fsdp+tensor"),
    "images": (_images, "data=8", "dp"),
}


@functools.cache
def compiled(name, platform):
    make, mesh, strategy = STEPS[name]
    recipe = make()
    layout = sw.layout(recipe.model, sw.mesh(mesh, on=ON[platform]), strategy)
    return sw.compile(recipe, layout, show=False)
