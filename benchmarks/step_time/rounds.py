"""The recipes by round, and those of the sixth: frozen with their predictions before anything of them was measured."""

import models as own
import optax
import others
import recipes
from flax import nnx
from recipes import BF16, array, decoder_of, images, ints, mlp, of


def gpt(vocab, width, heads, layers, batch, **options):
    rows, length = batch
    return of(
        lambda: others.Gpt(vocab, width, heads, layers, length, nnx.Rngs(0)),
        others.causal_loss,
        ints(rows, length + 1),
        **options,
    )


SIXTH = {
    # Decoders.
    "decoder 1024, 512, all recomputed": lambda: decoder_of(
        8, 1024, 2816, 16, (24, 512), vocab=50257, config={"remat": "nothing_saveable"}
    ),
    "decoder 2560, 4k, GQA": lambda: decoder_of(
        3, 2560, 6912, 20, (3, 4096), config={"kv_heads": 4}
    ),
    "decoder 1536, scanned, recomputed, adafactor": lambda: decoder_of(
        8, 1536, 4096, 12, (12, 1024), optimizer=optax.adafactor(1e-3),
        config={"scan": True, "remat": "nothing_saveable"},
    ),
    "decoder 2048, 16k": lambda: decoder_of(2, 2048, 5632, 16, (1, 16384)),
    "decoder 512, f32, 3 parts, sgd": lambda: decoder_of(
        4, 512, 2048, 8, (24, 256), vocab=16000, compute_dtype=None, accumulate=3,
        optimizer=optax.sgd(0.1, momentum=0.9),
    ),
    "experts 12 of 640, scanned": lambda: decoder_of(
        4, 640, 1792, 10, (12, 1024),
        config={"experts": 12, "chosen": 2, "capacity": 1.25, "scan": True},
    ),
    "experts 8 of 512, f32": lambda: decoder_of(
        3, 512, 1408, 8, (16, 256), vocab=16000, compute_dtype=None,
        config={"experts": 8, "chosen": 2, "capacity": 1.5},
    ),
    # Transformers by other hands.
    "GPT 768, bf16, dropout": lambda: gpt(50304, 768, 12, 6, (8, 1024), **BF16),
    "GPT 384, f32, dropout": lambda: gpt(5000, 384, 6, 6, (64, 256)),
    "rotary 1024, nnx.scan, nnx.remat": lambda: of(
        lambda: others.ScannedRotary(32000, 1024, 16, 4, 2816, 8, nnx.Rngs(0)),
        others.causal_loss, ints(12, 1025), **BF16,
    ),
    "BERT 512, bf16, lamb": lambda: of(
        lambda: others.Bert(30522, 512, 8, 6, 384, nnx.Rngs(0)),
        others.masked_loss, ints(48, 384), ints(48, 384), optimizer=optax.lamb(1e-3), **BF16,
    ),
    "ViT 192, class token, bf16": lambda: images(
        lambda: others.ClassToken(224, 16, 192, 3, 8, nnx.Rngs(0)), 128, 224, **BF16
    ),
    "windows 128 of 7, bf16": lambda: images(
        lambda: others.Windows(128, 4, 7, 6, nnx.Rngs(0)), 64, 224, **BF16
    ),
    "DiT 576, f32": lambda: of(
        lambda: others.DiffusionTransformer(256, 16, 576, 9, 5, nnx.Rngs(0)),
        others.diffusion_loss, array((32, 256, 16)), array((32, 256, 16)), array((32,)), ints(32),
    ),
    "two towers, bf16": lambda: of(
        lambda: others.TwoTowers(
            own.Vit(224, 32, 512, 8, 4, 1000, nnx.Rngs(0)),
            own.Encoder(30000, 384, 6, 4, 2, nnx.Rngs(1)), 384, 256, nnx.Rngs(2),
        ),
        others.contrastive_loss, array((256, 224, 224, 3)), ints(256, 64), **BF16,
    ),
    # Convolutions.
    "ResNet-18, bf16, sgd": lambda: images(
        lambda: others.BasicResNet((2, 2, 2, 2), nnx.Rngs(0)), 128, 160,
        optimizer=optax.sgd(0.1, momentum=0.9), **BF16,
    ),
    "ResNet-34, f32, 112": lambda: images(
        lambda: others.BasicResNet((3, 4, 6, 3), nnx.Rngs(0)), 64, 112
    ),
    "small CNN, f32": lambda: of(
        lambda: others.SmallCnn(nnx.Rngs(0), 32, (64, 128), 512),
        own.classified, array((1024, 32, 32, 3)), ints(1024),
    ),
    "diffusion UNet 128, bf16": lambda: of(
        lambda: others.DiffusionUNet((128, 256, 384), nnx.Rngs(0)),
        others.diffusion_loss, array((32, 32, 32, 4)), array((32, 32, 32, 4)), array((32,)), **BF16,
    ),
    "WaveNet 128, bf16": lambda: of(
        lambda: others.WaveNet(128, 12, nnx.Rngs(0)), others.causal_loss, ints(16, 4097), **BF16
    ),
    "VAE 64 to 256, f32": lambda: of(
        lambda: others.Vae((64, 128, 256), 128, 64, nnx.Rngs(0)),
        others.reconstruction_loss, array((128, 64, 64, 3)),
    ),
    # Plain networks, tables, graphs.
    "MLP 784, 1024, f32": lambda: mlp(4096, (784, 1024, 1024, 10), optimizer=optax.sgd(0.1)),
    "residual MLP 3072, bf16, adam": lambda: of(
        lambda: others.ResidualMlp(1024, 3072, 6, 512, nnx.Rngs(0)),
        own.squared, array((6144, 1024)), array((6144, 512)), optimizer=optax.adam(1e-3), **BF16,
    ),
    "recommender, f32, adagrad": lambda: of(
        lambda: others.Recommender(12, 100_000, 64, 13, nnx.Rngs(0)),
        others.binary_loss, array((8192, 13)), ints(8192, 12), array((8192,)),
        optimizer=optax.adagrad(0.05),
    ),
    "graph net 256, f32": lambda: of(
        lambda: others.GraphNet(64, 256, 4, nnx.Rngs(0)),
        others.graph_loss, array((16384, 64)), ints(131072), ints(131072), array((16384,)),
    ),
    "GRU 640, f32, 48 steps": lambda: of(
        lambda: own.Recurrent(8000, 640, nnx.Rngs(0)), own.next_token, ints(48, 49)
    ),
}  # fmt: skip

ROUNDS = {
    "first": recipes.FRESH,
    "second": recipes.HELD_OUT,
    "third": recipes.CONVS,
    "fourth": recipes.FOURTH,
    "sixth": SIXTH,
}
RECIPES = recipes.RECIPES | SIXTH
