"""Placing: initialises a model directly in its shards, or moves one to a layout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from .._base import either, public
from .._check import check, matched
from .._jax import jaxpr_as_fun, keep_outputs
from .._layout import Layout, require_layout
from .._mesh import show_mesh
from .._nnx import AbstractModel, abstract_model, keyed_leaves
from .moving import move_all
from .parts import put_anywhere, run_in_parts

T = TypeVar("T")


@public
def init(make: Callable[[], nnx.Module], layout: Layout) -> nnx.Module:
    """Returns the model that `make` builds, initialised directly in its shards.

    The function is traced, and each leaf is computed under `jax.jit` with its sharding as the
    output sharding: no device ever holds a full copy of a sharded leaf. Every mesh gets the same
    random bits, and values that agree to rounding, since XLA fuses and vectorises each program in
    its own way. (The exception is an initialiser that is not elementwise in its random bits, such
    as an orthogonal one or one that sums over a dim: XLA may gather it.)

    Args:
        make: a function without arguments that returns the model.
        layout: its layout, on a mesh of available devices.

    Raises:
        LayoutError: the layout has errors, or belongs to another model; nothing is allocated.

    Example:
        >>> import shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        >>> layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), sw.fsdp("data", min_bytes=0))
        >>> model = sw.init(make, layout)
        >>> model.kernel.addressable_shards[0].data.shape
        (16, 4)
    """
    mesh = require_devices(layout)
    if isinstance(make, nnx.Module) or not callable(make):
        raise ValueError(
            f"init needs a function without arguments that builds the model, got "
            f"{type(make).__name__}: use sw.shard for a model that already has arrays"
        )
    abstract = abstract_model(make, mesh)
    return nnx.merge(abstract.graphdef, initialise(abstract, matched(layout, abstract.state)))


def initialise(model: AbstractModel, layout: Layout) -> Any:
    """Returns the state of a traced factory, each array computed in its shards.

    Args:
        model: the abstract model of a factory.
        layout: its layout as returned by `matched`, without errors, on a mesh of devices.
    """
    mesh = layout.mesh
    assert isinstance(mesh, Mesh)
    # A factory that names axes was traced for one axis type, and must run with the same.
    own = _with_types(mesh, AxisType.Auto if model.mesh is None else model.mesh.axis_types[0])
    shardings = [NamedSharding(own, leaf.spec) for leaf in layout.leaves]
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        if model.mesh is None:
            arrays = run_in_parts(model.program, shardings)
        else:
            with jax.set_mesh(own):
                arrays = jax.jit(jaxpr_as_fun(model.program), out_shardings=shardings)()
    if mesh != own:
        arrays = jax.device_put(arrays, [NamedSharding(mesh, leaf.spec) for leaf in layout.leaves])
    return jax.tree.unflatten(layout.treedef, arrays)


def initialise_some(
    model: AbstractModel, layout: Layout, numbers: Sequence[int]
) -> dict[int, jax.Array]:
    """Returns some arrays of a traced factory, by number; what the others need is not computed.

    Args:
        model: the abstract model of a factory.
        layout: its layout as returned by `matched`, without errors, on a mesh of devices.
        numbers: the numbers of the leaves.
    """
    if not numbers:
        return {}
    mesh = layout.mesh
    assert isinstance(mesh, Mesh)
    own = _with_types(mesh, AxisType.Auto if model.mesh is None else model.mesh.axis_types[0])
    specs = [layout.leaves[number].spec for number in numbers]
    program, inputs = keep_outputs(model.program, numbers)
    run = jax.jit(jaxpr_as_fun(program), out_shardings=[NamedSharding(own, s) for s in specs])
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        with contextlib.nullcontext() if model.mesh is None else jax.set_mesh(own):
            arrays = run(*inputs)
    if mesh != own:
        arrays = jax.device_put(arrays, [NamedSharding(mesh, spec) for spec in specs])
    return dict(zip(numbers, arrays, strict=True))


@public
def shard(model: T, layout: Layout, *, limit: int | None = None, donate: bool = False) -> T:
    """Returns the model, or the state, with every array placed according to the layout.

    Args:
        model: a model with arrays on any devices, or its state, or an optimizer's state
            (with the layout from `layout.for_optimizer`).
        layout: where to place them, on a mesh of available devices.
        limit: the most bytes of these arrays that a device may hold meanwhile: leaves are moved
            one after the other, in pieces that are small enough, as `sw.transfer` plans it.
        donate: whether the old arrays are freed as they are moved. They cannot be used any more.

    Raises:
        LayoutError: the layout has errors, or belongs to another model; nothing is moved.
        ValueError: the move needs more than `limit`; nothing is moved.

    Example:
        >>> import shardwise as sw
        >>> from flax import nnx
        >>> model = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        >>> layout = sw.layout(model, sw.mesh("data=8", on="cpu:8"), sw.fsdp("data", min_bytes=0))
        >>> sw.shard(model, layout).kernel.addressable_shards[0].data.shape
        (16, 4)
    """
    mesh = require_devices(layout)
    if isinstance(model, nnx.Module):
        graphdef, state = nnx.split(model)
        return nnx.merge(graphdef, _put(state, layout, mesh, limit, donate))
    return _put(model, layout, mesh, limit, donate)


def _put(state: Any, layout: Layout, mesh: Mesh, limit: int | None, donate: bool) -> Any:
    for keys, array in keyed_leaves(state):
        if isinstance(array, jax.ShapeDtypeStruct):
            raise ValueError(
                f"{'.'.join(map(str, keys))} is abstract, so there is nothing to move: "
                f"use sw.init to initialise the model in its shards"
            )
    own = matched(layout, state)
    if limit is not None or donate:
        arrays = move_all(jax.tree.leaves(state), own, limit=limit, donate=donate)
        return jax.tree.unflatten(own.treedef, arrays)
    arrays = [
        put_anywhere(array, NamedSharding(mesh, leaf.spec))
        for array, leaf in zip(jax.tree.leaves(state), own.leaves, strict=True)
    ]
    return jax.tree.unflatten(own.treedef, arrays)


def require_devices(layout: Layout) -> Mesh:
    """Returns the layout's mesh.

    Raises:
        LayoutError: the layout has errors.
        ValueError: the mesh has no devices.
    """
    require_layout(layout)
    check(layout).raise_if_errors()
    return require_mesh(layout)


def require_mesh(layout: Layout) -> Mesh:
    """Returns the mesh of a layout that has already been checked for errors.

    Raises:
        ValueError: the mesh has no devices.
    """
    if not isinstance(layout.mesh, Mesh):
        axes = show_mesh(layout.mesh)
        raise ValueError(
            f"the layout's mesh {axes} has no devices, so nothing can be placed on it: "
            + either(
                f"use layout.on(sw.mesh({axes!r})) for the devices present",
                f"give --on here for the devices present, or --on cpu:{layout.mesh.size} for virtual ones",
            )
        )
    return layout.mesh


def own_mesh(mesh: Any) -> Any:
    """Returns a context that overrides any mesh the caller has set."""
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh)


def _with_types(mesh: Mesh, kind: AxisType) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * mesh.devices.ndim)
