"""The recipes by round: those from the sixth on were frozen, with their predictions, before any was measured."""

import families
import models as own
import optax
import others
import recipes
from flax import nnx
from recipes import BF16, array, decoder_of, images, ints, mlp, of, vit


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

SEVENTH = {
    # Decoders.
    "decoder 1280, 2k, GQA, dots saved": lambda: decoder_of(
        4, 1280, 3584, 10, (6, 2048), config={"kv_heads": 2, "remat": "dots_saveable"}
    ),
    "decoder 704, f32, 512": lambda: decoder_of(
        5, 704, 1920, 11, (16, 512), vocab=24000, compute_dtype=None
    ),
    "decoder 1600, scanned, all saved, lion": lambda: decoder_of(
        5, 1600, 4352, 25, (10, 1024), vocab=12000, optimizer=optax.lion(1e-4),
        config={"scan": True},
    ),
    "experts 24 of 448, top 4": lambda: decoder_of(
        4, 448, 1216, 7, (16, 512), config={"experts": 24, "chosen": 4, "capacity": 1.25}
    ),
    "decoder 2304, 65k words, 2 parts": lambda: decoder_of(
        3, 2304, 6144, 18, (8, 1536), vocab=65536, accumulate=2
    ),
    # Transformers by other hands.
    "rotary 1152, GQA, bf16": lambda: of(
        lambda: families.Rotary(32000, 1152, 18, 6, 3072, 4, nnx.Rngs(0)),
        others.causal_loss, ints(8, 1025), **BF16,
    ),
    "biased attention 512, bf16": lambda: of(
        lambda: families.SeqToSeq(32128, 512, 8, 1024, 4, 512, nnx.Rngs(0)),
        families.translated_loss, ints(24, 512), ints(24, 129), **BF16,
    ),
    "conformer 384, bf16": lambda: of(
        lambda: families.Conformer(80, 384, 6, 5, 31, 1000, nnx.Rngs(0)),
        families.labelled_loss, array((24, 1024, 80)), ints(24, 256), **BF16,
    ),
    "latents 384, f32": lambda: of(
        lambda: families.Latents(64, 256, 384, 6, 6, 1000, nnx.Rngs(0)),
        families.labelled_loss, array((32, 4096, 64)), ints(32),
    ),
    "ViT 1280, patches of 14, bf16": lambda: recipes.vit(24, 224, 14, 1280, 16, 3, **BF16),
    "linear recurrence 768, bf16": lambda: of(
        lambda: families.LinearRecurrence(16000, 768, 4, nnx.Rngs(0)),
        others.causal_loss, ints(8, 1025), **BF16,
    ),
    # Convolutions.
    "bottlenecks 64, group norms, bf16": lambda: images(
        lambda: families.Bottlenecks(64, (2, 2, 2, 2), nnx.Rngs(0)), 96, 192, **BF16
    ),
    "super-resolution 96, f32": lambda: of(
        lambda: families.SuperResolution(96, 6, 2, nnx.Rngs(0)),
        families.distance_loss, array((24, 64, 64, 3)), array((24, 128, 128, 3)),
    ),
    "temporal 256, f32": lambda: of(
        lambda: families.TemporalNet(80, 256, 10, 40, nnx.Rngs(0)),
        families.labelled_loss, array((32, 1024, 80)), ints(32, 1024),
    ),
    "ResNet-14 of 96, f32": lambda: images(
        lambda: others.BasicResNet((1, 2, 2, 1), nnx.Rngs(0), first=96), 64, 128
    ),
    "VAE 96 to 384, bf16": lambda: of(
        lambda: others.Vae((96, 192, 384), 64, 64, nnx.Rngs(0)),
        others.reconstruction_loss, array((96, 64, 64, 3)), **BF16,
    ),
    # Plain networks and tables.
    "radiance 384, f32": lambda: of(
        lambda: families.Radiance(384, nnx.Rngs(0)),
        own.squared, array((131072, 3)), array((131072, 4)),
    ),
    "points 64 to 1024, f32": lambda: of(
        lambda: families.Points((64, 128, 256, 1024), 40, nnx.Rngs(0)),
        own.classified, array((32, 2048, 3)), ints(32),
    ),
    "LSTM 512, two layers, f32": lambda: of(
        lambda: families.Lstm(12000, 512, nnx.Rngs(0)), others.causal_loss, ints(64, 65)
    ),
    "tabular 2048, bf16, batch norms": lambda: of(
        lambda: families.Tabular(200, (2048, 1024, 512), 10, nnx.Rngs(0)),
        own.classified, array((16384, 200)), ints(16384), **BF16,
    ),
    "recommender 32, 26 tables, sgd": lambda: of(
        lambda: others.Recommender(26, 40_000, 32, 13, nnx.Rngs(0)),
        others.binary_loss, array((16384, 13)), ints(16384, 26), array((16384,)),
        optimizer=optax.sgd(0.05),
    ),
}  # fmt: skip

