"""Paths: the one way to write where an array is in the state of a model or an optimizer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

Keys = tuple[Any, ...]


def keyed_leaves(tree: Any) -> list[tuple[Keys, Any]]:
    """Returns each array of a state (a model's, an optimizer's) with its keys, in tree order.

    The step from a variable into its value is not a key, so these are the keys of leaves.
    """
    return [
        (keys + inner, array)
        for keys, variable in variables_of(tree)
        for inner, array in arrays_of(variable)
    ]


def show_path(keys: Keys) -> str:
    """Returns the dotted path of `keys`; a key that itself contains a dot is bracketed."""
    if not keys:
        return "(root)"
    return ".".join(
        f"[{k!r}]" if isinstance(k, str) and ("." in k or k[:1] == "[") else str(k) for k in keys
    )


def dotted(path: Any) -> str:
    """Returns a `jax.tree_util` path as layouts show it: `up.kernel`, or an empty string at a root.

    The step from a variable into its value, an attribute, is not a key.
    """
    keys = _plain_keys(path)
    if path and getattr(path[-1], "name", None) == "value":
        keys = keys[:-1]
    return show_path(keys) if keys else ""


def split_path(path: str) -> list[Any]:
    """Returns the steps of a dotted path or pattern; the inverse of `show_path`."""
    steps = re.findall(r"""\['[^']*'\]|\["[^"]*"\]|[^.]+|(?<=\.)(?=\.|$)|^(?=\.|$)""", path)
    return [ast.literal_eval(step)[0] if step[:2] in ("['", '["') else step for step in steps]


def variables_of(tree: Any) -> Iterator[tuple[Keys, Any]]:
    """Yields each variable of a state, or each bare array, with its keys."""
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return ((_plain_keys(path), variable) for path, variable in pairs)


def arrays_of(variable: Any) -> list[tuple[Keys, Any]]:
    """Returns the arrays of a variable's value, with the keys within it."""
    value = variable.get_value() if isinstance(variable, nnx.Variable) else variable
    return [(_plain_keys(p), array) for p, array in jax.tree_util.tree_leaves_with_path(value)]


def _plain_keys(path: Any) -> Keys:
    return tuple(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))) for k in path)


def child_of(node: Any, key: Any) -> Any:
    """Returns the child of a module or a container at `key`, or None."""
    if isinstance(key, str) and hasattr(node, key):
        return getattr(node, key)
    try:
        return node[key]
    except (TypeError, KeyError, IndexError):
        return None
