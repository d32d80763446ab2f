"""shard_map on one device: same body, mesh and specs, same values and gradients."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._base import public, show_type
from .._check import Finding, Findings, LayoutError, make_finding
from .._jax import shorten, show_value
from .._mesh import AnyMesh, closest_axis, faults, require_spec, show_mesh, show_spec
from .._mesh import mesh as make_mesh
from .._nnx import dotted
from .agreement import AgreementCheck, axes_left_out, unproven
from .body import Body, Setting, plain_mesh, trace_body
from .events import Shards, Trace, Tracker
from .machine import Machine
from .stacked import Stacked, in_order, is_traced, join, split


@public
def simulate(
    body: Callable[..., Any],
    *,
    mesh: AnyMesh | str,
    in_specs: Any,
    out_specs: Any,
    check: bool = True,
    check_vma: bool = True,
    axis_names: Any = None,
) -> Simulation:
    """Returns `jax.shard_map(body, ...)` simulated on one device, whatever the size of the mesh.

    Call it with global arrays, optionally under jit, grad or vmap; it returns global arrays. JAX's
    own shard_map traces the body, so the body sees local shapes and its collectives behave as they
    do on real devices. All simulated devices then run at once.

    Args:
        body: a function of local arrays, with collectives. As in `jax.shard_map`, arguments may be
            any pytrees, including NNX modules and states.
        mesh: a mesh of devices, an abstract mesh, or text such as `"data=2,model=4"`.
        in_specs: a spec for each argument, or a tree of specs that is a prefix of the argument's
            tree.
        out_specs: the same for what the body returns.
        check: whether it is an error (a `LayoutError` with code SW501) if devices disagree, beyond
            rounding, where `out_specs` says that they hold the same value.
        check_vma: as in `jax.shard_map`, where it also decides the gradient of a collective inside
            the body.
        axis_names: as in `jax.shard_map`, the axes that are manual in the body; all by default.

    Raises:
        LayoutError: on a call, if a spec names an axis that is not on the mesh, names an axis
            twice, has more entries than the array has dims, or splits a dim unevenly. See also
            `check`.

    Example:
        >>> import jax, jax.numpy as jnp, shardwise as sw
        >>> from jax.sharding import PartitionSpec as P
        >>> def mean(x):
        ...     return jax.lax.pmean(x.sum(), "data")
        >>> f = sw.simulate(mean, mesh="data=4", in_specs=P("data"), out_specs=P())
        >>> float(f(jnp.arange(8.0)))
        7.0
        >>> f.shards(jnp.arange(8.0))[2].inputs
        (Array([4., 5.], dtype=float32),)
    """
    return Simulation(body, mesh, in_specs, out_specs, check, check_vma, axis_names)


@public
class Simulation:
    """A simulated shard_map: call it with global arrays. See `simulate`.

    Attributes:
        mesh: the mesh, without devices.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        mesh: AnyMesh | str,
        in_specs: Any,
        out_specs: Any,
        check: bool,
        check_vma: bool,
        axis_names: Any,
    ):
        """Reads the mesh; the specs are read on a call, when the arguments are known."""
        if not callable(body):
            raise ValueError(f"simulate takes a function, got {type(body).__name__}")
        found = make_mesh(mesh, on="none") if isinstance(mesh, str) else mesh
        if not hasattr(found, "axis_names"):
            raise ValueError(
                f"mesh must be a mesh, or text such as 'data=2,model=4', got {type(mesh).__name__}"
            )
        self.mesh = plain_mesh(found)
        manual = set(axis_names or self.mesh.axis_names)
        for axis in manual - set(self.mesh.axis_names):
            raise ValueError(
                f"axis_names has {axis!r}, which is not on the mesh: "
                f"{closest_axis(axis, self.mesh.shape)}the mesh is {show_mesh(self.mesh)}"
            )
        self._body, self._in_specs, self._out_specs = body, in_specs, out_specs
        self._checks = check
        self._setting = Setting(self.mesh, in_order(manual, self.mesh.shape), check_vma)
        functools.update_wrapper(self, body, updated=())

    def __repr__(self) -> str:
        """Returns the body's name and the mesh."""
        name = getattr(self._body, "__name__", type(self._body).__name__)
        return f"simulate({name}, mesh={show_mesh(self.mesh)!r})"

    def __call__(self, *args: Any) -> Any:
        """Returns what `jax.shard_map` returns for the same global arguments."""
        body, stacked, _ = self._prepare(args)
        agreement = self._agreement(stacked) if self._checks else None
        outs = self._run(body, stacked, agreement)
        specs = self._specs_of_outputs(body, outs)
        if agreement is not None:
            Findings(tuple(self._disagreements(agreement, body, outs, specs))).raise_if_errors()
        sizes = self._setting.sizes
        arrays = [join(_representative(o, s), s, sizes) for o, s in zip(outs, specs, strict=True)]
        return jax.tree.unflatten(body.out_tree, arrays)

    def check(self, *args: Any) -> Findings:
        """Runs the body once and returns all findings about specs, values and collectives.

        Args:
            *args: global arrays, as for a call.
        """
        try:
            body, stacked, _ = self._prepare(args)
            agreement = self._agreement(stacked)
            outs = self._run(body, stacked, agreement)
            specs = self._specs_of_outputs(body, outs)
        except LayoutError as error:
            return error.findings
        found = self._disagreements(agreement, body, outs, specs)
        reported = {finding.path for finding in found}
        if self._setting.typed:
            rows = zip(_output_paths(body, outs), specs, body.out_varying, outs, strict=True)
            suspects = [unproven(*row, self._show()) for row in rows]
            found += [f for f in suspects if f is not None and f.path not in reported]
        return Findings(tuple(found))

    def trace(self, *args: Any) -> Trace:
        """Returns every collective that a call with these arguments executes, in order.

        Args:
            *args: global arrays, as for a call.
        """
        body, stacked, _ = self._prepare(args)
        tracker = Tracker(self._setting.sizes)
        outs = self._run(body, stacked, tracker=tracker)
        jax.block_until_ready([o.value for o in outs])
        jax.effects_barrier()
        return Trace(self._show(), tuple(tracker.events()))

    def shards(self, *args: Any) -> Shards:
        """Returns the inputs and outputs of every simulated device, by its mesh coordinates.

        Args:
            *args: global arrays, as for a call.
        """
        body, stacked, tree = self._prepare(args)
        outs = self._run(body, stacked)
        paths, _ = jax.tree_util.tree_flatten_with_path(args)
        names = [self._argument_path(path) for path, _ in paths]
        out_names = [p.removeprefix("output").lstrip(".") for p in _output_paths(body, outs)]
        return Shards(
            self._show(),
            self._setting.sizes,
            (tree, stacked, names),
            (body.out_tree, outs, out_names),
        )

    def _show(self) -> str:
        return show_mesh(self.mesh)

    def _prepare(self, args: Sequence[Any]) -> tuple[Body, list[Stacked], Any]:
        leaves, tree = jax.tree_util.tree_flatten_with_path(args)
        arrays = [_unsharded(jnp.asarray(leaf)) for _, leaf in leaves]
        paths = [self._argument_path(path) for path, _ in leaves]
        specs = _broadcast(self._in_specs, tuple(args), "in_specs", "arguments")
        found = list(self._faults(paths, arrays, specs))
        if found:
            raise LayoutError(Findings((*found, *self._faults_of_out_specs())))

        def flat(*local: Any) -> Any:
            return self._body(*jax.tree.unflatten(tree, local))

        try:
            body = trace_body(flat, arrays, specs, self._setting)
        except (NameError, ValueError, AssertionError):
            self._require_bound(flat, arrays, specs)
            raise
        sizes = self._setting.sizes
        return body, [split(a, s, sizes) for a, s in zip(arrays, specs, strict=True)], tree

    def _run(
        self,
        body: Body,
        stacked: Sequence[Stacked],
        agreement: AgreementCheck | None = None,
        tracker: Tracker | None = None,
    ) -> list[Stacked]:
        log = None if tracker is None else tracker.log
        machine = Machine(self._setting, log, None if agreement is None else agreement.ways)
        return machine.run_body(body, stacked)

    def _agreement(self, stacked: Sequence[Stacked]) -> AgreementCheck:
        # Inside a jit even a sum of constants is traced.
        traced = is_traced(jnp.add(0, 0)) or any(is_traced(s.value) for s in stacked)
        return AgreementCheck(self._show(), eager=not traced)

    def _disagreements(
        self, agreement: AgreementCheck, body: Body, outs: Sequence[Stacked], specs: Sequence[P]
    ) -> list[Finding]:
        for path, out, spec in zip(_output_paths(body, outs), outs, specs, strict=True):
            agreement.outputs(path, spec, out)
        return agreement.findings(outs)

    def _specs_of_outputs(self, body: Body, outs: Sequence[Stacked]) -> list[P]:
        sample = jax.tree.unflatten(body.out_tree, outs)
        specs = _broadcast(self._out_specs, sample, "out_specs", "returned values")
        sizes = self._setting.sizes
        # A shard of any size can be joined, so divisibility is not checked: all sizes are 0.
        found = [
            make_finding(f.code, path, f.message, f.help, self._context(o.local_shape, s))
            for path, o, s in zip(_output_paths(body, outs), outs, specs, strict=True)
            for f in faults(tuple(0 for _ in o.local_shape), s, sizes)
        ]
        if found:
            raise LayoutError(Findings(tuple(found)))
        return specs

    def _faults(self, paths: Any, arrays: Any, specs: Any) -> Iterator[Finding]:
        for path, array, spec in zip(paths, arrays, specs, strict=True):
            for fault in faults(array.shape, spec, self._setting.sizes):
                context = self._context(array.shape, spec)
                yield make_finding(fault.code, path, fault.message, fault.help, context)

    def _faults_of_out_specs(self) -> Iterator[Finding]:
        """Yields the faults of `out_specs` that can be found without running the body."""
        rows = jax.tree_util.tree_leaves_with_path(self._out_specs, is_leaf=_is_spec)
        for path, spec in rows:
            shape = (0,) * len(spec) if _is_spec(spec) else ()
            for fault in faults(shape, spec, self._setting.sizes) if shape else ():
                context = f"spec {show_spec(spec)}  mesh {self._show()}"
                name = _dotted("output", path)
                yield make_finding(fault.code, name, fault.message, fault.help, context)

    def _context(self, shape: Sequence[int], spec: P) -> str:
        return f"shape {tuple(shape)}  spec {show_spec(spec)}  mesh {self._show()}"

    def _require_bound(self, flat: Any, arrays: Any, specs: Any) -> None:
        """Raises a finding if the body uses an axis that is not on the mesh."""
        try:  # without check_vma JAX always reports this with the same error
            trace_body(flat, arrays, specs, dataclasses.replace(self._setting, typed=False))
        except NameError as error:
            # The axis is in the sentence alone: JAX leaves the error's `name` unset.
            if (unbound := re.search(r"unbound axis name: (\w+)", str(error))) is None:
                return
            finding = make_finding(
                "SW101",
                getattr(self._body, "__name__", "body"),
                f"the body uses axis {unbound[1]!r}, which is not on the mesh",
                closest_axis(unbound[1], self._setting.manual)
                + f"the mesh has {', '.join(self._setting.manual)}",
                f"mesh {self._show()}",
            )
            raise LayoutError(Findings((finding,))) from None
        except Exception:  # not about axes: the error of the first trace is the one to report
            return

    def _argument_path(self, path: Sequence[Any]) -> str:
        index = path[0].idx
        try:
            names = list(inspect.signature(self._body).parameters.values())
        except (TypeError, ValueError):
            names = []
        plain = index < len(names) and names[index].kind != inspect.Parameter.VAR_POSITIONAL
        name = names[index].name if plain else f"args.{index}"
        return _dotted(name, path[1:])


