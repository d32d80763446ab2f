"""Which memory an array is in: the device's own, or the pinned memory of its host."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

HOST = "pinned_host"


def in_host_memory(sharding: Any) -> Any:
    """Returns a sharding of the same shards in the memory of the hosts."""
    return NamedSharding(sharding.mesh, sharding.spec, memory_kind=HOST)


def is_in_host_memory(sharding: Any) -> bool:
    """Returns whether arrays with this sharding are in the memory of the hosts."""
    return getattr(sharding, "memory_kind", None) == HOST


def on_device(x: Any) -> Any:
    """Returns an array in device memory, which programs compute with; for use while tracing."""
    return jax.device_put(x, jax.memory.Space.Device) if _is_host(x) else x


def on_host(x: Any) -> Any:
    """Returns an array in the memory of the hosts; for use while tracing."""
    return x if _is_host(x) else jax.device_put(x, jax.memory.Space.Host)


def _is_host(x: Any) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Host
