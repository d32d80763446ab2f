"""How each leaf's dims flow through a traced function: which dims are one, and what happens to them.

The jaxpr is walked once. Every dim of every value is a list of factors (`_factors`); operations
unify them. What would cost communication if a factor were split is recorded as an event and
looked up once all is unified.
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
    """An abstract value: its dims, whether it depends on the inputs, and what was summed on the way.

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
    """A sum over a dim: a contraction or a lookup. Splitting the dim costs a reduction here.

    Attributes:
        index: its bit in `Val.past`.
        kind: `weights` (a leaf against an activation), `activations`, `leaves` or `lookup`.
        summed: the dims that are summed over.
        produced: the dims that the leaf's side brings to the result.
        past: the contractions before it.
    """

    index: int
    kind: str
    summed: list[Dim]
    produced: list[Dim]
    past: int


@dataclasses.dataclass(slots=True)
class Group:
    """All that happens to one factor, wherever it stands.

    Attributes:
        size: its size.
        sites: where it is summed over.
        broken: why it cannot be split without more communication.
        reduced: why a whole row along it is needed, where the result no longer has it.
        made: a leaf brings it to an activation, as the columns of a kernel do.
        inputs: where it is a dim of the model's inputs: the input's index, and the dim.
        written: it is a dim of something that is updated in place, as a KV cache is.
        is_output: it is a dim of the model's outputs.
        recurs: it is produced from a sum over itself: the residual stream.
        scanned: a loop steps along it.
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
    """The finished account of one traced function.

    Attributes:
        leaf_groups: for each leaf, for each dim, its factors' groups, major first.
        groups: what happens to each group.
        met: the leaves that the function uses.
        input_names: what the function's inputs are called.
        what: what was traced, such as `__call__`.
        is_loss: it was a loss, so that all that leaves the model is seen.
    """

    leaf_groups: list[list[list[int]]]
    groups: list[Group]
    met: frozenset[int]
    input_names: Sequence[str] = ()
    what: str = "__call__"
    is_loss: bool = False


class Tracer:
    """Walks jaxprs and keeps the account. One instance serves one trace."""

    def __init__(self) -> None:
        """Starts an empty account."""
        self.sites: list[Site] = []
        self.broken: list[tuple[Dim, str]] = []
        self.reduced: list[tuple[Dim, str]] = []
        self.written: list[Dim] = []
        self.used: set[int] = set()
        self.scanned: list[Dim] = []

    def unknown(self, shape: Sequence[int], live: bool = False, past: int = 0) -> Val:
        """Returns a value whose dims are no other dims."""
        return Val([fresh(size) for size in shape], live, past)

    def breaks(self, dim: Dim, why: str) -> None:
        """Records that `dim` cannot be split for free."""
        self.broken.append((dim, why))

    def reduces(self, dim: Dim, why: str) -> None:
        """Records that `dim` is needed in full for a result that no longer has it."""
        self.reduced.append((dim, why))

    def same(self, a: Dim, b: Dim, why: str) -> None:
        """Makes two dims one, or records that they do not line up."""
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
                self.used.update(map(id, values))  # what is only handed on is not used yet
                outputs = (rule or unknown_primitive)(self, eqn, values)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def call(self, closed: Any, args: Sequence[Val]) -> list[Val]:
        """Returns the outputs of an inner jaxpr, closed or open."""
        jaxpr, consts = opened(closed)
        return self.run(jaxpr, [self.unknown(getattr(c, "shape", ())) for c in consts], args)

    def finish(self, leaves: Sequence[Val], inputs: Sequence[Val], outputs: Sequence[Val]) -> Flow:
        """Returns the account by group, now that everything has been unified."""
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
                # A table that is looked up and used again as the head is no residual stream.
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

    An output that is one of the inputs, such as a variable that is not changed, is none.

    Args:
        closed: the traced function, from `jax.make_jaxpr`.
        count: how many of its inputs are leaves; the rest are what activations depend on.
    """
    tracer = Tracer()
    values = [
        tracer.unknown(getattr(var.aval, "shape", ()), live=i >= count)
        for i, var in enumerate(closed.jaxpr.invars)
    ]
    consts = [tracer.unknown(getattr(c, "shape", ())) for c in closed.consts]
    results = tracer.run(closed.jaxpr, consts, values)
    given = set(closed.jaxpr.invars)
    outputs = [
        value
        for var, value in zip(closed.jaxpr.outvars, results, strict=True)
        if is_literal(var) or var not in given
    ]
    return tracer.finish(values[:count], values[count:], outputs)
