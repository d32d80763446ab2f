"""What a recipe chooses for the code that it traces, read where that code knows no recipe."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax


# Compared by identity: JAX's caches then hold what was traced with one of them apart from the rest,
# and a jitted function of the user's reads its choices each time that a step is traced.
@dataclasses.dataclass(slots=True, eq=False)
class Chosen:
    """One recipe's choices while its step is traced, and whether they were read.

    Attributes:
        loss_chunks: in how many chunks `models.head_loss` computes a loss.
        used: whether a loss was computed with it.
    """

    loss_chunks: int
    used: bool = False


_chosen: Any = jax.make_user_context(None)


@contextlib.contextmanager
def choosing(chosen: Chosen) -> Iterator[None]:
    """Makes these the choices of what is traced inside."""
    with _chosen(chosen):
        yield


def chosen_chunks() -> int:
    """Returns the chunks that the recipe being traced asks for; 1 without one."""
    chosen = _chosen.value
    if chosen is None:
        return 1
    chosen.used = True
    return chosen.loss_chunks


@dataclasses.dataclass(slots=True, eq=False)
class Seen:
    """What was found while a step was traced.

    Attributes:
        pipelined: whether a pipeline ran its stages along an axis.
    """

    pipelined: bool = False


_seen: Any = jax.make_user_context(None)


class _Enough(ValueError):
    """What was asked for is found."""


@contextlib.contextmanager
def seeing() -> Iterator[Seen]:
    """Yields what is found in what is traced inside; the trace ends, by a ValueError, where it is."""
    seen = Seen()
    with _seen(seen):
        yield seen


def see_pipeline() -> None:
    """Notes that a pipeline is being traced, for whoever asked."""
    if _seen.value is not None:
        _seen.value.pipelined = True
        raise _Enough("a pipeline was found")