def _broadcast(specs: Any, tree: Any, word: str, of: str) -> list[P]:
    """Returns a spec for each leaf of `tree`; `specs` is a prefix of it, and None means P()."""
    specs = jax.tree.map(lambda s: P() if s is None else s, specs, is_leaf=lambda s: s is None)
    try:
        full = jax.tree.broadcast(specs, tree, is_leaf=_is_spec)
    except ValueError as error:
        raise ValueError(
            f"{word} does not match the structure of the {of}, nor is it a prefix of it: "
            f"{word} is {shorten(str(jax.tree.structure(specs, is_leaf=_is_spec)))}, the {of} are "
            f"{shorten(str(jax.tree.structure(tree)))}. Give one spec for each, or one for all"
        ) from error
    leaves = jax.tree.leaves(full, is_leaf=_is_spec)
    for leaf in leaves:
        if not _is_spec(leaf):
            raise ValueError(
                f"{word} contains {show_value(leaf)}, {show_type(leaf)}: use PartitionSpecs, "
                f"such as P('data')"
            )
    return [require_spec(leaf, word) for leaf in leaves]


def _unsharded(array: Any) -> Any:
    """Returns an array whose type names no axis: its sharding must not affect the simulation."""
    if any(entry is not None for entry in jax.typeof(array).sharding.spec):
        return jax.reshard(array, P(*(None,) * array.ndim))
    return array


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _output_paths(body: Body, outs: Sequence[Stacked]) -> list[str]:
    sample = jax.tree.unflatten(body.out_tree, outs)
    leaves = jax.tree_util.tree_leaves_with_path(sample, is_leaf=lambda x: isinstance(x, Stacked))
    return [_dotted("output", path) for path, _ in leaves]


def _dotted(name: str, path: Sequence[Any]) -> str:
    rest = dotted(path)
    return f"{name}.{rest}" if rest else name


def _representative(stacked: Stacked, spec: P) -> Stacked:
    """Returns the value on the first device along each axis that the spec leaves out."""
    for axis in reversed(axes_left_out(stacked.axes, spec)):
        at = stacked.axes.index(axis)
        stacked = Stacked(_first(stacked.value, at), tuple(a for a in stacked.axes if a != axis))
    return stacked


def _first(value: Any, dim: int) -> Any:
    """Returns the first entry along `dim`; the cotangent is shared, as it is on real devices."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.take(value, 0, axis=dim)
    fn = jax.custom_jvp(lambda v: jnp.take(v, 0, axis=dim))
    fn.defjvp(lambda p, t: (jnp.take(p[0], 0, axis=dim), jnp.mean(t[0], axis=dim)))
    return fn(value)
