"""Helpers for walking jaxprs, independent of the version of JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.core import eval_jaxpr

from .._base import users_line
from .private import equation_frames, open_jaxpr


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


def cut_jaxpr(jaxpr: Any, invars: list[Any], outvars: list[Any], eqns: list[Any]) -> Any:
    """Returns the part of a jaxpr that consists of these equations."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return open_jaxpr(invars, outvars, eqns, effects, jaxpr)


def keep_outputs(jaxpr: Any, numbers: Sequence[int]) -> tuple[Any, Sequence[Any]]:
    """Returns what computes some outputs of a closed jaxpr without inputs, and its arguments."""
    program, consts = opened(jaxpr)
    outvars = [program.outvars[number] for number in numbers]
    needed = {v for v in outvars if not is_literal(v)}
    eqns = []
    for eqn in reversed(program.eqns):
        if any(v in needed for v in eqn.outvars):
            eqns.append(eqn)
            needed.update(v for v in eqn.invars if not is_literal(v))
    return cut_jaxpr(program, list(program.constvars), outvars, eqns[::-1]), consts


def jaxpr_as_fun(jaxpr: Any) -> Callable[..., list[Any]]:
    """Returns the function that a jaxpr is, open or closed."""
    program, consts = opened(jaxpr)
    return lambda *args: eval_jaxpr(program, consts, *args)


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
    return users_line(equation_frames(eqn))
