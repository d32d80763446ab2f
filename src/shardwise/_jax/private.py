"""The one place for names of JAX, Flax and Orbax that may move without notice.

Each is looked up when it is used, never at import, so a missing one disables only the feature that
needs it: planning, checking and reporting need none. `probe` reports which are missing, and
`shardwise doctor` prints that. The table contains

- private names (`jax._src`, `jaxlib`, a leading underscore) and undocumented ones;
- `jax.extend`, which is documented, but as an interface "without compatibility guarantees".

It does not contain primitives and the names of their parameters, which are data that we read from a
program, not an interface that we import: an unknown primitive is treated as opaque. Nor does it
contain `typer.core`, whose classes Typer documents for subclassing; `jax.experimental.mesh_utils`
and `jax.experimental.multihost_utils`, which are documented; or `jax.core.Tracer` and
`jax.core.eval_jaxpr`, which stayed public when JAX made the rest of that module private.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

TESTED = {
    "jax": ("0.10.2", "0.12.0.1"),
    "flax": ("0.12.8", "0.12.12"),
    "optax": ("0.2.8",),
    "orbax-checkpoint": ("0.12.8",),
}
"""The versions that the tests run with, the oldest first; a test holds them to what they find."""

_COMPILE = "sw.compile"
_PROCESSES = "sw.distributed and runs of several processes"
_CHECKPOINTS = "sw.Checkpoints"

# What is reached, and the feature that needs it.
_FEATURES = {
    "jax._src.clusters.ClusterEnv._cluster_types": "detecting a cluster in sw.distributed",
    "jax._src.dispatch.jaxpr_has_prim_requiring_devices": "compiling cuDNN attention for absent GPUs",
    "jax._src.distributed.global_state": _PROCESSES,
    "jax._src.interpreters.mlir.make_ir_context": _COMPILE,
    "jaxlib._jax.DeviceList": _COMPILE,
    "jaxlib._jax.make_gloo_tcp_collectives": _PROCESSES,
    "jax._src.xla_bridge._backend_factories": _PROCESSES,
    "jax._src.xla_bridge.backends_are_initialized": _PROCESSES,
    "jax._src.xla_bridge.config": _PROCESSES,
    "jax._src.xla_bridge.make_cpu_client": _PROCESSES,
    "jax.core.Tracer.sharding": "tracing thousands of layers in linear time",
    "jax.experimental.pallas.ops.tpu.splash_attention": "splash attention in sw.models",
    "jax.experimental.topologies.get_topology_desc": "sw.compile for chips you do not have",
    "jax.extend.backend.get_compile_options": _COMPILE,
    "jax.extend.core.JaxprEqn.source_info": "naming your lines in findings and in simulations",
    "jaxlib._jax.LoadedExecutable.get_compiled_memory_stats": _COMPILE,
    "jaxlib._jax.LoadedExecutable.hlo_modules": _COMPILE,
    "jaxlib.mlir.ir.Module": _COMPILE,
    "jaxlib.mlir.passmanager.PassManager": _COMPILE,
    "flax.core.spmd.get_logical_axis_rules": "logical axis rules that are active in Flax",
    "flax.nnx.Module._pytree__nodes": "models that keep arrays outside their state",
    "orbax.checkpoint.future.CommitFutureAwaitingContractedSignals": _CHECKPOINTS,
}
_DISTRIBUTIONS = {"orbax": "orbax-checkpoint"}


class MissingInternal(RuntimeError):
    """A feature needs a name that the installed version of a package does not have."""


@dataclass(frozen=True, slots=True)
class Internal:
    """A name that may move without notice.

    Attributes:
        name: such as `jax._src.distributed.global_state`.
        feature: what needs it.
        problem: why the feature does not work with the installed version; empty if it does.
    """

    name: str
    feature: str
    problem: str


def probe() -> list[Internal]:
    """Returns every name that is reached from here, and whether the installed packages have it."""
    rows = []
    for name, feature in _FEATURES.items():
        try:
            reach(name)
        except MissingInternal as error:
            rows.append(Internal(name, feature, str(error)))
        else:
            rows.append(Internal(name, feature, ""))
    return rows


def reach(name: str) -> Any:
    """Returns what a dotted name of the table stands for.

    Raises:
        MissingInternal: the installed version does not have it.
    """
    feature = _FEATURES[name]
    try:
        return _find(name)
    except (ImportError, AttributeError) as error:
        raise MissingInternal(_missing(name, feature, error)) from error


def missing(name: str, error: BaseException | str) -> MissingInternal:
    """Returns the error for a name of the table that was missed elsewhere, as in a worker process."""
    return MissingInternal(_missing(name, _FEATURES[name], error))


def _find(name: str) -> Any:
    """Returns the value of a dotted name: modules as far as they go, then attributes."""
    first, *steps = name.split(".")
    place, found = first, importlib.import_module(first)
    while steps:
        step = steps.pop(0)
        place = f"{place}.{step}"
        try:
            found = getattr(found, step)
        except AttributeError:
            try:
                found = importlib.import_module(place)
            except ModuleNotFoundError as error:
                if error.name != place:
                    raise  # it is there, and needs something that is not
                raise AttributeError(f"no {place}") from None
    return found


def _missing(name: str, feature: str, error: BaseException | str) -> str:
    package = name.partition(".")[0]
    distribution = _DISTRIBUTIONS.get(package, package)
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    # The versions of jaxlib are those of jax.
    tested = TESTED["jax" if distribution == "jaxlib" else distribution]
    return (
        f"{feature} needs {name}, which {distribution} {version} does not have ({error}): "
        f"Shardwise is tested with {distribution} {' and '.join(tested)}"
    )


def distributed_state() -> Any:
    """Returns JAX's own record of the processes: their number, this one's, and their store."""
    return reach("jax._src.distributed.global_state")


def cluster_kinds() -> Sequence[Any]:
    """Returns the kinds of clusters that JAX can detect, in the order in which it asks them."""
    return reach("jax._src.clusters.ClusterEnv._cluster_types")


def bind_gloo(host: str) -> None:
    """Makes the CPU's collectives listen on one address, instead of that of the host's name.

    To be called before the backend starts. JAX has a parameter for the collectives, which nothing
    passes on.
    """
    factories = reach("jax._src.xla_bridge._backend_factories")
    make_client = reach("jax._src.xla_bridge.make_cpu_client")
    make_gloo = reach("jaxlib._jax.make_gloo_tcp_collectives")
    is_gloo = reach("jax._src.xla_bridge.config").cpu_collectives_implementation

    def make() -> Any:
        client = distributed_state().client
        if client is None or is_gloo.value != "gloo":
            return make_client()
        return make_client(collectives=make_gloo(distributed_client=client, hostname=host))

    factories["cpu"] = replace(factories["cpu"], factory=make)


def backend_has_started() -> bool:
    """Returns whether JAX has started a backend, without starting one."""
    return reach("jax._src.xla_bridge.backends_are_initialized")()


def needs_devices(jaxpr: Any) -> bool:
    """Returns whether a program can only be lowered for devices that this process knows."""
    return reach("jax._src.dispatch.jaxpr_has_prim_requiring_devices")(jaxpr)


def module_bytes(module: Any) -> bytes:
    """Returns the bytecode of the module that `lowered.compiler_ir("stablehlo")` returns."""
    # The method is one of the MLIR bindings', which come with jaxlib: one without
    # modules has no writer either.
    reach("jaxlib.mlir.ir.Module")
    written = io.BytesIO()
    module.operation.write_bytecode(file=written)
    return written.getvalue()


def mlir_bindings() -> tuple[Any, Any]:
    """Returns the MLIR bindings' `ir` and `passmanager`."""
    reach("jaxlib.mlir.ir.Module")
    reach("jaxlib.mlir.passmanager.PassManager")
    return _find("jaxlib.mlir.ir"), _find("jaxlib.mlir.passmanager")