EIGHTH = {
    "decoder 1920, GQA, 100k words": lambda: decoder_of(
        2, 1920, 5120, 15, (6, 2048), vocab=100_000, config={"kv_heads": 5}
    ),
    "decoder 576, f32, scanned": lambda: decoder_of(
        8, 576, 1536, 9, (16, 512), vocab=20000, compute_dtype=None, config={"scan": True}
    ),
    "experts 10 of 896, top 2": lambda: decoder_of(
        3, 896, 2432, 14, (8, 1024), config={"experts": 10, "chosen": 2, "capacity": 1.25}
    ),
    "GPT 1024, bf16, lion": lambda: gpt(
        32000, 1024, 16, 4, (6, 1024), optimizer=optax.lion(1e-4), **BF16
    ),
    "BERT 384, f32, 256 long": lambda: of(
        lambda: others.Bert(30000, 384, 6, 4, 256, nnx.Rngs(0)),
        others.masked_loss, ints(64, 256), ints(64, 256),
    ),
    "conformer 256, f32": lambda: of(
        lambda: families.Conformer(64, 256, 4, 4, 15, 500, nnx.Rngs(0)),
        families.labelled_loss, array((32, 800, 64)), ints(32, 200),
    ),
    "biased attention 384, f32": lambda: of(
        lambda: families.SeqToSeq(16000, 384, 6, 1024, 3, 320, nnx.Rngs(0)),
        families.translated_loss, ints(32, 320), ints(32, 161),
    ),
    "windows 96 of 7, f32": lambda: images(
        lambda: others.Windows(96, 3, 7, 4, nnx.Rngs(0)), 32, 224
    ),
    "diffusion UNet 96, f32": lambda: of(
        lambda: others.DiffusionUNet((96, 192, 256), nnx.Rngs(0)),
        others.diffusion_loss, array((48, 32, 32, 4)), array((48, 32, 32, 4)), array((48,)),
    ),
    "bottlenecks 32, f32": lambda: images(
        lambda: families.Bottlenecks(32, (3, 4, 3), nnx.Rngs(0)), 64, 160
    ),
    "VAE 48 to 192, f32": lambda: of(
        lambda: others.Vae((48, 96, 192), 64, 96, nnx.Rngs(0)),
        others.reconstruction_loss, array((64, 96, 96, 3)),
    ),
    "temporal 192, bf16": lambda: of(
        lambda: families.TemporalNet(64, 192, 8, 30, nnx.Rngs(0)),
        families.labelled_loss, array((48, 1024, 64)), ints(48, 1024), **BF16,
    ),
    "graph net 128, 262k edges, f32": lambda: of(
        lambda: others.GraphNet(32, 128, 3, nnx.Rngs(0)),
        others.graph_loss,
        array((32768, 32)), ints(262144), ints(262144), array((32768,)),
    ),
    "recommender 48, 16 tables, adam": lambda: of(
        lambda: others.Recommender(16, 100_000, 48, 20, nnx.Rngs(0)),
        others.binary_loss, array((8192, 20)), ints(8192, 16), array((8192,)),
        optimizer=optax.adam(1e-3),
    ),
    "points 128 to 512, bf16": lambda: of(
        lambda: families.Points((128, 256, 512), 40, nnx.Rngs(0)),
        own.classified, array((64, 1024, 3)), ints(64), **BF16,
    ),
    "radiance 256, bf16": lambda: of(
        lambda: families.Radiance(256, nnx.Rngs(0)),
        own.squared, array((262144, 3)), array((262144, 4)), **BF16,
    ),
}  # fmt: skip

