"""Any NNX model as an abstract state and a list of leaves, without making an array."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import AbstractMesh, NamedSharding

from ._leaf import Leaf
from ._tracer import quick_tracing

Keys = tuple[Any, ...]
Model = Callable[[], nnx.Module] | nnx.Module


@dataclasses.dataclass(frozen=True, slots=True)
class AbstractModel:
    """A model without arrays.

    Attributes:
        graphdef: its structure.
        state: its state, every array a `jax.ShapeDtypeStruct`.
        variables: each variable (or bare array) with its keys, in the order of the state.
        modules: the modules that hold them, by keys.
    """

    graphdef: Any
    state: Any
    variables: tuple[tuple[Keys, Any], ...]
    modules: Mapping[Keys, Any]


def abstract_model(model: Model) -> AbstractModel:
    """Returns `model` (a factory, a module, or an abstract module) without its arrays.

    Raises:
        ValueError: it is none of these, or the factory returns something else.
    """
    if isinstance(model, nnx.Module):
        built = model
        graphdef, state = nnx.split(built)
        state = jax.tree.map(shape_of, state)
    elif callable(model):
        graphdef, state = _build(model)
        built = nnx.merge(graphdef, state)
    else:
        raise ValueError(
            f"the model is {model!r}, a {type(model).__name__}: "
            f"give an nnx.Module, or a function of no arguments that returns one"
        )
    variables = tuple(_variables(state))
    modules: dict[Keys, Any] = {(): built}
    for keys, _ in variables:
        for depth in range(1, len(keys)):
            if keys[:depth] not in modules:
                modules[keys[:depth]] = _child(modules[keys[: depth - 1]], keys[depth - 1])
    return AbstractModel(graphdef, state, variables, modules)


def build_model(make: Callable[[], nnx.Module]) -> nnx.Module:
    """Returns `make()`, built without eager sharding, and otherwise as the caller would get it."""
    ambient = nnx.using_eager_sharding()
    # Eager sharding would place each annotated variable as it is made, by names that
    # may not be axes; the layout does the placing.
    with nnx.use_eager_sharding(False):
        built = make()
    if not isinstance(built, nnx.Module):
        raise ValueError(
            f"the model's factory returned a {type(built).__name__}: it must return an nnx.Module"
        )
    for _, node in nnx.iter_graph(built):
        if isinstance(node, nnx.Variable) and ambient:
            # The flag is metadata, hence part of the tree structure: left off, no tree of ours
            # would pair with a tree of the caller's own model.
            node.set_metadata("eager_sharding", True)
        elif isinstance(node, nnx.Module):
            # Within a trace, Flax takes a bare array for a static attribute; it is data.
            for name, value in list(vars(node).items()):
                if isinstance(value, jax.Array):
                    setattr(node, name, nnx.data(value))
    return built


def leaves_of(model: AbstractModel, sizes: Mapping[str, int]) -> list[Leaf]:
    """Returns one leaf for each array, in the order of the state's pytree."""
    found = []
    for keys, variable in model.variables:
        is_variable = isinstance(variable, nnx.Variable)
        owner = model.modules.get(keys[:-1])
        expected = _unstacked_shape(owner, keys[-1]) if keys else None
        for inner, array in _arrays(variable):
            all_keys = keys + inner
            found.append(
                Leaf(
                    path=show_path(all_keys),
                    keys=all_keys,
                    shape=tuple(array.shape),
                    dtype=array.dtype,
                    kind=type(variable).__name__ if is_variable else "Array",
                    sizes=sizes,
                    names=_annotation(variable) if is_variable and not inner else None,
                    stacked=_extra_dims(array.shape, expected),
                )
            )
    return _spread_stacks(found, known={k for k, _ in model.variables if _is_known(model, k)})


def keyed_leaves(tree: Any) -> list[tuple[Keys, Any]]:
    """Returns each array of a state (a model's, an optimizer's) with its keys, in tree order.

    The step from a variable into its value is no key, so that these are the keys of leaves.
    """
    return [
        (keys + inner, array)
        for keys, variable in _variables(tree)
        for inner, array in _arrays(variable)
    ]


def show_path(keys: Keys) -> str:
    """Returns the dotted path of `keys`; a key that has a dot itself is bracketed."""
    if not keys:
        return "(root)"
    return ".".join(
        f"[{k!r}]" if isinstance(k, str) and ("." in k or k[:1] == "[") else str(k) for k in keys
    )


