"""Audits live arrays: is every array sharded as the layout says?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from .._base import public, show_bytes, show_type
from .._layout import Layout
from .._mesh import normal_spec, show_mesh, show_spec
from .._nnx import Leaf, array_bytes, keyed_leaves
from .findings import Allow, Finding, Findings, make_finding, sift
from .matching import is_alike, match_findings


@public
def audit(layout: Layout, live: Any, *, allow: Allow | None = None) -> Findings:
    """Returns the live arrays that are not sharded as planned, with the cost in bytes.

    Args:
        layout: the planned layout; for an optimizer's state, `layout.for_optimizer(tx)`.
        live: a model, its state, an optimizer's state, or an `nnx.Optimizer`.
        allow: findings that are intentional, by code and path pattern.

    Example:
        >>> import shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0))
        >>> layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), "fsdp")
        >>> print(sw.audit(layout, sw.init(make, layout)))
        no findings
    """
    if not isinstance(layout, Layout):
        raise ValueError(f"audit takes a layout as its first argument, got {show_type(layout)}")
    if isinstance(live, nnx.Optimizer):
        live = live.opt_state
    state = nnx.split(live)[1] if isinstance(live, nnx.Module) else live
    return sift(_findings(layout, dict(keyed_leaves(state))), allow)


def _findings(layout: Layout, live: dict[tuple, Any]) -> Iterator[Finding]:
    yield from match_findings(layout, live)
    for leaf in layout.leaves:
        array = live.get(leaf.keys)
        for fault in leaf.faults:
            yield make_finding(fault.code, leaf.path, fault.message, fault.help)
        if array is None or not is_alike(leaf, array) or leaf.faults:
            continue
        sharding = getattr(array, "sharding", None)
        if sharding is None or not isinstance(array, jax.Array):
            yield make_finding(
                "SW201",
                leaf.path,
                f"planned {show_spec(leaf.spec)}, but its {show_bytes(leaf.bytes)} are on the host, "
                f"as {type(array).__name__}",
                "place it with sw.shard(model, layout)",
            )
        elif not _as_planned(layout, leaf, sharding):
            resident = array_bytes(sharding.shard_shape(leaf.shape), leaf.dtype)
            over = resident - leaf.shard_bytes
            cost = f"{show_bytes(abs(over))} {'more' if over > 0 else 'less'} on each device"
            if not over:
                cost = "the same number of bytes, but other parts or other devices"
            yield make_finding(
                "SW201",
                leaf.path,
                f"planned {show_spec(leaf.spec)}, but is {_show(sharding)}: "
                f"{show_bytes(resident)} instead of {show_bytes(leaf.shard_bytes)}, {cost}",
                "place it with sw.shard(model, layout)",
                f"shape {leaf.shape}  planned shard {leaf.shard_shape}  "
                f"live shard {tuple(sharding.shard_shape(leaf.shape))}",
            )


def _as_planned(layout: Layout, leaf: Leaf, sharding: Any) -> bool:
    if isinstance(layout.mesh, Mesh):
        return sharding.is_equivalent_to(NamedSharding(layout.mesh, leaf.spec), leaf.ndim)
    if isinstance(sharding, NamedSharding):
        if normal_spec(sharding.spec) != normal_spec(leaf.spec):
            return False
    return tuple(sharding.shard_shape(leaf.shape)) == leaf.shard_shape


def _show(sharding: Any) -> str:
    if isinstance(sharding, NamedSharding):
        return f"{show_spec(sharding.spec)} on {show_mesh(sharding.mesh)}"
    return f"on {len(sharding.device_set)} device{'s' if len(sharding.device_set) > 1 else ''}, as {type(sharding).__name__}"