NINTH = {
    "decoder 1472, 3 layers, 24k words": lambda: decoder_of(
        3, 1472, 4096, 23, (12, 768), vocab=24000
    ),
    "experts 6 of 768, f32": lambda: decoder_of(
        2, 768, 2048, 12, (8, 512), vocab=12000, compute_dtype=None,
        config={"experts": 6, "chosen": 2, "capacity": 1.25},
    ),
    "rotary 640, f32": lambda: of(
        lambda: families.Rotary(16000, 640, 10, 10, 1728, 4, nnx.Rngs(0)),
        others.causal_loss, ints(8, 513),
    ),
    "DiT 768, bf16": lambda: of(
        lambda: others.DiffusionTransformer(256, 16, 768, 12, 4, nnx.Rngs(0)),
        others.diffusion_loss, array((48, 256, 16)), array((48, 256, 16)), array((48,)), ints(48),
        **BF16,
    ),
    "class token 384, f32": lambda: images(
        lambda: others.ClassToken(192, 16, 384, 6, 6, nnx.Rngs(0)), 64, 192
    ),
    "conformer 512, bf16": lambda: of(
        lambda: families.Conformer(80, 512, 8, 3, 23, 1000, nnx.Rngs(0)),
        families.labelled_loss, array((16, 1200, 80)), ints(16, 300), **BF16,
    ),
    "temporal 128, bf16, 12 layers": lambda: of(
        lambda: families.TemporalNet(40, 128, 12, 20, nnx.Rngs(0)),
        families.labelled_loss, array((32, 512, 40)), ints(32, 512), **BF16,
    ),
    "bottlenecks 64, two stages, bf16": lambda: images(
        lambda: families.Bottlenecks(64, (3, 3), nnx.Rngs(0)), 128, 128, **BF16
    ),
    "super-resolution 80, three times, f32": lambda: of(
        lambda: families.SuperResolution(80, 4, 3, nnx.Rngs(0)),
        families.distance_loss, array((32, 48, 48, 3)), array((32, 144, 144, 3)),
    ),
    "graph net 192, 98k edges, f32": lambda: of(
        lambda: others.GraphNet(48, 192, 3, nnx.Rngs(0)),
        others.graph_loss, array((10000, 48)), ints(98304), ints(98304), array((10000,)),
    ),
    "recommender 24, 40 tables, lion": lambda: of(
        lambda: others.Recommender(40, 20_000, 24, 8, nnx.Rngs(0)),
        others.binary_loss, array((4096, 8)), ints(4096, 40), array((4096,)),
        optimizer=optax.lion(1e-3),
    ),
    "LSTM 384, bf16": lambda: of(
        lambda: families.Lstm(8000, 384, nnx.Rngs(0)), others.causal_loss, ints(96, 49), **BF16
    ),
}  # fmt: skip

