"""The recipes of the step-time benchmark: FITTED ones set constants, all others judge them."""

import jax
import models as own
import networks
import optax
from flax import nnx

import shardwise as sw
from shardwise import models
from shardwise.examples import decoder

BF16 = {"compute_dtype": "bfloat16"}


def of(model, loss, *batch, optimizer=None, **options):
    return sw.Recipe(
        model=model,
        loss=loss,
        optimizer=optimizer or optax.adamw(1e-4),
        batch=batch[0] if len(batch) == 1 else tuple(batch),
        **options,
    )


def array(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape):
    return array(shape, "int32")


def decoder_of(layers, width, hidden, heads, batch, vocab=32000, config=(), **options):
    sizes = models.Config(
        layers=layers, width=width, hidden=hidden, heads=heads, vocab=vocab, **dict(config)
    )
    return of(
        lambda: models.Decoder(sizes, rngs=nnx.Rngs(0)),
        models.next_token_loss,
        ints(*batch),
        **{**BF16, **options},
    )


def vit(batch, size, patch, width, heads, layers, **options):
    return of(
        lambda: own.Vit(size, patch, width, heads, layers, 1000, nnx.Rngs(0)),
        own.classified,
        array((batch, size, size, 3)),
        ints(batch),
        **options,
    )


def mlp(batch, sizes, **options):
    return of(
        lambda: own.Mlp(sizes, nnx.Rngs(0)),
        own.squared,
        array((batch, sizes[0])),
        array((batch, sizes[-1])),
        **options,
    )


def images(model, batch, size, **options):
    return of(model, own.classified, array((batch, size, size, 3)), ints(batch), **options)


