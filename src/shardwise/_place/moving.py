"""Moves arrays from the shards that they are in to those of a layout, as planned."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._base import show_bytes
from .._layout import Layout
from .._mesh import show_mesh, show_spec
from .._nnx import array_bytes
from .parts import put_anywhere
from .pieces import Box, Boxes, Exchange, Piece, place_of
from .planned_moves import Row, device_ids, plan_rows


def move_all(
    arrays: Sequence[Any], layout: Layout, *, limit: int | None, donate: bool
) -> list[jax.Array]:
    """Returns arrays in the shards of a layout, moved one after the other as planned.

    Args:
        arrays: the arrays, in the order of the layout's leaves.
        layout: their layout, on a mesh of devices.
        limit: the most bytes that a device may hold meanwhile.
        donate: whether the old arrays are freed as they are moved.

    Raises:
        ValueError: the move needs more than the limit.
    """
    mesh = layout.mesh
    assert isinstance(mesh, Mesh)
    if not all(
        each.is_fully_addressable
        for each in (NamedSharding(mesh, P()), *(a for a in arrays if isinstance(a, jax.Array)))
    ):
        return _move_by_program(arrays, layout, mesh, limit, donate)
    made: dict[int, jax.Array] = {}
    rows: list[Row] = []
    places: dict[int, int] = {}
    known: dict[Any, Boxes] = {}
    for number, (array, leaf) in enumerate(zip(arrays, layout.leaves, strict=True)):
        sharding = NamedSharding(mesh, leaf.spec)
        if not isinstance(array, jax.Array) or jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            made[number] = put_anywhere(array, sharding)  # on the host, or a few words
            continue
        sides = []
        for each in (array.sharding, sharding):
            key = (each, leaf.shape)
            known[key] = known.get(key) or _boxes(each, leaf.shape)
            sides.append(known[key])
        specs = (_show(array.sharding), show_spec(leaf.spec))
        rows.append(Row(leaf.path, leaf.shape, leaf.dtype, leaf.bytes, specs, *sides))
        places[id(rows[-1])] = number
    place = place_of(mesh, device_ids(mesh))
    plan, order = plan_rows(
        rows, place, ("the arrays", show_mesh(mesh)), limit=limit, keep=not donate
    )
    for row, exchange in order:
        number = places[id(row)]
        spec = layout.leaves[number].spec
        made[number] = move(arrays[number], spec, mesh, exchange, plan.chunk_bytes, keep=not donate)
    return [made[number] for number in range(len(arrays))]


def _move_by_program(
    arrays: Sequence[Any], layout: Layout, mesh: Mesh, limit: int | None, donate: bool
) -> list[jax.Array]:
    """Returns arrays that span processes in the shards of a layout, one program for each.

    No process can copy a shard of another one, so XLA's collectives move them. What that needs is
    what each compiled program says.
    """
    found: dict[int, Any] = {}
    programs: dict[Any, Any] = {}
    moves = []
    resident = sum(_local_bytes(array) for array in arrays)
    for number, (array, leaf) in enumerate(zip(arrays, layout.leaves, strict=True)):
        sharding = NamedSharding(mesh, leaf.spec)
        if not isinstance(array, jax.Array) or array.is_fully_addressable:
            found[number] = put_anywhere(array, sharding)
            continue
        key = (array.sharding, sharding, array.shape, array.dtype)
        if key not in programs:
            programs[key] = jax.jit(_same, out_shardings=sharding).lower(array).compile()
        memory = programs[key].memory_analysis()
        new, temporary = memory.output_size_in_bytes, memory.temp_size_in_bytes
        freed = _local_bytes(array) if donate else 0
        moves.append((new - freed, new + temporary, number, programs[key]))
    # First what frees more than it takes; nothing moves unless all of it can.
    moves.sort(key=lambda row: (row[0] > 0, row[1] if row[0] <= 0 else row[0] - row[1], row[2]))
    for change, needed, number, _ in moves:
        if limit is not None and resident + needed > limit:
            raise ValueError(
                f"moving {layout.leaves[number].path} needs {show_bytes(resident + needed)} on one "
                f"device (compiled), but the limit is {show_bytes(limit)}"
            )
        resident += change
    for _, _, number, program in moves:
        found[number] = jax.block_until_ready(program(arrays[number]))
        if donate:
            arrays[number].delete()
    return [found[number] for number in range(len(arrays))]


def _local_bytes(array: Any) -> int:
    """Returns the bytes of an array on one of its devices."""
    if not isinstance(array, jax.Array):
        return 0
    return array_bytes(array.sharding.shard_shape(array.shape), array.dtype)


def _same(array: jax.Array) -> jax.Array:
    return array


def _boxes(sharding: Any, shape: tuple[int, ...]) -> Boxes:
    """Returns the part of an array of this shape that each device holds."""
    return {
        device.id: tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }


def _show(sharding: Any) -> str:
    return show_spec(sharding.spec) if isinstance(sharding, NamedSharding) else "one device"


def move(
    array: jax.Array, spec: P, mesh: Mesh, exchange: Exchange, chunk: int, *, keep: bool
) -> jax.Array:
    """Returns an array in its new shards, copied piece by piece.

    Args:
        array: the array, all of whose shards are on devices of this process.
        spec: its new spec.
        mesh: its new mesh.
        exchange: the pieces.
        chunk: bytes beyond which a piece is cut up.
        keep: whether the old shards stay; if not, they are freed, but for those that are reused.
    """
    shards = {shard.device.id: shard.data for shard in array.addressable_shards}
    devices = {device.id: device for device in mesh.devices.flat}
    made: dict[int, jax.Array] = {device: shards[device] for device in exchange.aliased}
    for step in exchange.steps(chunk):
        for piece in step:
            _copy(piece, shards, devices, made, exchange, chunk)
        # Wait, so that the pieces of one step are freed before the next ones are made.
        jax.block_until_ready([made[piece.target] for piece in step])
    sharding = NamedSharding(mesh, spec)
    result = jax.make_array_from_single_device_arrays(
        array.shape, sharding, [made[device.id] for device in mesh.devices.flat]
    )
    if not keep:
        for device, shard in shards.items():
            if device not in exchange.aliased:
                shard.delete()
    return result


def _copy(
    piece: Piece,
    shards: dict[int, jax.Array],
    devices: Any,
    made: Any,
    exchange: Exchange,
    chunk: int,
) -> None:
    held, target = exchange.old[piece.source], devices[piece.target]
    source = shards[piece.source]
    part = (
        source if piece.box == held else _slice(source, _start(piece.box, held), _shape(piece.box))
    )
    if piece.source != piece.target:
        part = jax.device_put(part, target)
    if exchange.is_alone(piece, chunk):
        # A full copy of a shard that another array still has would be freed with it.
        made[piece.target] = part if part is not source else jnp.copy(part)
        return
    box = exchange.new[piece.target]
    if piece.target not in made:
        made[piece.target] = jnp.zeros(_shape(box), source.dtype, device=target)
    made[piece.target] = _write(made[piece.target], part, _start(piece.box, box))


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _start(inner: Box, outer: Box) -> tuple[int, ...]:
    return tuple(a - b for (a, _), (b, _) in zip(inner, outer, strict=True))


@functools.partial(jax.jit, static_argnames="shape")
def _slice(array: jax.Array, start: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(array, start, shape)


@functools.partial(jax.jit, donate_argnums=0)
def _write(array: jax.Array, part: jax.Array, start: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(array, part, start)
