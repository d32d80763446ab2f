"""Calls, loops, branches and custom derivatives of a body, for all simulated devices at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from ._body import as_arguments, trace_local, varying
from ._collectives import waiting_axes
from ._held import Held, in_order, one_by_one, widen
from ._jaxpr import is_literal, scan_parts, user_line
from ._spec import Axes


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How one primitive is run, and along which axes its results may differ."""

    run: Callable[[Any, Any, list[Held]], list[Held]]
    axes: Callable[[Any, Any, list[Axes]], list[Axes]]


RULES: dict[str, Rule] = {}


# --- calls --------------------------------------------------------------------------------------


def _called(eqn: Any) -> Any:
    return eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]


def _call(machine: Any, eqn: Any, args: list[Held]) -> list[Held]:
    return machine.run(_called(eqn), args)


def _call_axes(machine: Any, eqn: Any, axes: list[Axes]) -> list[Axes]:
    return machine.axes_through(_called(eqn), axes)


for _name in ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "custom_lin"):
    RULES[_name] = Rule(_call, _call_axes)


def _remat(machine: Any, eqn: Any, args: list[Held]) -> list[Held]:
    outs = _Outs()

    def fn(*values: Any) -> list[Any]:
        return outs.keep(machine.run(_called(eqn), _like(args, values)))

    options = {"prevent_cse": eqn.params["prevent_cse"], "policy": eqn.params["policy"]}
    return outs.of(jax.checkpoint(fn, **options)(*_values(args)))


for _name in ("remat", "remat2", "checkpoint"):
    RULES[_name] = Rule(_remat, _call_axes)


# --- loops --------------------------------------------------------------------------------------


def _settled(
    machine: Any, jaxpr: Any, before: list[Axes], carry: list[Axes], xs: list[Axes]
) -> Any:
    """Returns the axes of a loop's carried values once they grow no more, and those of the rest."""
    while True:
        outs = machine.axes_through(jaxpr, [*before, *carry, *xs])
        grown = [
            in_order((*a, *b), machine.sizes)
            for a, b in zip(carry, outs[: len(carry)], strict=True)
        ]
        if grown == carry:
            return carry, outs[len(carry) :]
        carry = grown


def _scan(machine: Any, eqn: Any, args: list[Held]) -> list[Held]:
    jaxpr, sizes = eqn.params["jaxpr"], machine.sizes
    consts, carried = scan_parts(eqn)
    fixed, carry, xs = args[:consts], args[consts : consts + carried], args[consts + carried :]
    axes, out_axes = _settled(machine, jaxpr, *_axes_of(fixed, carry, xs))
    init = [widen(c, a, sizes).value for c, a in zip(carry, axes, strict=True)]

    def body(state: list[Any], now: list[Any]) -> tuple[list[Any], list[Any]]:
        inner = [Held(v, a) for v, a in zip(state, axes, strict=True)]
        outs = machine.run(jaxpr, [*fixed, *inner, *_like(xs, now)])
        outs = [widen(o, a, sizes).value for o, a in zip(outs, [*axes, *out_axes], strict=True)]
        return outs[:carried], outs[carried:]

    # Each device's dim to step along stands behind the dims of the devices.
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
    return [Held(v, a) for v, a in zip([*state, *ys], [*axes, *out_axes], strict=True)]


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