RECIPES = {
    # Decoders of several shapes.
    "decoder 768, 1k": lambda: decoder_of(6, 768, 3072, 12, (16, 1024)),
    "decoder 2048, 2k": lambda: decoder_of(4, 2048, 8192, 16, (8, 2048)),
    "decoder 1024, 256": lambda: decoder_of(6, 1024, 4096, 16, (64, 256)),
    "decoder 1024, 8k": lambda: decoder_of(4, 1024, 4096, 8, (4, 8192)),
    "decoder 4096, GQA, 128k words": lambda: decoder_of(
        2, 4096, 14336, 32, (4, 2048), vocab=128256, config={"kv_heads": 8}
    ),
    "decoder 512, tiny": lambda: decoder_of(4, 512, 2048, 8, (8, 128), vocab=8192),
    "decoder 768, f32": lambda: decoder_of(4, 768, 3072, 12, (8, 1024), compute_dtype=None),
    "decoder 1536, dots saved": lambda: decoder_of(
        6, 1536, 6144, 12, (8, 2048), config={"remat": "dots_saveable"}
    ),
    "decoder 2048, scanned, nothing saved": lambda: decoder_of(
        12, 2048, 8192, 16, (8, 2048), config={"scan": True, "remat": "nothing_saveable"}
    ),
    "decoder 1024, scanned, all saved": lambda: decoder_of(
        16, 1024, 4096, 16, (8, 1024), config={"scan": True}
    ),
    "decoder 1024, 4 parts": lambda: decoder_of(6, 1024, 4096, 16, (16, 1024), accumulate=4),
    "decoder 1024, window, gemma-like": lambda: decoder_of(
        6, 1024, 4096, 8, (8, 2048),
        config={"window": 512, "period": 3, "qk_norm": True, "activation": "gelu", "tied": True},
    ),
    "experts 8 of 768": lambda: decoder_of(
        4, 768, 2048, 12, (8, 1024), config={"experts": 8, "capacity": 1.25}
    ),
    "experts 4 of 1024, scanned": lambda: decoder_of(
        6, 1024, 2816, 16, (8, 1024), config={"experts": 4, "capacity": 2.0, "scan": True}
    ),
    "decoder 1024, sgd": lambda: decoder_of(
        6, 1024, 4096, 16, (8, 1024), optimizer=optax.sgd(0.1, momentum=0.9)
    ),
    "decoder 2048, adafactor": lambda: decoder_of(
        4, 2048, 5632, 16, (4, 2048), optimizer=optax.adafactor(1e-3)
    ),
    "decoder 1024, lion, clipped, EMA": lambda: decoder_of(
        6, 1024, 4096, 16, (8, 1024), optimizer=optax.lion(1e-4), clip=1.0, ema=0.999
    ),
    "Flax's layers, bf16": lambda: of(decoder.make, decoder.loss, ints(32, 512), **BF16),
    "Flax's layers, f32": lambda: of(decoder.make, decoder.loss, ints(16, 512)),
    # Other transformers.
    "ViT 384, bf16": lambda: vit(64, 224, 16, 384, 6, 6, **BF16),
    "ViT 768, f32": lambda: vit(32, 224, 16, 768, 12, 4),
    "encoder 512, f32, dropout-free": lambda: of(
        lambda: own.Encoder(30000, 512, 8, 6, 2, nnx.Rngs(0)),
        own.classified, ints(64, 256), ints(64),
    ),
    "mixer 512, bf16": lambda: of(
        lambda: own.Mixer(196, 512, 6, nnx.Rngs(0)),
        own.squared, array((64, 196, 512)), array((64, 196, 512)), **BF16,
    ),
    # Convolutions.
    "ResNet-50, bf16": lambda: images(
        lambda: own.ResNet((3, 4, 6, 3), nnx.Rngs(0)), 64, 224, **BF16
    ),
    "ResNet-26, f32": lambda: images(lambda: own.ResNet((2, 2, 2, 2), nnx.Rngs(0)), 32, 224),
    "ConvNeXt 192, bf16": lambda: images(
        lambda: own.ConvNext(192, 6, 1000, nnx.Rngs(0)), 64, 224, **BF16
    ),
    "UNet 64, f32": lambda: of(
        lambda: own.UNet(64, nnx.Rngs(0)),
        own.squared, array((16, 128, 128, 3)), array((16, 128, 128, 3)),
    ),
    # Plain networks.
    "MLP 8192, bf16": lambda: mlp(8192, (8192,) * 5, **BF16),
    "MLP 4096, f32": lambda: mlp(4096, (4096,) * 5),
    "MLP 512, tiny": lambda: mlp(256, (512,) * 5),
    "MLP 2048, dropout, accumulated": lambda: of(
        lambda: own.Mlp((2048,) * 7, nnx.Rngs(0), nnx.gelu, 0.1),
        own.squared, array((8192, 2048)), array((8192, 2048)), accumulate=2, **BF16,
    ),
    # Recurrences and lookups.
    "GRU 1024, 128 steps": lambda: of(
        lambda: own.Recurrent(8192, 1024, nnx.Rngs(0)), own.next_token, ints(64, 129)
    ),
    "state space 1024, bf16": lambda: of(
        lambda: own.StateSpace(1024, 4, nnx.Rngs(0)),
        own.squared, array((8, 1024, 1024)), array((8, 1024, 1024)), **BF16,
    ),
    "lookups": lambda: of(
        lambda: own.Lookup(8, 200_000, 64, nnx.Rngs(0)),
        own.squared, ints(8192, 8), array((8192,)), optimizer=optax.adagrad(0.1),
    ),
}  # fmt: skip

# Measured after the first constants were frozen, and seen since.
FRESH = {
    "decoder 1280, 512, GQA": lambda: decoder_of(
        5, 1280, 5120, 20, (24, 512), vocab=50304, config={"kv_heads": 4}
    ),
    "decoder 3072, clipped": lambda: decoder_of(3, 3072, 8192, 24, (4, 2048), clip=1.0),
    "decoder 640, f32, scanned, dots saved": lambda: decoder_of(
        8, 640, 2560, 10, (16, 512), compute_dtype=None,
        config={"scan": True, "remat": "dots_saveable"},
    ),
    "experts 16 of 512, top 1": lambda: decoder_of(
        4, 512, 1024, 8, (16, 512), config={"experts": 16, "chosen": 1, "capacity": 1.5}
    ),
    "ViT 512, patches of 8, bf16": lambda: vit(32, 128, 8, 512, 8, 6, **BF16),
    "ResNet-14, wide, bf16": lambda: images(
        lambda: own.ResNet((1, 1, 1, 1), nnx.Rngs(0), inner=128), 64, 160, **BF16
    ),
    "MLP 3000, odd sizes, f32": lambda: mlp(5000, (3000,) * 6, optimizer=optax.rmsprop(1e-3)),
    "encoder 768, bf16, 512 long": lambda: of(
        lambda: own.Encoder(30000, 768, 12, 6, 2, nnx.Rngs(0)),
        own.classified, ints(32, 512), ints(32), **BF16,
    ),
    "mixer 384, f32": lambda: of(
        lambda: own.Mixer(256, 384, 4, nnx.Rngs(0)),
        own.squared, array((64, 256, 384)), array((64, 256, 384)),
    ),
    "GRU 512, bf16, 64 steps": lambda: of(
        lambda: own.Recurrent(4096, 512, nnx.Rngs(0)), own.next_token, ints(128, 65), **BF16
    ),
}  # fmt: skip
RECIPES |= FRESH

