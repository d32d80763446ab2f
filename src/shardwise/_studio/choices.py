"""What the controls offer for a state, and why the rest is closed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._chips import CHIPS, parse_chips
from .._layout import PART_AXES
from .._mesh import DATA_AXES
from .._mesh import mesh as make_mesh
from .._nnx import Recipe
from .._search import (
    AXES,
    BATCH_AXES,
    PARTS,
    POLICIES,
    Abilities,
    samples_of,
    sizes,
    strategies_of,
)
from .._step import OPTIMIZERS
from ..models import Decoder
from .state import State, as_query, parse_axes, parse_query

# The axes that take what another one gives up, and the price of changing one that should not.
_FREE, _DEAR = ("data", "fsdp"), 4.0
# The parts of a strategy that an axis of their own brings.
_SPLITS = ("expert", "sequence", "tensor", "pipeline")


@dataclasses.dataclass(frozen=True)
class Abled:
    """What a target can do, which takes a moment to find out.

    Attributes:
        limits: by axis, what its size must divide, and how that is called: `(8, "experts")`.
        missing: why the other axes are not offered.
        samples: those of a global batch; 0 if nothing is known of it.
        remats: the policies to offer.
        offloads: what may be offloaded.
        chunks: whether the loss can be computed in chunks.
        pipelined: whether the number of a pipeline's microbatches can be set.
        is_recipe: whether it has a step.
        own: what the target says of its step itself.
    """

    limits: dict[str, tuple[int, str]]
    missing: str = ""
    samples: int = 0
    remats: tuple[str, ...] = ()
    offloads: tuple[str, ...] = ()
    chunks: bool = False
    pipelined: bool = False
    is_recipe: bool = False
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_COUNTED = {"pipe": "layers", "expert": "experts", "sequence": "tokens of a sequence"}


def abilities(found: Any) -> Abled:
    """Returns what a target can do."""
    if not isinstance(found, Recipe):
        return Abled({"model": (0, "")})
    can = Abilities(found)
    counts, missing = can.limits
    limits = {axis: (count, _COUNTED.get(axis, "")) for axis, count in counts.items()}
    if "model" in limits and isinstance(can.model, Decoder):
        limits["model"] = (can.model.config.heads, "attention heads")
    remats = ["none", *POLICIES, *can.saved, *can.offloaded]
    return Abled(
        limits,
        missing,
        samples_of(found),
        tuple(dict.fromkeys(remats)),
        ("none", "optimizer", *(["ema", "optimizer,ema"] if found.ema is not None else [])),
        can.chunks,
        can.own_microbatches and "pipe" in limits,
        True,
        _own(found, can.model),
    )


def _own(recipe: Recipe, model: Any) -> dict[str, Any]:
    """Returns what a recipe says of its step, where it is a name or a number."""
    remat = model.remat if isinstance(model, Decoder) else recipe.remat
    own: dict[str, Any] = {
        "accumulate": recipe.accumulate,
        "loss_chunks": recipe.loss_chunks,
        "offload": recipe.offload or "none",
    }
    if remat is None or isinstance(remat, str):
        own["remat"] = remat or "none"
    return own


def offered(state: State, able: Abled) -> dict[str, Any]:
    """Returns what each control offers in this state, as plain data."""
    devices = state.devices
    axes = [_stops(state, axis, able) for axis in axis_names(state, able)]
    chip = state.on.partition(":")[0]
    places = (
        sizes(chip.rpartition("x")[2] if chip not in CHIPS else chip) if state.on != "none" else []
    )
    return {
        "axes": axes,
        "missing": able.missing,
        "chips": ["none", *CHIPS],
        "topologies": [{"on": on, "devices": parse_chips(on).device_count} for on in places],
        "strategies": ["", *strategies_of(make_mesh(state.axes, on="none"))],
        "remats": list(able.remats),
        "optimizers": list(OPTIMIZERS) if able.is_recipe else [],
        "offloads": list(able.offloads),
        "accumulate": _divisors(max(1, able.samples // _ways(state.mesh)))
        if able.is_recipe
        else [],
        "chunks": [1, 2, 4, 8, 16] if able.chunks else [],
        "microbatches": _divisors(able.samples)
        if able.pipelined and dict(state.mesh).get("pipe", 1) > 1
        else [],
        "samples": able.samples,
        "devices": devices,
        "recipe": able.is_recipe,
        "own": dict(able.own),
    }


def axis_names(state: State, able: Abled) -> list[str]:
    """Returns the axes that have a control: the mesh's own, then those that the model allows."""
    own = [name for name, _ in state.mesh]
    # Two names for one kind of axis would only confuse: the mesh's own name stands.
    kinds = {
        kind
        for name in own
        for kind, names in PART_AXES.items()
        if name in names and kind != "fsdp"
    }
    open_ones = [
        name
        for name in AXES
        if name in ("data", "fsdp") or name in able.limits
        if name not in own and PARTS.get(name) not in kinds
    ]
    names = [*own, *open_ones]
    order = [*AXES, *(name for name in names if name not in AXES)]
    # The mesh's own order is kept: it decides which devices are neighbours.
    return sorted(names, key=lambda n: own.index(n) if n in own else len(own) + order.index(n))


