"""Flax NNX models that know nothing about meshes: their dims have names, and a layout maps them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._config import Config as Config
from ._published import CONFIGS as CONFIGS

if TYPE_CHECKING:
    from ._decoder import Decoder as Decoder
    from ._decoder import next_token_loss as next_token_loss
    from ._head_loss import head_loss as head_loss


def __getattr__(name: str) -> Any:
    # The configs load without Flax, so that shell completion of their names is fast.
    if name not in ("Decoder", "head_loss", "next_token_loss"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import _decoder

    return getattr(_decoder, name)
