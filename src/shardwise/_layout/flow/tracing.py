"""The forward pass of a model, traced abstractly: a call, a method, or a recipe's loss."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from ..._base import line_of, show_type
from ..._jax import shorten, show_value
from ..._mesh import AnyMesh
from ..._nnx import AbstractModel, Recipe, shape_of
from .dataflow import Flow, follow

Method = str | Callable[..., Any] | None


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments that `inputs=` stands for.

    Raises:
        ValueError: an argument is written as the command line has it, `"int32[8,128]"`.
    """
    for leaf in jax.tree.leaves(inputs):
        shape = re.fullmatch(r"(\w+)\[([\d, ]*)\]", leaf) if isinstance(leaf, str) else None
        if shape is not None or (isinstance(leaf, str) and leaf is inputs):
            dtype, sizes = shape.groups() if shape is not None else ("int32", "8,128")
            dims = tuple(int(size) for size in sizes.split(",") if size.strip())
            raise ValueError(
                f"inputs has the text {leaf!r}: only the command line takes shapes as text; give "
                f"jax.ShapeDtypeStruct({dims}, {dtype!r}) or an array"
            )
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def method_of(model: Any, method: Method) -> Callable[..., Any]:
    """Returns what is to be traced, as a function of the model and its inputs.

    Raises:
        ValueError: the model has no such method.
    """
    if callable(method):
        return method
    if method is None:
        return lambda model, *args, **kwargs: model(*args, **kwargs)
    if not (isinstance(method, str) and callable(getattr(model, method, None))):
        names = [n for n in dir(type(model)) if not n.startswith("_") and n not in dir(nnx.Module)]
        near = difflib.get_close_matches(str(method), names, n=3) or names[:5]
        hint = f"; it has {', '.join(near)}" if near else ""
        raise ValueError(f"the model, {show_type(model)}, has no method {show_value(method)}{hint}")
    return lambda model, *args, **kwargs: getattr(model, method)(*args, **kwargs)


def trace_flow(
    abstract: AbstractModel,
    mesh: AnyMesh,
    inputs: Any = None,
    method: Method = None,
    recipe: Recipe | None = None,
) -> Flow | None:
    """Returns how the dims of the leaves flow through the traced function.

    Args:
        abstract: the model.
        mesh: the mesh of the layout; the trace sees its axes and their types.
        inputs: what the model is called with.
        method: what is called with them: a method's name, or a function of a model and inputs.
        recipe: if there are no inputs, its loss is traced with its batch.

    Raises:
        ValueError: the function cannot be called with these inputs.
    """
    if inputs is None and recipe is None:
        return None
    model = abstract.modules[()]
    if inputs is not None:
        function = method_of(model, method)
        what = method if isinstance(method, str) else getattr(method, "__name__", "__call__")
        blame = f"{type(model).__name__}.{what}" if not callable(method) else what
        args, kwargs = call_arguments(inputs)
        parts: Any = dict(enumerate(args)) | kwargs
    else:
        assert recipe is not None
        what = blame = "the recipe's loss"
        seed, loss = recipe.rngs, recipe.loss

        def function(model: Any, batch: Any) -> Any:
            # Random keys are created within the trace, so that a plan starts no backend.
            return loss(model, batch, *([] if seed is None else [nnx.Rngs(seed)]))

        args, kwargs, parts = (recipe.batch,), {}, {"batch": recipe.batch}
    flat, treedef = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in flat]
    arrays = [shape_of(x) for x, yes in zip(flat, is_array, strict=True) if yes]

    def forward(state: Any, arrays: list[Any]) -> Any:
        rest = iter(arrays)
        # Anything that is not an array, such as train=True, is passed unchanged.
        values = [next(rest) if yes else x for x, yes in zip(flat, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, values)
        model = nnx.merge(abstract.graphdef, state)
        out = function(model, *args, **kwargs)
        # State that the call changed, such as a cache, is an output too.
        changed = jax.tree.leaves((nnx.state(model), args, kwargs))
        kept = [x for x in (*jax.tree.leaves(out), *changed) if isinstance(x, jax.Array)]
        return kept

    try:
        closed = _traced(forward, abstract.state, arrays, mesh)
    except Exception as error:
        raise ValueError(_failed(error, blame, parts, mesh)) from error
    flow = follow(closed, len(jax.tree.leaves(abstract.state)))
    names = [_argument(path, inputs) for path, x in _paths(args, kwargs)]
    return dataclasses.replace(
        flow,
        input_names=[n for n, yes in zip(names, is_array, strict=True) if yes],
        what=what,
        is_loss=inputs is None,
    )


def _traced(forward: Callable[..., Any], state: Any, arrays: list[Any], mesh: AnyMesh) -> Any:
    """Returns the jaxpr of `forward`, traced with the mesh's axis types.

    A model that uses `out_sharding=` needs Explicit axes. With those, a model may also require
    a certain sharding of its weights, which is not known yet: Auto axes then do as well.
    """
    auto = (AxisType.Auto,) * len(mesh.shape)
    # The empty mesh comes first, since a mesh that the caller has set cannot be resized.
    none = AbstractMesh((), ())
    use = jax.sharding.use_abstract_mesh
    failed: Exception | None = None
    for types in dict.fromkeys((tuple(mesh.axis_types), auto)):
        typed = AbstractMesh(tuple(mesh.shape.values()), tuple(mesh.shape), axis_types=types)
        try:
            with use(none), use(typed), nnx.use_eager_sharding(False):
                return jax.make_jaxpr(forward)(state, arrays)
        except Exception as error:
            failed = failed or error
    assert failed is not None
    raise failed


def _failed(error: Exception, blame: str, parts: Mapping[Any, Any], mesh: AnyMesh) -> str:
    """Returns the message for a trace that failed, with the cause first."""
    line = line_of(error)
    where = f" at {line}" if line else ""
    text = str(error)
    # A ValueError of JAX like many, without a property; and a trace on Explicit axes, which would
    # show it too, may fail for reasons of its own.
    if "of type Auto or Manual" in text and AxisType.Auto in mesh.axis_types:
        return (
            f"{blame} itself names mesh axes, with out_sharding= or reshard{where}, which "
            f"needs Explicit axes: make the mesh with sw.mesh(..., explicit=True)"
        )
    shown = ", ".join(
        f"{key}={show_value(x)}" if isinstance(key, str) else show_value(x)
        for key, x in parts.items()
    )
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    return (
        f"{blame} cannot be traced: {type(error).__name__}: {shorten(lines[0], 300).rstrip('.')}{where}; "
        f"it was called with {shorten(shown, 300)}"
    )


def _paths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path((args, kwargs))


def _argument(path: Any, inputs: Any) -> str:
    """Returns the name of an input for a message: `cache[0].k`, or `inputs[1]`."""
    (_, first, *rest) = path
    name = getattr(first, "key", None)
    if name is None:
        name = f"inputs[{first.idx}]" if isinstance(inputs, tuple | list) else "inputs"
    steps = [k for k in rest if getattr(k, "name", None) != "value"]
    return f"{name}{jax.tree_util.keystr(tuple(steps))}"