def open_jaxpr(
    invars: list[Any], outvars: list[Any], eqns: list[Any], effects: Any, like: Any
) -> Any:
    """Returns a jaxpr of these parts, without constants."""
    # Of the class that JAX itself has made `like` of: it need not be found anywhere.
    return type(like)([], invars, outvars, eqns, effects, like.debug_info.with_unknown_names())


def equation_frames(eqn: Any) -> Iterable[tuple[str, int]]:
    """Returns file and line of each frame that an equation came from, the innermost first.

    None where JAX does not tell: a line is only an extra to what is said of an equation.
    """
    stack = getattr(getattr(eqn, "source_info", None), "traceback", None)
    frames = getattr(stack, "frames", ()) if stack is not None else ()
    return ((frame.file_name, frame.line_num) for frame in frames)


def tracer_searches() -> bool:
    """Returns whether a tracer that is asked for its sharding searches for its own origin.

    As it does in JAX before 0.11; where JAX does not say, nothing is to be kept from it.
    """
    from jax.core import Tracer

    found = inspect.getattr_static(Tracer, "sharding", None)
    names = found.fget.__code__.co_names if isinstance(found, property) and found.fget else ()
    return "_origin_msg" in names


def active_axis_rules() -> Any:
    """Returns the logical axis rules that are active in Flax; none where it does not tell.

    Flax documents how to set them (`nnx.logical_axis_rules`), but not how to ask.
    """
    try:
        return reach("flax.core.spmd.get_logical_axis_rules")() or ()
    except MissingInternal:
        return ()


def data_attributes(node: Any) -> set[str]:
    """Returns the names of the attributes of an `nnx.Pytree` that are data, not static."""
    kinds = getattr(node, "_pytree__nodes", None)
    if kinds is not None:
        return {name for name, is_data in kinds.items() if is_data}
    # One that is registered with JAX has its data as children, by name.
    import jax

    rows = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    return {str(getattr(path[0], "name", getattr(path[0], "key", ""))) for path, _ in rows if path}


def commit_future() -> Any:
    """Returns Orbax's class of a future that ends with what a coroutine writes."""
    return reach("orbax.checkpoint.future.CommitFutureAwaitingContractedSignals")


def splash_attention() -> Any:
    """Returns the module of Pallas' splash attention; slow to import, and only a TPU needs it."""
    return reach("jax.experimental.pallas.ops.tpu.splash_attention")
