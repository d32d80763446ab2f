"""Exercises of lesson 1: a model's state as leaves, and a layout as a tree that matches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from ..._base import show_type
from ..._layout import by_rank, layout
from ..._mesh import mesh as make_mesh
from ..._mesh import normal_spec
from ..._nnx import keyed_leaves, show_path
from .._exercise import Case, Differs, Exercise

_ZEROS = nnx.initializers.zeros_init()  # only shapes matter here, and zeros are faster to make
_RULE = by_rank({2: P(None, "model"), 1: P("model")})


class Mlp(nnx.Module):
    """A model with a list, a norm and its statistics."""

    def __init__(self, layers: int = 2):
        """Makes the layers."""
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(
            [nnx.Linear(8, 8, kernel_init=_ZEROS, rngs=rngs) for _ in range(layers)]
        )
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(()))


class Image(nnx.Module):
    """A model with a kernel of four dims."""

    def __init__(self) -> None:
        """Makes the layers."""
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(3, 8, (3, 3), kernel_init=_ZEROS, rngs=rngs)
        self.out = nnx.Linear(8, 4, use_bias=False, kernel_init=_ZEROS, rngs=rngs)


def _models() -> list[nnx.Module]:
    linear = nnx.Linear(8, 16, kernel_init=_ZEROS, rngs=nnx.Rngs(0))
    return [linear, Image(), Mlp(), Mlp(layers=12)]


def _leaf_shapes_cases() -> Iterator[Case]:
    for model in _models():
        plan = layout(model, make_mesh("model=1", on="none"))
        yield Case((model,), {leaf.path: leaf.shape for leaf in plan.leaves})


def _spec_tree_cases() -> Iterator[Case]:
    for model in _models():
        state = nnx.split(model)[1]
        plan = layout(model, make_mesh("model=4", on="none"), _RULE)
        expected = {leaf.path: leaf.spec for leaf in plan.leaves}
        call = f"spec_tree(nnx.split({type(model).__name__}(…))[1])"
        yield Case((state,), expected, lambda f, state=state: _by_path(f, state), call)


def _by_path(function: Callable[[Any], Any], state: Any) -> dict[str, Any]:
    """Returns the specs of a tree with the state's structure, by path."""

    def is_spec(x: Any) -> bool:
        return isinstance(x, P)

    tree = function(state)
    specs, structure = jax.tree.flatten(tree, is_leaf=is_spec)
    if structure != jax.tree.structure(state):
        wanted = len(jax.tree.leaves(state))
        raise Differs(
            f"it does not have the state's structure: it is {show_type(tree)} with "
            f"{len(specs)} leaves, and the state is {show_type(state)} with {wanted}"
        )
    paths = [show_path(keys) for keys, _ in keyed_leaves(state)]
    return dict(zip(paths, specs, strict=True))


def _resolve_cases() -> Iterator[Case]:
    rules: dict[str, Any] = {"embed": None, "mlp": "model", "vocab": ("data", "model"), "batch": ()}
    rows = [
        ("embed", "mlp"),
        ("vocab", "embed"),
        ("mlp",),
        (),
        (None, "mlp", None),
        ("batch", None, "vocab"),
    ]
    for names in rows:
        plan = layout(_annotated(names), make_mesh("data=2,model=4", on="none"), logical=rules)
        hint = "None and () both leave a dim unsplit" if None in names else ""
        yield Case((names, dict(rules)), plan["weight"].spec, hint=hint)


def _annotated(names: tuple[str | None, ...]) -> Callable[[], nnx.Module]:
    class Weight(nnx.Module):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.zeros((8,) * len(names)), out_sharding=names)

    return Weight


def _bias_cases() -> Iterator[Case]:
    rows: list[tuple[P, int, int]] = [
        (P(None, "model"), 2, 1),
        (P("model", None), 2, 1),
        (P("model"), 2, 1),
        (P(), 2, 1),
        (P(None, ("data", "model")), 2, 1),
        (P("data", "model"), 3, 2),
        (P(None, None, None, "model"), 4, 1),
        (P("model", None, "data"), 3, 1),
    ]
    for spec, kernel_ndim, bias_ndim in rows:
        entries = [*spec, *[None] * (kernel_ndim - len(spec))]
        expected = normal_spec(P(*entries[kernel_ndim - bias_ndim :]))
        yield Case((spec, kernel_ndim, bias_ndim), expected)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "leaf_shapes",
        "model",
        "Returns a dict from the dotted path of each leaf of an nnx.Module's state to its shape. "
        "Items of a list go by their index: 'layers.0.kernel'. Include all variables, not only "
        "parameters.",
        "leaf_shapes(nnx.Linear(8, 16, rngs=nnx.Rngs(0)))\n  → {'bias': (16,), 'kernel': (8, 16)}",
        "nnx.split(model)[1] is the state, and state.flat_state() or "
        "jax.tree_util.tree_flatten_with_path(state) walks its leaves",
        _leaf_shapes_cases,
    ),
    Exercise(
        "spec_tree",
        "state",
        "Returns a tree with the same structure as an NNX state and a PartitionSpec for every "
        "leaf: P(None, 'model') for two dims, P('model') for one, P() for any other number.",
        "spec_tree(nnx.split(nnx.Linear(8, 16, rngs=nnx.Rngs(0)))[1])\n"
        "  → a State with P('model') at bias and P(None, 'model') at kernel",
        "jax.tree.map(pick, state) keeps the structure; pick gets one array and looks at its ndim",
        _spec_tree_cases,
    ),
    Exercise(
        "resolve",
        "names, rules",
        "Returns the PartitionSpec of an array whose dims have the given names. `rules` maps a "
        "name to an axis, to a tuple of axes, or to None or () if the dim is not split; a dim "
        "without a name (None) is not split either.",
        "resolve(('embed', 'mlp'), {'embed': None, 'mlp': 'model'})\n  → P(None, 'model')",
        "one entry for each dim, in order; like None, () stands for no axis",
        _resolve_cases,
    ),
    Exercise(
        "bias_spec",
        "kernel_spec, kernel_ndim, bias_ndim",
        "Returns the PartitionSpec of a bias that is split like the output of its kernel. The dims "
        "of the bias are the last `bias_ndim` of the kernel's `kernel_ndim`.",
        "bias_spec(P(None, 'model'), 2, 1)\n  → P('model')",
        "a spec may have fewer entries than its array has dims: the rest are not split. Pad it "
        "with None before you take the last entries",
        _bias_cases,
    ),
)
