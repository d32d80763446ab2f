"""Simulated devices: a body's jaxpr, run for all of them at once on the one device that is there.

Ordinary equations are mapped over the devices that hold different values. Collectives become
sums, transposes and slices (`_collectives`), loops and branches loops and branches of the stacked
values (`control`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from .._jax import call_jaxpr, is_jaxpr, is_literal, opened, sub_jaxprs, user_line
from .._mesh import Axes
from . import control
from .body import Body, Setting
from .collectives import CASTS, UNKNOWN, TracedCollective, as_collective, axes_after, collect
from .held import Held, Sizes, in_order, one_by_one, spread, union, widen

# Sharding has no meaning on simulated devices.
_IDENTITY = CASTS | {"sharding_constraint", "reshard", "mesh_cast"}
# Under vmap these would not do for each device what a real one does alone: XLA's own generator
# of random bits (rbg keys) draws others, and callbacks refuse.
_ALONE = frozenset({"rng_bit_generator", "pure_callback", "io_callback"})
_EVERYWHERE = frozenset({"debug_callback", "debug_print", "io_callback"})


@dataclasses.dataclass(frozen=True)
class Machine:
    """The simulated devices of one call.

    Attributes:
        setting: the mesh and its axes.
        log: told of every collective, with its line, or None.
        disagree: told what decides where devices wait for each other, the axes along which they
            must agree on it, and the line.
        at: the coordinates along axes that are stepped through one by one.
        line: the user's line that called what is run, for what has none of its own: JAX cuts
            the tracebacks within a loop's body.
    """

    setting: Setting
    log: Callable[[TracedCollective, Held, str, Mapping[str, Any]], None] | None = None
    disagree: Callable[[Held, Axes, str], None] | None = None
    at: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    line: str = "?"

    @property
    def sizes(self) -> Sizes:
        """The sizes of the manual axes."""
        return self.setting.sizes

    def run(self, jaxpr: Any, args: Sequence[Held]) -> list[Held]:
        """Returns the outputs of a jaxpr (closed or not, its inputs all given) on all devices."""
        inner, consts = opened(jaxpr)
        env: dict[Any, Held] = {}
        last = _last_uses(inner)

        def read(atom: Any) -> Held:
            if not is_literal(atom):
                return env[atom]
            weak = getattr(atom.aval, "weak_type", False)
            return constant(np.asarray(atom.val).item() if weak else atom.val)

        for var, const in zip(inner.constvars, consts, strict=True):
            env[var] = constant(const)
        env.update(zip(inner.invars, args, strict=True))
        for i, eqn in enumerate(inner.eqns):
            outs = self.step(eqn, [read(a) for a in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
            for var in last.get(i, ()):
                env.pop(var, None)
        return [read(a) for a in inner.outvars]

    def run_body(self, body: Body, args: Sequence[Held]) -> list[Held]:
        """Returns the outputs of a traced body on all devices."""
        if body.jaxpr is None:
            return []
        outs = self.run(body.jaxpr, [*(constant(c) for c in body.consts), *args])
        # Without the dim that tracing gave them.
        return [Held(jnp.squeeze(o.value, len(o.axes)), o.axes) for o in outs]

    def step(self, eqn: Any, args: list[Held]) -> list[Held]:
        """Returns what the devices hold after one equation."""
        name, sizes = eqn.primitive.name, self.sizes
        if collective := as_collective(eqn):
            if self.log is not None:
                self.log(collective, args[0], user_line(eqn) or self.line, self.at)
            return [collect(collective, args[0], args[1:], sizes)]
        if name == "axis_index":
            axis = eqn.params["axis_name"]
            if axis in self.at:
                return [Held(self.at[axis])]
            return [Held(jnp.arange(sizes[axis], dtype="int32"), (axis,))]
        if name in _IDENTITY:
            return args
        if rule := control.RULES.get(name):
            return rule.run(self.called_by(eqn), eqn, args)
        if (inner := call_jaxpr(eqn)) is not None:
            return self.called_by(eqn).run(inner, args)
        if name in UNKNOWN or _has_axes(eqn):
            raise NotImplementedError(
                f"{name}, at {user_line(eqn) or self.line}, cannot be simulated: it works in "
                f"jax.shard_map on real devices only"
            )
        if name in _EVERYWHERE:  # each device prints, though all hold the same, or nothing
            free = [a for a in sizes if a not in self.at]
            if free and not args:
                return one_by_one(
                    lambda *_: _bind(eqn, [], sizes), [], in_order(free, sizes), sizes
                )
            args = [widen(a, free, sizes) for a in args]
        if _runs_alone(eqn) and (axes := union(args, sizes)):
            return one_by_one(lambda _, inner: _bind(eqn, inner, sizes), args, axes, sizes)
        return _bind(eqn, args, sizes)

    def inside(self, at: Mapping[str, Any]) -> Machine:
        """Returns the devices at fixed coordinates along some axes."""
        return dataclasses.replace(self, at={**self.at, **at})

    def called_by(self, eqn: Any) -> Machine:
        """Returns the devices within what an equation calls."""
        return dataclasses.replace(self, line=user_line(eqn) or self.line)

    def axes_through(self, jaxpr: Any, axes: Sequence[Axes]) -> list[Axes]:
        """Returns the axes along which each output may differ, without running anything."""
        inner, _ = opened(jaxpr)
        env: dict[Any, Axes] = {var: () for var in inner.constvars}
        env.update(zip(inner.invars, axes, strict=True))
        for eqn in inner.eqns:
            before = [() if is_literal(a) else env[a] for a in eqn.invars]
            env.update(zip(eqn.outvars, self._axes_step(eqn, before), strict=True))
        return [() if is_literal(a) else env[a] for a in inner.outvars]

    def _axes_step(self, eqn: Any, before: list[Axes]) -> list[Axes]:
        name = eqn.primitive.name
        if collective := as_collective(eqn):
            return [axes_after(collective, before[0], self.sizes)]
        if name == "axis_index":
            axis = eqn.params["axis_name"]
            return [() if axis in self.at else (axis,)]
        if name in _IDENTITY:
            return before
        if rule := control.RULES.get(name):
            return rule.axes(self, eqn, before)
        if (inner := call_jaxpr(eqn)) is not None:
            return self.axes_through(inner, before)
        if name in _EVERYWHERE:
            before = [*before, tuple(a for a in self.sizes if a not in self.at)]
        together = in_order((a for axes in before for a in axes), self.sizes)
        return [together] * len(eqn.outvars)


def _runs_alone(eqn: Any) -> bool:
    """Returns whether an equation under vmap would not do what each device does by itself."""
    name = eqn.primitive.name
    if name.startswith("random_"):
        keys = [v.aval.dtype for v in eqn.invars if hasattr(v.aval, "dtype")]
        return any("rbg" in str(dtype) for dtype in keys)
    return name in _ALONE


def constant(value: Any) -> Held:
    """Returns a constant of a jaxpr, the same on all devices.

    JAX may have typed it with the mesh of some trace, which means nothing here.
    """
    plain = isinstance(value, jax.Array) or type(value) in (bool, int, float, complex)
    return Held(jnp.asarray(value if plain else np.asarray(value)))


def _has_axes(eqn: Any) -> bool:
    """Returns whether an equation of unknown kind holds anything that a plain vmap would break."""

    def typed(jaxpr: Any) -> bool:
        inner, _ = opened(jaxpr)
        return any(
            as_collective(e) or e.primitive.name in ("axis_index", *UNKNOWN) or _has_axes(e)
            for e in inner.eqns
        )

    return any(typed(jaxpr) for jaxpr in sub_jaxprs(eqn))


def _bind(eqn: Any, args: Sequence[Held], sizes: Sizes) -> list[Held]:
    params = {name: _meshless(value) for name, value in eqn.params.items()}
    if eqn.primitive.name == "dot_general" and (dot := _merged_dot(params, list(args))):
        return [dot]

    def fn(*values: Any) -> Any:
        out = eqn.primitive.bind(*values, **params)
        return list(out) if eqn.primitive.multiple_results else [out]

    return spread(fn, args, sizes)


def _meshless(param: Any) -> Any:
    """Returns a parameter that says nothing of the body's mesh, which is not there."""
    if isinstance(param, NamedSharding):
        return None
    if isinstance(param, tuple) and any(is_jaxpr(p) for p in param):
        parts = [_meshless(p) for p in param]
        return type(param)(*parts) if hasattr(param, "_fields") else tuple(parts)
    if not is_jaxpr(param) or not hasattr(param, "consts"):
        return param
    bare = Machine(Setting(AbstractMesh((), ()), (), False))
    avals = [v.aval for v in opened(param)[0].invars]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]

    def run(*values: Any) -> list[Any]:
        return [out.value for out in bare.run(param, [Held(v) for v in values])]

    return jax.make_jaxpr(run)(*shapes)


