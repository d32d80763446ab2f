"""Helpers for walking jaxprs, independent of the version of JAX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import Jaxpr

from .._base import users_line


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr and its constants; newer JAX has one class for open and closed jaxprs."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def is_literal(atom: Any) -> bool:
    """Returns whether an operand is a literal."""
    return hasattr(atom, "val")


def is_jaxpr(value: Any) -> bool:
    """Returns whether a parameter is a jaxpr, open or closed."""
    return hasattr(opened(value)[0], "eqns")


def sub_jaxprs(eqn: Any) -> Iterator[Any]:
    """Yields the jaxprs among an equation's parameters."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(item):
                yield item


def cut_jaxpr(jaxpr: Any, invars: list[Any], outvars: list[Any], eqns: list[Any]) -> Jaxpr:
    """Returns the part of a jaxpr that consists of these equations."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return Jaxpr([], invars, outvars, eqns, effects, jaxpr.debug_info.with_unknown_names())


def call_jaxpr(eqn: Any) -> Any:
    """Returns the inner jaxpr of a primitive that only calls it, such as jit or remat."""
    if eqn.primitive.name in ("shard_map", "pallas_call", "reduce", "reduce_window"):
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(key)
        jaxpr, _ = opened(inner)
        if hasattr(jaxpr, "invars"):
            same = len(jaxpr.invars) == len(eqn.invars) and len(jaxpr.outvars) == len(eqn.outvars)
            return inner if same else None
    return None


def scan_parts(eqn: Any) -> tuple[int, int]:
    """Returns how many operands of a scan are constants, and how many are carried.

    They are counted by rank alone, since the parameters that say so differ between JAX versions.
    """
    body, _ = opened(eqn.params["jaxpr"])
    kept = sum(
        len(outer.aval.shape) == len(inner.aval.shape)
        for outer, inner in zip(eqn.invars, body.invars, strict=True)
    )
    carried = sum(
        len(outer.aval.shape) == len(inner.aval.shape)
        for outer, inner in zip(eqn.outvars, body.outvars, strict=True)
    )
    return kept - carried, carried


def user_line(eqn: Any) -> str:
    """Returns `file.py:12`, the innermost user line that an equation comes from."""
    stack = eqn.source_info.traceback
    frames = stack.frames if stack is not None else ()
    return users_line((frame.file_name, frame.line_num) for frame in frames)
