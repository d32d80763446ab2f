"""Small training steps for chips that are not here, which several tests share: each compiles once."""

import dataclasses
import functools

import jax
import optax
from flax import nnx

import shardwise as sw
from shardwise import models
from shardwise._compile.compilation import _compiled, _result
from shardwise._compile.job import job_of

ON = {"gpu": "h100:2x4", "tpu": "v5p:2x2x2"}
LAYERS = 4


def _decoder(scan):
    config = models.Config(
        vocab=8192, width=1024, layers=LAYERS, heads=8, kv_heads=4, hidden=4096,
        scan=scan, remat="nothing_saveable" if scan else None,
    )  # fmt: skip
    return sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adamw(1e-3),
        batch=jax.ShapeDtypeStruct((16, 512), "int32"),
    )


class Images(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.convs = nnx.List([nnx.Conv(n, 64, (3, 3), rngs=rngs) for n in (3, 64, 64)])
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
    """Returns what `sw.compile` returns, and what the compiler returned."""
    make, mesh, strategy = STEPS[name]
    recipe = make()
    layout = sw.layout(recipe, sw.mesh(mesh, on=ON[platform]), strategy)
    job = job_of(recipe, layout, None)
    program = _compiled(job, layout.mesh, False)
    return dataclasses.replace(_result(job, program, layout.mesh, None), seconds=0.0), program
