"""custom_jvp and custom_vjp calls of a body: the user's own rules, on all simulated devices.

A rule may hold collectives, and what they mean under differentiation is JAX's to say. So the rule
is traced by JAX's own shard_map, and its jaxpr run like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import cut_jaxpr, is_literal, jaxpr_as_fun, opened
from .._mesh import Axes
from .body import as_arguments, trace_local, varying
from .held import Held, in_order, like, values_of, widen, widened


def called(eqn: Any) -> Any:
    """Returns the jaxpr that an equation calls."""
    return eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]


def _alone(eqn: Any) -> Callable[..., list[Any]]:
    """Returns the function that one equation is, its derivatives JAX's own."""
    invars = [v for v in eqn.invars if not is_literal(v)]
    jaxpr = cut_jaxpr(opened(called(eqn))[0], invars, eqn.outvars, [eqn])
    return jaxpr_as_fun(jaxpr)


def custom_jvp(machine: Any, eqn: Any, args: list[Held]) -> list[Held]:
    """Returns what the devices hold after a custom_jvp call; its rule is kept."""
    keep = [i for i, v in enumerate(eqn.invars) if not is_literal(v)]
    declared = [tuple(varying(eqn.invars[i].aval)) for i in keep]
    out_axes = machine.axes_through(called(eqn), [a.axes for a in args])

    def plain(*values: Any) -> list[Any]:
        whole = list(args)
        for i, v in zip(keep, values, strict=True):
            whole[i] = Held(v, args[i].axes)
        return widened(machine.run(called(eqn), whole), out_axes, machine.sizes)

    fn = jax.custom_jvp(plain)

    @fn.defjvp
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        held = [Held(v, args[i].axes) for i, v in zip(keep, primals, strict=True)]
        floats = [n for n, p in enumerate(primals) if _is_float(p)]

        def both(*leaves: Any) -> Any:
            inner, given = leaves[: len(keep)], iter(leaves[len(keep) :])
            steps = [next(given) if n in floats else _no_tangent(p) for n, p in enumerate(inner)]
            out, out_tangents = jax.jvp(_alone(eqn), inner, tuple(steps))
            return out, [t for t in out_tangents if t.dtype != jax.dtypes.float0]

        steps = [Held(tangents[n], held[n].axes) for n in floats]
        found = _run_local(
            machine, both, [*held, *steps], [*declared, *(declared[n] for n in floats)]
        )
        count = len(eqn.outvars)
        out = widened(found[:count], out_axes, machine.sizes)
        given = iter(found[count:])
        moved = [
            widen(next(given), a, machine.sizes).value if _is_float(o) else _no_tangent(o)
            for o, a in zip(out, out_axes, strict=True)
        ]
        return out, moved

    outs = fn(*(args[i].value for i in keep))
    return [Held(v, a) for v, a in zip(outs, out_axes, strict=True)]


def custom_vjp(machine: Any, eqn: Any, args: list[Held]) -> list[Held]:
    """Returns what the devices hold after a custom_vjp call; its two passes are kept."""
    keep = [i for i, v in enumerate(eqn.invars) if not is_literal(v)]
    declared = [_declared(machine, eqn.invars[i]) for i in keep]
    # A backward pass need not be linear: each device must get the cotangent that a real one gets,
    # and so must hold its own copy.
    held = [widen(args[i], a, machine.sizes) for i, a in zip(keep, declared, strict=True)]
    out_axes = [_declared(machine, v) for v in eqn.outvars]
    found: dict[str, Any] = {}

    def plain(*values: Any) -> list[Any]:
        whole = list(args)
        for i, h in zip(keep, like(held, values), strict=True):
            whole[i] = h
        return widened(machine.run(called(eqn), whole), out_axes, machine.sizes)

    fn = jax.custom_vjp(plain)

    def forward(*values: Any) -> Any:
        def both(*leaves: Any) -> Any:
            out, found["tree"] = _split_vjp(*jax.vjp(_alone(eqn), *leaves))
            found["declared"] = [tuple(varying(jax.typeof(r))) for r in out[1]]
            return out

        outs = _run_local(machine, both, like(held, values), declared)
        count = len(eqn.outvars)
        kept = outs[count:]
        found["axes"] = [h.axes for h in kept]
        return widened(outs[:count], out_axes, machine.sizes), values_of(kept)

    def backward(kept: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        floats = [n for n, v in enumerate(eqn.outvars) if _is_float(v.aval)]

        def pull(*leaves: Any) -> Any:
            back = jax.tree.unflatten(found["tree"], leaves[: len(kept)])
            given = iter(leaves[len(kept) :])
            steps = [
                next(given) if n in floats else _no_tangent(v.aval)
                for n, v in enumerate(eqn.outvars)
            ]
            return [c for c in back(steps) if c.dtype != jax.dtypes.float0]

        residuals = [Held(v, a) for v, a in zip(kept, found["axes"], strict=True)]
        steps = [Held(cotangents[n], out_axes[n]) for n in floats]
        types = [*found["declared"], *(out_axes[n] for n in floats)]
        outs = iter(_run_local(machine, pull, [*residuals, *steps], types))
        return tuple(
            widen(next(outs), h.axes, machine.sizes).value if _is_float(h.value) else None
            for h in held
        )

    fn.defvjp(forward, backward)
    return [Held(v, a) for v, a in zip(fn(*values_of(held)), out_axes, strict=True)]


def custom_vjp_axes(machine: Any, eqn: Any, axes: list[Axes]) -> list[Axes]:
    """Returns the axes along which its results have a copy for each device."""
    return [_declared(machine, v) for v in eqn.outvars]


def _declared(machine: Any, var: Any) -> Axes:
    """Returns the axes along which a value must have its own copy for each device."""
    wanted = varying(var.aval) if machine.setting.typed else machine.sizes
    return in_order((a for a in wanted if a not in machine.at), machine.sizes)


def _split_vjp(out: Any, back: Any) -> tuple[tuple[Any, list[Any]], Any]:
    leaves, tree = jax.tree.flatten(back)
    return (out, leaves), tree


def _run_local(
    machine: Any, fn: Callable[..., Any], held: Sequence[Held], declared: Sequence[Axes]
) -> list[Held]:
    body = trace_local(fn, held, declared, machine.setting)
    return machine.run_body(body, as_arguments(held, machine.sizes))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _no_tangent(x: Any) -> np.ndarray:
    return np.zeros(x.shape, jax.dtypes.float0)
