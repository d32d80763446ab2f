"""Loops and branches of a body, for all simulated devices at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import scan_parts
from .._mesh import Axes
from .collectives import waiting_axes
from .derivatives import called, custom_jvp, custom_vjp, custom_vjp_axes
from .stacked import Stacked, axes_of, in_order, like, one_by_one, values_of, widened


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How one primitive is run, and along which axes its results may vary."""

    run: Callable[[Any, Any, list[Stacked]], list[Stacked]]
    axes: Callable[[Any, Any, list[Axes]], list[Axes]]


RULES: dict[str, Rule] = {}


# --- calls --------------------------------------------------------------------------------------


def _call_axes(machine: Any, eqn: Any, axes: list[Axes]) -> list[Axes]:
    return machine.axes_through(called(eqn), axes)


def _remat(machine: Any, eqn: Any, args: list[Stacked]) -> list[Stacked]:
    axes = _call_axes(machine, eqn, [a.axes for a in args])

    def fn(*values: Any) -> list[Any]:
        return widened(machine.run(called(eqn), like(args, values)), axes, machine.sizes)

    options = {"prevent_cse": eqn.params["prevent_cse"], "policy": eqn.params["policy"]}
    outs = jax.checkpoint(fn, **options)(*values_of(args))
    return [Stacked(v, a) for v, a in zip(outs, axes, strict=True)]


# --- loops --------------------------------------------------------------------------------------


def _settled(
    machine: Any, jaxpr: Any, before: list[Axes], carry: list[Axes], xs: list[Axes]
) -> Any:
    """Returns the axes of a loop's carried values at the fixed point, and of its other outputs."""
    while True:
        outs = machine.axes_through(jaxpr, [*before, *carry, *xs])
        grown = [
            in_order((*a, *b), machine.sizes)
            for a, b in zip(carry, outs[: len(carry)], strict=True)
        ]
        if grown == carry:
            return carry, outs[len(carry) :]
        carry = grown


