"""Rules: what chooses a spec for a leaf. Annotations, path patterns, ranks and plain functions.

A rule is a function `(leaf) -> PartitionSpec | None`. It may return an `Opinion` to give its
reason. A strategy, which needs to see the whole model, has a method `bind` that returns a rule.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jax.sharding import PartitionSpec as P

from .._base import count, either, public, show_type
from .._jax import active_axis_rules, show_value
from .._mesh import Axes, closest_axis, dim_axes, normal_spec, require_spec, show_spec
from .._nnx import AbstractModel, Leaf, Opinion, plain_keys, sharding_rules_of, split_path

if TYPE_CHECKING:
    from .flow import Flow

Rule = Callable[[Leaf], P | Opinion | None]
Logical = Mapping[str, str | Sequence[str] | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """What a strategy can look at before it decides: the whole model at once.

    Attributes:
        model: the abstract model; None where only the leaves are known.
        sizes: the mesh's axes and their sizes.
        flow: returns how each leaf's dims flow through the forward pass, or None if
            `layout` has neither inputs nor a recipe.
        known: the same, but None if that would require tracing a recipe's loss first.
    """

    model: AbstractModel | None
    sizes: Mapping[str, int]
    flow: Callable[[], Flow | None]
    known: Callable[[], Flow | None]


@runtime_checkable
class Strategy(Protocol):
    """A rule that needs the whole model before it can decide on one leaf."""

    def bind(self, leaves: Sequence[Leaf], scene: Scene) -> Rule:
        """Returns the rule for these leaves, whose specs were set by earlier rules."""
        ...


Rules = Rule | Strategy | Mapping[str, P] | str | Sequence[Any] | None


@public
def by_rank(specs: Mapping[int, P]) -> Rule:
    """Returns a rule that picks a spec by a leaf's number of dims.

    Stacked dims do not count, so a scanned layer gets the spec of a plain one, with None for
    the stacked dim. Adapters (LoRA) and scales of quantised arrays follow the leaves that they
    belong to, whatever their own number of dims.

    Example:
        >>> import shardwise as sw
        >>> from flax import nnx
        >>> from jax.sharding import PartitionSpec as P
        >>> make = lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0))
        >>> rule = sw.by_rank({2: P(None, "model"), 1: P("model")})
        >>> sw.layout(make, sw.mesh("model=4", on="none"), rule)["kernel"].shard_shape
        (4, 2)
    """
    if not isinstance(specs, Mapping):
        raise ValueError(f"by_rank takes {{rank: spec}}, got {show_type(specs)}")
    for rank, spec in specs.items():
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise ValueError(
                f"by_rank has the rank {show_value(rank)}: a rank must be a non-negative integer"
            )
        require_spec(spec, f"by_rank({{{rank}: ...}})")

    def pick(leaf: Leaf) -> Opinion | None:
        if leaf.follows is not None and leaf.follows.base:
            return None
        rank = leaf.ndim - len(leaf.stacked)
        if rank not in specs:
            return None
        entries = list(specs[rank])
        for dim in leaf.stacked:
            entries.insert(dim, None) if dim <= len(entries) else None
        stack = f", plus {len(leaf.stacked)} of stacked layers" if leaf.stacked else ""
        return Opinion(P(*entries), f"a leaf of {count(rank, 'dim')}{stack}")

    pick.__name__ = "by_rank"
    return pick


@public
def replicate() -> Rule:
    """Returns a rule that intentionally replicates every leaf on every device.

    Example:
        >>> import shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0))
        >>> sw.layout(make, sw.mesh("data=4", on="none"), sw.replicate())["kernel"].copies
        4
    """
    return _replicate


def _replicate(leaf: Leaf) -> Opinion | None:
    if leaf.follows is not None and leaf.follows.base:
        return None  # as the leaf that it belongs to, which a later rule may split
    return Opinion(P(), "replicated on every device, as requested", intentional=True)


_replicate.__name__ = "replicate"


@dataclasses.dataclass(frozen=True, slots=True)
class Patterns:
    """Path patterns with their specs: `*` is one step of a path, `**` zero or more."""

    specs: Mapping[str, P]
    compiled: tuple[tuple[str, re.Pattern[str], P], ...]

    def matches(self, leaf: Leaf) -> list[tuple[str, P]]:
        """Returns each pattern that matches, with its spec.

        A kernel that is wrapped in an adapter, or quantised, also has the path that it has without.
        """
        texts = {steps_text(leaf.keys), steps_text(plain_keys(leaf.keys))}
        return [
            (pattern, spec)
            for pattern, regex, spec in self.compiled
            if any(regex.fullmatch(text) for text in texts)
        ]

    def __call__(self, leaf: Leaf) -> Opinion | None:
        """Returns the spec of the first pattern that matches; `check` reports clashes."""
        found = self.matches(leaf)
        if not found:
            return None
        pattern, spec = found[0]
        disagree = any(normal_spec(other) != normal_spec(spec) for _, other in found[1:])
        return Opinion(spec, f"path matches {pattern!r}", clashes=tuple(found) if disagree else ())


def patterns(specs: Mapping[str, P]) -> Patterns:
    """Returns the rule for a dict of path patterns.

    Raises:
        ValueError: a pattern is not a string of steps, or its spec is not a spec.
    """
    compiled = []
    for pattern, spec in specs.items():
        if not isinstance(pattern, str) or not pattern or "" in split_path(pattern):
            raise ValueError(
                f"{pattern!r} is not a path pattern: separate steps with dots, such as "
                f"'layers.*.kernel' (one step) or '**.kernel' (any number of steps)"
            )
        if any(
            isinstance(s, str) and s in pattern.split(".") and "[" in s for s in split_path(pattern)
        ):
            raise ValueError(
                f"{pattern!r} is not a path pattern: the only wildcards in a step are * and ?, "
                f"and ['a.b'] is a key with a dot"
            )
        compiled.append(
            (pattern, pattern_regex(pattern), require_spec(spec, f"pattern {pattern!r}"))
        )
    return Patterns(dict(specs), tuple(compiled))


def pattern_regex(pattern: str) -> re.Pattern[str]:
    """Returns the regex of a path pattern, to match against the text from `steps_text`."""
    glob = {"*": r"[^\x00]*", "?": r"[^\x00]"}
    parts = []
    for step in split_path(pattern):
        if step == "**":
            parts.append(r"(?:[^\x00]*\x00)*")
        elif isinstance(step, str) and step not in pattern.split("."):  # ['a.b']: a literal key
            parts.append(re.escape(step) + r"\x00")
        else:
            parts.append("".join(glob.get(c) or re.escape(c) for c in str(step)) + r"\x00")
    return re.compile("".join(parts))


def steps_text(keys: Sequence[Any]) -> str:
    """Returns the text of a path's keys that a pattern's regex is matched against."""
    return "".join(f"{key}\0" for key in keys)


def from_annotations(model: AbstractModel, logical: Logical | None) -> Rule:
    """Returns the rule for the model's own annotations.

    Names are resolved by `logical` first, then by the variable's own `sharding_rules`, then
    by Flax's active logical axis rules; a name that is itself an axis of the mesh is kept.
    Unresolved names stay in the spec, and `check` reports them.
    """
    if logical is not None and not isinstance(logical, Mapping):
        raise ValueError(
            f"logical is {show_type(logical)}: give a dict such as {{'mlp': 'model', 'embed': None}}"
        )
    table = {name: _as_axes(name, to) for name, to in (logical or {}).items()}
    active = once(active_axis_rules(), "Flax's active logical axis rules")
    own = {
        keys: once(rules, f"the sharding_rules of {'.'.join(map(str, keys))}")
        for keys, variable in model.variables
        if (rules := sharding_rules_of(variable))
    }

    def pick(leaf: Leaf) -> Opinion | None:
        if leaf.names is None:
            return None
        rules = own.get(leaf.keys, {})

        def resolve(name: str) -> Axes:
            if name in table:
                return table[name]
            if name in rules:
                return rules[name]
            return active.get(name, (name,))

        entries = []
        for entry in leaf.names:
            axes = tuple(axis for name in dim_axes(entry) for axis in resolve(name))
            entries.append(axes[0] if len(axes) == 1 else (axes or None))
        spec = P(*entries)
        written = show_spec(P(*leaf.names))
        detail = f" with names {written}" if list(spec) != list(leaf.names) else f" {written}"
        return Opinion(spec, f"the model's annotation{detail}")

    pick.__name__ = "annotation"
    return pick


def require_axes(axes: Sequence[str], sizes: Mapping[str, int], what: str) -> None:
    """Raises a ValueError if the mesh lacks one of `axes`."""
    for axis in axes:
        if axis not in sizes:
            raise ValueError(
                f"{what} uses axis {axis!r}, which the mesh does not have: "
                f"{closest_axis(axis, sizes)}its axes are {', '.join(f'{a}={s}' for a, s in sizes.items())}"
            )


def once(pairs: Any, what: str) -> dict[str, Axes]:
    """Returns Flax's (name, axis) pairs as a dict.

    Raises:
        ValueError: a name is mapped twice; Flax itself would silently take the last.
    """
    found: dict[str, Axes] = {}
    for name, to in pairs or ():
        axes = dim_axes(to)
        if found.setdefault(name, axes) != axes:
            raise ValueError(
                f"{what} map {name!r} to both {found[name] or None!r} and {axes or None!r}: "
                f"map it once"
            )
    return found


def _as_axes(name: str, to: str | Sequence[str] | None) -> Axes:
    if to is None or isinstance(to, str):
        return dim_axes(to)
    if isinstance(to, Sequence) and all(isinstance(axis, str) for axis in to):
        return tuple(to)
    raise ValueError(
        either(
            f"logical={{{name!r}: {show_value(to)}}} is not an axis: give an axis name, a tuple of them, or None",
            f"[logical] {name} = {show_value(to)} is not an axis: give an axis name, or a list of them",
        )
    )