TENTH = {
    # Decoders of several shapes.
    "decoder 1344, 1.5k, tied, GQA": lambda: decoder_of(
        4, 1344, 3584, 21, (8, 1536), vocab=48000, config={"kv_heads": 7, "tied": True}
    ),
    "decoder 448, f32, 128 long": lambda: decoder_of(
        6, 448, 1280, 7, (48, 128), vocab=10000, compute_dtype=None
    ),
    "decoder 1920, 4k, scanned, dots saved": lambda: decoder_of(
        5, 1920, 5120, 15, (3, 4096), config={"scan": True, "remat": "dots_saveable"}
    ),
    "decoder 832, 6 parts, adam": lambda: decoder_of(
        5, 832, 2240, 13, (24, 768), vocab=24000, accumulate=6, optimizer=optax.adam(1e-3)
    ),
    "decoder 640, 12k": lambda: decoder_of(3, 640, 1728, 5, (1, 12288)),
    "decoder 2816, f32, lamb": lambda: decoder_of(
        2, 2816, 7552, 22, (2, 1024), compute_dtype=None, optimizer=optax.lamb(1e-3)
    ),
    "decoder 1216, all recomputed, f32, sgd": lambda: decoder_of(
        4, 1216, 3328, 19, (8, 512), vocab=16000, compute_dtype=None,
        optimizer=optax.sgd(0.1, momentum=0.9), config={"remat": "nothing_saveable"},
    ),
    "experts 20 of 576, scanned, recomputed": lambda: decoder_of(
        5, 576, 1536, 9, (12, 768),
        config={
            "experts": 20, "chosen": 2, "capacity": 1.25, "scan": True, "remat": "nothing_saveable"
        },
    ),
    "experts 8 of 1024, f32": lambda: decoder_of(
        2, 1024, 2560, 16, (6, 640), vocab=20000, compute_dtype=None,
        config={"experts": 8, "chosen": 1, "capacity": 1.5},
    ),
    # Other transformers.
    "GPT 512, f32, adafactor": lambda: gpt(
        24000, 512, 8, 5, (16, 384), optimizer=optax.adafactor(1e-3)
    ),
    "BERT 640, bf16, adam": lambda: of(
        lambda: others.Bert(28000, 640, 10, 5, 192, nnx.Rngs(0)),
        others.masked_loss, ints(64, 192), ints(64, 192), optimizer=optax.adam(1e-4), **BF16,
    ),
    "rotary 896, scanned, f32": lambda: of(
        lambda: others.ScannedRotary(20000, 896, 14, 2, 2432, 5, nnx.Rngs(0)),
        others.causal_loss, ints(6, 769),
    ),
    "ViT 448, f32, 160": lambda: vit(64, 160, 16, 448, 7, 5),
    "ViT 896, bf16, lion": lambda: vit(
        40, 224, 16, 896, 14, 4, optimizer=optax.lion(1e-4), **BF16
    ),
    "DiT 448, bf16": lambda: of(
        lambda: others.DiffusionTransformer(196, 16, 448, 7, 6, nnx.Rngs(0)),
        others.diffusion_loss, array((64, 196, 16)), array((64, 196, 16)), array((64,)), ints(64),
        **BF16,
    ),
    "mixer 640, bf16": lambda: of(
        lambda: own.Mixer(225, 640, 5, nnx.Rngs(0)),
        own.squared, array((48, 225, 640)), array((48, 225, 640)), **BF16,
    ),
    # Convolutions.
    "ResNet-50, f32, 128": lambda: images(
        lambda: own.ResNet((3, 4, 6, 3), nnx.Rngs(0)), 48, 128
    ),
    "ResNet-38, bf16, 192": lambda: images(
        lambda: own.ResNet((3, 3, 3, 3), nnx.Rngs(0)), 80, 192, **BF16
    ),
    "ConvNeXt 160, f32": lambda: images(
        lambda: own.ConvNext(160, 5, 1000, nnx.Rngs(0)), 48, 192
    ),
    "UNet 48, bf16": lambda: of(
        lambda: own.UNet(48, nnx.Rngs(0)),
        own.squared, array((20, 144, 144, 3)), array((20, 144, 144, 3)), **BF16,
    ),
    "VGG 8, f32": lambda: images(
        lambda: own.Vgg(((64, 1), (128, 2), (256, 2), (384, 2)), nnx.Rngs(0)), 40, 96
    ),
    "wide ResNet 112, f32": lambda: images(
        lambda: own.WideResNet(((112, 2), (224, 2), (448, 2)), nnx.Rngs(0)), 128, 40
    ),
    # Plain networks.
    "MLP 1536, bf16, momentum": lambda: mlp(
        20000, (1536,) * 7, optimizer=optax.sgd(0.1, momentum=0.9), **BF16
    ),
    "MLP 6000, f32, 3 parts": lambda: mlp(6144, (1200, 6000, 6000, 1200), accumulate=3),
    "GRU 768, f32": lambda: of(
        lambda: own.Recurrent(9000, 768, nnx.Rngs(0)), own.next_token, ints(64, 73)
    ),
}  # fmt: skip