def _scan(machine: Any, eqn: Any, args: list[Stacked]) -> list[Stacked]:
    jaxpr, sizes = eqn.params["jaxpr"], machine.sizes
    consts, carried = scan_parts(eqn)
    fixed, carry, xs = args[:consts], args[consts : consts + carried], args[consts + carried :]
    axes, out_axes = _settled(machine, jaxpr, *axes_of(fixed, carry, xs))
    init = widened(carry, axes, sizes)

    def body(state: list[Any], now: list[Any]) -> tuple[list[Any], list[Any]]:
        inner = [Stacked(v, a) for v, a in zip(state, axes, strict=True)]
        outs = machine.run(jaxpr, [*fixed, *inner, *like(xs, now)])
        outs = widened(outs, [*axes, *out_axes], sizes)
        return outs[:carried], outs[carried:]

    # The dim to scan over comes after the device dims: move it to the front.
    stepped = [jnp.moveaxis(x.value, len(x.axes), 0) for x in xs]
    state, ys = jax.lax.scan(
        body,
        init,
        stepped,
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    ys = [jnp.moveaxis(y, 0, len(a)) for y, a in zip(ys, out_axes, strict=True)]
    return [Stacked(v, a) for v, a in zip([*state, *ys], [*axes, *out_axes], strict=True)]


def _scan_axes(machine: Any, eqn: Any, axes: list[Axes]) -> list[Axes]:
    consts, carried = scan_parts(eqn)
    parts = axes[:consts], axes[consts : consts + carried], axes[consts + carried :]
    carry, outs = _settled(machine, eqn.params["jaxpr"], *parts)
    return [*carry, *outs]


def _while_parts(eqn: Any, args: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    cond, body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    return args[:cond], args[cond : cond + body], args[cond + body :]


def _while_axes(machine: Any, eqn: Any, axes: list[Axes]) -> list[Axes]:
    cond, body, carry = _while_parts(eqn, axes)
    while True:
        carry, _ = _settled(machine, eqn.params["body_jaxpr"], body, carry, [])
        (stop,) = machine.axes_through(eqn.params["cond_jaxpr"], [*cond, *carry])
        # Devices that stop at different times end with different values.
        grown = [in_order((*c, *stop), machine.sizes) for c in carry]
        if grown == carry:
            return carry
        carry = grown


def _while(machine: Any, eqn: Any, args: list[Stacked]) -> list[Stacked]:
    sizes = machine.sizes
    cond_consts, body_consts, carry = _while_parts(eqn, args)
    axes = _while_axes(machine, eqn, [a.axes for a in args])
    waits = waiting_axes(eqn.params["cond_jaxpr"], sizes)
    waits |= waiting_axes(eqn.params["body_jaxpr"], sizes)

    def stack(values: Sequence[Any]) -> list[Stacked]:
        return [Stacked(v, a) for v, a in zip(values, axes, strict=True)]

    def goes_on(values: Sequence[Any]) -> Stacked:
        (out,) = machine.run(eqn.params["cond_jaxpr"], [*cond_consts, *stack(values)])
        return _agreed(machine, out, waits)

    def body(values: list[Any]) -> list[Any]:
        outs = machine.run(eqn.params["body_jaxpr"], [*body_consts, *stack(values)])
        return widened(outs, axes, sizes)

    (stop,) = machine.axes_through(
        eqn.params["cond_jaxpr"], [*(c.axes for c in cond_consts), *axes]
    )
    if kept := tuple(a for a in stop if a not in waits):
        # Devices that stop at different times run one by one, each only as long as it would.

        def step(at: dict[str, Any], inner: list[Stacked]) -> list[Stacked]:
            return _while(machine.inside(at), eqn, inner)

        return one_by_one(step, args, kept, sizes)
    init = widened(carry, axes, sizes)
    return stack(jax.lax.while_loop(lambda values: goes_on(values).value, body, init))


# --- branches -----------------------------------------------------------------------------------


def _branch_axes(machine: Any, eqn: Any, axes: list[Axes]) -> list[Axes]:
    each = [machine.axes_through(branch, axes[1:]) for branch in eqn.params["branches"]]
    return [
        in_order((*axes[0], *(a for out in outs for a in out)), machine.sizes)
        for outs in zip(*each, strict=True)
    ]


def _cond(machine: Any, eqn: Any, args: list[Stacked]) -> list[Stacked]:
    branches, sizes = eqn.params["branches"], machine.sizes
    waits = set[str]().union(*(waiting_axes(branch, sizes) for branch in branches))
    index = _agreed(machine, args[0], waits)
    if not index.axes:
        axes = _branch_axes(machine, eqn, [(), *(a.axes for a in args[1:])])

        def taken(branch: Any) -> Callable[..., list[Any]]:
            def fn(*values: Any) -> list[Any]:
                outs = machine.run(branch, like(args[1:], values))
                return widened(outs, axes, sizes)

            return fn

        picked = jnp.asarray(index.value, "int32")
        outs = jax.lax.switch(picked, [taken(b) for b in branches], *values_of(args[1:]))
        return [Stacked(v, a) for v, a in zip(outs, axes, strict=True)]

    # Devices that take different branches run one by one: as on a real device, a branch that is
    # not taken must not be computed (it may divide by zero, and so may its gradient).
    def step(at: dict[str, Any], inner: list[Stacked]) -> list[Stacked]:
        return _cond(machine.inside(at), eqn, inner)

    return one_by_one(step, [index, *args[1:]], index.axes, sizes)


def _agreed(machine: Any, stacked: Stacked, axes: set[str]) -> Stacked:
    """Returns a predicate that no longer varies along the axes over which devices wait."""
    shared = tuple(a for a in stacked.axes if a in axes)
    if not shared:
        return stacked
    if machine.disagree is not None:
        machine.disagree(stacked, shared, machine.line)
    value = stacked.value
    for axis in reversed(shared):
        at = stacked.axes.index(axis)
        # A loop ends as soon as any of the devices that wait for each other would end it:
        # otherwise it might never end.
        value = jnp.all(value, axis=at) if value.dtype == bool else jnp.take(value, 0, axis=at)
    return Stacked(value, tuple(a for a in stacked.axes if a not in shared))


RULES |= {
    **{name: Rule(_remat, _call_axes) for name in ("remat", "remat2", "checkpoint")},
    "scan": Rule(_scan, _scan_axes),
    "while": Rule(_while, _while_axes),
    "cond": Rule(_cond, _branch_axes),
    "custom_jvp_call": Rule(custom_jvp, _call_axes),
    "custom_vjp_call": Rule(custom_vjp, custom_vjp_axes),
}
