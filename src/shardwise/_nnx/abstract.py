"""Any NNX model as abstract state and a list of leaves, without creating an array."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from .._base import show_type
from .._mesh import AnyMesh, require_plain
from .adapters import with_bases
from .build import trace_build
from .leaf import Leaf
from .paths import Keys, arrays_of, child_of, keyed_leaves, show_path, variables_of

Model = Callable[[], nnx.Module] | nnx.Module

# Flax's documentation and MaxText name the dim of stacked layers so (nnx.PARTITION_NAME).
STACK_NAME = "layers"


@dataclasses.dataclass(frozen=True, slots=True)
class AbstractModel:
    """A model without arrays.

    Attributes:
        graphdef: its structure.
        state: its state, every array a `jax.ShapeDtypeStruct`.
        variables: each variable (or bare array) with its keys, in the order of the state.
        modules: the modules that contain them, by keys.
        typed: the specs of arrays created with one, by keys: `jnp.zeros(…, out_sharding=P("model"))`.
        program: the jaxpr that initialises the state, of a factory; None for a model that exists.
        mesh: the mesh under which the factory was traced, if it needs one; else None.
    """

    graphdef: Any
    state: Any
    variables: tuple[tuple[Keys, Any], ...]
    modules: Mapping[Keys, Any]
    typed: Mapping[Keys, tuple[Any, ...]]
    program: Any = None
    mesh: AbstractMesh | None = None


def abstract_model(model: Model, mesh: AnyMesh | None = None) -> AbstractModel:
    """Returns `model` (a factory, a module, or an abstract module) without its arrays.

    Args:
        model: the model.
        mesh: the mesh to build on if the factory names axes.

    Raises:
        ValueError: it is none of these, or the factory does not return a module.
    """
    typed: dict[Keys, tuple[Any, ...]] = {}
    program = on = None
    if isinstance(model, nnx.Module):
        built = model
        graphdef, state = nnx.split(built)
        state = jax.tree.map(shape_of, state)
    elif callable(model):
        # The only trace of a factory: what initialises the model later is this very program.
        graphdef, program, state, on = trace_build(model, mesh)
        if on is not None:
            typed = _typed(state)
        state = jax.tree.map(shape_of, state)
        built = nnx.merge(graphdef, state)
    else:
        raise ValueError(
            f"the model is {model!r}, {show_type(model)}: "
            f"give an nnx.Module, or a function of no arguments that returns one"
        )
    variables = tuple(variables_of(state))
    modules: dict[Keys, Any] = {(): built}
    for keys, _ in variables:
        for depth in range(1, len(keys)):
            if keys[:depth] not in modules:
                modules[keys[:depth]] = child_of(modules[keys[: depth - 1]], keys[depth - 1])
    return AbstractModel(graphdef, state, variables, modules, typed, program, on)


def leaves_of(model: AbstractModel, sizes: Mapping[str, int]) -> list[Leaf]:
    """Returns one leaf for each array, in the order of the state's pytree."""
    found = []
    for keys, variable in model.variables:
        is_variable = isinstance(variable, nnx.Variable)
        owner = model.modules.get(keys[:-1])
        expected = _unstacked_shape(owner, keys[-1]) if keys else None
        for inner, array in arrays_of(variable):
            all_keys = keys + inner
            names = (_annotation(variable, keys) if is_variable and not inner else None) or (
                model.typed.get(all_keys)
            )
            found.append(
                Leaf(
                    path=show_path(all_keys),
                    keys=all_keys,
                    shape=tuple(array.shape),
                    dtype=array.dtype,
                    kind=type(variable).__name__ if is_variable else "Array",
                    sizes=sizes,
                    names=names,
                    stacked=_extra_dims(array.shape, expected) or _named_stacks(array.shape, names),
                )
            )
    known = {k for k, _ in model.variables if _is_known(model, k)}
    return with_bases(_spread_stacks(found, known), model)


def sharding_rules_of(variable: Any) -> Any:
    """Returns the (name, axis) pairs in a variable's own metadata."""
    if not isinstance(variable, nnx.Variable):
        return ()
    return variable.get_metadata().get("sharding_rules") or ()


