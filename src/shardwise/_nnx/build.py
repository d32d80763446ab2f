"""Building a model under a trace, as the caller would get it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import AbstractMesh, AxisType

from .._jax import quick_tracing
from .._mesh import AnyMesh, show_mesh
from .hidden import compute_hidden, fill_hidden, hidden_tracers

Trace = Callable[[Callable[[], Any]], Any]


class Built(NamedTuple):
    """What a factory builds, as a trace sees it.

    Attributes:
        graphdef: the model's structure.
        traced: what the trace returned.
        mesh: the mesh under which it was built, if it asks for one; else None.
    """

    graphdef: Any
    traced: Any
    mesh: AbstractMesh | None


def trace_build(make: Callable[[], Any], trace: Trace, mesh: AnyMesh | None = None) -> Built:
    """Returns what `make` builds.

    Args:
        make: the factory.
        trace: such as `jax.eval_shape`: called with a function that returns the state.
        mesh: the mesh of a factory that names axes, as in `jnp.zeros(…, out_sharding=P("model"))`.

    Raises:
        ValueError: the factory cannot be called so.
    """
    require_factory(make)
    try:
        return _built(make, trace, None)
    except TraceContextError as error:
        raise ValueError(
            "the model's factory changes something that was made outside it, such as an "
            "nnx.Rngs: make it inside, so that every call builds the same model"
        ) from error
    except Exception as error:
        # All of JAX's sentences about a spec without a mesh have the word; and an empty mesh has
        # no axis to ask for.
        # They are ValueErrors, RuntimeErrors and others without a property; trying a mesh for
        # every error instead would call a factory that fails three times.
        names_mesh = "mesh" in str(error).lower()
        if mesh is None or not (names_mesh or isinstance(error, KeyError)):
            raise
        without_mesh = error
    last: Exception = without_mesh
    for on in _kinds(mesh):
        try:
            return _built(make, trace, on)
        except Exception as error:
            last = error
    if not names_mesh:
        raise without_mesh
    raise ValueError(
        f"the model's factory names mesh axes for its arrays, and cannot build them on "
        f"{show_mesh(mesh)}: {last}"
    ) from last


def _built(make: Callable[[], Any], trace: Trace, on: AbstractMesh | None) -> Built:
    graphdef, traced, hidden = _trace(make, trace, on, {})
    if hidden:
        found = []

        def build() -> Any:
            tracers = hidden_tracers(build_model(make))
            found.extend(tracers)
            return list(tracers.values())

        with _on(on):
            closed = jax.make_jaxpr(build)()
        graphdef, traced, _ = _trace(make, trace, on, compute_hidden(closed, found))
    return Built(graphdef, traced, on)


def _trace(
    make: Callable[[], Any], trace: Trace, on: AbstractMesh | None, values: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Returns the graphdef, what `trace` returns, and the tracers that the graphdef holds."""
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
        traced = trace(build)
    graphdef, hidden = kept
    return graphdef, traced, hidden


@contextlib.contextmanager
def _on(mesh: AbstractMesh | None) -> Iterator[None]:
    use = jax.sharding.use_abstract_mesh
    # A mesh that the caller has set would type what is built; the layout's own is in outputs.
    ours = use(mesh) if mesh is not None else contextlib.nullcontext()
    with use(AbstractMesh((), ())), ours, quick_tracing():
        yield


def _kinds(mesh: AnyMesh) -> list[AbstractMesh]:
    """Returns the mesh with axes of either type: constraints want Auto, types want Explicit."""
    sizes, names = tuple(mesh.shape.values()), tuple(mesh.shape)
    kinds = (AxisType.Auto, AxisType.Explicit)
    return [AbstractMesh(sizes, names, axis_types=(kind,) * len(names)) for kind in kinds]


def build_model(make: Callable[[], nnx.Module]) -> nnx.Module:
    """Returns `make()`, built without eager sharding, and otherwise as the caller would get it."""
    ambient = nnx.using_eager_sharding()
    # Eager sharding would place each annotated variable as it is made, by names that
    # may not be axes; the layout does the placing.
    with nnx.use_eager_sharding(False):
        built = make()
    if not isinstance(built, nnx.Module):
        raise ValueError(
            f"the model's factory returned a {type(built).__name__}: it must return an nnx.Module"
        )
    for _, node in nnx.iter_graph(built):
        if isinstance(node, nnx.Variable) and ambient:
            # The flag is metadata, hence part of the tree structure: left off, no tree of ours
            # would pair with a tree of the caller's own model.
            node.set_metadata("eager_sharding", True)
        elif isinstance(node, nnx.Module):
            # Within a trace, Flax takes a bare array for a static attribute; it is data.
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
