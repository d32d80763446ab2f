"""Tensor parallelism: Megatron pairs, found by how dims flow through the forward pass; experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..._base import public
from ..._mesh import dim_axes, make_spec, padded
from ..._nnx import Leaf, Opinion
from ..flow import Flow, Group
from ..rules import Rule, Scene, require_axes
from .guess import Split, guess_pairs

# The name that a model gives to the dim of its experts.
_EXPERTS = "experts"


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """Tensor parallelism over one axis; see `tensor`."""

    axis: str

    def bind(self, leaves: Sequence[Leaf], scene: Scene) -> Rule:
        """Returns the rule: each leaf's split, or why it is left alone."""
        require_axes((self.axis,), scene.sizes, "tensor")
        ways = scene.sizes[self.axis]
        flow = scene.flow()
        assert scene.model is not None, "for_optimizer rejects strategies that need the model"
        if flow is None:
            splits = guess_pairs(leaves, scene.model, self.axis, ways)
        else:
            splits = dict(_Choice(leaves, flow, self.axis, ways).splits())
            unmet = frozenset(range(len(leaves))) - flow.met
            splits |= guess_pairs(leaves, scene.model, self.axis, ways, unmet, flow.what)
        opinions = _opinions(self.axis, leaves, splits)
        return lambda leaf: opinions.get(leaf.path)

    def __str__(self) -> str:
        """Returns it as it was written."""
        return f"tensor({self.axis!r})"


@public
def tensor(axis: str) -> Tensor:
    """Returns the strategy that splits matching pairs of weights over `axis` (Megatron).

    If `layout` has `inputs` or a `Recipe`, the forward pass is traced abstractly, and dims that
    one weight produces and another contracts are split: column then row, with one all-reduce per
    pair. If an input such as a KV cache has such a dim too, the reason names it: split it the
    same way. Without inputs, and for leaves that the trace does not reach, pairs are guessed from
    module types and widths. A leaf that cannot be decided is left alone, with the reason.

    Example:
        >>> import jax, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Sequential(
        ...     nnx.Linear(8, 32, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(32, 8, rngs=nnx.Rngs(1)))
        >>> layout = sw.layout(make, sw.mesh("model=4", on="none"), sw.tensor("model"),
        ...                    inputs=jax.ShapeDtypeStruct((2, 8), "float32"))
        >>> [leaf.spec for leaf in layout.leaves if leaf.ndim == 2]
        [P(None, 'model'), P('model',)]
    """
    if not isinstance(axis, str) or not axis:
        raise ValueError(f"tensor({axis!r}) needs the name of one axis")
    return Tensor(axis)


@dataclasses.dataclass(frozen=True, slots=True)
class _Candidate:
    """A group that may be split, the leaf dims in it, and the inner factor split along with it."""

    group: int
    members: Sequence[tuple[int, int]]
    inner: int | None = None


