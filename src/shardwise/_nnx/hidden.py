"""Arrays that a model keeps outside its state: in helper objects, closures and partials.

Flax treats such an attribute as static, and its arrays as constants of the model. A model that is
built under a trace has tracers there instead, which must not outlive the trace: their values are
computed once, concretely, and put in their place.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
from flax import nnx
from jax.core import Tracer

from .._base import show_type
from .._jax import cut_jaxpr, data_attributes, is_literal, jaxpr_as_fun

Swap = Callable[[Any, str], Any]
_LIBRARIES = ("jax", "jaxlib", "flax", "numpy")
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)


def hidden_tracers(model: nnx.Module) -> dict[str, Any]:
    """Returns the tracers in static attributes, by location, such as `rope.sin`.

    Raises:
        ValueError: an attribute is a container of arrays, which Flax rejects outside of a trace.
    """
    found: dict[str, Any] = {}

    def note(tracer: Any, where: str) -> Any:
        found.setdefault(where, tracer)
        return tracer

    for where, node, name, value in _static_attributes(model):
        before = len(found)
        _Walk(note)(value, where)
        if len(found) > before and isinstance(value, tuple | list | dict | set):
            raise ValueError(
                f"{where} of {type(node).__name__} is {show_type(value)} of arrays, "
                f"which Flax rejects in a static attribute: assign self.{name} = nnx.data(…), or "
                f"keep them in an nnx.Variable"
            )
    return found


def fill_hidden(model: nnx.Module, values: dict[str, Any]) -> None:
    """Puts concrete arrays where `hidden_tracers` found tracers in a model of the same factory."""

    def put(tracer: Any, where: str) -> Any:
        value = values.get(where)
        if value is None or value.shape != tracer.shape or value.dtype != tracer.dtype:
            raise ValueError(
                f"the array at {where} differs from one call of the model's factory to the next: "
                f"the factory must build the same model every time"
            )
        return value

    for where, node, name, value in _static_attributes(model):
        new = _Walk(put)(value, where)
        if new is not value:
            object.__setattr__(node, name, new)


def compute_hidden(closed: Any, where: Sequence[str]) -> dict[str, Any]:
    """Returns the last outputs of a closed jaxpr, one per location, and computes nothing else."""
    jaxpr = closed.jaxpr
    outvars = jaxpr.outvars[len(jaxpr.outvars) - len(where) :]
    needed = {v for v in outvars if not is_literal(v)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            eqns.append(eqn)
            needed.update(v for v in eqn.invars if not is_literal(v))
    part = cut_jaxpr(jaxpr, list(jaxpr.constvars), outvars, eqns[::-1])
    # Without jit, so that the values are those of a model that is built eagerly.
    values = jaxpr_as_fun(part)(*closed.consts)
    return dict(zip(where, values, strict=True))


def _static_attributes(model: nnx.Module) -> Iterator[tuple[str, Any, str, Any]]:
    """Yields the location, module, name and value of each static attribute."""
    for path, node in list(nnx.iter_graph(model)):
        if not isinstance(node, nnx.Pytree):
            continue
        data = data_attributes(node)
        for name, value in list(vars(node).items()):
            if not name.startswith("_pytree__") and name not in data:
                yield ".".join(map(str, (*path, name))), node, name, value


class _Walk:
    """Visits everything that a static attribute refers to, and replaces the tracers in it.

    Mutable containers are changed in place; tuples and other immutable ones are rebuilt.
    """

    def __init__(self, swap: Swap):
        self.swap = swap
        self.seen: dict[int, Any] = {}

    def __call__(self, value: Any, where: str) -> Any:
        if isinstance(value, Tracer):
            return self.swap(value, where)
        if isinstance(value, jax.Array) or isinstance(value, _PLAIN):
            return value
        if id(value) in self.seen:
            return self.seen[id(value)]
        self.seen[id(value)] = value
        new = self._inside(value, where)
        self.seen[id(value)] = new
        return new

    def _inside(self, value: Any, where: str) -> Any:
        match value:
            case nnx.Variable():
                raw = value.get_raw_value()
                if (new := self(raw, where)) is not raw:
                    value.set_raw_value(new)
                return value
            case dict():
                for key, item in list(value.items()):
                    if (new := self(item, f"{where}[{key!r}]")) is not item:
                        value[key] = new
                return value
            case list():
                for i, item in enumerate(value):
                    value[i] = self(item, f"{where}[{i}]")
                return value
            case tuple():
                items = [self(item, f"{where}[{i}]") for i, item in enumerate(value)]
                if all(new is old for new, old in zip(items, value, strict=True)):
                    return value
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
            case functools.partial():
                args = self(value.args, f"{where}.args")
                keywords = self(dict(value.keywords), f"{where}.keywords")
                func = self(value.func, f"{where}.func")
                # The only way to change a partial in place, which pickle uses too.
                cast(Any, value).__setstate__((func, args, keywords, vars(value)))
                return value
            case types.MethodType():
                self(value.__self__, f"{where}.__self__")
                return value
            case types.FunctionType():
                self._inside_function(value, where)
                return value
        return self._inside_object(value, where)

    def _inside_function(self, function: types.FunctionType, where: str) -> None:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # a variable that was never set
                continue
            if (new := self(content, f"{where} (its variable {name})")) is not content:
                cell.cell_contents = new
        if function.__defaults__:
            function.__defaults__ = self(function.__defaults__, f"{where} (a default)")
        if function.__kwdefaults__:
            self(function.__kwdefaults__, f"{where} (a default)")

    def _inside_object(self, value: Any, where: str) -> Any:
        attributes = dict(getattr(value, "__dict__", {}))
        for name in (name for cls in type(value).__mro__ for name in _slots(cls)):
            if hasattr(value, name):
                attributes[name] = getattr(value, name)
        if type(value).__module__.split(".")[0] in _LIBRARIES and not isinstance(value, nnx.Pytree):
            # The internals of libraries are not the user's, except what a jitted function wraps.
            attributes = {name: x for name, x in attributes.items() if name == "__wrapped__"}
        for name, item in attributes.items():
            if name.startswith("_pytree__"):
                continue  # internal to Flax, and refers to the trace itself
            if (new := self(item, f"{where}.{name}")) is not item:
                object.__setattr__(value, name, new)
        return value


def _slots(cls: type) -> Sequence[str]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
