"""What is compiled: a training step or a forward pass, jitted, with its abstract arguments."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._base import either
from .._check import check, matched
from .._jax import is_in_host_memory, quick_tracing
from .._layout import Layout, Method, call_arguments, method_of
from .._nnx import Recipe, abstract_model, array_bytes
from .._step import (
    Blueprint,
    data_axes,
    explained_tracing,
    gathered,
    make_blueprint,
    module_paths,
    named_activations,
    on_mesh,
    scope_modules,
)


def job_of(recipe: Any, layout: Layout, inputs: Any, method: Method = None) -> Job:
    if isinstance(recipe, Recipe):
        return _training_job(recipe, layout)
    return _forward_job(recipe, layout, inputs, method)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What is compiled: a jitted function with its abstract arguments, and facts about it."""

    jitted: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    layout: Layout
    batch: Any
    paths: tuple[str, ...]
    parameters_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    host_bytes: int = 0
    accumulate: int = 1


def _training_job(recipe: Recipe, layout: Layout) -> Job:
    blueprint: Blueprint = make_blueprint(recipe, layout)
    batch = blueprint.batch
    return Job(
        jitted=blueprint.jitted(),
        arguments=(blueprint.abstract, batch),
        options=blueprint.compiler_options,
        layout=blueprint.layout,
        batch=batch,
        paths=tuple(module_paths(blueprint.model.modules[()])),
        parameters_bytes=shard_bytes(blueprint.abstract.model),
        optimizer_bytes=shard_bytes((blueprint.abstract.optimizer, blueprint.abstract.ema)),
        batch_bytes=shard_bytes(batch),
        host_bytes=shard_bytes(blueprint.abstract, host=True),
        accumulate=recipe.accumulate,
    )


class Forward:
    """A model's forward pass as a pure function of its arrays and its inputs."""

    def __init__(
        self,
        layout: Layout,
        graphdef: Any,
        args: Any,
        given: list[Any],
        placed: Any,
        function: Callable[..., Any],
    ):
        """Stores what the call needs."""
        self.function = function
        self.layout, self.graphdef, self.args = layout, graphdef, args
        self.given, self.placed = given, placed

    def __call__(
        self, arrays: dict[str, Any], inputs: list[Any], cache: dict[str, Any] | None = None
    ) -> Any:
        """Returns the model's outputs; with a cache, also what the call leaves in it."""
        with on_mesh(self.layout.mesh), named_activations(self.layout, self.placed):
            arrays = gathered({**arrays, **(cache or {})}, self.layout)
            flat = [arrays[leaf.path] for leaf in self.layout.leaves]
            model = nnx.merge(self.graphdef, jax.tree.unflatten(self.layout.treedef, flat))
            model.eval()
            scope_modules(model)
            rest = iter(inputs)
            flat = [next(rest) if x is None else x for x in self.given]
            positional, named = jax.tree.unflatten(self.args, flat)
            found = self.function(model, *positional, **named)
            if cache is None:
                return found
            left = jax.tree.leaves(nnx.state(model))
            paths = [leaf.path for leaf in self.layout.leaves]
            return found, {path: x for path, x in zip(paths, left, strict=True) if path in cache}


def _forward_job(model: Any, layout: Layout, inputs: Any, method: Method) -> Job:
    if inputs is None:
        raise ValueError(
            "compiling a model needs inputs=, such as jax.ShapeDtypeStruct((8, 128), 'int32'); "
            "or give a Recipe to compile a training step"
        )
    check(layout).raise_if_errors()
    abstract = abstract_model(model, layout.mesh)
    own = matched(layout, abstract.state)
    flat, treedef = jax.tree.flatten(call_arguments(inputs))
    placed = [_placed(x, own) for x in flat if _is_array(x)]
    # Arguments that are not arrays, such as train=True, are passed unchanged.
    given = [None if _is_array(x) else x for x in flat]
    arrays = {
        leaf.path: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(own.mesh, leaf.spec)
        )
        for leaf in own.leaves
    }
    # A call updates caches in place, as serving does: they are donated and returned.
    cached = {leaf.path for leaf in own.leaves if leaf.kind == nnx.Cache.__name__}
    cache = {path: arrays[path] for path in arrays if path in cached}
    arguments: Any = ({path: arrays[path] for path in arrays if path not in cached}, placed)
    arguments = (*arguments, cache) if cache else arguments
    shardings = jax.tree.map(lambda leaf: leaf.sharding, arguments)
    function = method_of(abstract.modules[()], method)
    forward = Forward(own, abstract.graphdef, treedef, given, placed, function)
    updated = {"donate_argnums": 2, "out_shardings": (None, shardings[2])} if cache else {}
    return Job(
        jitted=jax.jit(forward.__call__, in_shardings=shardings, **updated),
        arguments=arguments,
        options={},
        layout=own,
        batch=placed,
        paths=tuple(module_paths(abstract.modules[()])),
        parameters_bytes=shard_bytes(arrays),
        optimizer_bytes=0,
        batch_bytes=shard_bytes(placed),
    )


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _placed(x: Any, layout: Layout) -> Any:
    """Returns an input with its sharding: its own if it has one, else dim 0 over the data axes."""
    axes = data_axes(layout)
    ways = math.prod(layout.mesh.shape[axis] for axis in axes)
    given = getattr(getattr(x, "sharding", None), "spec", None)
    spec = given if given is not None else P(axes) if x.shape and axes else P()
    if given is None and x.shape and x.shape[0] % ways:
        raise ValueError(
            f"an input of shape {tuple(x.shape)} cannot be split {ways} ways over {'+'.join(axes)}: "
            + either(
                f"make dim 0 a multiple of {ways}, or give it a sharding of its own, such as "
                f"jax.ShapeDtypeStruct(…, sharding=NamedSharding(layout.mesh, P()))",
                f"make its first size in --inputs a multiple of {ways}",
            )
        )
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(layout.mesh, spec))


def shard_bytes(tree: Any, *, host: bool = False) -> int:
    """Returns the bytes that one device holds of a pytree of abstract arrays (exact).

    Args:
        tree: the arrays.
        host: whether to count those in the memory of its host instead.
    """
    total = 0
    for leaf in jax.tree.leaves(tree):
        if is_in_host_memory(leaf.sharding) is not host:
            continue
        total += array_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    return total


def traced(job: Job) -> Any:
    with explained_tracing(), quick_tracing():
        return job.jitted.trace(*job.arguments)