def shape_of(array: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype that JAX gives an array, a NumPy array or a Python number."""
    if not isinstance(array, jax.Array | jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(np.shape(array), jnp.result_type(array))
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _annotation(variable: nnx.Variable, keys: Keys) -> tuple[Any, ...] | None:
    """Returns the entries of a variable's annotation, however it was written."""
    sharding = variable.get_metadata().get("out_sharding")
    sharding = getattr(sharding, "sharding", sharding)  # a Format wraps a sharding
    if isinstance(sharding, NamedSharding):
        sharding = sharding.spec
    if sharding is None:
        return None
    if isinstance(sharding, PartitionSpec):
        require_plain(sharding, f"the annotation of {show_path(keys)}")
    return tuple(tuple(e) if isinstance(e, list) else e for e in sharding)


def _typed(state: Any) -> dict[Keys, tuple[Any, ...]]:
    specs = {keys: getattr(x.sharding, "spec", ()) for keys, x in keyed_leaves(state)}
    for keys, spec in specs.items():
        if isinstance(spec, PartitionSpec):
            require_plain(spec, f"the sharding of {show_path(keys)}")
    return {keys: tuple(spec) for keys, spec in specs.items() if any(spec)}


def _unstacked_shape(owner: Any, name: Any) -> tuple[int, ...] | None:
    """Returns the shape that Flax's own layers give `name` before any stacking."""
    match owner, name:
        case nnx.Linear(), "kernel":
            return (owner.in_features, owner.out_features)
        case nnx.LinearGeneral(), "kernel" if not owner.batch_axis:
            return (*owner.in_features, *owner.out_features)
        case nnx.LinearGeneral(), "bias" if not owner.batch_axis:
            return tuple(owner.out_features)
        case ((nnx.Conv() | nnx.ConvTranspose() | nnx.Einsum()), "kernel"):
            return tuple(owner.kernel_shape)
        case nnx.Einsum(), "bias":
            return tuple(owner.bias_shape or ())
        case ((nnx.Linear() | nnx.Conv() | nnx.ConvTranspose()), "bias"):
            return (owner.out_features,)
        case nnx.Embed(), "embedding":
            return (owner.num_embeddings, owner.features)
        case (
            (nnx.LayerNorm() | nnx.RMSNorm() | nnx.BatchNorm()),
            ("scale" | "bias" | "mean" | "var"),
        ):
            return (owner.num_features,)
        case nnx.GroupNorm(), ("scale" | "bias"):
            return (owner.num_groups * owner.group_size,)
    return None


def _is_known(model: AbstractModel, keys: Keys) -> bool:
    return bool(keys) and _unstacked_shape(model.modules.get(keys[:-1]), keys[-1]) is not None


def _extra_dims(shape: tuple[int, ...], expected: tuple[int, ...] | None) -> tuple[int, ...]:
    """Returns the dims of `shape` that `expected` does not have, the leading ones if in doubt."""
    if expected is None or len(shape) <= len(expected):
        return ()
    extra: list[int] = []
    wanted = list(expected)
    for dim in reversed(range(len(shape))):
        if wanted and shape[dim] == wanted[-1]:
            wanted.pop()
        else:
            extra.append(dim)
    return tuple(reversed(extra)) if not wanted else ()


def _named_stacks(shape: tuple[int, ...], names: tuple[Any, ...] | None) -> tuple[int, ...]:
    """Returns the dims that the model's own annotation calls a stack of layers."""
    if names is None or len(names) != len(shape):
        return ()
    return tuple(dim for dim, name in enumerate(names) if name == STACK_NAME)


def _spread_stacks(leaves: list[Leaf], known: set[Keys]) -> list[Leaf]:
    """Marks leaves of the user's own modules as stacked if all Flax layers next to them are."""
    stacks: dict[Keys, set[int | None]] = {}
    for leaf in leaves:
        if leaf.keys in known:
            lead = leaf.shape[0] if leaf.stacked[:1] == (0,) else None
            for depth in range(len(leaf.keys)):
                stacks.setdefault(leaf.keys[:depth], set()).add(lead)
    spread = []
    for leaf in leaves:
        if leaf.keys not in known and leaf.shape:
            for depth in reversed(range(1, len(leaf.keys))):
                near = stacks.get(leaf.keys[:depth])
                if near is not None:
                    if near == {leaf.shape[0]}:
                        leaf = dataclasses.replace(leaf, stacked=(0,))
                    break
        spread.append(leaf)
    return spread