def _while(machine: Any, eqn: Any, args: list[Held]) -> list[Held]:
    sizes = machine.sizes
    cond_consts, body_consts, carry = _while_parts(eqn, args)
    axes = _while_axes(machine, eqn, [a.axes for a in args])
    waits = waiting_axes(eqn.params["cond_jaxpr"], sizes)
    waits |= waiting_axes(eqn.params["body_jaxpr"], sizes)

    def held(values: Sequence[Any]) -> list[Held]:
        return [Held(v, a) for v, a in zip(values, axes, strict=True)]

    def goes_on(values: Sequence[Any]) -> Held:
        (out,) = machine.run(eqn.params["cond_jaxpr"], [*cond_consts, *held(values)])
        return _agreed(machine, out, waits, eqn)

    def body(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        live, old = Held(state[0], first.axes), held(state[1])
        outs = machine.run(eqn.params["body_jaxpr"], [*body_consts, *old])
        new = [widen(o, a, sizes) for o, a in zip(outs, axes, strict=True)]
        if live.axes:
            new = [_where(live, n, o, sizes) for n, o in zip(new, old, strict=True)]
        values = [n.value for n in new]
        return live.value & goes_on(values).value, values

    init = [widen(c, a, sizes).value for c, a in zip(carry, axes, strict=True)]
    (stop,) = machine.axes_through(
        eqn.params["cond_jaxpr"], [*(c.axes for c in cond_consts), *axes]
    )
    kept = [a for a in stop if a not in waits]
    first = widen(goes_on(init), kept, sizes)
    return held(jax.lax.while_loop(lambda s: jnp.any(s[0]), body, (first.value, init))[1])


def _where(live: Held, new: Held, old: Held, sizes: Any) -> Held:
    mask = widen(live, new.axes, sizes).value
    mask = mask.reshape(mask.shape + (1,) * len(new.local_shape))
    return Held(jnp.where(mask, new.value, old.value), new.axes)


# --- branches -----------------------------------------------------------------------------------


def _branch_axes(machine: Any, eqn: Any, axes: list[Axes]) -> list[Axes]:
    each = [machine.axes_through(branch, axes[1:]) for branch in eqn.params["branches"]]
    return [
        in_order((*axes[0], *(a for out in outs for a in out)), machine.sizes)
        for outs in zip(*each, strict=True)
    ]


def _cond(machine: Any, eqn: Any, args: list[Held]) -> list[Held]:
    branches, sizes = eqn.params["branches"], machine.sizes
    waits = set[str]().union(*(waiting_axes(branch, sizes) for branch in branches))
    index = _agreed(machine, args[0], waits, eqn)
    if not index.axes:
        axes = _branch_axes(machine, eqn, [(), *(a.axes for a in args[1:])])

        def taken(branch: Any) -> Callable[..., list[Any]]:
            def fn(*values: Any) -> list[Any]:
                outs = machine.run(branch, _like(args[1:], values))
                return [widen(o, a, sizes).value for o, a in zip(outs, axes, strict=True)]

            return fn

        picked = jnp.asarray(index.value, "int32")
        outs = jax.lax.switch(picked, [taken(b) for b in branches], *_values(args[1:]))
        return [Held(v, a) for v, a in zip(outs, axes, strict=True)]

    # Devices that take different branches run one by one: what a branch that is not taken would
    # compute (a division by zero, and its gradient) must not be computed, as on a real device.
    def step(at: dict[str, Any], inner: list[Held]) -> list[Held]:
        return _cond(machine.inside({**machine.at, **at}), eqn, inner)

    return one_by_one(step, [index, *args[1:]], index.axes, sizes)


def _agreed(machine: Any, held: Held, axes: set[str], eqn: Any) -> Held:
    """Returns a predicate without the axes over which devices wait for each other under it."""
    shared = tuple(a for a in held.axes if a in axes)
    if not shared:
        return held
    if machine.disagree is not None:
        machine.disagree(held, shared, user_line(eqn))
    value = held.value
    for axis in reversed(shared):
        value = jnp.take(value, 0, axis=held.axes.index(axis))
    return Held(value, tuple(a for a in held.axes if a not in shared))


# --- custom derivatives -------------------------------------------------------------------------


def _alone(eqn: Any) -> Callable[..., list[Any]]:
    """Returns the function that one equation is, its derivatives JAX's own."""
    invars = [v for v in eqn.invars if not is_literal(v)]
    jaxpr = Jaxpr((), invars, eqn.outvars, [eqn], eqn.effects)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))