ELEVENTH = {
    # Decoders of several shapes.
    "decoder 2176, GQA, 28k words": lambda: decoder_of(
        3, 2176, 5888, 17, (6, 1280), vocab=28000, config={"kv_heads": 1}
    ),
    "decoder 896, 6k, window": lambda: decoder_of(
        4, 896, 2432, 7, (2, 6144), config={"window": 1024, "period": 2}
    ),
    "decoder 1728, scanned, recomputed, momentum": lambda: decoder_of(
        7, 1728, 4608, 27, (10, 768), vocab=20000, optimizer=optax.sgd(0.1, momentum=0.9),
        config={"scan": True, "remat": "nothing_saveable"},
    ),
    "decoder 960, f32, 1k, GQA": lambda: decoder_of(
        4, 960, 2560, 15, (6, 1024), vocab=30000, compute_dtype=None, config={"kv_heads": 3}
    ),
    "decoder 384, bf16, 192 long, lamb": lambda: decoder_of(
        8, 384, 1024, 6, (96, 192), vocab=12000, optimizer=optax.lamb(1e-3)
    ),
    "decoder 3584, dots saved, adafactor": lambda: decoder_of(
        2, 3584, 9728, 28, (3, 2048), optimizer=optax.adafactor(1e-3),
        config={"remat": "dots_saveable"},
    ),
    "decoder 1088, f32, 4 parts, scanned": lambda: decoder_of(
        4, 1088, 2944, 17, (16, 512), vocab=16000, compute_dtype=None, accumulate=4,
        config={"scan": True},
    ),
    "experts 14 of 704, top 2": lambda: decoder_of(
        3, 704, 1920, 11, (14, 768), vocab=24000,
        config={"experts": 14, "chosen": 2, "capacity": 1.25},
    ),
    "experts 4 of 1536, top 1, lion": lambda: decoder_of(
        3, 1536, 4096, 12, (6, 1536), optimizer=optax.lion(1e-4),
        config={"experts": 4, "chosen": 1, "capacity": 1.25},
    ),
    # Other transformers.
    "GPT 640, bf16, dropout, 2 parts": lambda: gpt(
        40000, 640, 10, 6, (16, 768), accumulate=2, **BF16
    ),
    "encoder 384, bf16, 640 long": lambda: of(
        lambda: own.Encoder(16000, 384, 6, 6, 2, nnx.Rngs(0)),
        own.classified, ints(32, 640), ints(32), **BF16,
    ),
    "encoder-decoder 448, f32": lambda: of(
        lambda: own.EncoderDecoder(16000, 448, 7, 3, nnx.Rngs(0)),
        own.translated, ints(24, 256), ints(24, 193),
    ),
    "ViT 576, f32, patches of 12": lambda: vit(32, 192, 12, 576, 9, 4),
    "ViT 704, bf16, 288, sgd": lambda: vit(
        32, 288, 16, 704, 11, 5, optimizer=optax.sgd(0.1, momentum=0.9), **BF16
    ),
    "mixer 448, f32": lambda: of(
        lambda: own.Mixer(180, 448, 5, nnx.Rngs(0)),
        own.squared, array((56, 180, 448)), array((56, 180, 448)),
    ),
    # Convolutions.
    "ResNet-50, bf16, 160, adamw": lambda: images(
        lambda: own.ResNet((3, 4, 6, 3), nnx.Rngs(0)), 96, 160, **BF16
    ),
    "ResNet-18, f32, 144": lambda: images(
        lambda: others.BasicResNet((2, 2, 2, 2), nnx.Rngs(0)), 72, 144
    ),
    "ConvNeXt 224, bf16": lambda: images(
        lambda: own.ConvNext(224, 5, 1000, nnx.Rngs(0)), 56, 192, **BF16
    ),
    "UNet 80, f32": lambda: of(
        lambda: own.UNet(80, nnx.Rngs(0)),
        own.squared, array((12, 96, 96, 3)), array((12, 96, 96, 3)),
    ),
    "autoencoder 64, bf16": lambda: of(
        lambda: own.AutoEncoder((64, 128, 256, 512), nnx.Rngs(0)),
        own.squared, array((48, 128, 128, 3)), array((48, 128, 128, 3)), **BF16,
    ),
    # Plain networks.
    "MLP 3584, bf16, adamw": lambda: mlp(9000, (3584,) * 5, **BF16),
    "MLP 1280 and 2560, f32, lamb": lambda: mlp(
        10000, (1280, 2560, 1280, 2560, 1280), optimizer=optax.lamb(1e-3)
    ),
    "MLP 4608, dropout, bf16": lambda: of(
        lambda: own.Mlp((4608,) * 4, nnx.Rngs(0), nnx.gelu, 0.2),
        own.squared, array((6000, 4608)), array((6000, 4608)), **BF16,
    ),
    "LSTM 640, bf16": lambda: of(
        lambda: own.Recurrent(8000, 640, nnx.Rngs(0), nnx.LSTMCell), own.next_token, ints(80, 65),
        **BF16,
    ),
}  # fmt: skip

