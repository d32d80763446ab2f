"""The layout of an optimizer's state: it follows the parameters, by tree structure and by dims."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from .._mesh import make_spec, padded, show_spec
from .._nnx import Keys, Leaf, keyed_leaves, show_path
from .flow import follow


def optimizer_leaves(
    leaves: Sequence[Leaf], treedef: Any, tx: Any, wrt: Any
) -> tuple[list[Leaf], Any]:
    """Returns the leaves of `tx.init(parameters)` and their tree structure.

    An array of the state belongs to the parameter whose full path is contained in its own path,
    since optax keeps the parameters' tree inside its state. If its shape is not the parameter's
    (factored second moments), its dims are matched by size; if sizes are ambiguous, by tracing
    the update.
    """
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    state = jax.tree.unflatten(treedef, shapes)
    if not isinstance(state, nnx.State):
        raise ValueError(
            "a layout loaded from a lockfile has no variables: "
            "make it with sw.layout to lay out an optimizer's state"
        )
    parameters = nnx.filter_state(state, wrt)
    abstract = jax.eval_shape(tx.init, parameters)
    by_keys = {leaf.keys: _as_state(leaf) for leaf in leaves}
    owners = {keys: by_keys[keys] for keys, _ in keyed_leaves(parameters)}
    by_update = functools.cache(lambda: _specs_by_update(parameters, abstract, tx, owners))
    found = []
    keyed = keyed_leaves(abstract)
    owner_of = _Owners([keys for keys, _ in keyed], owners)
    for index, (keys, array) in enumerate(keyed):
        owner = owner_of(keys)
        leaf = _bare(keys, array, leaves)
        if owner is None:
            found.append(dataclasses.replace(leaf, reason=f"optimizer: {_no_owner(array)}"))
            continue
        specs = _matches(owner, leaf.shape)
        if len(specs) > 1:
            traced = by_update()[index]
            specs = [traced] if traced is not None else []
            how = "its dims were matched by tracing the update"
        else:
            how = "the same shape" if leaf.shape == owner.shape else "its dims matched by size"
        spec = specs[0] if specs else P()
        if not specs:
            how = "no dim is known to match, so it is replicated"
        reason = f"optimizer: follows {owner.path} {show_spec(owner.spec)}, {how}{_why(owner)}"
        same = leaf.shape == owner.shape
        found.append(
            dataclasses.replace(
                leaf,
                spec=spec,
                reason=reason,
                gathered=owner.gathered,
                intentional=owner.intentional,
                left=owner.left,
                names=owner.names if same else None,
                stacked=owner.stacked if same else (),
            )
        )
    return found, jax.tree.structure(abstract)


def _as_state(leaf: Leaf) -> Leaf:
    """Returns a parameter's leaf with the spec that its optimizer state follows."""
    gathered = leaf.gathered | {*leaf.update_axes}
    return dataclasses.replace(leaf, spec=leaf.update_spec, gathered=gathered)


def _why(owner: Leaf) -> str:
    """Returns why the optimizer state is not split as the parameter itself, if that is known."""
    why = [f"{o.source}: {o.reason}" for o in owner.trail if o.moments is not None]
    return f" ({why[-1]})" if why else ""


class _Owners:
    """Finds the parameter that an array of the state belongs to.

    Optax keeps copies of the parameters' tree inside its state. The root of such a copy is the
    shortest prefix under which every path continues as some parameter's path: this way, a
    parameter that has the name of a field of the state is not mistaken for it.
    """

    def __init__(self, all_keys: Sequence[Keys], owners: Mapping[Keys, Leaf]):
        self.owners = owners
        self.is_copy: dict[Keys, bool] = {}
        for keys in all_keys:
            for depth in range(len(keys)):
                fits = self._start(keys[depth:]) is not None
                top = keys[:depth]
                self.is_copy[top] = fits and self.is_copy.get(top, True)

    def __call__(self, keys: Keys) -> Leaf | None:
        for depth in range(len(keys)):
            if self.is_copy[keys[:depth]]:
                return self._start(keys[depth:])
        return None

    def _start(self, keys: Keys) -> Leaf | None:
        # Only indices may follow a parameter's path: SM3 keeps a list of one array per dim.
        for stop in range(len(keys), 0, -1):
            if keys[:stop] in self.owners:
                return self.owners[keys[:stop]]
            if not isinstance(keys[stop - 1], int):
                return None
        return None


def _bare(keys: Keys, array: Any, leaves: Sequence[Leaf]) -> Leaf:
    sizes = leaves[0].sizes if leaves else {}
    return Leaf(show_path(keys), keys, tuple(array.shape), array.dtype, "OptState", sizes)


def _no_owner(array: Any) -> str:
    return "a scalar of its own" if not array.shape else "belongs to no parameter: replicated"


def _matches(owner: Leaf, shape: tuple[int, ...]) -> list[P]:
    """Returns the distinct specs that matching dims by size allows."""
    axes = padded(owner.spec, owner.ndim)
    if shape == owner.shape:
        return [owner.spec]
    if owner.faults:
        return []
    found: list[P] = []

    def add(pairs: Iterable[tuple[int, int]]) -> None:
        placed: list[tuple[str, ...]] = [()] * len(shape)
        for mine, theirs in pairs:
            placed[mine] = axes[theirs]
        spec = make_spec(placed)
        if spec not in found:
            found.append(spec)

    if len(shape) == owner.ndim:  # some dims have size 1, as in SM3
        kept = [d for d in range(len(shape)) if shape[d] == owner.shape[d]]
        if kept:
            add((d, d) for d in kept)
    elif len(shape) < owner.ndim:
        for dims in itertools.combinations(range(owner.ndim), len(shape)):
            if all(owner.shape[d] == shape[i] for i, d in enumerate(dims)):
                add(enumerate(dims))
    elif shape[len(shape) - owner.ndim :] == owner.shape:  # a history of parameters, as in L-BFGS
        add((len(shape) - owner.ndim + d, d) for d in range(owner.ndim))
    else:
        for dims in itertools.combinations(range(len(shape)), owner.ndim):
            if all(shape[d] == owner.shape[i] for i, d in enumerate(dims)):
                add((d, i) for i, d in enumerate(dims))
    return found


def _specs_by_update(
    parameters: Any, state: Any, tx: Any, owners: Mapping[Keys, Leaf]
) -> list[P | None]:
    """Returns the spec of each array of the state, found by following dims through the update.

    None means that it cannot be determined, as when an update needs more than gradients.
    """

    def update(followed: Any, parameters: Any) -> Any:
        gradients, state = followed
        return tx.update(gradients, state, parameters)

    try:
        closed = jax.make_jaxpr(update)((parameters, state), parameters)
    except Exception:  # the user's own function may fail in any way: then nothing is known
        return [None] * len(jax.tree.leaves(state))
    count = len(jax.tree.leaves(parameters))
    flow = follow(closed, count + len(jax.tree.leaves(state)))
    axes_of: dict[tuple[int, ...], list[tuple[str, ...]]] = {}
    for groups, owner in zip(flow.leaf_groups[:count], owners.values(), strict=True):
        if owner.faults:
            continue
        for group, axes in zip(groups, padded(owner.spec, owner.ndim), strict=True):
            axes_of.setdefault(tuple(group), []).append(axes)
    specs: list[P | None] = []
    for groups in flow.leaf_groups[count:]:
        known = [axes_of.get(tuple(group), [()]) for group in groups]
        sure = all(len(set(axes)) == 1 for axes in known)
        specs.append(make_spec([axes[0] for axes in known]) if sure else None)
    return specs
