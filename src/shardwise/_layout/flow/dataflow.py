"""How dims of leaves flow through a traced function: which are the same, what happens to them.

The jaxpr is walked once. Every dim of every value is a list of factors (see `factors`), and
operations unify them. Whatever would cost communication if a factor were split is recorded as an
event, and looked up once everything is unified.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ..._jax import call_jaxpr, is_literal, opened
from .factors import Dim, Factor, fresh, resolve, unify


@dataclasses.dataclass(frozen=True, slots=True)
class Val:
    """An abstract value: its dims, whether it depends on the inputs, and the contractions before it.

    Attributes:
        dims: the factors of each dim.
        live: whether it depends on the model's inputs.
        past: a bit for each contraction among its ancestors.
    """

    dims: list[Dim]
    live: bool
    past: int


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """A contraction or lookup over a dim. Splitting the dim costs a reduction here.

    Attributes:
        index: its bit in `Val.past`.
        kind: `weights` (a leaf with an activation), `activations`, `leaves` or `lookup`.
        summed: the dims that are summed over.
        produced: the dims of the result that come from the leaf.
        past: the contractions before it.
    """

    index: int
    kind: str
    summed: list[Dim]
    produced: list[Dim]
    past: int


@dataclasses.dataclass(slots=True)
class Group:
    """Everything that happens to one factor, wherever it occurs.

    Attributes:
        size: its size.
        sites: where it is summed over.
        broken: why it cannot be split without more communication.
        reduced: why all of it is needed for a result that no longer has it.
        made: whether a leaf introduces it into an activation, as the columns of a kernel do.
        inputs: where it is a dim of the model's inputs: the input's index, and the dim.
        written: whether it is a dim of something that is updated in place, such as a KV cache.
        is_output: whether it is a dim of the model's outputs.
        recurs: whether it is produced from a sum over itself: the residual stream.
        scanned: whether a loop steps along it.
    """

    size: int
    sites: list[Site] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)
    reduced: list[str] = dataclasses.field(default_factory=list)
    made: bool = False
    inputs: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    written: bool = False
    is_output: bool = False
    recurs: bool = False
    scanned: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """The result of following the dims of one traced function.

    Attributes:
        leaf_groups: for each leaf and dim, the groups of its factors, major first.
        groups: what happens to each group.
        met: the leaves that the function uses.
        input_names: the names of the function's inputs.
        what: the name of what was traced, such as `__call__`.
        is_loss: whether it was a loss, so that every use of the model's outputs is seen.
    """

    leaf_groups: list[list[list[int]]]
    groups: list[Group]
    met: frozenset[int]
    input_names: Sequence[str] = ()
    what: str = "__call__"
    is_loss: bool = False


class Tracer:
    """Walks jaxprs and records what happens to dims. Each trace needs its own instance."""

    def __init__(self) -> None:
        """Starts with nothing recorded."""
        self.sites: list[Site] = []
        self.broken: list[tuple[Dim, str]] = []
        self.reduced: list[tuple[Dim, str]] = []
        self.written: list[Dim] = []
        self.used: set[int] = set()
        self.scanned: list[Dim] = []

    def unknown(self, shape: Sequence[int], live: bool = False, past: int = 0) -> Val:
        """Returns a value whose dims are distinct from all others."""
        return Val([fresh(size) for size in shape], live, past)

    def breaks(self, dim: Dim, why: str) -> None:
        """Records that splitting `dim` would need communication."""
        self.broken.append((dim, why))

    def reduces(self, dim: Dim, why: str) -> None:
        """Records that `dim` is needed in full for a result that no longer has it."""
        self.reduced.append((dim, why))

    def same(self, a: Dim, b: Dim, why: str) -> None:
        """Unifies two dims, or records that they do not line up."""
        if not unify(a, b):
            self.breaks(a, why)
            self.breaks(b, why)

    def site(self, kind: str, summed: list[Dim], produced: list[Dim], past: int) -> int:
        """Records a sum over dims; returns its bit."""
        index = len(self.sites)
        self.sites.append(Site(index, kind, summed, produced, past))
        return 1 << index

    def run(self, jaxpr: Any, consts: Sequence[Val], args: Sequence[Val]) -> list[Val]:
        """Returns the values of the jaxpr's outputs."""
        from .primitives import RULES, unknown_primitive

        env: dict[Any, Val] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Val:
            if is_literal(atom):
                return self.unknown(getattr(atom.aval, "shape", ()))
            return env[atom]

        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            rule = RULES.get(eqn.primitive.name)
            inner = call_jaxpr(eqn) if rule is None else None
            if inner is not None:
                outputs = self.call(inner, values)
            else:
                self.used.update(map(id, values))  # what is only passed to a call is not used yet
                outputs = (rule or unknown_primitive)(self, eqn, values)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def call(self, closed: Any, args: Sequence[Val]) -> list[Val]:
        """Returns the outputs of an inner jaxpr, closed or open."""
        jaxpr, consts = opened(closed)
        return self.run(jaxpr, [self.unknown(getattr(c, "shape", ())) for c in consts], args)

    def finish(self, leaves: Sequence[Val], inputs: Sequence[Val], outputs: Sequence[Val]) -> Flow:
        """Returns what was recorded for each group, once everything has been unified."""
        ids: dict[Factor, int] = {}
        groups: list[Group] = []

        def group_ids(dim: Dim) -> list[int]:
            found = []
            for factor in resolve(dim):
                if factor not in ids:
                    ids[factor] = len(groups)
                    groups.append(Group(factor.size))
                found.append(ids[factor])
            return found

        leaf_groups = [[group_ids(dim) for dim in leaf.dims] for leaf in leaves]
        past_of: dict[int, int] = defaultdict(int)
        for site in self.sites:
            for i in {i for dim in site.summed for i in group_ids(dim)}:
                groups[i].sites.append(site)
                # A table that is looked up and used again as the head is not a residual stream.
                past_of[i] |= (site.kind != "lookup") << site.index
        for site in self.sites:
            for i in {i for dim in site.produced for i in group_ids(dim)}:
                groups[i].made = True
                if past_of[i] & (site.past | 1 << site.index):
                    groups[i].recurs = True
        for dim, why in self.broken:
            for i in group_ids(dim):
                groups[i].broken.append(why)
        for dim, why in self.reduced:
            for i in group_ids(dim):
                groups[i].reduced.append(why)
        for index, value in enumerate(inputs):
            for place, dim in enumerate(value.dims):
                for i in group_ids(dim):
                    groups[i].inputs.append((index, place))
        for value in outputs:
            for i in {i for dim in value.dims for i in group_ids(dim)}:
                groups[i].is_output = True
        for dim in self.written:
            for i in group_ids(dim):
                groups[i].written = True
        for dim in self.scanned:
            for i in group_ids(dim):
                groups[i].scanned = True
        met = frozenset(i for i, leaf in enumerate(leaves) if id(leaf) in self.used)
        return Flow(leaf_groups, groups, met)


def follow(closed: Any, count: int) -> Flow:
    """Returns how the dims of the first `count` inputs flow through a closed jaxpr.

    An output that is one of the inputs, such as a variable that is not changed, does not count.

    Args:
        closed: the traced function, from `jax.make_jaxpr`.
        count: how many of its inputs are leaves; activations depend on the others.
    """
    tracer = Tracer()
    values = [
        tracer.unknown(getattr(var.aval, "shape", ()), live=i >= count)
        for i, var in enumerate(closed.jaxpr.invars)
    ]
    consts = [tracer.unknown(getattr(c, "shape", ())) for c in closed.consts]
    results = tracer.run(closed.jaxpr, consts, values)
    invars = set(closed.jaxpr.invars)
    outputs = [
        value
        for var, value in zip(closed.jaxpr.outvars, results, strict=True)
        if is_literal(var) or var not in invars
    ]
    return tracer.finish(values[:count], values[count:], outputs)
