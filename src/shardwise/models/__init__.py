"""Flax NNX models that know nothing about meshes: their dims have names, and a layout maps them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._config import Config as Config
from ._families import config_from_hf as config_from_hf
from ._families import config_to_hf as config_to_hf
from ._families import weight_names as weight_names
from ._published import CONFIGS as CONFIGS

if TYPE_CHECKING:
    from ._decoder import Decoder as Decoder
    from ._decoder import next_token_loss as next_token_loss
    from ._generate import generate as generate
    from ._head_loss import head_loss as head_loss


def __getattr__(name: str) -> Any:
    # The configs load without Flax, so that shell completion of their names is fast.
    if name not in ("Decoder", "generate", "head_loss", "next_token_loss"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import _decoder, _generate

    return getattr(_generate if name == "generate" else _decoder, name)
