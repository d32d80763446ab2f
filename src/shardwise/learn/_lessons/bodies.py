"""Cases where the function is a shard_map body: simulated first, then run on virtual devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from ..._mesh import mesh as make_mesh
from ..._simulate import simulate
from .._compare import show
from .._exercise import Case, Differs


def body_case(
    name: str,
    arguments: Mapping[str, Any],
    expected: Any,
    *,
    axes: str,
    in_specs: Mapping[str, Any],
    out_specs: Any,
    constants: tuple[Any, ...] = (),
    collectives: Mapping[str, int] | None = None,
    most_bytes: int | None = None,
    hint: str = "",
) -> Case:
    """Returns the case of a body that runs on every device of a mesh.

    Args:
        name: the name of the function.
        arguments: the global arrays, by parameter.
        expected: the global result, computed without a mesh.
        axes: the mesh, as text.
        in_specs: the spec of each of `arguments`.
        out_specs: as in `jax.shard_map`.
        constants: further arguments, which are not arrays.
        collectives: how often each kind may be executed; other kinds are not allowed. None allows
            all.
        most_bytes: the most bytes that one device may send (modelled); None allows any.
        hint: the hint of this case.
    """
    arrays = tuple(arguments.values())
    how = {"in_specs": tuple(in_specs.values()), "out_specs": out_specs}

    def run(function: Callable[..., Any]) -> Any:
        def body(*local: Any) -> Any:
            return function(*local, *constants)

        simulated = simulate(body, mesh=axes, **how)
        # The simulation reports devices that disagree with their values, and finds a deadlock
        # instead of running into it.
        for finding in simulated.check(*arrays):
            text = f"{finding.name}: {finding.message}; {finding.help}"
            raise Differs(f"{text} [{finding.code}]")
        _require_frugal(simulated.trace(*arrays), collectives, most_bytes)
        count = make_mesh(axes, on="none").size
        real = jax.shard_map(body, mesh=make_mesh(axes, on=f"cpu:{count}"), **how)
        return jax.jit(real)(*arrays)

    shown = [f"{key}={show_split(value, in_specs[key])}" for key, value in arguments.items()]
    shown += [show(value) for value in constants]
    call = f"{name}({', '.join(shown)}) on each device of {axes}"
    return Case(arrays, expected, run, call, hint)


def show_split(value: Any, spec: Any) -> str:
    """Returns the shape and spec of an array, or of each array in a dict, as text."""
    if isinstance(value, Mapping):
        specs = spec if isinstance(spec, Mapping) else dict.fromkeys(value, spec)
        return "{" + ", ".join(f"{k}: {show_split(v, specs[k])}" for k, v in value.items()) + "}"
    assert isinstance(spec, P)
    return f"{value.dtype}{list(value.shape)} split by {show(spec)}"


def _require_frugal(
    trace: Any, collectives: Mapping[str, int] | None, most_bytes: int | None
) -> None:
    counts: dict[str, int] = {}
    for event in trace:
        counts[event.kind] = counts.get(event.kind, 0) + event.times
    ran = ", ".join(f"{kind} ×{n}" for kind, n in counts.items()) or "none"
    if collectives is not None:
        for kind, count in counts.items():
            if count > collectives.get(kind, 0):
                wanted = ", ".join(f"{kind} ×{n}" for kind, n in collectives.items())
                raise Differs(f"it runs the collectives {ran}; the exercise allows {wanted}")
    if most_bytes is not None and trace.total_bytes > most_bytes:
        raise Differs(
            f"each device sends {trace.total_bytes} bytes (modelled; collectives: {ran}); the "
            f"exercise allows {most_bytes}"
        )
