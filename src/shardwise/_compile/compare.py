"""Compares two layouts, or two compilations: what changed, and what it costs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, overload

from .._base import public, show_bytes, show_flops, show_type
from .._hlo import Collective
from .._layout import Layout, LayoutDiff, diff_layouts
from .result import Compiled


@public
@dataclasses.dataclass(frozen=True, slots=True)
class CompiledDiff:
    """The differences between two compilations. It is true if there are any.

    Attributes:
        chips: the chips of both, with their meshes.
        memory: each number of `Compiled.memory` that differs, before and after; None if unknown.
        added: collectives that only the new one has, each with how many more a step runs.
        removed: collectives that only the old one has.
        flops: before and after; None if unknown.
        findings: codes and paths that are new, and those that are gone.
    """

    chips: tuple[str, str]
    memory: dict[str, tuple[int | None, int | None]]
    added: tuple[tuple[Collective, int], ...]
    removed: tuple[tuple[Collective, int], ...]
    flops: tuple[int | None, int | None]
    findings: tuple[tuple[str, ...], tuple[str, ...]]

    def __bool__(self) -> bool:
        """Returns whether anything differs."""
        other = self.chips[0] != self.chips[1] or self.flops[0] != self.flops[1]
        return bool(other or self.memory or self.added or self.removed or any(self.findings))

    def __str__(self) -> str:
        """Returns one line for each difference."""
        lines = []
        if self.chips[0] != self.chips[1]:
            lines.append(f"{self.chips[0]} -> {self.chips[1]}")
        for name, (old, new) in self.memory.items():
            step = ""
            if old is not None and new is not None:
                step = f"{'+' if new >= old else '-'}{show_bytes(abs(new - old))}, "
            shown = ("unknown" if n is None else show_bytes(n) for n in (old, new))
            lines.append(f"{name} {' -> '.join(shown)} ({step}compiled)")
        if self.flops[0] != self.flops[1]:
            old, new = ("unknown" if n is None else show_flops(n) for n in self.flops)
            lines.append(f"flops {old} -> {new} (compiled)")
        lines += [f"- {_show(row, count)}" for row, count in self.removed]
        lines += [f"+ {_show(row, count)}" for row, count in self.added]
        lines += [f"+ finding {text}" for text in self.findings[0]]
        lines += [f"- finding {text}" for text in self.findings[1]]
        return "\n".join(lines) if lines else "no difference"


def _show(row: Collective, count: int) -> str:
    sent = show_bytes(row.sent_bytes * count)
    return f"{count} {row.kind} over {','.join(row.axes)} of {row.shape} ({sent}) from {row.source}"


@overload
def diff(old: Layout, new: Layout) -> LayoutDiff: ...
@overload
def diff(old: Compiled, new: Compiled) -> CompiledDiff: ...
@public
def diff(old: Any, new: Any) -> LayoutDiff | CompiledDiff:
    """Returns the differences between two layouts, or between two compilations.

    Example:
        >>> import shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0))
        >>> mesh = sw.mesh("data=8", on="none")
        >>> print(sw.diff(sw.layout(make, mesh, "dp"), sw.layout(make, mesh, "fsdp")))
        ~ kernel  float32[1024,4096] P() -> float32[1024,4096] P(None, 'data')
        16.0 MiB -> 2.0 MiB on each device (-14.0 MiB, exact)
    """
    if isinstance(old, Layout) and isinstance(new, Layout):
        return diff_layouts(old, new)
    if isinstance(old, Compiled) and isinstance(new, Compiled):
        return _diff_compiled(old, new)
    kinds = [show_type(one) for one in (old, new)]
    raise ValueError(
        f"diff compares two layouts, or two compilations, got {kinds[0]} and {kinds[1]}: "
        f"sw.load_layout and sw.load_compiled read them from files"
    )


def _diff_compiled(old: Compiled, new: Compiled) -> CompiledDiff:
    before, after = (
        dataclasses.asdict(one.memory) if one.memory is not None else {} for one in (old, new)
    )
    names = list(dict.fromkeys([*before, *after]))
    memory = {
        name: (before.get(name), after.get(name))
        for name in names
        if before.get(name) != after.get(name)
    }
    had, has = _counted(old), _counted(new)
    texts = [tuple(f"{f.code} {f.path}" for f in one.findings) for one in (old, new)]
    return CompiledDiff(
        chips=(_where(old), _where(new)),
        memory=memory,
        added=tuple((row, n) for row, n in (has - had).items()),
        removed=tuple((row, n) for row, n in (had - has).items()),
        flops=(old.flops, new.flops),
        findings=(
            tuple(text for text in texts[1] if text not in texts[0]),
            tuple(text for text in texts[0] if text not in texts[1]),
        ),
    )


def _where(compiled: Compiled) -> str:
    return f"{','.join(f'{a}={s}' for a, s in compiled.mesh.items())} on {compiled.chips}"


def _counted(compiled: Compiled) -> Counter[Collective]:
    """Returns how many times a step runs each collective, counting identical ones together."""
    found: Counter[Collective] = Counter()
    for row in compiled.collectives:
        found[dataclasses.replace(row, times=1)] += row.times
    return found