def fitted(state: State, able: Abled) -> State:
    """Returns the state with the nearest mesh that has as many devices as its chips.

    The batch is kept: a mesh that cannot divide it is not near.
    """
    if state.on == "none":
        return state
    devices = parse_chips(state.on).device_count
    if devices == state.devices and _divides(dict(state.mesh), able):
        return state
    names = axis_names(state, able)
    found = _nearest(state, names, _places(devices, names, able))
    if found is None:
        grown = [(name, size) for name, size in state.mesh if size > 1]
        found = dict(grown) if math.prod(s for _, s in grown) == devices else {"data": devices}
    return with_mesh(state, found)


def edited(state: State, edits: Sequence[Sequence[Any]], able: Callable[[State], Abled]) -> State:
    """Returns a state after what a page did to its controls, in order.

    Args:
        state: the state.
        edits: `["axis", name, size]`, which moves devices from other axes or to them;
            `["set", field, text]`; or `["rules", [[pattern, spec], …]]`.
        able: returns what the target of a state can do.

    Raises:
        ValueError: an edit is none of these, or leads to no state.
    """
    for edit in edits:
        match edit:
            case ["axis", str(name), int(size)]:
                state = _moved(state, name, size, able(state))
            case ["set", "mesh", str(text)]:
                mesh = parse_axes(text)
                strategy = strategy_for(state.strategy, dict(mesh))
                state = dataclasses.replace(state, mesh=mesh, strategy=strategy)
            case ["set", ("accumulate" | "loss_chunks" | "microbatches") as name, str(text)]:
                state = parse_query(f"{_without(state, name).query}&{name}={int(text or 0)}")
            case ["set", str(name), str(text)]:
                more = as_query([(name, text)])
                state = parse_query(f"{_without(state, name).query}&{more}")
            case ["rules", list(rules)]:
                more = as_query(("rule", f"{pattern}={spec}") for pattern, spec in rules)
                bare = dataclasses.replace(state, rules=()).query
                state = parse_query(f"{bare}&{more}" if more else bare)
            case _:
                raise ValueError(f"{str(edit)[:80]} is not an edit")
        if edit[0] == "set" and edit[1] in ("target", "on", "batch"):
            state = fitted(state, able(state))
    return state


def _without(state: State, name: str) -> State:
    """Returns a state without a field, which is then given anew."""
    if name not in {field.name for field in dataclasses.fields(State)} or name in ("mesh", "rules"):
        raise ValueError(f"{name[:40]!r} is not a field of a state")
    own = getattr(state, name)
    return dataclasses.replace(state, **{name: 0 if isinstance(own, int) else ""})


def _moved(state: State, axis: str, size: int, able: Abled) -> State:
    """Returns a state whose axis has this size, on the nearest mesh of as many devices."""
    names = axis_names(state, able)
    if axis not in names:
        raise ValueError(f"the mesh has no axis {axis[:40]!r}")
    if dict(state.mesh).get(axis, 1) == size:
        return state
    found = _nearest(state, names, _places(state.devices, names, able), axis, size)
    if found is None:
        raise ValueError(f"no mesh of {state.devices:,} devices has {axis}={size}")
    return with_mesh(state, found)


def with_mesh(state: State, sizes: Mapping[str, int]) -> State:
    """Returns a state on another mesh, with the strategy that its axes ask for."""
    own = [name for name, _ in state.mesh]
    order = [*own, *(name for name in AXES if name not in own)]
    kept = [(name, sizes[name]) for name in order if sizes.get(name, 1) > 1]
    if any(name not in own for name, _ in kept) and all(name in AXES for name, _ in kept):
        kept.sort(key=lambda pair: AXES.index(pair[0]))
    base = _base(state.strategy)
    if base in ("fsdp", "zero1", "zero2") and not any(name in DATA_AXES for name, _ in kept):
        # The strategy needs an axis of the batch, be it of one device: moving back restores it.
        kept.insert(0, (next((name for name in own if name in DATA_AXES), "data"), 1))
    mesh = tuple(kept) or (("data", 1),)
    return dataclasses.replace(state, mesh=mesh, strategy=strategy_for(state.strategy, dict(mesh)))


