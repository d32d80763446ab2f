"""Adapters for stacked blocks. Qwix makes them in a model's first call, of the blocks that it runs."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

_RNGS = "qwix_rngs"  # qwix sets it on every module for the first call, and to None after it
_AXES = "out_sharding"


def is_adapting(module: nnx.Module) -> bool:
    """Returns whether qwix makes adapters for the modules that this call runs."""
    return any(getattr(m, _RNGS, None) is not None for _, m in nnx.iter_modules(module))


def adapt_stack(stack: nnx.Module, batch: Any, extras: tuple[Any, ...]) -> Any:
    """Gives a stack adapters of each of its blocks, stacked; returns the batch.

    A loop over blocks would lose what qwix adds to one, so each is run for itself, on the same batch.
    """
    rngs = next(r for _, m in nnx.iter_modules(stack) if (r := getattr(m, _RNGS, None)) is not None)
    _set_rngs(stack, None)
    graphdef, state = nnx.split(stack)
    depth = jax.tree.leaves(state)[0].shape[0]
    structure: list[Any] = []

    def one(state: Any, key: jax.Array) -> Any:
        block: Any = nnx.merge(graphdef, state)
        lead = _unstack_names(block)
        _set_rngs(block, nnx.Rngs(key))
        # Twice: of two quantised parameters of one shape, qwix knows which is which in the second.
        for _ in range(2):
            block(batch, *extras)
        _set_rngs(block, None)
        _stack_names(block, lead)
        new, state = nnx.split(block)
        structure[:] = [new]
        return state

    state = jax.vmap(one)(state, jax.random.split(rngs.params(), depth))
    _copy(nnx.merge(structure[0], state), stack)
    _set_rngs(stack, rngs)
    return batch


def _set_rngs(module: nnx.Module, rngs: nnx.Rngs | None) -> None:
    for _, part in list(nnx.iter_modules(module)):
        if hasattr(part, _RNGS):
            setattr(part, _RNGS, rngs)


def _variables(module: nnx.Module) -> list[nnx.Variable]:
    return [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)]


def _unstack_names(module: nnx.Module) -> str | None:
    """Takes the name of the stack out of annotations, and returns it: qwix copies the others."""
    lead = None
    for variable in _variables(module):
        names = variable.get_metadata().get(_AXES)
        if isinstance(names, tuple | list) and len(names) == variable.ndim + 1:
            lead = names[0]
            variable.set_metadata(_AXES, tuple(names[1:]))
    return lead


def _stack_names(module: nnx.Module, lead: str | None) -> None:
    for variable in _variables(module):
        names = variable.get_metadata().get(_AXES)
        if isinstance(names, tuple | list) and len(names) == variable.ndim:
            variable.set_metadata(_AXES, (lead, *names))


def _copy(adapted: nnx.Module, stack: nnx.Module) -> None:
    """Gives the modules of a stack what those of its adapted copy have besides."""
    own = dict(nnx.iter_modules(stack))
    for path, module in nnx.iter_modules(adapted):
        had = vars(own[path])
        for name, value in vars(module).items():
            if name.startswith("_pytree__") or isinstance(value, nnx.Module):
                continue
            if name not in had or type(value) is not type(had[name]):
                setattr(own[path], name, value)
