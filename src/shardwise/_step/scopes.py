"""Names a model's modules in the compiled program, so that each operation shows its module."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import jax
from flax import nnx

# The name of each module in the model, including list indices.
_places: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def module_paths(model: nnx.Module) -> list[str]:
    """Returns the paths of the callable modules, with and without list indices.

    Inside a Flax transform a module is a different object, whose index is not known.
    """
    found = [path for path, module in nnx.iter_modules(model) if path and callable(module)]
    return list(dict.fromkeys([*map(_show, found), *(_show(_unnumbered(p)) for p in found)]))


def scope_modules(model: nnx.Module) -> None:
    """Makes each module's call a named scope; changes `model`, but not what it computes."""
    found = {path: m for path, m in nnx.iter_modules(model) if callable(m)}
    for path, module in found.items():
        if not path:
            continue
        # Relative to the nearest enclosing module, whose scope comes before it.
        outer = next((n for n in range(len(path) - 1, 0, -1) if path[:n] in found), 0)
        _places[module] = _show(path[outer:])
        # Python looks a call up on the class, so the instance gets one of its own; the same for
        # all members of a list, which must stay alike to be stacked. The other ways are worse:
        # NNX has no hook around calls (Linen's `intercept_methods` has no counterpart), and to
        # replace `__call__` on the user's own class would reach all of its instances, in all
        # threads. `model` is merged for one trace and nobody else holds it: the user's own
        # modules keep their class, whatever is raised. `isinstance` and `super()` hold inside,
        # and the name is the same; only `type(self) is Block` does not.
        name = _show(_unnumbered(path[outer:]))
        module.__class__ = _scoped_class(type(module), name)


def _show(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _unnumbered(path: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(key for key in path if not isinstance(key, int))


@functools.lru_cache(maxsize=4096)
def _scoped_class(base: type[Any], name: str) -> type[Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(_places.get(self, name)):
            return base.__call__(self, *args, **kwargs)

    functools.update_wrapper(call, base.__call__)
    metaclass: Any = type(base)
    fields = {"__call__": call, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return metaclass(base.__name__, (base,), fields)