# Predicted with the constants that were then frozen, measured once, and seen since.
HELD_OUT = {
    "decoder 896, f32, 384, GQA": lambda: decoder_of(
        5, 896, 2432, 14, (20, 384), vocab=20000, config={"kv_heads": 2}, compute_dtype=None
    ),
    "decoder 1792, 3k, 50257 words, sgd": lambda: decoder_of(
        3, 1792, 4864, 14, (4, 3072), vocab=50257, optimizer=optax.sgd(0.1)
    ),
    "decoder 1152, scanned, dots saved": lambda: decoder_of(
        10, 1152, 3072, 9, (12, 1024),
        config={"scan": True, "remat": "dots_with_no_batch_dims_saveable"},
    ),
    "decoder 512, f32, scanned, nothing saved, lion": lambda: decoder_of(
        12, 512, 1536, 8, (24, 256), vocab=16000, compute_dtype=None, optimizer=optax.lion(1e-4),
        config={"scan": True, "remat": "nothing_saveable"},
    ),
    "experts 32 of 384, top 2": lambda: decoder_of(
        3, 384, 768, 6, (16, 768), config={"experts": 32, "chosen": 2, "capacity": 1.25}
    ),
    "experts 6 of 1280, clipped": lambda: decoder_of(
        2, 1280, 3456, 10, (6, 1024), config={"experts": 6, "capacity": 1.5}, clip=1.0
    ),
    "ViT 640, patches of 14, bf16": lambda: vit(48, 224, 14, 640, 10, 5, **BF16),
    "ViT 1024, patches of 32, f32, adafactor": lambda: vit(
        96, 256, 32, 1024, 16, 4, optimizer=optax.adafactor(1e-3)
    ),
    "VGG 10, bf16": lambda: images(
        lambda: own.Vgg(((64, 2), (128, 2), (256, 3), (512, 3)), nnx.Rngs(0)), 48, 128, **BF16
    ),
    "denoiser 48, f32": lambda: of(
        lambda: own.Denoiser(48, nnx.Rngs(0)),
        own.squared, array((32, 96, 96, 3)), array((32, 96, 96, 3)),
    ),
    "LSTM 768, 96 steps": lambda: of(
        lambda: own.Recurrent(10000, 768, nnx.Rngs(0), nnx.LSTMCell), own.next_token, ints(96, 97)
    ),
    "mixer 768, bf16, 3 parts": lambda: of(
        lambda: own.Mixer(144, 768, 5, nnx.Rngs(0)),
        own.squared, array((96, 144, 768)), array((96, 144, 768)), accumulate=3, **BF16,
    ),
    "encoder-decoder 576, bf16, dropout": lambda: of(
        lambda: own.EncoderDecoder(24000, 576, 9, 4, nnx.Rngs(0)),
        own.translated, ints(24, 512), ints(24, 257), **BF16,
    ),
    "MLP 2500 and 5004, bf16, adafactor": lambda: mlp(
        12000, (2500, 5004, 2500, 5004, 2500), optimizer=optax.adafactor(1e-3), **BF16
    ),
}  # fmt: skip
RECIPES |= HELD_OUT

