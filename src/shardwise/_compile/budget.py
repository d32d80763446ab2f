"""Budgets for users' own tests: what a step may cost, and which line makes it cost more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._base import public, show_bytes, show_flops
from .._hlo import Collective
from .._memory import OTHER
from .._mesh import closest_axis
from .result import Compiled, show_not_counted


@public
class BudgetExceeded(AssertionError):
    """A compiled step costs more than its budget."""


@public
def assert_budget(
    compiled: Compiled,
    *,
    peak_bytes: int | None = None,
    temporaries_bytes: int | None = None,
    collectives: Mapping[str, Mapping[str, int]] | None = None,
    collective_bytes: Mapping[str, int] | None = None,
    flops: int | None = None,
) -> None:
    """Raises an AssertionError if a step costs more than its budget, naming the lines responsible.

    Args:
        compiled: the result of `sw.compile`.
        peak_bytes: the maximum memory that a device may need.
        temporaries_bytes: the maximum memory of the temporaries.
        collectives: how many collectives of each kind a step may run over each axis, such as
            `{"model": {"all-reduce": 2}}`; kinds that are not listed for an axis are not allowed
            over it. Several axes at once are written `"data,model"`.
        collective_bytes: the maximum bytes that a device may send over each axis in a step.
        flops: the maximum flops of a device in a step.

    Raises:
        BudgetExceeded: a number is over budget or unknown; the message names every such number.
        ValueError: the budget names an axis that the mesh does not have.

    Example:
        >>> import jax, optax, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
        >>> recipe = sw.Recipe(model=make, loss=lambda model, x: model(x).mean(),
        ...                    optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((32, 64), "float32"))
        >>> compiled = sw.compile(recipe, sw.layout(make, sw.mesh("data=8", on="cpu:8"), "dp"))
        >>> sw.assert_budget(compiled, peak_bytes=100_000, collectives={"data": {"all-reduce": 1}})
        >>> sw.assert_budget(compiled, flops=1000)
        Traceback (most recent call last):
        shardwise.BudgetExceeded: a device does 65.5 kFLOP in a step (compiled), over its budget of 1 kFLOP by 64,536
    """
    wrong = [*_memory(compiled, peak_bytes, temporaries_bytes)]
    found = compiled.by_axis
    for axes in (*(collectives or {}), *(collective_bytes or {})):
        unknown = [axis for axis in axes.split(",") if axis not in compiled.mesh]
        if unknown:
            raise ValueError(
                f"the budget names axis {unknown[0]!r}, which the mesh does not have: "
                f"{closest_axis(unknown[0], compiled.mesh)}its axes are {', '.join(compiled.mesh)}"
            )
    for axes, kinds in (collectives or {}).items():
        have = found.get(axes, {})
        for kind in dict.fromkeys([*kinds, *have]):
            count, allowed = have.get(kind, (0, 0))[0], kinds.get(kind, 0)
            if count > allowed:
                rows = [r for r in compiled.collectives if ",".join(r.axes) == axes]
                causes = _causes([r for r in rows if r.kind == kind])
                wrong.append(
                    f"the step runs {count} {kind} over {axes!r}, over its budget of {allowed}: {causes}"
                )
    for axes, allowed in (collective_bytes or {}).items():
        sent = sum(size for _, size in found.get(axes, {}).values())
        if sent > allowed:
            rows = [r for r in compiled.collectives if ",".join(r.axes) == axes]
            wrong.append(
                f"a device sends {show_bytes(sent)} over {axes!r} in a step, over its budget of "
                f"{show_bytes(allowed)}: {_causes(rows)}"
            )
    wrong += _unknown(compiled, collectives, collective_bytes)
    wrong += _flops(compiled, flops)
    if wrong:
        raise BudgetExceeded("\n".join(wrong))


def _unknown(compiled: Compiled, *budgets: Mapping[str, Any] | None) -> list[str]:
    if compiled.has_program or not any(budgets):
        return []
    return [
        "the collectives of the step are unknown, so their budget cannot be confirmed: "
        f"there is no program, and {compiled.verdict}"
    ]


def _flops(compiled: Compiled, most: int | None) -> list[str]:
    if most is None:
        return []
    if compiled.flops is None:
        return [
            f"the flops of the step are unknown, so the budget of {show_flops(most)} cannot be confirmed: "
            f"there is no program, and {compiled.verdict}"
        ]
    if compiled.flops > most:
        return [
            f"a device does {show_flops(compiled.flops)} in a step (compiled), over its budget of "
            f"{show_flops(most)} by {compiled.flops - most:,.0f}"
        ]
    if compiled.not_counted:
        return [
            f"a device does {show_flops(compiled.flops)} in a step (compiled), and some kernels are "
            f"not counted, so the budget of {show_flops(most)} cannot be confirmed: "
            f"{show_not_counted(compiled.not_counted)}"
        ]
    return []


def _memory(compiled: Compiled, peak: int | None, temporaries: int | None) -> list[str]:
    if peak is None and temporaries is None:
        return []
    memory = compiled.memory
    if memory is None:
        return [compiled.verdict]
    wrong = []
    buffers = "; ".join(str(row) for row in compiled.buffers[:3] if row.shape != OTHER)
    largest = f"; largest temporaries: {buffers}" if buffers else ""
    if peak is not None and memory.peak > peak:
        wrong.append(
            f"the step needs {show_bytes(memory.peak)} on each device (compiled), over its budget of "
            f"{show_bytes(peak)}{largest}"
        )
    if temporaries is not None and memory.temporaries > temporaries:
        wrong.append(
            f"the step needs {show_bytes(memory.temporaries)} of temporaries (compiled), over their "
            f"budget of {show_bytes(temporaries)}{largest}"
        )
    return wrong


def _causes(rows: list[Collective]) -> str:
    ordered = sorted(rows, key=lambda row: -row.total_bytes)
    causes = [
        f"{row.times} of {row.shape} from {row.source}{' (backward)' if row.source.backward else ''}"
        for row in ordered
    ]
    causes = list(dict.fromkeys(causes))
    more = f"; and {len(causes) - 6} more" if len(causes) > 6 else ""
    return "; ".join(causes[:6]) + more
