"""A small decoder that learns the bytes of a short tale; `shardwise demo` trains it.

`shardwise train shardwise.examples.text:recipe --mesh data=2,model=4 --on cpu:8 --steps 50`
"""

from importlib import resources

import jax
import numpy as np
import optax
from flax import nnx

import shardwise as sw
from shardwise.models import Config, Decoder, next_token_loss

BATCH, LENGTH = 32, 64
CONFIG = Config(layers=4, width=128, hidden=512, heads=8, vocab=256)


def make() -> Decoder:
    """Returns the decoder, with 1.1 million parameters and one token per byte."""
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


def data() -> sw.Data:
    """Returns samples of the tale that ships with the package.

    The tale is short, so it is used 16 times, each time starting at a different byte.
    """
    text = resources.files("shardwise.examples").joinpath("text.txt").read_bytes()
    raw = np.frombuffer(text, "uint8")
    cuts = [np.roll(raw, -4 * shift) for shift in range(16)]
    return sw.data(np.concatenate(cuts), length=LENGTH)


recipe = sw.Recipe(
    model=make,
    loss=next_token_loss,
    optimizer=optax.adamw(optax.warmup_cosine_decay_schedule(0, 3e-3, 10, 400)),
    batch=jax.ShapeDtypeStruct((BATCH, LENGTH), "int32"),
)
