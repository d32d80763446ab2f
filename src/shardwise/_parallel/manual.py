"""Where manual SPMD code runs: in the body that calls it, on real devices, or simulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from .._mesh import AnyMesh, closest_axis, show_mesh
from .._mesh import mesh as make_mesh
from .._simulate import cast, simulate, varying


def in_body(axis: str) -> bool:
    """Returns whether this is called inside a shard_map body, real or simulated, with this axis."""
    try:
        jax.lax.axis_size(axis)
    except NameError:
        return False
    return True


def find_mesh(axis: str, mesh: AnyMesh | str | None, caller: str) -> AnyMesh:
    """Returns the mesh to run on: the given one, or the one that `jax.set_mesh` has set.

    Raises:
        ValueError: if there is no mesh, or it lacks the axis.
    """
    if isinstance(mesh, str):
        mesh = make_mesh(mesh, on="none")
    found: Any = mesh if mesh is not None else jax.sharding.get_abstract_mesh()
    if mesh is None and axis not in found.axis_names:
        raise ValueError(
            f"{caller} is called outside of any mesh with axis {axis!r}: call it in the body of a "
            f"jax.shard_map or sw.simulate, or pass mesh="
        )
    if axis not in found.axis_names:
        near = closest_axis(axis, found.axis_names)
        raise ValueError(
            f"axis {axis!r} is not on the mesh {show_mesh(found)}{near and f': {near.strip()}'}"
        )
    return found


def run_manual(
    body: Callable[..., Any],
    *,
    mesh: AnyMesh,
    is_set: bool,
    axis: str,
    in_specs: Any,
    out_specs: Any,
) -> Callable[..., Any]:
    """Returns the function of global arrays that runs `body` along `axis`.

    Other axes are left to the compiler. A mesh of real devices, or one that `jax.set_mesh` has set
    (`is_set`), runs on those devices; an abstract mesh is simulated.
    """
    if isinstance(mesh, Mesh) or is_set:
        shard_map: Any = jax.shard_map
        mapped = shard_map(
            body,
            mesh=mesh if isinstance(mesh, Mesh) else None,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={axis},
        )
        return jax.jit(mapped)  # a body that is manual over some of the axes runs only under jit
    return simulate(
        body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={axis}, check=False
    )


def vary(x: Any, *, like: Any = (), axes: tuple[str, ...] = ()) -> Any:
    """Returns `x` typed as also varying along `axes`, and along every axis that `like` does."""
    wanted = set(axes).union(*(varying(jax.typeof(leaf)) for leaf in jax.tree.leaves(like)))
    # Without check_vma JAX does not track varying axes, and casts change nothing.
    return jax.tree.map(lambda leaf: cast(leaf, wanted), x)