def _custom_jvp(machine: Any, eqn: Any, args: list[Held]) -> list[Held]:
    keep = [i for i, v in enumerate(eqn.invars) if not is_literal(v)]
    declared = [tuple(varying(eqn.invars[i].aval)) for i in keep]
    outs = _Outs()

    def plain(*values: Any) -> list[Any]:
        whole = list(args)
        for i, v in zip(keep, values, strict=True):
            whole[i] = Held(v, args[i].axes)
        return outs.keep(machine.run(_called(eqn), whole))

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
        plain(*primals)  # for the axes of the results
        out = [
            widen(h, a, machine.sizes).value for h, a in zip(found[:count], outs.axes, strict=True)
        ]
        given = iter(found[count:])
        moved = [
            widen(next(given), a, machine.sizes).value if _is_float(o) else _no_tangent(o)
            for o, a in zip(out, outs.axes, strict=True)
        ]
        return out, moved

    return outs.of(fn(*(args[i].value for i in keep)))


def _custom_vjp(machine: Any, eqn: Any, args: list[Held]) -> list[Held]:
    keep = [i for i, v in enumerate(eqn.invars) if not is_literal(v)]
    declared = [_declared(machine, eqn.invars[i]) for i in keep]
    # A backward pass need not be linear: each device must get the cotangent that a real one gets,
    # and so must hold its own copy.
    held = [widen(args[i], a, machine.sizes) for i, a in zip(keep, declared, strict=True)]
    out_axes = [_declared(machine, v) for v in eqn.outvars]
    found: dict[str, Any] = {}

    def fit(outs: Sequence[Held]) -> list[Any]:
        return [widen(o, a, machine.sizes).value for o, a in zip(outs, out_axes, strict=True)]

    def plain(*values: Any) -> list[Any]:
        whole = list(args)
        for i, h in zip(keep, _like(held, values), strict=True):
            whole[i] = h
        return fit(machine.run(_called(eqn), whole))

    fn = jax.custom_vjp(plain)

    def forward(*values: Any) -> Any:
        def both(*leaves: Any) -> Any:
            out, found["tree"] = _split_vjp(*jax.vjp(_alone(eqn), *leaves))
            found["declared"] = [tuple(varying(jax.typeof(r))) for r in out[1]]
            return out

        outs = _run_local(machine, both, _like(held, values), declared)
        count = len(eqn.outvars)
        kept = outs[count:]
        found["axes"] = [h.axes for h in kept]
        return fit(outs[:count]), [h.value for h in kept]

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
    return [Held(v, a) for v, a in zip(fn(*_values(held)), out_axes, strict=True)]


def _custom_vjp_axes(machine: Any, eqn: Any, axes: list[Axes]) -> list[Axes]:
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
    if body.jaxpr is None:
        return []
    args = [*(Held(c) for c in body.consts), *as_arguments(held, machine.sizes)]
    return [without_lead(out) for out in machine.run(body.jaxpr, args)]


def without_lead(out: Held) -> Held:
    """Returns an output of a traced body without the dim that tracing gave it."""
    return Held(jnp.squeeze(out.value, len(out.axes)), out.axes)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _no_tangent(x: Any) -> np.ndarray:
    return np.zeros(x.shape, jax.dtypes.float0)


# --- flat values and what is known of them --------------------------------------------------------


class _Outs:
    """The axes of outputs, learnt while JAX traces the function that makes them."""

    def __init__(self) -> None:
        self.axes: list[Axes] = []

    def keep(self, outs: Sequence[Held]) -> list[Any]:
        self.axes = [out.axes for out in outs]
        return _values(outs)

    def of(self, values: Sequence[Any]) -> list[Held]:
        return [Held(v, a) for v, a in zip(values, self.axes, strict=True)]


def _values(held: Sequence[Held]) -> list[Any]:
    return [h.value for h in held]


def _like(held: Sequence[Held], values: Sequence[Any]) -> list[Held]:
    return [Held(v, h.axes) for h, v in zip(held, values, strict=True)]


def _axes_of(*parts: Sequence[Held]) -> list[list[Axes]]:
    return [[h.axes for h in part] for part in parts]


RULES |= {
    "scan": Rule(_scan, _scan_axes),
    "while": Rule(_while, _while_axes),
    "cond": Rule(_cond, _branch_axes),
    "custom_jvp_call": Rule(_custom_jvp, _call_axes),
    "custom_vjp_call": Rule(_custom_vjp, _custom_vjp_axes),
}
