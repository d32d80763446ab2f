"""What a studio is about: a target, and how a state of the controls becomes a layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .._base import parse_bytes
from .._chips import parse_chips
from .._layout import Layout, Logical, Named, layout
from .._mesh import mesh as make_mesh
from .._mesh import parse_spec
from .._nnx import Recipe
from .._search import parse_batch, with_batch, with_step
from .._step import with_optimizer
from .state import State


@dataclasses.dataclass(frozen=True)
class Source:
    """What the controls act on; it stays the same while a studio runs.

    Attributes:
        start: the state that the page opens with.
        targets: the targets that the page may choose.
        found: returns what a state's target names, with what the state says of its step.
        inputs: the arguments of a model's call, as `sw.layout` takes them.
        method: the method that takes them.
        logical: the mesh axes of each logical name.
        options: further options of the command line, such as `--inputs`.
        command: whether the target is one of the command line; else there is none to copy.
        calibration: the file of measured rates.
        prices: dollars for an hour of one chip, by its name.
    """

    start: State
    targets: tuple[str, ...]
    found: Callable[[State], Any]
    inputs: Any = None
    method: Any = None
    logical: Logical | None = None
    options: tuple[str, ...] = ()
    command: bool = True
    calibration: str | None = None
    prices: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def lay_out(self, state: State) -> tuple[Any, Layout]:
        """Returns what a state's target names, and its layout.

        Raises:
            ValueError: a part of the state does not exist, or cannot be applied.
        """
        if state.target not in self.targets:
            raise ValueError(
                f"the target {state.target!r} is not one that this studio was opened on"
            )
        if state.on != "none":
            chips = parse_chips(state.on)
            if chips.device_count != state.devices:
                raise ValueError(
                    f"the mesh {state.axes} has {state.devices:,} devices, but {state.on} has "
                    f"{chips.device_count:,}"
                )
        mesh = make_mesh(state.axes, on=state.on)
        found = self.found(state)
        rules = [*path_rules(state), *strategy_rules(state)]
        made = layout(
            found, mesh, rules, logical=self.logical, inputs=self.inputs_of(state, found),
            method=self.method,
        )  # fmt: skip
        return found, made

    def inputs_of(self, state: State, found: Any) -> Any:
        """Returns what the strategies trace the model with; None for a recipe's own loss."""
        if self.inputs is None and ":" not in state.target and isinstance(found, Recipe):
            # A published shape takes its batch unchanged, as on the command line.
            return (found.batch,) if self.command else None
        return self.inputs


def path_rules(state: State) -> list[Any]:
    """Returns the rules of a state, each for itself, as a rules file has them."""
    return [{pattern: parse_spec(spec)} for pattern, spec in state.rules]


def strategy_rules(state: State) -> list[Any]:
    """Returns the strategy of a state, as a list of one or none."""
    if not state.strategy:
        return []
    if state.strategy == "best":
        raise ValueError("the strategy best is a search: use Search, and choose a point")
    split = any(part in state.strategy for part in ("fsdp", "zero"))
    size = parse_bytes(state.min_bytes) if state.min_bytes and split else None
    return [Named(state.strategy, size)]


def step_fields(state: State) -> dict[str, Any]:
    """Returns what a state says of a step, as `with_step` takes it."""
    fields: dict[str, Any] = {}
    if state.remat:
        fields["remat"] = None if state.remat == "none" else state.remat
    if state.offload:
        fields["offload"] = "" if state.offload == "none" else state.offload
    for name in ("accumulate", "loss_chunks", "microbatches"):
        if value := getattr(state, name):
            fields[name] = value
    return fields


def applied(found: Any, state: State) -> Any:
    """Returns a recipe with what a state says of its batch, its step and its optimizer.

    Raises:
        ValueError: it is not a recipe, or cannot have one of these.
    """
    fields = step_fields(state)
    if not isinstance(found, Recipe):
        names = [*fields, *(name for name in ("batch", "optimizer") if getattr(state, name))]
        given = next(iter(names), "")
        if given:
            raise ValueError(f"{given} needs a recipe: {state.target} is a model alone")
        return found
    if state.batch:
        found = with_batch(found, parse_batch(state.batch))
    if state.optimizer:
        found = with_optimizer(found, state.optimizer)
    return with_step(found, fields) if fields else found


def first_mesh(on: str) -> tuple[tuple[str, int], ...]:
    """Returns the mesh that a studio opens with if none is given: one axis over all devices."""
    return (("data", parse_chips(on).device_count if on != "none" else 8),)