def dotted(path: Any) -> str:
    """Returns a path of `jax.tree_util` as the layouts show it: `up.kernel`, or nothing for a root.

    The step from a variable into its value, an attribute, is no key.
    """
    keys = _plain_keys(path)
    if path and getattr(path[-1], "name", None) == "value":
        keys = keys[:-1]
    return show_path(keys) if keys else ""


def split_path(path: str) -> list[Any]:
    """Returns the steps of a dotted path or pattern, bracketed keys whole; undoes `show_path`."""
    steps = re.findall(r"""\['[^']*'\]|\["[^"]*"\]|[^.]+|(?<=\.)(?=\.|$)|^(?=\.|$)""", path)
    return [ast.literal_eval(step)[0] if step[:2] in ("['", '["') else step for step in steps]


def sharding_rules_of(variable: Any) -> Any:
    """Returns the pairs of name and axis that a variable carries itself."""
    if not isinstance(variable, nnx.Variable):
        return ()
    return variable.get_metadata().get("sharding_rules") or ()


def trace_build(make: Callable[[], Any], trace: Callable[[Callable[[], Any]], Any]) -> Any:
    """Returns the graphdef that `make` gives and what `trace` makes of the state's building.

    Args:
        make: the factory.
        trace: such as `jax.eval_shape`: called with a function that returns the state.
    """
    require_factory(make)
    graphdefs = []

    def build() -> Any:
        graphdef, state = nnx.split(build_model(make))
        graphdefs.append(graphdef)
        return state

    # A mesh that the caller has set would type what is built; the layout's own stands in outputs.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), quick_tracing():
        try:
            traced = trace(build)
        except TraceContextError as error:
            raise ValueError(
                "the model's factory changes something that was made outside it, such as an "
                "nnx.Rngs: make it inside, so that every call builds the same model"
            ) from error
    return graphdefs[0], traced


def _build(make: Callable[[], Any]) -> Any:
    return trace_build(make, lambda build: nnx.eval_shape(build))


def require_factory(make: Callable[[], Any]) -> None:
    """Raises a ValueError if `make` cannot be called without arguments."""
    try:
        # The signature of a module class is that of its metaclass, which takes anything.
        bound = functools.partial(make.__init__, None) if inspect.isclass(make) else make
        parameters = inspect.signature(bound).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needs = [p.name for p in parameters if p.default is p.empty and p.kind not in fixed]
    if needs:
        raise ValueError(
            f"the model's factory {getattr(make, '__name__', make)!r} needs the argument "
            f"{needs[0]!r}: give a function of no arguments, such as lambda: Model(config, rngs=...)"
        )


def shape_of(array: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype that JAX gives an array, a NumPy array or a Python number."""
    if not isinstance(array, jax.Array | jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(np.shape(array), jnp.result_type(array))
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _variables(tree: Any) -> Iterator[tuple[Keys, Any]]:
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return ((_plain_keys(path), variable) for path, variable in pairs)


def _arrays(variable: Any) -> list[tuple[Keys, Any]]:
    value = variable.get_value() if isinstance(variable, nnx.Variable) else variable
    return [(_plain_keys(p), array) for p, array in jax.tree_util.tree_leaves_with_path(value)]


def _plain_keys(path: Any) -> Keys:
    return tuple(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))) for k in path)


def _child(node: Any, key: Any) -> Any:
    if isinstance(key, str) and hasattr(node, key):
        return getattr(node, key)
    try:
        return node[key]
    except (TypeError, KeyError, IndexError):
        return None


def _annotation(variable: nnx.Variable) -> tuple[Any, ...] | None:
    """Returns the entries of a variable's annotation, however it was spelled."""
    sharding = variable.get_metadata().get("out_sharding")
    sharding = getattr(sharding, "sharding", sharding)  # a Format holds a sharding
    if isinstance(sharding, NamedSharding):
        sharding = sharding.spec
    if sharding is None:
        return None
    return tuple(tuple(e) if isinstance(e, list) else e for e in sharding)


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
    """Returns the dims of `shape` that `expected` does not have, as early as can be."""
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


def _spread_stacks(leaves: list[Leaf], known: set[Keys]) -> list[Leaf]:
    """Marks leaves of the user's own modules as stacked where all of Flax's beside them are."""
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