# Not measured when convolutions were fitted again; predicted with those constants: predicted.json.
CONVS = {
    "wide ResNet 160, bf16": lambda: images(
        lambda: own.WideResNet(((160, 3), (320, 3), (640, 3)), nnx.Rngs(0)), 256, 32, **BF16
    ),
    "autoencoder 80, f32": lambda: of(
        lambda: own.AutoEncoder((80, 160, 320, 640), nnx.Rngs(0)),
        own.squared, array((40, 192, 192, 3)), array((40, 192, 192, 3)),
    ),
    "mobile net 40, f32": lambda: images(
        lambda: own.MobileNet(((40, 2, 1), (80, 3, 2), (160, 3, 2)), nnx.Rngs(0)), 56, 160
    ),
    "5x5 kernels 72, bf16": lambda: images(
        lambda: own.Wide5((72, 144, 288, 288), nnx.Rngs(0)), 112, 96, **BF16
    ),
}  # fmt: skip
RECIPES |= CONVS

# Predicted with the constants of the fourth fit before they were measured: predicted_fourth.json.
FOURTH = {
    "ResNet 56 to 448, bf16": lambda: images(
        lambda: own.WideResNet(((56, 2), (112, 2), (224, 2), (448, 2)), nnx.Rngs(0)), 96, 64, **BF16
    ),
    "squeezed net 40, bf16": lambda: images(
        lambda: networks.Efficient(
            ((40, 2, 3, 1), (64, 2, 5, 2), (112, 3, 3, 2), (192, 3, 5, 2)), nnx.Rngs(0)
        ), 64, 160, **BF16,
    ),
    "dense net 24, f32": lambda: images(
        lambda: networks.Dense(48, 24, (4, 6, 6), nnx.Rngs(0)), 64, 64
    ),
    "audio 96 to 384, bf16": lambda: of(
        lambda: networks.Audio((96, 192, 384), 6, nnx.Rngs(0)),
        own.classified, array((48, 65536, 1)), ints(48), **BF16,
    ),
    "video 40 to 320, f32": lambda: of(
        lambda: networks.Video((40, 80, 160, 320), nnx.Rngs(0)),
        own.classified, array((12, 16, 96, 96, 3)), ints(12),
    ),
    "UNet 96, bf16": lambda: of(
        lambda: own.UNet(96, nnx.Rngs(0)),
        own.squared, array((24, 112, 112, 3)), array((24, 112, 112, 3)), **BF16,
    ),
    "ConvNeXt 96 to 384, bf16": lambda: images(
        lambda: networks.NextStages((96, 192, 384), (2, 2, 4), nnx.Rngs(0)), 64, 192, **BF16
    ),
    "separable 48 to 384, bf16": lambda: images(
        lambda: networks.Separable((48, 96, 96, 192, 192, 384, 384), nnx.Rngs(0)), 96, 192, **BF16
    ),
    "grouped ResNet 128, f32": lambda: images(
        lambda: networks.Grouped(
            ((128, 2), (256, 2), (512, 2)), 16, nnx.Rngs(0), dtype="float32"
        ), 96, 48,
    ),
    "decoder 1408, 640 long, GQA": lambda: decoder_of(
        4, 1408, 3840, 11, (12, 640), vocab=24000, config={"kv_heads": 1}
    ),
    "encoder 640, f32, 384 long": lambda: of(
        lambda: own.Encoder(20000, 640, 10, 4, 2, nnx.Rngs(0)),
        own.classified, ints(24, 384), ints(24),
    ),
    "GRU 896, bf16, 80 steps": lambda: of(
        lambda: own.Recurrent(6000, 896, nnx.Rngs(0)), own.next_token, ints(80, 81), **BF16
    ),
}  # fmt: skip
RECIPES |= FOURTH

# Chosen before anything was measured: one of each sort. A third of all at most.
FITTED = (
    "decoder 768, 1k",
    "decoder 4096, GQA, 128k words",
    "decoder 512, tiny",
    "decoder 768, f32",
    "decoder 1024, scanned, all saved",
    "experts 8 of 768",
    "ViT 384, bf16",
    "ResNet-26, f32",
    "ConvNeXt 192, bf16",
    "MLP 8192, bf16",
    "GRU 1024, 128 steps",
    "UNet 64, f32",  # its convolutions with the image as their kernel were missed by 23% before
)
