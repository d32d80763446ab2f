"""Where a public name says that it lives: in the package that users import it from."""

from __future__ import annotations

from typing import Any, ForwardRef, TypeVar

T = TypeVar("T")


def public(thing: T) -> T:
    """Returns a class or function, which from now on names its public package as its module.

    Tracebacks, reprs and pickles then say `shardwise.LayoutError`, and files inside can move. It is
    the outermost decorator, because a dataclass looks its annotations up in the module of its file.

    As for JAX's own public classes, `inspect.getsource` no longer finds a class; functions and
    methods are found as before.
    """
    inside = thing.__module__
    if isinstance(thing, type):
        # Or they would be looked up in the public package, which lacks the names of the file.
        own = vars(thing).get("__annotations__", {})
        own |= {name: _held(hint, inside) for name, hint in own.items()}
    thing.__module__ = inside.partition("._")[0]
    if "__firstlineno__" in vars(thing):
        # A line of that file, which Python 3.13 would look for in the public package.
        delattr(thing, "__firstlineno__")
    return thing


def _held(hint: Any, module: str) -> Any:
    """Returns an annotation that `typing.get_type_hints` evaluates in the module it was written in."""
    return ForwardRef(hint, module=module, is_class=True) if isinstance(hint, str) else hint
