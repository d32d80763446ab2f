"""Rematerialisation of modules by path pattern, without changes to their code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from .._layout import pattern_regex, steps_text
from .._nnx import Remat, remat_policy


def remat_modules(model: nnx.Module, patterns: Mapping[str, Remat]) -> None:
    """Makes the calls of matching modules save only what their policy allows; changes `model`.

    Raises:
        ValueError: a pattern matches no module.
    """
    modules = [(path, m) for path, m in nnx.iter_modules(model) if callable(m)]
    for pattern, policy in patterns.items():
        regex = pattern_regex(pattern)
        found = [m for path, m in modules if regex.fullmatch(steps_text(path))]
        if not found:
            paths = [".".join(map(str, path)) for path, _ in modules if path]
            raise ValueError(
                f"remat pattern {pattern!r} matches no module that is called: "
                f"the model has {', '.join(paths[:8])}{', …' if len(paths) > 8 else ''}"
            )
        for module in found:
            # Python looks a call up on the class, so the instance gets a class of its own: see
            # `scope_modules` for why. It is not the user's, but one merged for this trace.
            module.__class__ = _remat_class(type(module), remat_policy(policy))


def _remat_class(base: type[Any], policy: Callable[..., Any]) -> type[Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        flat, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
        # Arguments that are not arrays, such as deterministic=True, must not be traced.
        is_traced = [_is_node(x) or hasattr(x, "dtype") for x in flat]

        def run(module: Any, traced: list[Any]) -> Any:
            rest = iter(traced)
            given = [next(rest) if yes else x for x, yes in zip(flat, is_traced, strict=True)]
            args, kwargs = jax.tree.unflatten(treedef, given)
            return base.__call__(module, *args, **kwargs)

        # Flax's own remat, since arguments may change too: an nnx.Rngs that is passed on counts.
        traced = [x for x, yes in zip(flat, is_traced, strict=True) if yes]
        return nnx.remat(run, policy=policy)(self, traced)

    metaclass: Any = type(base)
    return metaclass(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)
