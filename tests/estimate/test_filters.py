"""Convolutions that a TPU computes in parts, each compared with what libtpu of jax 0.12 made of it."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardwise as sw
from shardwise._estimate.kernels.tpu.filters import Cut


class Convolutions(nnx.Module):
    def __init__(self, widths, taps, strides, wide, grouped, rngs):
        self.wide = wide
        pairs = zip(widths, widths[1:], strides, strict=False)
        options = {"use_bias": False, "rngs": rngs}
        self.layers = nnx.List(
            nnx.Conv(
                a,
                b,
                (taps, taps),
                strides=(s, s),
                feature_group_count=a if grouped else 1,
                **options,
            )
            for a, b, s in pairs
        )

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
            x = x.astype(jnp.float32) if self.wide else x
        return x


def estimated(
    widths,
    size,
    batch,
    *,
    taps=3,
    strides=None,
    wide=False,
    grouped=False,
    mesh="data=16",
    on="v5p:2x2x4",
):
    images = jax.ShapeDtypeStruct((batch, size, size, widths[0]), "bfloat16")
    recipe = sw.Recipe(
        model=lambda: Convolutions(widths, taps, strides or [1] * 9, wide, grouped, nnx.Rngs(0)),
        loss=lambda model, x: (model(x).astype(jnp.float32) ** 2).mean(),
        optimizer=optax.adamw(1e-4),
        batch=images,
        compute_dtype="bfloat16",
    )
    return sw.estimate(recipe, sw.layout(recipe.model, sw.mesh(mesh, on=on), "fsdp"))


EIGHT = {"mesh": "data=8", "on": "v5p:2x2x2"}
# Widths, size of the images, batch and options; what was compiled: collectives with their bytes.
SENT = {
    "input features": (
        ([640] * 4, 8, 512), {},
        {"collective-permute": (134, 61747200), "all-reduce": (1, 7)},
    ),
    "output features first": (
        ([160, 320, 320, 320], 32, 512), {"strides": [2, 1, 1]},
        {"collective-permute": (134, 13478400), "all-reduce": (1, 7)},
    ),
    "eight devices": (
        ([160, 320, 320, 320], 32, 256), {"strides": [2, 1, 1], **EIGHT},
        {"collective-permute": (70, 14054400), "all-reduce": (1, 7)},
    ),
    "a gather for both passes": (
        ([256, 64, 256, 512, 128, 512], 28, 256), {"taps": 1},
        {"collective-permute": (102, 661504), "all-gather": (4, 522240), "all-reduce": (1, 7)},
    ),
    "strides, so that each pass gathers": (
        ([128, 256, 512, 512, 256], 28, 256), {"taps": 1, "strides": [1, 2, 1, 1]},
        {"collective-permute": (118, 1794048), "all-gather": (2, 737280), "all-reduce": (1, 7)},
    ),
    "just too few pixels": (
        ([256] * 3, 4, 368), {},
        {"all-gather": (2, 2211840), "all-reduce": (3, 4423687)},
    ),
    "just enough pixels": (
        ([256] * 4, 4, 384), {},
        {"collective-permute": (134, 9879552), "all-reduce": (1, 7)},
    ),
    "just too few on eight": (
        ([256] * 3, 8, 72), EIGHT,
        {"all-gather": (2, 2064384), "all-reduce": (3, 4128775)},
    ),
    "just enough on eight": (
        ([256] * 3, 8, 80), EIGHT,
        {"collective-permute": (44, 6488064), "all-reduce": (1, 7)},
    ),
    "a group for each feature": (
        ([256] * 3, 16, 64), {"taps": 7, "grouped": True, **EIGHT},
        {"all-to-all": (6, 5505024), "all-reduce": (3, 87815)},
    ),
    "not all devices": (
        ([256] * 3, 16, 256), {"mesh": "data=8,model=2"},
        {"all-gather": (2, 2064384), "reduce-scatter": (2, 2064384), "all-reduce": (1, 7)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SENT)
def test_what_travels_is_what_was_compiled(name):
    given, options, sent = SENT[name]
    assert estimated(*given, **options).by_axis["data"] == sent


def test_convolutions_of_float32_send_bfloat16_and_gather_for_each_pass():
    found = estimated([128, 256, 512, 512, 256], 28, 256, taps=1, strides=[1, 2, 1, 1], wide=True)
    count, size = found.by_axis["data"]["collective-permute"]
    assert "all-gather" not in found.by_axis["data"]
    assert (count, size) == (184, pytest.approx(4546560, rel=0.005))


# Compiled seconds. The wide ResNet and ResNet-26 are rows of benchmarks/estimate.py.
SECONDS = {
    "160": (([160] * 4, 32, 512), {}, 3.850e-3),
    "64": (([64] * 4, 56, 256), {}, 3.404e-3),
    "320": (([160, 320, 320, 320], 32, 512), {"strides": [2, 1, 1]}, 2.192e-3),
    "512": (([512] * 4, 14, 256), {}, 1.335e-3),
    "1x1": (([256, 64, 256, 512, 128, 512], 28, 256), {"taps": 1}, 0.840e-3),
    "eight": (([160, 320, 320, 320], 32, 256), {"strides": [2, 1, 1], **EIGHT}, 1.127e-3),
    "v5e": (
        ([160, 320, 320, 320], 32, 256),
        {"strides": [2, 1, 1], "mesh": "data=8", "on": "v5e:2x4"},
        2.418e-3,
    ),
}


@pytest.mark.parametrize("name", SECONDS)
def test_parts_take_about_what_the_compiler_says(name):
    given, options, seconds = SECONDS[name]
    assert estimated(*given, **options).seconds == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(
    ("batch", "piece", "made", "by_image", "piece_bytes"),
    [
        (32, 10, False, True, 100 * 2 * 16 * 128),
        (32, 40, False, False, 100 * 2 * 32 * 128),
        (16, 16, False, True, 100 * 2 * 16 * 128),  # both alike: as it is read, not as it is made
        (16, 16, True, False, 100 * 2 * 16 * 128),
        (16, 4, True, True, 100 * 2 * 8 * 128),
    ],
)
def test_images_or_features_fill_registers(batch, piece, made, by_image, piece_bytes):
    cut = Cut(0, made, False, 100, batch, 16 * piece, piece, 2)
    assert cut.by_image is by_image
    assert cut.piece_bytes == piece_bytes
