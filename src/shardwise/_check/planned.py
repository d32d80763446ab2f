"""Reports every problem of a layout in one pass, without devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax.sharding import PartitionSpec as P

from .._base import public
from .._layout import Layout, fold_paths, require_layout
from .._mesh import (
    DATA_AXES,
    Axes,
    Fault,
    faults,
    make_spec,
    padded,
    places_for_names,
    show_mesh,
    show_spec,
)
from .._nnx import Leaf, followed
from .findings import Allow, Finding, Findings, allowed_paths, make_finding, sift
from .replication import REPLICATED_BYTES, Replication


@public
def check(
    layout: Layout, *, allow: Allow | None = None, replicated_bytes: int = REPLICATED_BYTES
) -> Findings:
    """Returns everything that is wrong or suspicious in a layout.

    Args:
        layout: the layout.
        allow: findings that are intentional, by code and path pattern: `{"SW105": "embed.**"}`.
        replicated_bytes: the number of replicated bytes that is worth a finding: in one leaf, or
            in all smaller leaves together.

    Example:
        >>> import shardwise as sw
        >>> from flax import nnx
        >>> from jax.sharding import PartitionSpec as P
        >>> make = lambda: nnx.Linear(8, 6, use_bias=False, rngs=nnx.Rngs(0))
        >>> layout = sw.layout(make, sw.mesh("model=4", on="none"), {"kernel": P(None, "model")})
        >>> print(sw.check(layout))
        error[SW104] indivisible-dim: kernel
          dim 1 (size 6) cannot be split 4 ways over axis 'model'
          shape (8, 6)  spec P(None, 'model')  mesh model=4
          help: P('model', None) divides evenly
        1 error, 0 warnings
    """
    require_layout(layout)
    return sift(_findings(layout, replicated_bytes, allow), allow)


def _findings(layout: Layout, replicated_bytes: int, allow: Allow | None) -> Iterator[Finding]:
    mesh = show_mesh(layout.mesh)
    replication = Replication(layout, replicated_bytes, allowed_paths(allow, "SW105"))
    shared = _shared(layout, allow)
    by_path = {leaf.path: leaf for leaf in layout.leaves}
    siblings: dict[tuple, dict[str, Leaf]] = {}
    places: dict[str, str | None] | None = None
    for leaf in layout.leaves:
        context = f"shape {leaf.shape}  spec {show_spec(leaf.spec)}  mesh {mesh}"
        found = leaf.faults
        if any(fault.code == "SW109" for fault in found):
            # A name maps to the same axis in every leaf, so the suggestion must suit all of them.
            places = _places(layout) if places is None else places
            names = leaf.annotation_names
            found = faults(leaf.shape, leaf.spec, leaf.sizes, names, places, leaf.stacked)
        for fault in found:
            key = (fault.name or fault.message, leaf.path)
            leaves = shared.get(key, [leaf])
            if not leaves:
                continue
            message = fault.message
            if len(leaves) > 1:
                what = "it is used by" if fault.name else "it is the dim of"
                message += f": {what} {len(leaves)} leaves, {_first_paths(leaves)}"
            yield make_finding(fault.code, leaf.path, message, fault.help, context)
        for fault in leaf.update_faults:
            yield make_finding(fault.code, leaf.path, fault.message, fault.help, context)
        yield from _ambiguous(leaf, context)
        yield from _stack_lost(leaf, context)
        if not found:
            if leaf.follows is not None:
                yield from _adapter_mismatch(leaf, by_path.get(leaf.follows.base), context)
            yield from replication.of_leaf(leaf, context)
            if leaf.keys and leaf.keys[-1] in ("kernel", "bias"):
                siblings.setdefault(leaf.keys[:-1], {})[leaf.keys[-1]] = leaf
    for pair in siblings.values():
        if len(pair) == 2:
            yield from _bias_mismatch(pair["kernel"], pair["bias"], mesh)
    yield from replication.of_the_rest()
    yield from replication.of_an_idle_strategy()
    for pattern, nearest in layout.dead_patterns:
        hint = f"the closest path is {nearest}" if nearest else "drop it"
        yield make_finding("SW107", pattern, "this pattern matches no leaf", hint)
    yield from _unused_axes(layout)


def _places(layout: Layout) -> dict[str, str | None]:
    names = frozenset(name for leaf in layout.leaves for name in leaf.annotation_names)
    arrays = dict.fromkeys((leaf.shape, _unrefined(leaf)) for leaf in layout.leaves if leaf.names)
    return places_for_names(arrays, names, layout.mesh.shape)


def _unrefined(leaf: Leaf) -> P:
    """Returns the spec without the axes that strategies added to the annotation.

    They add only axes that are still free, so they yield to an axis that a name maps to.
    """
    specs = [o.spec for o in leaf.trail if o.spec is not None and not o.refines]
    return specs[-1] if specs else P()


def _shared(layout: Layout, allow: Allow | None) -> dict[tuple[str, str], list[Leaf]]:
    """Returns, by fault and path of its first leaf, all leaves with a fault that has one remedy.

    One mapping resolves a name everywhere, and the depth of a stack is that of all its leaves: these
    leaves are one finding, and the others of them have an empty list. Allowed leaves are not
    included.
    """
    allowed = {code: allowed_paths(allow, code) for code in ("SW104", "SW109")}
    found: dict[str, list[Leaf]] = {}
    for leaf in layout.leaves:
        for fault in leaf.faults if leaf.annotation_names or leaf.stacked else ():
            one = fault.name or (fault.message if _is_of_stack(fault, leaf) else "")
            if one and not allowed[fault.code](leaf.path):
                found.setdefault(one, []).append(leaf)
    return {
        (one, leaf.path): [] if number else leaves
        for one, leaves in found.items()
        for number, leaf in enumerate(leaves)
    }


def _is_of_stack(fault: Fault, leaf: Leaf) -> bool:
    return fault.code == "SW104" and any(
        fault.message.startswith(f"dim {dim} ") for dim in leaf.stacked
    )


def _first_paths(leaves: Sequence[Leaf]) -> str:
    """Returns the first few paths, with identical layers as one."""
    groups: dict[tuple, list[tuple]] = {}
    for leaf in leaves:
        numberless = tuple(0 if isinstance(key, int) else key for key in leaf.keys)
        groups.setdefault(numberless, []).append(leaf.keys)
    listed = [fold_paths(paths) for paths in groups.values()]
    return ", ".join(listed[:3]) + (", …" if len(listed) > 3 else "")


def _ambiguous(leaf: Leaf, context: str) -> Iterator[Finding]:
    clashes = ()
    for opinion in leaf.trail:
        if opinion.spec is not None and not opinion.refines:
            clashes = opinion.clashes
    if clashes:
        specs = ", ".join(f"{pattern!r} says {show_spec(spec)}" for pattern, spec in clashes)
        yield make_finding(
            "SW108",
            leaf.path,
            f"{len(clashes)} patterns match and disagree: {specs}",
            "make them disjoint, or put the exception into a later rule: "
            "[{general patterns}, {exceptions}]",
            context,
        )


def _stack_lost(leaf: Leaf, context: str) -> Iterator[Finding]:
    deciders = [o.source for o in leaf.trail if o.spec is not None and not o.refines]
    if leaf.names is None or not leaf.stacked or deciders[-1:] != ["annotation"]:
        return
    if any(leaf.names) and len(leaf.names) == leaf.ndim - len(leaf.stacked):
        entries = list(leaf.names)
        for dim in leaf.stacked:
            entries.insert(dim, None)
        stack = ", ".join(f"dim {d} (size {leaf.shape[d]})" for d in leaf.stacked)
        yield make_finding(
            "SW110",
            leaf.path,
            f"the annotation has {len(leaf.names)} entries for {leaf.ndim} dims: "
            f"it lacks the stacked {stack} and is off by {len(leaf.stacked)}",
            "pass transform_metadata={nnx.PARTITION_NAME: None} to nnx.vmap or nnx.scan, "
            f"or annotate {show_spec(P(*entries))}",
            context,
        )


def _bias_mismatch(kernel: Leaf, bias: Leaf, mesh: str) -> Iterator[Finding]:
    kernel_dims = [d for d in range(kernel.ndim) if d not in kernel.stacked]
    bias_dims = [d for d in range(bias.ndim) if d not in bias.stacked]
    matched = kernel_dims[len(kernel_dims) - len(bias_dims) :]
    if not bias_dims or [kernel.shape[d] for d in matched] != [bias.shape[d] for d in bias_dims]:
        return
    # Dims that FSDP splits are gathered before use and need not match.
    used = [_used(kernel, d) for d in matched]
    have = [_used(bias, d) for d in bias_dims]
    if used != have:
        wanted: list[Axes] = [()] * bias.ndim
        for d, axes in zip(bias_dims, used, strict=True):
            wanted[d] = axes
        yield make_finding(
            "SW106",
            bias.path,
            f"its spec is {show_spec(bias.spec)}, but it is added to the output of {kernel.path}, "
            f"which is " + (f"split {show_spec(make_spec(used))}" if any(used) else "not split"),
            f"use {show_spec(make_spec(wanted))}",
            f"kernel shape {kernel.shape} spec {show_spec(kernel.spec)}  "
            f"bias shape {bias.shape} spec {show_spec(bias.spec)}  mesh {mesh}",
        )


def _adapter_mismatch(leaf: Leaf, base: Leaf | None, context: str) -> Iterator[Finding]:
    """Yields how an adapter or a scale contradicts the leaf that it belongs to."""
    follows = leaf.follows
    assert follows is not None
    taken = padded(leaf.spec, leaf.ndim)
    wrong = []
    if follows.rank is not None:
        axes = [a for a in taken[follows.rank] if leaf.sizes[a] > 1]
        if axes:
            wrong.append(
                f"its rank, dim {follows.rank} (size {leaf.shape[follows.rank]}), is split over "
                f"{_named(axes)}"
            )
    if base is not None and not base.faults:
        wanted = followed(leaf, base)
        for dim, along in enumerate(follows.dims):
            have, want = _used(leaf, dim), _used(wanted, dim)
            if dim == follows.rank or have == want:
                continue
            split = f"split over {_named(have)}" if have else "not split"
            if not along:
                wrong.append(f"dim {dim} is {split}, but the same along all of {base.path}")
                continue
            theirs = f"dim {'+'.join(map(str, along))} of {base.path}"
            wanted_split = f"split over {_named(want)}" if want else "not split so"
            wrong.append(f"dim {dim} is {split}, but runs along {theirs}, which is {wanted_split}")
    if not wrong:
        return
    help = "never split the rank"
    if base is not None and not base.faults:
        use = show_spec(followed(leaf, base).spec)
        help = f"use {use}, or drop the rule that chose its spec: it then follows {base.path}"
        context += f"  {base.path} {base.shape} {show_spec(base.spec)}"
    yield make_finding("SW113", leaf.path, "; ".join(wrong), help, context)


def _named(axes: Sequence[str]) -> str:
    return f"axis {axes[0]!r}" if len(axes) == 1 else f"axes {', '.join(map(repr, axes))}"


def _used(leaf: Leaf, dim: int) -> Axes:
    axes = padded(leaf.spec, leaf.ndim)[dim]
    skipped = (*leaf.gathered, *DATA_AXES)
    return tuple(a for a in axes if a not in skipped and leaf.sizes[a] > 1)


def _unused_axes(layout: Layout) -> Iterator[Finding]:
    used = {a for leaf in layout.leaves for entry in padded(leaf.spec, 0) for a in entry}
    used |= {a for leaf in layout.leaves for a in leaf.update_axes}
    if not layout.leaves:
        return
    for axis, size in layout.mesh.shape.items():
        if size > 1 and axis not in used and (axis not in DATA_AXES or axis == "fsdp"):
            yield make_finding(
                "SW111",
                axis,
                f"no leaf is split over axis {axis!r} of size {size}: each has {size} copies along it",
                "add a rule that uses it, or merge it into another axis",
                f"mesh {show_mesh(layout.mesh)}",
            )