TWELFTH = {
    # Decoders of several shapes.
    "decoder 1152, bf16, 3k, dots saved": lambda: decoder_of(
        5, 1152, 3072, 9, (4, 3072), config={"remat": "dots_saveable", "kv_heads": 3}
    ),
    "decoder 1792, scanned, lion": lambda: decoder_of(
        6, 1792, 4864, 14, (8, 1024), vocab=24000, optimizer=optax.lion(1e-4),
        config={"scan": True, "remat": "dots_with_no_batch_dims_saveable"},
    ),
    "decoder 640, f32, 768, all recomputed": lambda: decoder_of(
        6, 640, 1728, 10, (12, 768), vocab=20000, compute_dtype=None,
        config={"remat": "nothing_saveable"},
    ),
    "decoder 2816, 4 parts, adafactor": lambda: decoder_of(
        2, 2816, 7680, 22, (8, 1024), accumulate=4, optimizer=optax.adafactor(1e-3)
    ),
    "decoder 1024, 8k, window": lambda: decoder_of(
        4, 1024, 2816, 16, (1, 8192), config={"window": 2048, "period": 4}
    ),
    "decoder 768, tied words, momentum": lambda: decoder_of(
        6, 768, 2048, 12, (16, 512), vocab=48000, config={"tied": True},
        optimizer=optax.sgd(0.1, momentum=0.9),
    ),
    "experts 8 of 896, scanned": lambda: decoder_of(
        4, 896, 2432, 14, (10, 1024),
        config={"experts": 8, "chosen": 2, "capacity": 1.25, "scan": True},
    ),
    "experts 6 of 768, 16k words, f32": lambda: decoder_of(
        3, 768, 2048, 12, (8, 512), vocab=16000, compute_dtype=None,
        config={"experts": 6, "chosen": 2, "capacity": 1.25},
    ),
    # Other transformers.
    "GPT 512, f32, dropout, 1k": lambda: gpt(30000, 512, 8, 5, (10, 1024)),
    "rotary 768, nnx.scan, bf16": lambda: of(
        lambda: others.ScannedRotary(20000, 768, 12, 4, 2048, 7, nnx.Rngs(0)),
        others.causal_loss, ints(16, 769), **BF16,
    ),
    "encoder 640, f32, 320 long": lambda: of(
        lambda: own.Encoder(24000, 640, 10, 5, 3, nnx.Rngs(0)),
        own.classified, ints(32, 320), ints(32),
    ),
    "ViT 512, bf16, 240, lamb": lambda: vit(
        64, 240, 16, 512, 8, 6, optimizer=optax.lamb(1e-3), **BF16
    ),
    "ViT 640, f32, 4 parts": lambda: vit(64, 160, 16, 640, 10, 5, accumulate=4),
    "diffusion transformer 640, bf16": lambda: of(
        lambda: others.DiffusionTransformer(256, 16, 640, 10, 5, nnx.Rngs(0)),
        others.diffusion_loss, array((40, 256, 16)), array((40, 256, 16)), array((40,)), ints(40),
        **BF16,
    ),
    # Convolutions.
    "ResNet-50, bf16, 192, lion": lambda: images(
        lambda: own.ResNet((3, 4, 6, 3), nnx.Rngs(0)), 64, 192, optimizer=optax.lion(1e-4), **BF16
    ),
    "ResNet-26, f32, 128": lambda: images(
        lambda: own.ResNet((2, 2, 2, 2), nnx.Rngs(0)), 80, 128
    ),
    "VGG, bf16, 112": lambda: images(
        lambda: own.Vgg(((64, 1), (128, 2), (256, 2), (512, 2)), nnx.Rngs(0)), 64, 112, **BF16
    ),
    "wide ResNet 96, bf16": lambda: images(
        lambda: own.WideResNet(((96, 2), (192, 2), (384, 2)), nnx.Rngs(0)), 160, 32, **BF16
    ),
    "ConvNeXt 128, f32": lambda: images(
        lambda: own.ConvNext(128, 6, 1000, nnx.Rngs(0)), 48, 160
    ),
    "UNet 64, bf16": lambda: of(
        lambda: own.UNet(64, nnx.Rngs(0)),
        own.squared, array((24, 112, 112, 3)), array((24, 112, 112, 3)), **BF16,
    ),
    "autoencoder 48, f32": lambda: of(
        lambda: own.AutoEncoder((48, 96, 192), nnx.Rngs(0)),
        own.squared, array((32, 96, 96, 3)), array((32, 96, 96, 3)),
    ),
    # Plain networks.
    "MLP 2304, bf16, 2 parts": lambda: mlp(12288, (2304,) * 6, accumulate=2, **BF16),
    "MLP 1024, f32, adafactor": lambda: mlp(
        16384, (1024, 4096, 1024, 4096, 1024), optimizer=optax.adafactor(1e-3)
    ),
    "MLP 7168, bf16, lion": lambda: mlp(
        4096, (7168, 7168, 7168), optimizer=optax.lion(1e-4), **BF16
    ),
}  # fmt: skip

