"""Tracing that stays linear in the size of a model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.core import Tracer

from .private import tracer_searches

_LOCK = threading.Lock()
_inside = 0
_original: Any = None


@contextlib.contextmanager
def quick_tracing() -> Iterator[None]:
    """Keeps JAX from searching the program so far each time a tracer is asked for its sharding.

    A tracer has none, and says so by an `AttributeError`. Before version 0.11, JAX explains there
    where the tracer came from, which takes as long as the program is. `nnx.Rngs` asks whenever it
    gives a key, so that a model of 10,000 layers took far more than ten minutes to trace. Within this context the
    error is as short as in later versions; several threads may be in it at once.
    """
    global _inside, _original
    with _LOCK:
        _inside += 1
        if _inside == 1 and tracer_searches():
            _original = Tracer.sharding
            Tracer.sharding = property(_no_sharding)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if _inside == 0 and _original is not None:
                Tracer.sharding = _original  # pyright: ignore[reportAttributeAccessIssue]
                _original = None


def _no_sharding(tracer: Tracer) -> Any:
    what = f"traced array of type {jax.typeof(tracer)}"
    raise AttributeError(f"The 'sharding' attribute is not available on {what}.")
