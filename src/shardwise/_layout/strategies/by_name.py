"""Strategies by name, such as `fsdp+tensor`, and the axes that they take."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from ..._base import either
from ..._jax import show_value
from ..._mesh import DATA_AXES, SEQUENCE_AXES, Axes
from ..rules import Rules, patterns, replicate
from .depth import stages
from .fully_sharded import Fsdp, fsdp
from .tensor_parallel import Experts, tensor
from .zero import Zero, beside_fsdp

FSDP_AXES = ("fsdp", "data")
TENSOR_AXES = ("tensor", "tp", "model")
PIPELINE_AXES = ("pipe", "stage")
EXPERT_AXES = ("expert", "experts")
# The axes that each part of a strategy's name takes, the first that the mesh has.
PART_AXES = {
    "dp": (),
    "fsdp": FSDP_AXES,
    "zero1": DATA_AXES,
    "zero2": DATA_AXES,
    "expert": EXPERT_AXES,
    "sequence": SEQUENCE_AXES,
    "tensor": TENSOR_AXES,
    "pipeline": PIPELINE_AXES,
}
# What a strategy is called where its axis has another name.
_FUNCTIONS = {
    "fsdp": "sw.fsdp(axis)",
    "zero1": "sw.zero1(axis)",
    "zero2": "sw.zero2(axis)",
    "tensor": "sw.tensor(axis)",
    "pipeline": "sw.stages(axis)",
    "expert": "logical={'experts': axis}",
    "sequence": "Recipe(batch_spec=)",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """A strategy by name, with the options that a name cannot express."""

    name: str
    min_bytes: int | None = None


def flatten_rules(rules: Rules | Named, sizes: Mapping[str, int]) -> list[tuple[str, Any]]:
    """Returns the rules one by one, in order, each with its name.

    Raises:
        ValueError: something among them is not a rule.
    """
    if rules is None:
        return []
    if isinstance(rules, str | Named):
        named = Named(rules) if isinstance(rules, str) else rules
        return [(f"strategy {named.name!r}: {label}", r) for label, r in _named(named, sizes)]
    if isinstance(rules, Mapping):
        return [("patterns", patterns(rules))]
    if isinstance(rules, Sequence):
        return [pair for rule in rules for pair in flatten_rules(rule, sizes)]
    if hasattr(rules, "bind"):
        return [(str(rules), rules)]
    if callable(rules):
        return [(getattr(rules, "__name__", None) or type(rules).__name__, rules)]
    raise ValueError(
        f"{show_value(rules)} is not a rule: give a dict of path patterns, a function of a leaf, "
        f"a strategy such as sw.fsdp('data') or its name, or a list of these"
    )


def _named(strategy: Named, sizes: Mapping[str, int]) -> list[tuple[str, Any]]:
    name = strategy.name
    parts = [part.strip() for part in name.split("+")]
    for part in parts:
        if part not in PART_AXES:
            near = difflib.get_close_matches(part, PART_AXES, n=1)
            meant = (
                f"did you mean {'+'.join(near[0] if p == part else p for p in parts)!r}? "
                if near
                else ""
            )
            raise ValueError(
                f"unknown strategy {name!r}: {meant}{'U' if near else 'u'}se "
                f"{', '.join(map(repr, PART_AXES))}, or several joined by +, such as 'fsdp+tensor'"
                + either(
                    "; 'best' cannot be one of several rules" if name == "best" else "",
                    "" if "best" in parts else ", or 'best' for the fastest of them",
                )
            )
    both = any({*pair} <= set(parts) for pair in (("dp", "fsdp"), ("zero1", "zero2")))
    if len(set(parts)) != len(parts) or both:
        raise ValueError(
            f"strategy {name!r} contradicts itself: use each part once, and either dp or fsdp, "
            f"zero1 or zero2"
        )
    chosen: list[tuple[str, Any]] = []
    axes = {part: _pick_axis(part, PART_AXES[part], sizes) for part in parts if part not in _FREE}
    if "dp" in parts:
        chosen.append(("replicate", replicate()))
    if "expert" in parts:
        rule = Experts(axes["expert"])
        chosen.append((str(rule), rule))
    if "tensor" in parts:  # before fsdp, which takes what is left
        rule = tensor(axes["tensor"])
        chosen.append((str(rule), rule))
    if "pipeline" in parts:
        rule = stages(axes["pipeline"])
        chosen.append((str(rule), rule))
    if "fsdp" in parts:
        # Whatever else splits the batch stores its part of the parameters too.
        more = [axes[part] for part in ("expert", "sequence") if part in parts]
        own = [axis for axis in FSDP_AXES if axis in sizes][:1]
        own = own or ([] if more else [_pick_axis("fsdp", FSDP_AXES, sizes)])
        rule = fsdp(*own, *more, min_bytes=strategy.min_bytes)
        chosen.append((str(rule), rule))
    for part in ("zero1", "zero2"):
        if part in parts:
            taken = [axis for _, rule in chosen if isinstance(rule, Fsdp) for axis in rule.axes]
            rule = Zero(int(part[-1]), _free_data_axes(part, taken, sizes), strategy.min_bytes)
            chosen.append((str(rule), rule))
    return chosen


# Parts of a strategy's name whose axes are not the first that the mesh has.
_FREE = ("dp", "fsdp", "zero1", "zero2")


def _free_data_axes(strategy: str, taken: Sequence[str], sizes: Mapping[str, int]) -> Axes:
    """Returns all axes that split the batch, except those that FSDP takes."""
    _pick_axis(strategy, DATA_AXES, sizes)
    axes = tuple(axis for axis in sizes if axis in DATA_AXES and axis not in taken)
    if not axes:
        raise ValueError(beside_fsdp(strategy, taken))
    return tuple(axis for axis in axes if sizes[axis] > 1) or axes


def _pick_axis(strategy: str, wanted: tuple[str, ...], sizes: Mapping[str, int]) -> str:
    for axis in wanted:
        if axis in sizes:
            return axis
    raise ValueError(
        f"strategy {strategy!r} needs an axis named {' or '.join(map(repr, wanted))}, but the mesh "
        f"has {', '.join(f'{a}={s}' for a, s in sizes.items())}: rename one"
        + either(f", or use {_FUNCTIONS[strategy]}", "")
    )
