"""Building a model under a trace, just as the caller would build it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.errors import TraceContextError
from jax.errors import (
    ConcretizationTypeError,
    NonConcreteBooleanIndexError,
    TracerArrayConversionError,
    TracerBoolConversionError,
    TracerIntegerConversionError,
)
from jax.sharding import AbstractMesh, AxisType

from .._base import at_line_of, show_type
from .._jax import quick_tracing
from .._mesh import AnyMesh, show_mesh
from .hidden import compute_hidden, fill_hidden, hidden_tracers

# What JAX raises when Python asks a traced array for its value. Subclasses come first.
_READS = {
    TracerBoolConversionError: "as a condition",
    TracerArrayConversionError: "as a NumPy array",
    TracerIntegerConversionError: "as an index or a size",
    NonConcreteBooleanIndexError: "as a boolean mask",
    ConcretizationTypeError: "as a Python number",
}


class Built(NamedTuple):
    """What a factory builds, as a trace sees it.

    Attributes:
        graphdef: the model's structure.
        program: the jaxpr that computes its state.
        shapes: the state, its arrays abstract.
        mesh: the mesh under which it was built, if the factory needs one; else None.
    """

    graphdef: Any
    program: Any
    shapes: Any
    mesh: AbstractMesh | None


_built_before: ContextVar[dict[Any, Built] | None] = ContextVar("built_before", default=None)


@contextlib.contextmanager
def building_once() -> Iterator[None]:
    """Traces each factory once, however often it is asked for inside.

    For one call of the user's, in which what a factory builds cannot change. A context inside another
    is part of it.
    """
    known = _built_before.get()
    token = _built_before.set({} if known is None else known)
    try:
        yield
    finally:
        _built_before.reset(token)


def trace_build(make: Callable[[], Any], mesh: AnyMesh | None = None) -> Built:
    """Returns what `make` builds.

    Args:
        make: the factory.
        mesh: for a factory that names axes, as in `jnp.zeros(…, out_sharding=P("model"))`.

    Raises:
        ValueError: the factory cannot be called without arguments, or cannot be traced.
    """
    require_factory(make)
    try:
        return _built(make, None)
    except TraceContextError as error:
        raise ValueError(
            "the model's factory changes something that was created outside it, such as an "
            "nnx.Rngs: create it inside, so that every call builds the same model"
        ) from error
    except Exception as error:
        how = _reads_value(error)
        if how:
            raise ValueError(
                f"the model's factory reads the value of an array {how}{at_line_of(error)}: the "
                f"factory is traced, so its arrays have shapes and dtypes but no values; choose "
                f"between arrays with jnp.where, and compute numbers and sizes with NumPy"
            ) from error
        # Every JAX error about a spec without a mesh contains the word; and looking up an axis of
        # an empty mesh is a KeyError. They are ValueErrors, RuntimeErrors and others without a
        # property; trying a mesh for every error instead would call a failing factory three times.
        names_mesh = "mesh" in str(error).lower()
        if mesh is None or not (names_mesh or isinstance(error, KeyError)):
            raise
        without_mesh = error
    last: Exception = without_mesh
    for on in _kinds(mesh):
        try:
            return _built(make, on)
        except Exception as error:
            last = error
    if not names_mesh:
        raise without_mesh
    raise ValueError(
        f"the model's factory names mesh axes for its arrays, and cannot build them on "
        f"{show_mesh(mesh)}: {last}"
    ) from last


def _reads_value(error: Exception) -> str:
    """Returns how Python asked a traced array for its value, or an empty string."""
    for kind, how in _READS.items():
        if isinstance(error, kind):
            return how
    # A traced size in a shape is a plain TypeError.
    is_shape = type(error) is TypeError and "Tracer" in str(error) and "concrete" in str(error)
    return "as a size" if is_shape else ""


def _built(make: Callable[[], Any], on: AbstractMesh | None) -> Built:
    known = _built_before.get()
    if known is None or not _is_hashable(make):
        return _build(make, on)
    if (make, on) not in known:
        known[make, on] = _build(make, on)
    return known[make, on]


def _is_hashable(make: Callable[[], Any]) -> bool:
    try:
        hash(make)
    except TypeError:
        return False
    return True


def _build(make: Callable[[], Any], on: AbstractMesh | None) -> Built:
    built, hidden = _trace(make, on, {})
    if hidden:
        found = []

        def build() -> Any:
            tracers = hidden_tracers(build_model(make))
            found.extend(tracers)
            return list(tracers.values())

        with _on(on):
            closed = jax.make_jaxpr(build)()
        built, _ = _trace(make, on, compute_hidden(closed, found))
    return built


def _trace(
    make: Callable[[], Any], on: AbstractMesh | None, values: dict[str, Any]
) -> tuple[Built, dict[str, Any]]:
    """Returns what `make` builds, and the tracers inside its graphdef."""
    kept: list[Any] = []

    def build() -> Any:
        model = build_model(make)
        if values:
            fill_hidden(model, values)
        hidden = hidden_tracers(model)
        graphdef, state = nnx.split(model)
        kept[:] = graphdef, hidden
        return state

    with _on(on):
        program, shapes = jax.make_jaxpr(build, return_shape=True)()
    graphdef, hidden = kept
    return Built(graphdef, program, shapes, on), hidden


@contextlib.contextmanager
def _on(mesh: AbstractMesh | None) -> Iterator[None]:
    use = jax.sharding.use_abstract_mesh
    # A mesh that the caller has set would end up in the types of what is built.
    ours = use(mesh) if mesh is not None else contextlib.nullcontext()
    with use(AbstractMesh((), ())), ours, quick_tracing():
        yield


def _kinds(mesh: AnyMesh) -> list[AbstractMesh]:
    """Returns the mesh with Auto and with Explicit axes: constraints need Auto, types Explicit."""
    sizes, names = tuple(mesh.shape.values()), tuple(mesh.shape)
    kinds = (AxisType.Auto, AxisType.Explicit)
    return [AbstractMesh(sizes, names, axis_types=(kind,) * len(names)) for kind in kinds]


def build_model(make: Callable[[], nnx.Module]) -> nnx.Module:
    """Returns `make()`, built without eager sharding, and otherwise as the caller would build it."""
    ambient = nnx.using_eager_sharding()
    # Eager sharding would place each annotated variable on creation, by names that may not be
    # axes; placement is up to the layout.
    with nnx.use_eager_sharding(False):
        built = make()
    if not isinstance(built, nnx.Module):
        raise ValueError(
            f"the model's factory returned {show_type(built)}: it must return an nnx.Module"
        )
    for _, node in nnx.iter_graph(built):
        if isinstance(node, nnx.Variable) and ambient:
            # The flag is metadata, hence part of the tree structure: without it, our trees would
            # not match those of the caller's own model.
            node.set_metadata("eager_sharding", True)
        elif isinstance(node, nnx.Module):
            # Within a trace, Flax mistakes a bare array for a static attribute; it is data.
            for name, value in list(vars(node).items()):
                if isinstance(value, jax.Array):
                    setattr(node, name, nnx.data(value))
    return built


def require_factory(make: Callable[[], Any]) -> None:
    """Raises a ValueError if `make` cannot be called without arguments."""
    try:
        # The signature of a module class is that of its metaclass, which takes anything.
        bound = functools.partial(make.__init__, None) if inspect.isclass(make) else make
        parameters = inspect.signature(bound).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needs = [p.name for p in parameters if p.default is p.empty and p.kind not in fixed]
    if needs:
        raise ValueError(
            f"the model's factory {getattr(make, '__name__', make)!r} needs the argument "
            f"{needs[0]!r}: give a function of no arguments, such as lambda: Model(config, rngs=...)"
        )