THIRTEENTH = {
    # Decoders of several shapes.
    "decoder 1280, GQA, 1k, lion": lambda: decoder_of(
        4, 1280, 3584, 20, (10, 1024), vocab=36000, optimizer=optax.lion(1e-4),
        config={"kv_heads": 5},
    ),
    "decoder 2304, scanned, recomputed": lambda: decoder_of(
        5, 2304, 6144, 18, (6, 1024), vocab=24000,
        config={"scan": True, "remat": "nothing_saveable"},
    ),
    "decoder 768, f32, 640, dots saved": lambda: decoder_of(
        4, 768, 2048, 12, (12, 640), vocab=18000, compute_dtype=None,
        config={"remat": "dots_saveable"},
    ),
    "decoder 1536, 3 parts, momentum": lambda: decoder_of(
        4, 1536, 4096, 12, (9, 1024), vocab=20000, accumulate=3,
        optimizer=optax.sgd(0.1, momentum=0.9),
    ),
    "decoder 1280, 6k, window": lambda: decoder_of(
        3, 1280, 3456, 10, (2, 6144), vocab=20000, config={"window": 1024, "period": 3}
    ),
    "decoder 640, scanned, adafactor, 320 long": lambda: decoder_of(
        8, 640, 1792, 10, (40, 320), vocab=24000, optimizer=optax.adafactor(1e-3),
        config={"scan": True},
    ),
    "decoder 896, f32, scanned": lambda: decoder_of(
        5, 896, 2432, 14, (8, 512), vocab=16000, compute_dtype=None, config={"scan": True}
    ),
    "experts 10 of 768, top 2": lambda: decoder_of(
        3, 768, 2048, 12, (12, 768), vocab=20000,
        config={"experts": 10, "chosen": 2, "capacity": 1.25},
    ),
    "experts 6 of 1152, top 1, scanned": lambda: decoder_of(
        4, 1152, 3072, 9, (8, 1024), vocab=16000,
        config={"experts": 6, "chosen": 1, "capacity": 1.5, "scan": True},
    ),
    # Other transformers.
    "GPT 896, bf16, dropout, lamb": lambda: gpt(
        36000, 896, 14, 4, (10, 768), optimizer=optax.lamb(1e-3), **BF16
    ),
    "encoder 512, bf16, 448 long": lambda: of(
        lambda: own.Encoder(20000, 512, 8, 5, 4, nnx.Rngs(0)),
        own.classified, ints(32, 448), ints(32), **BF16,
    ),
    "ViT 448, f32, 176": lambda: vit(48, 176, 16, 448, 7, 5),
    "ViT 832, bf16, 224, momentum": lambda: vit(
        48, 224, 16, 832, 13, 4, optimizer=optax.sgd(0.1, momentum=0.9), **BF16
    ),
    "mixer 640 over 256, bf16": lambda: of(
        lambda: own.Mixer(256, 640, 4, nnx.Rngs(0)),
        own.squared, array((48, 256, 640)), array((48, 256, 640)), **BF16,
    ),
    # Convolutions.
    "ResNet-50, f32, 160, momentum": lambda: images(
        lambda: own.ResNet((3, 4, 6, 3), nnx.Rngs(0)), 48, 160,
        optimizer=optax.sgd(0.1, momentum=0.9),
    ),
    "ResNet-18, bf16, 192": lambda: images(
        lambda: others.BasicResNet((2, 2, 2, 2), nnx.Rngs(0)), 96, 192, **BF16
    ),
    "wide ResNet 128, f32": lambda: images(
        lambda: own.WideResNet(((128, 1), (256, 2), (512, 1)), nnx.Rngs(0)), 96, 32
    ),
    "VGG, f32, 80": lambda: images(
        lambda: own.Vgg(((64, 1), (128, 1), (256, 2), (512, 2)), nnx.Rngs(0)), 48, 80
    ),
    "ConvNeXt 192, bf16, 160": lambda: images(
        lambda: own.ConvNext(192, 5, 1000, nnx.Rngs(0)), 64, 160, **BF16
    ),
    "autoencoder 96, bf16": lambda: of(
        lambda: own.AutoEncoder((96, 192, 384), nnx.Rngs(0)),
        own.squared, array((40, 96, 96, 3)), array((40, 96, 96, 3)), **BF16,
    ),
    # Plain networks.
    "MLP 3072, bf16, lamb": lambda: mlp(
        8192, (3072,) * 5, optimizer=optax.lamb(1e-3), **BF16
    ),
    "MLP 1792, f32, 2 parts": lambda: mlp(12288, (1792,) * 5, accumulate=2),
    "MLP 2048 and 8192, bf16, momentum": lambda: mlp(
        8192, (2048, 8192, 2048, 8192, 2048), optimizer=optax.sgd(0.1, momentum=0.9), **BF16
    ),
}  # fmt: skip

ROUNDS = {
    "first": recipes.FRESH,
    "second": recipes.HELD_OUT,
    "third": recipes.CONVS,
    "fourth": recipes.FOURTH,
    "sixth": SIXTH,
    "seventh": SEVENTH,
    "eighth": EIGHTH,
    "ninth": NINTH,
    "tenth": TENTH,
    "eleventh": ELEVENTH,
    "twelfth": TWELFTH,
    "thirteenth": THIRTEENTH,
}
RECIPES = recipes.RECIPES.copy()
for found in list(ROUNDS.values())[4:]:
    RECIPES |= found
