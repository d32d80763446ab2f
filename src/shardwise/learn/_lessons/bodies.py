"""Cases whose function is the body of a shard_map: simulated first, then run on virtual devices."""

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
    """Returns the case of a body that is run on every device of a mesh.

    Args:
        name: of the function.
        arguments: the global arrays, by parameter.
        expected: the global result, computed without any mesh.
        axes: the mesh.
        in_specs: for each of `arguments`.
        out_specs: as in `jax.shard_map`.
        constants: further arguments, which are no arrays.
        collectives: how often each kind may be executed; other kinds may not. None allows all.
        most_bytes: that one device may send (modelled); None allows any.
        hint: of this case.
    """
    given = tuple(arguments.values())
    how = {"in_specs": tuple(in_specs.values()), "out_specs": out_specs}

    def run(function: Callable[..., Any]) -> Any:
        def body(*local: Any) -> Any:
            return function(*local, *constants)

        simulated = simulate(body, mesh=axes, **how)
        # Devices that disagree are told with their numbers here, and one that would wait for the
        # others for ever is told at all.
        for finding in simulated.check(*given):
            text = f"{finding.name}: {finding.message}; {finding.help}"
            raise Differs(f"{text} [{finding.code}]")
        _require_frugal(simulated.trace(*given), collectives, most_bytes)
        count = make_mesh(axes, on="none").size
        real = jax.shard_map(body, mesh=make_mesh(axes, on=f"cpu:{count}"), **how)
        return jax.jit(real)(*given)

    shown = [f"{key}={show_split(value, in_specs[key])}" for key, value in arguments.items()]
    shown += [show(value) for value in constants]
    call = f"{name}({', '.join(shown)}) on each device of {axes}"
    return Case(given, expected, run, call, hint)


def show_split(value: Any, spec: Any) -> str:
    """Returns an array's shape and spec, or those of a dict of arrays, in words."""
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
                raise Differs(f"its collectives are {ran}; these are enough: {wanted}")
    if most_bytes is not None and trace.total_bytes > most_bytes:
        raise Differs(
            f"each device sends {trace.total_bytes} bytes (modelled; its collectives are {ran}); "
            f"{most_bytes} are enough"
        )
