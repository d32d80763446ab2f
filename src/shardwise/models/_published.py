"""Published decoders by name, with scanned blocks: they are compiled more often than tuned."""

from __future__ import annotations

from ._config import Config


def _llama3(layers: int, width: int, hidden: int, heads: int) -> Config:
    return Config(
        layers=layers,
        width=width,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        vocab=128_256,
        rope_theta=500_000.0,
        norm_eps=1e-5,
        scan=True,
    )


def _qwen3(layers: int, width: int, hidden: int, heads: int, *, tied: bool = False) -> Config:
    return Config(
        layers=layers,
        width=width,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        depth=128,
        vocab=151_936,
        tied=tied,
        rope_theta=1_000_000.0,
        qk_norm=True,
        scan=True,
    )


def _gemma3(
    layers: int,
    width: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    *,
    depth: int = 256,
    query_scale: float = 256**-0.5,
    window: int = 1024,
    rope_scale: float = 8.0,
    vocab: int = 262_208,
) -> Config:
    return Config(
        layers=layers,
        width=width,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        depth=depth,
        vocab=vocab,
        tied=True,
        rope_theta=1_000_000.0,
        rope_scale=rope_scale,
        window=window,
        period=6,
        local_theta=10_000.0,
        query_scale=query_scale,
        qk_norm=True,
        post_norms=True,
        offset_norms=True,
        scale_embed=True,
        activation="gelu",
        scan=True,
    )


CONFIGS: dict[str, Config] = {
    # Llama 3 as first published, without the position scaling of 3.1.
    "llama3-8b": _llama3(32, 4096, 14_336, 32),
    "llama3-70b": _llama3(80, 8192, 28_672, 64),
    "llama3-405b": _llama3(126, 16_384, 53_248, 128),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12_288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17_408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25_600, 64),
    # The text models only, without vision.
    "gemma3-1b": _gemma3(26, 1152, 6912, 4, 1, window=512, rope_scale=1.0, vocab=262_144),
    "gemma3-4b": _gemma3(34, 2560, 10_240, 8, 4),
    "gemma3-12b": _gemma3(48, 3840, 15_360, 16, 8),
    "gemma3-27b": _gemma3(62, 5376, 21_504, 32, 16, depth=128, query_scale=168**-0.5),
    "mixtral-8x7b": Config(
        layers=32,
        width=4096,
        hidden=14_336,
        heads=32,
        kv_heads=8,
        vocab=32_000,
        rope_theta=1_000_000.0,
        norm_eps=1e-5,
        experts=8,
        chosen=2,
        scan=True,
    ),
}