def _last_uses(jaxpr: Any) -> dict[int, list[Any]]:
    """Returns the variables that are needed no more after each equation."""
    last = {}
    for i, eqn in enumerate(jaxpr.eqns):
        for atom in (*eqn.invars, *eqn.outvars):
            if not is_literal(atom):
                last[atom] = i
    for atom in jaxpr.outvars:
        if not is_literal(atom):
            last.pop(atom, None)
    uses: dict[int, list[Any]] = {}
    for var, i in last.items():
        uses.setdefault(i, []).append(var)
    return uses


def _merged_dot(params: dict[str, Any], args: list[Held]) -> Held | None:
    """Returns a dot_general of all devices, or None where it is not such a product.

    Under vmap the devices' dim would be a second free dim of the operand, which XLA copies into
    another order first. Merged with a dim that the result keeps, it costs nothing.

    Args:
        params: the equation's, without any sharding.
        args: its two operands.
    """
    (contracting, batch) = params["dimension_numbers"]
    sides = [i for i, a in enumerate(args) if a.axes]
    if len(sides) != 1 or any(batch):
        return None
    (side,) = sides
    held = args[side]
    free = [d for d in range(len(held.local_shape)) if d not in contracting[side]]
    if not free:
        return None
    # The devices' dims go before the first dim that the result keeps, and become one with it.
    count, dim = len(held.axes), free[0]
    value = jnp.moveaxis(held.value, range(count), range(dim, dim + count))
    sizes = value.shape[dim : dim + count + 1]
    value = value.reshape(*value.shape[:dim], math.prod(sizes), *value.shape[dim + count + 1 :])
    operands = [a.value for a in args]
    operands[side] = value
    out = jax.lax.dot_general_p.bind(*operands, **params)
    at = 0 if side == 0 else len(args[0].local_shape) - len(contracting[0])
    out = out.reshape(*out.shape[:at], *sizes, *out.shape[at + 1 :])
    return Held(jnp.moveaxis(out, range(at, at + count), range(count)), held.axes)
