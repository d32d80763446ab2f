"""Names a model's modules in the compiled program, so that each operation says whose it is."""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx


def module_paths(model: nnx.Module) -> list[str]:
    """Returns the paths of the modules that can be called."""
    return [_show(path) for path, module in nnx.iter_modules(model) if path and callable(module)]


def scope_modules(model: nnx.Module) -> None:
    """Makes each module's call a named scope; changes `model`, but nothing that it computes."""
    callable_paths = {path for path, module in nnx.iter_modules(model) if callable(module)}
    for path, module in nnx.iter_modules(model):
        if not path or not callable(module):
            continue
        # Relative to the nearest module around it, whose own scope comes before.
        outer = next((n for n in range(len(path) - 1, 0, -1) if path[:n] in callable_paths), 0)
        # Python looks a call up on the class, so the instance gets a class of its own.
        module.__class__ = _scoped_class(type(module), _show(path[outer:]))


def _show(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


@functools.lru_cache(maxsize=4096)
def _scoped_class(base: type[Any], scope: str) -> type[Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(scope):
            return base.__call__(self, *args, **kwargs)

    functools.update_wrapper(call, base.__call__)
    metaclass: Any = type(base)
    fields = {"__call__": call, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return metaclass(base.__name__, (base,), fields)
