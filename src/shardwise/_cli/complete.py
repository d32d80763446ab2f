"""Shell completion of chips, published shapes, strategies and policies; fast, as JAX is not imported."""

from __future__ import annotations

from collections.abc import Iterable

from .._chips import CHIPS

STRATEGIES = (
    *("dp", "fsdp", "zero1", "zero2", "expert", "sequence", "tensor", "pipeline"),
    *(
        "fsdp+tensor",
        "zero1+tensor",
        "zero2+tensor",
        "fsdp+pipeline",
        "fsdp+expert",
        "fsdp+sequence",
    ),
)
OPTIMIZERS = ("adamw", "adam", "adafactor", "lion", "sgd")
POLICIES = (
    "none",
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)


def complete_devices(incomplete: str) -> list[str]:
    """Returns values of `--on`: each chip comes with an example of its topology."""
    chips = []
    for chip in CHIPS.values():
        size = "8" if chip.platform == "gpu" else "4"
        chips.append(f"{chip.name}:{'x'.join([size] * chip.dims)}")
    return _begin(["here", "none", "cpu:8", *chips], incomplete)


def complete_target(incomplete: str) -> list[str]:
    """Returns the published shapes; files and modules are left to the user."""
    from ..models import CONFIGS

    return _begin(CONFIGS, incomplete)


def complete_strategy(incomplete: str) -> list[str]:
    """Returns the strategies that `--strategy` knows by name."""
    return _begin([*STRATEGIES, "best"], incomplete)


def complete_policy(incomplete: str) -> list[str]:
    """Returns the most common values of `--remat`."""
    return _begin(POLICIES, incomplete)


def complete_optimizer(incomplete: str) -> list[str]:
    """Returns the optimizers that `--optimizer` knows by name."""
    return _begin(OPTIMIZERS, incomplete)


def _begin(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