class _Choice:
    """Chooses which groups of dims to split."""

    def __init__(self, leaves: Sequence[Leaf], flow: Flow, axis: str, ways: int):
        self.leaves, self.flow, self.axis, self.ways = leaves, flow, axis, ways
        self.members: dict[int, list[tuple[int, int]]] = {}
        for index, dims in enumerate(flow.leaf_groups):
            if leaves[index].follows is not None:
                continue  # it follows its base
            for dim, groups in enumerate(dims):
                for group in groups:
                    self.members.setdefault(group, []).append((index, dim))

    def splits(self) -> Mapping[int, Split]:
        """Returns the split of each leaf, as far as the trace decides it."""
        refused: dict[int, str] = {}
        candidates: list[_Candidate] = []
        for group, members in self.members.items():
            why = self._refuse(group, members)
            if why is None and self.flow.groups[group].size % self.ways:
                why = f"its size {self.flow.groups[group].size} cannot be split {self.ways} ways"
                if self.flow.groups[group].written:
                    # The compiler would split it partially, and gather it again at every call.
                    why += ", nor can the cache that has it"
                else:
                    candidates += self._with_inner(group)
            elif why is None:
                candidates.append(_Candidate(group, members))
            if why is not None:
                refused[group] = why
        chosen: dict[int, tuple[_Candidate, int]] = {}
        for candidate in sorted(candidates, key=self._preference):
            rivals = [index for index, _ in candidate.members if index in chosen]
            if rivals:
                rival = self.leaves[rivals[0]].path
                refused[candidate.group] = f"{rival} is already split along another dim"
                continue
            for index, dim in candidate.members:
                chosen[index] = (candidate, dim)
        found: dict[int, Split] = {}
        for index in range(len(self.leaves)):
            if index in chosen:
                candidate, dim = chosen[index]
                found[index] = Split(dim, self._describe(index, dim, candidate))
            else:
                found[index] = Split(None, self._left_alone(index, refused))
        return found

    def _refuse(self, group: int, members: Sequence[tuple[int, int]], place: int = 0) -> str | None:
        """Returns why a group must not be split, or None if its flow allows it."""
        info: Group = self.flow.groups[group]
        if info.scanned:
            return "a loop steps along it"
        if info.inputs and not (info.made and (info.sites or info.written)):
            # A dim that a weight produces and that an input such as a KV cache shares is fine:
            # the input is split the same way, or each device takes its own part of it.
            return "it is a dim of the inputs"
        if info.recurs:
            return "it is contracted and produced again: the residual stream, or a layer used twice"
        if info.broken:
            return info.broken[0]
        kinds = {site.kind for site in info.sites}
        if info.reduced and not (self.flow.is_loss and kinds <= {"lookup"}):
            return info.reduced[0]
        if "activations" in kinds:
            return "it is contracted between two activations"
        if "leaves" in kinds:
            return "it is contracted between two leaves"
        if info.sites and not info.made and "lookup" not in kinds:
            return "no weight produces it before it is contracted, so only half of a pair could be split"
        if not info.sites and not info.is_output and not info.reduced:
            return "no weight contracts it, and it is not a dim of the outputs"
        for index, dim in members:
            leaf = self.leaves[index]
            if sum(i == index for i, _ in members) > 1:
                return f"{leaf.path} has it twice"
            if self.flow.leaf_groups[index][dim][place : place + 1] != [group]:
                return f"it is not the outermost factor of dim {dim} of {leaf.path}"
            taken = padded(leaf.spec, leaf.ndim)
            if taken[dim] or any(self.axis in entry for entry in taken):
                return f"an earlier rule already splits {leaf.path}"
        return None

    def _with_inner(self, group: int) -> list[_Candidate]:
        """Returns splits of a group that is too small, together with the factor inside it.

        Eight KV heads cannot be split sixteen ways, but the query heads that are grouped
        under them can; leaves with only the KV heads stay replicated.
        """
        size = self.flow.groups[group].size
        if self.ways % size:
            return []
        inside = {
            self.flow.leaf_groups[index][dim][1]
            for index, dim in self.members[group]
            if len(self.flow.leaf_groups[index][dim]) > 1
        }
        found = []
        for inner in inside:
            members = self.members[inner]
            under = all(self.flow.leaf_groups[i][d][:2] == [group, inner] for i, d in members)
            fits = self.flow.groups[inner].size % (self.ways // size) == 0
            if under and fits and self._refuse(inner, members, place=1) is None:
                found.append(_Candidate(group, members, inner))
        return found

    def _preference(self, candidate: _Candidate) -> tuple[bool, int, int]:
        """Sorts pairs before single columns, then by the bytes that are split."""
        info = self.flow.groups[candidate.group]
        weight = sum(self.leaves[index].bytes for index, _ in candidate.members)
        return (not info.sites, -weight, candidate.members[0][0])

    def _describe(self, index: int, dim: int, candidate: _Candidate) -> str:
        info = self.flow.groups[candidate.group]
        others = [self.leaves[i].path for i, _ in candidate.members if i != index]
        more = " …" if len(others) > 4 else ""
        together = f" with {', '.join(others[:4])}{more}" if others else ""
        size = str(info.size)
        if candidate.inner is not None:
            size += f" x {self.flow.groups[candidate.inner].size}"
        sums = len(info.sites)
        if sums:
            effect = f"{sums} all-reduce{'s' if sums > 1 else ''} in the forward pass"
        else:
            effect = "no all-reduce"
            effect = effect if info.reduced else f"the outputs of the model are split; {effect}"
        if info.reduced:
            effect += ", except where the loss reduces along it"
        effect += self._shared(info, candidate)
        looked = any(site.kind == "lookup" for site in info.sites)
        word = "looked up" if looked else "traced"
        return f"dim {dim}, {word} as one dim of {size}{together}: {effect}"

    def _shared(self, info: Group, candidate: _Candidate) -> str:
        """Returns which inputs share the dim, and must be split with it."""
        if not info.inputs or candidate.inner is not None:
            return ""
        names = [f"{self.flow.input_names[i]} (dim {dim})" for i, dim in info.inputs]
        more = " …" if len(names) > 2 else ""
        return f"; split the inputs that share it the same way: {', '.join(names[:2])}{more}"

    def _left_alone(self, index: int, refused: Mapping[int, str]) -> str:
        parts = []
        for dim, groups in enumerate(self.flow.leaf_groups[index]):
            for group in groups[:1]:
                parts.append(f"dim {dim}: {refused.get(group, 'not chosen')}")
        return "left alone; " + "; ".join(parts) if parts else "left alone: nothing to split"


def _opinions(axis: str, leaves: Sequence[Leaf], splits: Mapping[int, Split]) -> dict[str, Opinion]:
    opinions = {}
    for index, split in splits.items():
        leaf = leaves[index]
        if split.dim is None:
            opinions[leaf.path] = Opinion(None, split.reason)
            continue
        taken = padded(leaf.spec, leaf.ndim)
        taken[split.dim] = (axis,)
        opinions[leaf.path] = Opinion(make_spec(taken), split.reason, refines=True)
    return opinions


@dataclasses.dataclass(frozen=True, slots=True)
class Experts:
    """Expert parallelism over one axis: dims named `experts` are split."""

    axis: str

    def bind(self, leaves: Sequence[Leaf], scene: Scene) -> Rule:
        """Returns the rule.

        Raises:
            ValueError: the mesh does not have the axis, or no dim is named `experts`.
        """
        require_axes((self.axis,), scene.sizes, "expert")
        if not any(_expert_dim(leaf) is not None for leaf in leaves):
            raise ValueError(
                "expert found no experts: name their dim 'experts' in the model's annotations, "
                "as models.Config(experts=8) does"
            )
        return self._pick

    def _pick(self, leaf: Leaf) -> Opinion:
        dim = _expert_dim(leaf)
        if dim is None:
            return Opinion(None, "no dim is named 'experts'")
        taken = padded(leaf.spec, leaf.ndim)
        if taken[dim] or any(self.axis in entry for entry in taken):
            return Opinion(None, f"an earlier rule already splits dim {dim}, or uses {self.axis!r}")
        # Experts that do not divide are split all the same: `check` reports it.
        taken[dim] = (self.axis,)
        return Opinion(make_spec(taken), f"dim {dim}, {leaf.shape[dim]} experts", refines=True)

    def __str__(self) -> str:
        """Returns it as it was written."""
        return f"expert({self.axis!r})"


def _expert_dim(leaf: Leaf) -> int | None:
    named = enumerate(leaf.names or ())
    return next((dim for dim, names in named if _EXPERTS in dim_axes(names)), None)
