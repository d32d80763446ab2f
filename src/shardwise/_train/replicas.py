"""Replicas: checks that devices with the same shard of an array have the same values.

Nothing in JAX keeps them equal: a process with a different learning rate, or a faulty device,
changes its own replica, and the run continues with models that drift apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._base import public
from .._checkpoint import words_of
from .._jax import on_device
from .._mesh import spec_axes
from .._place import own_mesh
from .._processes import odd_ones
from .._step import TrainState, named_arrays, show_array


@public
class ReplicasDiffer(RuntimeError):
    """Devices that must hold the same values hold different ones.

    Attributes:
        path: the first array that differs.
        devices: the devices whose replica differs from the others.
    """

    path: str = ""
    devices: tuple[Any, ...] = ()


class Replicas:
    """Compares the replicas of a state with one small program that is compiled once."""

    def __init__(self, state: TrainState):
        """Picks the arrays that have more than one replica."""
        arrays = _replicated(state)
        self._names = list(arrays)
        shardings: list[Any] = [x.sharding for x in arrays.values()]
        self._mesh = state.step.sharding.mesh
        self._specs = tuple(sharding.spec for sharding in shardings)
        self._unused = [_unused(spec, self._mesh) for spec in self._specs]
        compare = self._on_mesh(self._compare, P())
        self._differ = jax.jit(lambda *arrays: compare(*map(on_device, arrays)))

    def check(self, state: TrainState, step: int) -> None:
        """Waits for the devices, and compares the replicas.

        Raises:
            ReplicasDiffer: two replicas differ; raised on all processes.
        """
        if not self._names:
            return
        with own_mesh(self._mesh):
            values = list(_replicated(state).values())
            wrong = np.flatnonzero(np.asarray(self._differ(*values)))
            if not wrong.size:
                return
            first = int(wrong[0])
            odd = self._odd_devices(first, values[first])
        shown = ", ".join(f"{d.device_kind} {d.id} of process {d.process_index}" for d in odd[:4])
        more = ", …" if len(odd) > 4 else ""
        rest = f" (and {wrong.size - 1} more arrays)" if wrong.size > 1 else ""
        error = ReplicasDiffer(
            f"the replicas of {self._names[first]}{rest} differ after step {step}: {shown}{more} "
            f"{'have' if len(odd) > 1 else 'has'} different values from the other devices"
        )
        error.path, error.devices = self._names[first], odd
        raise error

    def _compare(self, *parts: jax.Array) -> jax.Array:
        hashes = [_part_hash(part) for part in parts]
        found: list[Any] = [None] * len(parts)
        for axes in set(self._unused):
            own = [i for i, unused in enumerate(self._unused) if unused == axes]
            mine = jnp.stack([hashes[i] for i in own])
            differ = jax.lax.pmax(mine, axes) != jax.lax.pmin(mine, axes)
            for place, i in enumerate(own):
                found[i] = differ[place]
        every = jnp.stack(found).astype(jnp.int32)
        return jax.lax.pmax(every, self._mesh.axis_names)

    def _on_mesh(self, body: Any, out: P) -> Any:
        return jax.shard_map(
            body, mesh=self._mesh, in_specs=self._specs, out_specs=out, check_vma=False
        )

    def _odd_devices(self, index: int, array: jax.Array) -> tuple[Any, ...]:
        """Returns the devices whose shard differs from most of its replicas."""
        every = P(self._mesh.axis_names)
        each = jax.shard_map(
            lambda part: _part_hash(part)[None],
            mesh=self._mesh,
            in_specs=self._specs[index],
            out_specs=every,
            check_vma=False,
        )
        hashed = jax.jit(lambda x: each(on_device(x)), out_shardings=NamedSharding(self._mesh, P()))
        hashes = hashed(array)
        by_device = dict(zip(self._mesh.devices.flat, np.asarray(hashes).tolist(), strict=True))
        places: dict[str, list[Any]] = {}
        for device, part in array.sharding.devices_indices_map(array.shape).items():
            places.setdefault(str(part), []).append(device)
        return tuple(
            devices[i]
            for devices in places.values()
            for i in odd_ones([by_device[d] for d in devices])
        )


def _replicated(state: TrainState) -> Mapping[str, jax.Array]:
    found = {}
    for name, x in named_arrays(state).items():
        sharding: Any = x.sharding
        if x.size and _unused(sharding.spec, sharding.mesh):
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            found[show_array(name)] = jax.random.key_data(x) if is_key else x
    return found


def _unused(spec: P, mesh: Any) -> tuple[str, ...]:
    used = set(itertools.chain(*spec_axes(spec)))
    return tuple(axis for axis in mesh.axis_names if axis not in used and mesh.shape[axis] > 1)


def _part_hash(part: jax.Array) -> jax.Array:
    """Returns a hash of one device's shard: each word is mixed with its position, then summed."""
    words = jnp.concatenate([word.reshape(-1) for word in words_of(part)])
    mixed = words ^ (jnp.arange(words.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9))
    for shift, odd in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(odd)
    return jax.lax.bitcast_convert_type(mixed.sum(dtype=jnp.uint32), jnp.int32)
