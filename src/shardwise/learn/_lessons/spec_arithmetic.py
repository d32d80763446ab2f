"""Exercises of lesson 2: PartitionSpec arithmetic, checked against arrays on eight devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._mesh import mesh as make_mesh
from .._exercise import Case, Exercise

_MESHES = ("data=2,model=4", "data=8", "replica=2,data=2,model=2", "data=1,model=8")
_DTYPES = ("float32", "bfloat16", "int8", "float16")


def _mesh(axes: str) -> Any:
    return make_mesh(axes, on="cpu:8")


def _placed(shape: tuple[int, ...], spec: P, mesh: Mesh, dtype: Any = "float32") -> Any:
    """Returns an array that lies so, or None where JAX refuses."""
    try:
        sharding = NamedSharding(mesh, spec)
        # Asked first, since jax 0.12 prints a line of its own where device_put refuses.
        sharding.shard_shape(shape)
        sharding.check_compatible_aval(shape)
    except Exception:  # JAX has a type of its own for each reason, and exports none
        return None
    return jax.device_put(np.zeros(shape, dtype), sharding)


def _random(seed: int, count: int, *, divides: bool) -> Iterator[tuple[tuple[int, ...], P, Mesh]]:
    """Yields shapes, specs and meshes; each axis is used at most once."""
    draw = np.random.default_rng(seed)
    for i in range(count):
        mesh = _mesh(_MESHES[i % len(_MESHES)])
        ndim = int(draw.integers(1, 4))
        axes: list[list[str]] = [[] for _ in range(ndim)]
        for axis in draw.permutation(mesh.axis_names):
            dim = int(draw.integers(0, ndim + 1))
            if dim < ndim:
                axes[dim].append(str(axis))
        shape = []
        for entry in axes:
            ways = math.prod(mesh.shape[axis] for axis in entry)
            shape.append(int(draw.integers(1, 5)) * (ways if divides else int(draw.integers(1, 5))))
        yield tuple(shape), P(*(tuple(e) if len(e) > 1 else (e or [None])[0] for e in axes)), mesh


def _shard_shape_cases() -> Iterator[Case]:
    mesh = _mesh("data=2,model=4")
    named: list[tuple[tuple[int, ...], P, str]] = [
        ((8, 16), P(None, "model"), ""),
        ((8, 16), P("data", "model"), ""),
        ((8, 16), P("data"), "a dim that the spec has no entry for is whole"),
        ((8, 16), P(), ""),
        ((), P(), "a scalar has no dims: its shard is a scalar"),
        ((16, 3), P(("data", "model")), "two axes on one dim split it as often as their product"),
        ((6, 16), P("model"), "6 rows cannot be split 4 ways: None"),
        ((4, 16), P(("data", "model")), "4 rows cannot be split 2 x 4 ways: None"),
    ]
    for shape, spec, hint in named:
        yield _shard_shape_case(shape, spec, mesh, hint)
    random = itertools.chain(_random(0, 8, divides=True), _random(1, 8, divides=False))
    for shape, spec, mesh in random:
        yield _shard_shape_case(shape, spec, mesh)


def _shard_shape_case(shape: tuple[int, ...], spec: P, mesh: Mesh, hint: str = "") -> Case:
    array = _placed(shape, spec, mesh)
    shard = None if array is None else array.addressable_shards[0].data.shape
    return Case((shape, spec, mesh), shard, hint=hint)


def _device_bytes_cases() -> Iterator[Case]:
    mesh = _mesh("data=2,model=4")
    named = [
        ((8, 16), "float32", P(None, "model"), mesh),
        ((8, 16), "bfloat16", P(None, "model"), mesh),
        ((8, 16), "float32", P(), mesh),
        ((), "int8", P(), mesh),
    ]
    random = (
        (shape, _DTYPES[i % 4], spec, mesh)
        for i, (shape, spec, mesh) in enumerate(_random(2, 12, divides=True))
    )
    for shape, dtype, spec, mesh in itertools.chain(named, random):
        array = _placed(shape, spec, mesh, jax.numpy.dtype(dtype))
        yield Case((shape, dtype, spec, mesh), array.addressable_shards[0].data.nbytes)


def _copies_cases() -> Iterator[Case]:
    mesh = _mesh("data=2,model=4")
    named = [P(), P("data"), P(None, "model"), P("model", "data"), P(("model", "data"))]
    shapes = [(8,) * max(1, len(spec)) for spec in named]
    given = zip(shapes, named, itertools.repeat(mesh))
    for shape, spec, mesh in itertools.chain(given, _random(3, 8, divides=True)):
        held = _placed(shape, spec, mesh).addressable_shards
        yield Case((spec, mesh), sum(shard.index == held[0].index for shard in held))


def _held_cases() -> Iterator[Case]:
    mesh = _mesh("data=2,model=4")
    named = [
        ((8, 16), P("data", "model"), mesh),
        ((8, 16), P(None, "model"), mesh),
        ((16, 2), P(("data", "model")), mesh),
        ((16, 2), P(("model", "data")), mesh),
        ((), P(), mesh),
    ]
    for shape, spec, mesh in itertools.chain(named, _random(4, 10, divides=True)):
        found = NamedSharding(mesh, spec).devices_indices_map(shape)
        for at in list(np.ndindex(mesh.devices.shape))[1::3]:
            slices = found[mesh.devices[at]]
            expected = tuple(
                s.indices(size)[:2] for s, size in zip(slices or (), shape, strict=True)
            )
            where = dict(zip(mesh.axis_names, at, strict=True))
            swapped = any(isinstance(entry, tuple) for entry in spec)
            hint = "of two axes on one dim the first is the major one" if swapped else ""
            yield Case((shape, spec, mesh, where), expected, hint=hint)


def _first_spec_cases() -> Iterator[Case]:
    mesh = _mesh("data=2,model=4")
    column, row, both = P(None, "model"), P("model"), P("data", "model")
    given: list[tuple[tuple[int, ...], list[P], str]] = [
        ((8, 16), [column, row], ""),
        ((8, 6), [column, row], "6 cannot be split 4 ways, 8 can"),
        ((6, 10), [both, column, P("data")], ""),
        ((3, 5), [both, column, row], "none of them divides: None"),
        ((16,), [column, row], "a spec of two entries is too long for an array of one dim"),
        ((8, 8), [P("modle"), column], "an axis that the mesh has not cannot be used"),
        ((8, 8), [P("data", "data"), row], "an axis splits one dim once"),
        ((8, 8), [P(("data", "model")), row], ""),
        ((4, 8), [P(("data", "model")), row], "4 cannot be split 2 x 4 ways"),
        ((), [row, P()], ""),
        ((8, 8), [], "no candidates: None"),
    ]
    for shape, specs, hint in given:
        fits = (spec for spec in specs if _placed(shape, spec, mesh) is not None)
        yield Case((shape, specs, mesh), next(fits, None), hint=hint)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "shard_shape",
        "shape, spec, mesh",
        "Returns the shape of what one device holds of an array, as a tuple of ints; None if a dim "
        "does not divide evenly.",
        "shard_shape((8, 16), P(None, 'model'), sw.mesh('data=2,model=4', on='cpu:8'))\n  → (8, 4)",
        "an entry is None, one axis, or a tuple of axes; mesh.shape['model'] is an axis's size",
        _shard_shape_cases,
    ),
    Exercise(
        "device_bytes",
        "shape, dtype, spec, mesh",
        "Returns the bytes that one device holds of an array; every dim divides. `dtype` is a "
        "name such as 'bfloat16'.",
        "device_bytes((8, 16), 'bfloat16', P(None, 'model'), sw.mesh('data=2,model=4', on='cpu:8'))"
        "\n  → 64",
        "the shard's size times jnp.dtype(dtype).itemsize; a scalar has one number",
        _device_bytes_cases,
    ),
    Exercise(
        "copies",
        "spec, mesh",
        "Returns how many devices hold the same shard of an array with this spec.",
        "copies(P(None, 'model'), sw.mesh('data=2,model=4', on='cpu:8'))\n  → 2",
        "devices that differ only along axes that the spec does not name hold the same",
        _copies_cases,
    ),
    Exercise(
        "held",
        "shape, spec, mesh, device",
        "Returns which part of an array the device at the given coordinates holds: for each dim "
        "the pair (start, stop). `device` maps each axis to a number.",
        "held((8, 16), P('data', 'model'), sw.mesh('data=2,model=4', on='cpu:8'), "
        "{'data': 1, 'model': 2})\n  → ((4, 8), (8, 12))",
        "along one axis, device i holds the i-th piece; a dim without an axis is (0, size)",
        _held_cases,
    ),
    Exercise(
        "first_spec",
        "shape, specs, mesh",
        "Returns the first of the candidate specs that JAX accepts for an array of this shape, or "
        "None. It refuses an axis that the mesh has not, an axis that is used twice, more entries "
        "than dims, and a dim that does not divide.",
        "first_spec((8, 6), [P(None, 'model'), P('model')], sw.mesh('data=2,model=4', on='cpu:8'))"
        "\n  → P('model')",
        "try the candidates in order, each against all four reasons",
        _first_spec_cases,
    ),
)
