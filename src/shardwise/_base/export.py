"""Makes a public name report the package that users import it from as its module."""

from __future__ import annotations

from typing import Any, ForwardRef, TypeVar

T = TypeVar("T")


def public(thing: T) -> T:
    """Returns the class or function, with its public package as its `__module__`.

    Tracebacks, reprs and pickles then say `shardwise.LayoutError`, and files inside can move. It is
    the outermost decorator, because a dataclass looks its annotations up in the module of its file.

    As for JAX's own public classes, `inspect.getsource` no longer finds a class; functions and
    methods are found as before.
    """
    inside = thing.__module__
    if isinstance(thing, type):
        # Otherwise they would be evaluated in the public package, which lacks the file's names.
        own = vars(thing).get("__annotations__", {})
        own |= {name: _evaluated_in(inside, hint) for name, hint in own.items()}
    thing.__module__ = inside.partition("._")[0]
    if "__firstlineno__" in vars(thing):
        # A line number in the file, which Python 3.13 would look up in the public package.
        delattr(thing, "__firstlineno__")
    return thing


def _evaluated_in(module: str, hint: Any) -> Any:
    """Returns an annotation that `typing.get_type_hints` evaluates in the module it was written in."""
    return ForwardRef(hint, module=module, is_class=True) if isinstance(hint, str) else hint