def strategy_for(strategy: str, mesh: Mapping[str, int]) -> str:
    """Returns a strategy with the parts that a mesh has axes for, and without the others.

    Example:
        >>> from shardwise._studio.choices import strategy_for
        >>> strategy_for("fsdp", {"data": 2, "model": 4}), strategy_for("dp+tensor", {"fsdp": 8})
        ('fsdp+tensor', 'fsdp')
    """
    if not strategy:
        return strategy
    base = _base(strategy)
    if mesh.get("fsdp", 1) > 1 and base in ("", "dp"):
        base = "fsdp"
    has = [part for part, names in PART_AXES.items() if any(mesh.get(n, 1) > 1 for n in names)]
    kept = [part for part in _SPLITS if part in has]
    return "+".join([base] * bool(base) + kept) or "dp"


def _base(strategy: str) -> str:
    """Returns what a strategy does with the axes of the batch."""
    return "+".join(part for part in strategy.split("+") if part and part not in _SPLITS)


def _stops(state: State, axis: str, able: Abled) -> dict[str, Any]:
    """Returns the sizes that an axis can have, each with the mesh that it leads to."""
    names = axis_names(state, able)
    now = dict(state.mesh)
    places = _places(state.devices, names, able)
    count, what = able.limits.get(axis, (0, ""))
    stops, closed = [], []
    for size in _divisors(state.devices):
        if size == now.get(axis, 1):
            stops.append({"size": size, "mesh": state.axes})
            continue
        found = _nearest(state, names, places, axis, size)
        if found is not None:
            led = with_mesh(state, found)
            stops.append({"size": size, "mesh": led.axes, "strategy": led.strategy})
        elif count and count % size:
            closed.append({"size": size, "why": f"{count:,} {what} cannot be divided by {size}"})
        else:
            closed.append(
                {
                    "size": size,
                    "why": f"no mesh of {state.devices:,} devices with {axis}={size} divides a batch "
                    f"of {able.samples:,} samples",
                }
            )
    return {"name": axis, "size": now.get(axis, 1), "stops": stops, "closed": closed}


def _nearest(
    state: State,
    names: Sequence[str],
    places: Sequence[tuple[int, ...]],
    axis: str = "",
    size: int = 0,
) -> dict[str, int] | None:
    """Returns the place that changes least, with an axis of this size; None if there is none."""
    now = dict(state.mesh)
    at = names.index(axis) if axis else -1

    def far(place: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        total = 0.0
        for name, new in zip(names, place, strict=True):
            if name != axis:
                old = now.get(name, 1)
                new_axis = name not in now and new > 1
                dear = _DEAR if name not in _FREE or new_axis else 1.0
                total += dear * abs(math.log2(new / old))
        return total, place

    open_ones = [place for place in places if at < 0 or place[at] == size]
    return dict(zip(names, min(open_ones, key=far), strict=True)) if open_ones else None


def _places(devices: int, names: Sequence[str], able: Abled) -> tuple[tuple[int, ...], ...]:
    limits = tuple((name, able.limits.get(name, (0, ""))[0]) for name in names)
    return _all_places(devices, limits, able.samples)


@functools.lru_cache(maxsize=256)
def _all_places(
    devices: int, limits: tuple[tuple[str, int], ...], samples: int
) -> tuple[tuple[int, ...], ...]:
    """Returns every mesh of so many devices that divides what it must."""
    found: list[tuple[tuple[int, ...], int]] = [((), 1)]
    divisors = _divisors(devices)
    for place, (_, limit) in enumerate(limits):
        last = place == len(limits) - 1
        found = [
            ((*before, size), product * size)
            for before, product in found
            for size in ([devices // product] if last else divisors)
            if devices % (product * size) == 0 and not (limit and limit % size)
        ]
    names = [name for name, _ in limits]
    splits = [place for place, name in enumerate(names) if _splits_batch(name)]
    return tuple(
        sizes
        for sizes, _ in found
        if not samples or samples % math.prod(sizes[place] for place in splits) == 0
    )


def _splits_batch(name: str) -> bool:
    return name in BATCH_AXES or name in DATA_AXES


def _ways(mesh: Sequence[tuple[str, int]]) -> int:
    return math.prod(size for name, size in mesh if _splits_batch(name))


def _divides(mesh: Mapping[str, int], able: Abled) -> bool:
    for name, size in mesh.items():
        count = able.limits.get(name, (0, ""))[0]
        if count and count % size:
            return False
    return not able.samples or able.samples % _ways(tuple(mesh.items())) == 0


def _divisors(count: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(count) + 1) if count % d == 0]
    return sorted({*small, *(count // d for d in small)})
