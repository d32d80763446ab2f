"""Simulated devices: runs the jaxpr of a body for all of them at once, on one real device.

Ordinary equations are mapped over the devices that hold different values. Collectives become
sums, transposes and slices (`collectives`). Loops and branches remain loops and branches, of
stacked values (`control`).
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
from .stacked import Sizes, Stacked, in_order, one_by_one, spread, union, widen

# Sharding has no meaning on simulated devices.
_IDENTITY = CASTS | {"sharding_constraint", "reshard", "mesh_cast"}
# Under vmap these would not do what each device does by itself: XLA's random bit generator (rbg
# keys) draws different numbers, and callbacks raise.
_ALONE = frozenset({"rng_bit_generator", "pure_callback", "io_callback"})
_EVERYWHERE = frozenset({"debug_callback", "debug_print", "io_callback"})


@dataclasses.dataclass(frozen=True)
class Machine:
    """The simulated devices of one call.

    Attributes:
        setting: the mesh and its axes.
        log: called with every collective and its source line, or None.
        disagree: called with each predicate that guards a collective, the axes along which devices
            must agree on it, and the source line; or None.
        at: the coordinates along axes whose devices run one by one.
        line: the user's line that called the code being run. It stands in for equations without a
            line of their own, since JAX cuts tracebacks inside a loop's body.
    """

    setting: Setting
    log: Callable[[TracedCollective, Stacked, str, Mapping[str, Any]], None] | None = None
    disagree: Callable[[Stacked, Axes, str], None] | None = None
    at: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    line: str = "?"

    @property
    def sizes(self) -> Sizes:
        """The sizes of the manual axes."""
        return self.setting.sizes

    def run(self, jaxpr: Any, args: Sequence[Stacked]) -> list[Stacked]:
        """Returns the outputs of a jaxpr, closed or open, on all devices."""
        inner, consts = opened(jaxpr)
        env: dict[Any, Stacked] = {}
        last = _last_uses(inner)

        def read(atom: Any) -> Stacked:
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

    def run_body(self, body: Body, args: Sequence[Stacked]) -> list[Stacked]:
        """Returns the outputs of a traced body on all devices."""
        if body.jaxpr is None:
            return []
        outs = self.run(body.jaxpr, [*(constant(c) for c in body.consts), *args])
        # Drop the leading dim that tracing added.
        return [Stacked(jnp.squeeze(o.value, len(o.axes)), o.axes) for o in outs]

    def step(self, eqn: Any, args: list[Stacked]) -> list[Stacked]:
        """Returns the results of one equation on all devices."""
        name, sizes = eqn.primitive.name, self.sizes
        if collective := as_collective(eqn):
            if self.log is not None:
                self.log(collective, args[0], user_line(eqn) or self.line, self.at)
            return [collect(collective, args[0], args[1:], sizes)]
        if name == "axis_index":
            axis = eqn.params["axis_name"]
            if axis in self.at:
                return [Stacked(self.at[axis])]
            return [Stacked(jnp.arange(sizes[axis], dtype="int32"), (axis,))]
        if name in _IDENTITY:
            return args
        if rule := control.RULES.get(name):
            return rule.run(self.called_by(eqn), eqn, args)
        if (inner := call_jaxpr(eqn)) is not None:
            return self.called_by(eqn).run(inner, args)
        if name in UNKNOWN or _has_axes(eqn):
            raise NotImplementedError(
                f"{name} at {user_line(eqn) or self.line} cannot be simulated: it works only in "
                f"jax.shard_map on real devices"
            )
        if name in _EVERYWHERE:  # every device prints, even where all hold the same value
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
        """Returns a machine for the devices at fixed coordinates along some axes."""
        return dataclasses.replace(self, at={**self.at, **at})

    def called_by(self, eqn: Any) -> Machine:
        """Returns a machine that runs what an equation calls, and reports the equation's line."""
        return dataclasses.replace(self, line=user_line(eqn) or self.line)

    def axes_through(self, jaxpr: Any, axes: Sequence[Axes]) -> list[Axes]:
        """Returns the axes along which each output may vary, without running anything."""
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
    """Returns whether an equation must run device by device: vmap would change what it does."""
    name = eqn.primitive.name
    if name.startswith("random_"):
        keys = [v.aval.dtype for v in eqn.invars if hasattr(v.aval, "dtype")]
        return any("rbg" in str(dtype) for dtype in keys)
    return name in _ALONE


def constant(value: Any) -> Stacked:
    """Returns a constant of a jaxpr, which is the same on all devices.

    JAX may have typed it with the mesh of the trace, which has no meaning here.
    """
    plain = isinstance(value, jax.Array) or type(value) in (bool, int, float, complex)
    return Stacked(jnp.asarray(value if plain else np.asarray(value)))


def _has_axes(eqn: Any) -> bool:
    """Returns whether an equation of unknown kind contains anything that vmap would break."""

    def typed(jaxpr: Any) -> bool:
        inner, _ = opened(jaxpr)
        return any(
            as_collective(e) or e.primitive.name in ("axis_index", *UNKNOWN) or _has_axes(e)
            for e in inner.eqns
        )

    return any(typed(jaxpr) for jaxpr in sub_jaxprs(eqn))


def _bind(eqn: Any, args: Sequence[Stacked], sizes: Sizes) -> list[Stacked]:
    params = {name: _meshless(value) for name, value in eqn.params.items()}
    if eqn.primitive.name == "dot_general" and (dot := _merged_dot(params, list(args))):
        return [dot]

    def fn(*values: Any) -> Any:
        out = eqn.primitive.bind(*values, **params)
        return list(out) if eqn.primitive.multiple_results else [out]

    return spread(fn, args, sizes)


def _meshless(param: Any) -> Any:
    """Returns a parameter without references to the body's mesh, which does not exist here."""
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
        return [out.value for out in bare.run(param, [Stacked(v) for v in values])]

    return jax.make_jaxpr(run)(*shapes)


def _last_uses(jaxpr: Any) -> dict[int, list[Any]]:
    """Returns the variables that are no longer needed after each equation."""
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


def _merged_dot(params: dict[str, Any], args: list[Stacked]) -> Stacked | None:
    """Returns a dot_general of all devices, or None if the device dims cannot be merged.

    Under vmap the device dim would be a second free dim of the operand, which XLA first copies
    into a different order. Merged with a dim that the result keeps, it costs nothing.

    Args:
        params: the equation's parameters, without any sharding.
        args: its two operands.
    """
    (contracting, batch) = params["dimension_numbers"]
    sides = [i for i, a in enumerate(args) if a.axes]
    if len(sides) != 1 or any(batch):
        return None
    (side,) = sides
    stacked = args[side]
    free = [d for d in range(len(stacked.local_shape)) if d not in contracting[side]]
    if not free:
        return None
    # Move the device dims in front of the first dim that the result keeps, and merge them with it.
    count, dim = len(stacked.axes), free[0]
    value = jnp.moveaxis(stacked.value, range(count), range(dim, dim + count))
    sizes = value.shape[dim : dim + count + 1]
    value = value.reshape(*value.shape[:dim], math.prod(sizes), *value.shape[dim + count + 1 :])
    operands = [a.value for a in args]
    operands[side] = value
    out = jax.lax.dot_general_p.bind(*operands, **params)
    at = 0 if side == 0 else len(args[0].local_shape) - len(contracting[0])
    out = out.reshape(*out.shape[:at], *sizes, *out.shape[at + 1 :])
    return Stacked(jnp.moveaxis(out, range(at, at + count), range(count)), stacked.axes)
