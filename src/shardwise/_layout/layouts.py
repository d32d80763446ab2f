"""The layout: every leaf's spec on one mesh."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._base import count, either, public, show_bytes, show_devices, show_type, text_table
from .._jax import show_value
from .._mesh import AnyMesh, require_spec, shard_shape, show_mesh, show_spec
from .._nnx import Leaf, Left, Model, Opinion, Recipe, abstract_model, followed, leaves_of
from . import lockfile
from .flow import Method, call_arguments, method_of, trace_flow
from .optimizer import optimizer_leaves
from .rows import HEADER, leaf_rows, show_shape
from .rules import Logical, Patterns, Rules, Scene, from_annotations
from .strategies import Fsdp, Zero, flatten_rules

if TYPE_CHECKING:
    from .._report import Report
    from .._studio import InlineStudio
    from .flow import Flow


@public
@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Every leaf of a model's state, with its spec, on one mesh.

    Made by `sw.layout`. `specs`, `shardings` and `abstract` are pytrees of the structure of
    `nnx.split(model)[1]`.

    Attributes:
        mesh: the mesh.
        leaves: the leaves, in the order of the state's pytree.
        treedef: the structure of the state.
        dead_patterns: path patterns that matched no leaf, each with the nearest path.
    """

    mesh: AnyMesh
    leaves: tuple[Leaf, ...]
    treedef: Any
    dead_patterns: tuple[tuple[str, str], ...] = ()
    _make: Callable[[AnyMesh], Layout] | None = None

    def __getitem__(self, path: str) -> Leaf:
        """Returns the leaf at a dotted path.

        Raises:
            KeyError: no leaf has this path; the nearest ones are named.
        """
        try:
            return self._by_path[path]
        except KeyError:
            near = difflib.get_close_matches(str(path), self._by_path, n=3)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise KeyError(f"no leaf has the path {path!r}{hint}") from None

    @property
    def specs(self) -> Any:
        """The specs, as a pytree of the state's structure."""
        return self._tree([leaf.spec for leaf in self.leaves])

    @property
    def shardings(self) -> Any:
        """A `NamedSharding` for each leaf, as a pytree of the state's structure.

        Raises:
            ValueError: a spec cannot be applied; all such leaves are named.
        """
        return self._tree(self._shardings())

    @property
    def abstract(self) -> Any:
        """A `jax.ShapeDtypeStruct` with its sharding for each leaf, as a pytree."""
        return self._tree(
            [
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
                for leaf, sharding in zip(self.leaves, self._shardings(), strict=True)
            ]
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole state, each leaf once (exact)."""
        return sum(leaf.bytes for leaf in self.leaves)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that one device holds (exact); a leaf whose spec has faults counts in full."""
        return sum(leaf.resident_bytes for leaf in self.leaves)

    def on(self, mesh: AnyMesh) -> Layout:
        """Returns the same specs on another mesh, such as a real one after an abstract one."""
        sizes = _sizes(mesh)
        leaves = tuple(dataclasses.replace(leaf, sizes=sizes) for leaf in self.leaves)
        return dataclasses.replace(self, mesh=mesh, leaves=leaves)

    def made_on(self, mesh: AnyMesh) -> Layout:
        """Returns what the same rules decide on another mesh, such as a smaller one.

        Unlike `on`, which keeps the specs: a rule may split another dim there, or none. A layout
        from a lockfile, or of a module that exists already, keeps its specs.

        Example:
            >>> import shardwise as sw
            >>> from flax import nnx
            >>> make = lambda: nnx.Linear(12, 16, use_bias=False, rngs=nnx.Rngs(0))
            >>> rule = sw.fsdp("data", min_bytes=0)
            >>> layout = sw.layout(make, sw.mesh("data=4", on="none"), rule)
            >>> smaller = layout.made_on(sw.mesh("data=3", on="none"))
            >>> layout["kernel"].spec, smaller["kernel"].spec
            (P(None, 'data'), P('data',))
        """
        return self.on(mesh) if self._make is None else self._make(mesh)

    def explain(self, path: str) -> str:
        """Returns which rule decided a leaf's spec, why, and what else was considered."""
        leaf = self[path]
        lines = [f"{leaf.path}  {show_shape(leaf)}  {leaf.kind}  on {show_mesh(self.mesh)}"]
        if leaf.faults:
            lines += [f"  spec {show_spec(leaf.spec)}"]
            lines += [f"  error {f.code}: {f.message}; {f.help}" for f in leaf.faults]
        else:
            shard = ",".join(map(str, leaf.shard_shape))
            lines.append(
                f"  spec {show_spec(leaf.spec)}  shard [{shard}]  {show_bytes(leaf.shard_bytes)} of "
                f"{show_bytes(leaf.bytes)} on each device  copies {leaf.copies}"
            )
        for what, spec in (("optimizer state", leaf.moments), ("gradient", leaf.gradients)):
            if spec is not None:
                lines.append(f"  {what} {show_spec(spec)}{_show_shard(leaf, spec)}")
        lines += [f"  error {f.code}: {f.message}; {f.help}" for f in leaf.update_faults]
        lines.append(f"  decided by {leaf.reason}")
        considered = leaf.trail or (Opinion(None, "no rule matched this leaf"),)
        lines.append("  considered, in order:")
        for opinion in considered:
            source = f"{opinion.source}: " if opinion.source else ""
            lines.append(
                f"    {source}{opinion.verdict}{' - ' if opinion.reason else ''}{opinion.reason}"
            )
            for pattern, spec in opinion.clashes:
                lines.append(f"      {pattern!r} says {show_spec(spec)}")
        return "\n".join(lines)

    def for_optimizer(self, tx: Any, *, wrt: Any = nnx.Param, rules: Rules = None) -> Layout:
        """Returns the layout of `tx`'s state: each part follows the parameter that it belongs to.

        Args:
            tx: any optax transformation.
            wrt: which variables it trains; its state is that of `tx.init(nnx.state(model, wrt))`.
            rules: how the state is split where that differs from the parameters: rules for the
                parameters' leaves, as for `sw.layout`, on top of this layout. `"zero1"` or
                `"fsdp"` splits what belongs to replicated parameters over the data axes. To train
                with such a state, give `sw.zero1` to `sw.layout` instead.

        Example:
            >>> import optax, shardwise as sw
            >>> from flax import nnx
            >>> make = lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0))
            >>> layout = sw.layout(make, sw.mesh("data=8", on="none"), "fsdp")
            >>> layout.for_optimizer(optax.adamw(1e-3))["0.mu.kernel"].spec
            P(None, 'data')
            >>> replicated = sw.layout(make, sw.mesh("data=8", on="none"), "dp")
            >>> replicated.for_optimizer(optax.adamw(1e-3), rules="zero1")["0.mu.kernel"].spec
            P(None, 'data')
        """
        if not hasattr(tx, "init"):
            raise ValueError(f"{show_value(tx)} is not an optax transformation: it has no init")
        parameters, dead = self._ruled(rules)
        leaves, treedef = optimizer_leaves(parameters, self.treedef, tx, wrt)
        return Layout(self.mesh, tuple(leaves), treedef, dead)

    def _ruled(self, rules: Rules) -> tuple[Sequence[Leaf], tuple[tuple[str, str], ...]]:
        """Returns the leaves after further rules for the optimizer's state, and dead patterns."""
        if rules is None:
            return self.leaves, ()
        sizes = dict(self.mesh.shape)
        named = flatten_rules(rules, sizes)
        for source, rule in named:
            if hasattr(rule, "bind") and not isinstance(rule, Fsdp | Zero):
                raise ValueError(
                    f"rules={show_value(rules)} has {source}, which needs the model: give zero1, "
                    f"zero2, fsdp, path patterns or functions of a leaf"
                )
        scene = Scene(None, sizes, lambda: None, lambda: None)
        own = [dataclasses.replace(leaf, moments=None, gradients=None) for leaf in self.leaves]
        leaves = _decide(named, own, scene)
        return leaves, _dead_patterns(named, leaves)

    def save(self, path: str | os.PathLike[str], *, step: Mapping[str, Any] | None = None) -> None:
        """Writes the layout as a lockfile: JSON that is stable and easy to review.

        Args:
            path: the file.
            step: what belongs to the step rather than to the layout, such as
                `{"accumulate": 2, "remat": "nothing_saveable"}`: `shardwise train --layout`
                applies it too.
        """
        lockfile.write(path, self.lockfile(step))

    def lockfile(self, step: Mapping[str, Any] | None = None) -> str:
        """Returns the text that `save` writes."""
        return lockfile.text(self.mesh, self.leaves, self.dead_patterns, step)

    def report(self, *, against: Layout | None = None) -> Report:
        """Returns one HTML page: findings, memory, the model as a tree and by size, and the mesh.

        Args:
            against: another layout to compare with.

        Example:
            >>> import shardwise as sw
            >>> from flax import nnx
            >>> make = lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0))
            >>> layout = sw.layout(make, sw.mesh("model=4", on="none"), "tensor")
            >>> layout.report().title
            'model=4'
        """
        from .._report import report_of

        return report_of(self, against)

    def studio(self, model: Model | Recipe) -> InlineStudio:
        """Returns a local page that begins with this layout, and says what a change would take.

        A notebook shows it inline. It needs `shardwise[studio]`, and ends with the process.

        Args:
            model: the recipe, or the model, that the layout was made from, which it does not keep.

        Example:
            >>> import shardwise as sw
            >>> from flax import nnx
            >>> make = lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0))
            >>> layout = sw.layout(make, sw.mesh("model=4", on="none"), "tensor")
            >>> studio = layout.studio(make)
            >>> studio.address.partition("#")[0].partition(":")[0]
            'http'
            >>> studio.stop()
        """
        from .._studio import notebook_studio

        return notebook_studio(self, model)

    def __str__(self) -> str:
        """Returns a table: path, shape, spec, shard, bytes per device, copies."""
        return text_table(HEADER, leaf_rows(self.leaves), self._caption())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def _caption(self) -> str:
        wrong = sum(bool(leaf.faults) for leaf in self.leaves)
        note = f"; {wrong} with errors, counted as replicated: see sw.check" if wrong else ""
        return (
            f"{count(len(self.leaves), 'leaf', 'leaves')} on {show_mesh(self.mesh)}: {show_bytes(self.bytes_per_device)} "
            f"of {show_bytes(self.total_bytes)} on {show_devices(self.mesh.size)} (exact){note}{self._split_updates()}{self._left()}"
        )

    def _split_updates(self) -> str:
        """Returns a clause with the axes that split optimizer state and gradients, but not weights."""
        split = [leaf for leaf in self.leaves if leaf.update_axes]
        if not split:
            return ""
        axes = [a for a in self.mesh.shape if any(a in leaf.update_axes for leaf in split)]
        what = (
            "gradients and optimizer state" if split[0].gradients is not None else "optimizer state"
        )
        return (
            f"; {what} of {count(len(split), 'leaf', 'leaves')} also split over {', '.join(axes)}"
        )

    def _left(self) -> str:
        """Returns a clause with the leaves that a strategy left unsplit, and why."""
        parts = []
        for why in get_args(Left):
            left = [leaf for leaf in self.leaves if leaf.left == why and leaf.is_replicated]
            if why and left:
                size = show_bytes(sum(leaf.resident_bytes for leaf in left))
                parts.append(f"{count(len(left), f'{why} leaf', f'{why} leaves')} ({size})")
        return f"; not split: {', '.join(parts)}" if parts else ""

    @functools.cached_property
    def _by_path(self) -> dict[str, Leaf]:
        return {leaf.path: leaf for leaf in self.leaves}

    def _tree(self, values: list[Any]) -> Any:
        return jax.tree.unflatten(self.treedef, values)

    def _shardings(self) -> list[NamedSharding]:
        wrong = [(leaf, leaf.faults[0]) for leaf in self.leaves if leaf.faults]
        if wrong:
            first = "; ".join(f"{leaf.path}: {fault.message}" for leaf, fault in wrong[:3])
            more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ValueError(
                f"the layout has no shardings, because {count(len(wrong), 'spec')} cannot be applied: "
                f"{first}{more}; {either('sw.check(layout)', 'shardwise check')} suggests specs that work"
            )
        return [NamedSharding(self.mesh, leaf.spec) for leaf in self.leaves]


@public
def layout(
    model: Model | Recipe,
    mesh: AnyMesh,
    rules: Rules = None,
    *,
    logical: Logical | None = None,
    inputs: Any = None,
    method: Method = None,
) -> Layout:
    """Returns the layout of a model on a mesh, without creating an array.

    Args:
        model: a function of no arguments that returns an `nnx.Module`; a module, concrete or
            abstract; or a `Recipe`, whose model is laid out and whose loss strategies trace.
        mesh: from `sw.mesh`, or any JAX mesh.
        rules: applied in order after the model's own annotations: a dict of path patterns, a
            function of a leaf, a strategy or its name, or a list of these; or "best" alone, for a
            recipe on known chips: the strategy whose step is fastest (modelled), see `sw.search`.
        logical: the axes that names in annotations map to: `{"mlp": "model", "embed": None}`.
        inputs: what the model is called with, for strategies that trace the forward pass: a
            tuple of positional arguments, a dict of keyword arguments, or one argument;
            arrays or `jax.ShapeDtypeStruct`s.
        method: what is called with `inputs` instead of the model's `__call__`: the name of a
            method, or a function `method(model, *inputs)`.

    Raises:
        ValueError: the model, the mesh or a rule is invalid. Problems with individual leaves
            are not raised: `sw.check` reports them.

    Example:
        >>> import shardwise as sw
        >>> from flax import nnx
        >>> from jax.sharding import PartitionSpec as P
        >>> make = lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0))
        >>> layout = sw.layout(make, sw.mesh("data=2,model=4", on="none"),
        ...                    {"**.kernel": P(None, "model"), "**.bias": P("model")})
        >>> print(layout)
        path    shape          spec              shard   bytes/device  copies
        bias    float32[16]    P('model')        [4]             16 B       2
        kernel  float32[8,16]  P(None, 'model')  [8,4]          128 B       2
        2 leaves on data=2,model=4: 144 B of 576 B on each of 8 devices (exact)
    """
    sizes = _sizes(mesh)
    call_arguments(inputs)
    if isinstance(rules, str) and rules == "best":
        from .._search import best_layout

        return best_layout(model, mesh, logical=logical, inputs=inputs, method=method)
    recipe = model if isinstance(model, Recipe) else None
    abstract = abstract_model(model.model if isinstance(model, Recipe) else model, mesh)
    leaves = leaves_of(abstract, sizes)
    if method is not None:
        method_of(abstract.modules[()], method)
        if inputs is None:
            raise ValueError(f"method={show_value(method)} needs inputs= to call it with")
    flow = functools.cache(lambda: trace_flow(abstract, mesh, inputs, method, recipe))

    def traced_anyway() -> Flow | None:
        # A strategy that works without a trace is no reason to trace a recipe's loss.
        return flow() if inputs is not None or flow.cache_info().currsize else None

    scene = Scene(abstract, sizes, flow, traced_anyway)
    named = [("annotation", from_annotations(abstract, logical)), *flatten_rules(rules, sizes)]
    leaves = _decide(named, leaves, scene)
    treedef = jax.tree.structure(abstract.state)

    def again(mesh: AnyMesh) -> Layout:
        return layout(model, mesh, rules, logical=logical, inputs=inputs, method=method)

    # A module is not kept for that: its arrays would stay in memory with the layout.
    make = None if isinstance(model, nnx.Module) else again
    return Layout(mesh, tuple(leaves), treedef, _dead_patterns(named, leaves), make)


@public
def load_layout(path: str | os.PathLike[str], mesh: AnyMesh | None = None) -> Layout:
    """Returns the layout that `Layout.save` wrote.

    Its trees are nested dicts by path, since a lockfile has no modules; `sw.init` and
    `sw.shard` match it to a model by path, shape and dtype.

    Args:
        path: the lockfile.
        mesh: the mesh to use; by default, an abstract mesh with the axes of the lockfile.

    Raises:
        ValueError: the file is not a lockfile.

    Example:
        >>> import tempfile, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0))
        >>> layout = sw.layout(make, sw.mesh("data=4", on="none"), "dp")
        >>> path = tempfile.mkdtemp() + "/layout.json"
        >>> layout.save(path)
        >>> sw.load_layout(path)["kernel"].shape
        (8, 16)
    """
    saved_mesh, leaves, dead = lockfile.read(path)
    tree: dict[Any, Any] = {}
    for i, leaf in enumerate(leaves):
        node: Any = tree
        for key in leaf.keys[:-1]:
            node = node.setdefault(key, {}) if isinstance(node, dict) else node
        last = leaf.keys[-1] if leaf.keys else ""
        if not isinstance(node, dict) or last in node:
            raise ValueError(f"{path} is a damaged layout: {leaf.path} appears twice")
        node[last] = i
    order = jax.tree.leaves(tree)
    ordered = tuple(leaves[i] for i in order)
    found = Layout(saved_mesh, ordered, jax.tree.structure(tree), dead)
    return found if mesh is None else found.on(mesh)


def _show_shard(leaf: Leaf, spec: P) -> str:
    if leaf.faults or leaf.update_faults:
        return ""
    return f"  shard [{','.join(map(str, shard_shape(leaf.shape, spec, leaf.sizes)))}]"


def _sizes(mesh: AnyMesh) -> dict[str, int]:
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            f"the mesh is {show_value(mesh)}, {show_type(mesh)}: give sw.mesh('data=2,model=4') "
            f"or a jax.sharding.Mesh"
        )
    return dict(mesh.shape)


def _decide(named: Sequence[tuple[str, Any]], leaves: list[Leaf], scene: Scene) -> list[Leaf]:
    """Returns the leaves after all rules, in order; ZeRO comes last, since it adds to final specs.

    Adapters and scales follow their bases after each rule, unless a rule of the user's own chose
    their spec. Of the strategies, they listen only to FSDP, which stores each adapter for itself,
    and to ZeRO.
    """
    own: set[str] = set()
    for source, rule in sorted(named, key=lambda pair: isinstance(pair[1], Zero)):
        pick = rule.bind(leaves, scene) if hasattr(rule, "bind") else rule
        before = leaves
        leaves = [_apply(leaf, source, pick) if _listens(leaf, rule) else leaf for leaf in leaves]
        if not any(leaf.follows for leaf in leaves) or isinstance(rule, Zero):
            continue
        if not hasattr(rule, "bind"):
            own |= {
                new.path
                for old, new in zip(before, leaves, strict=True)
                if new.follows and new.trail != old.trail and new.trail[-1].spec is not None
            }
        by_path = {leaf.path: leaf for leaf in leaves}
        leaves = [
            followed(leaf, by_path[leaf.follows.base])
            if leaf.follows and leaf.follows.base in by_path and leaf.path not in own
            else leaf
            for leaf in leaves
        ]
    return leaves


def _listens(leaf: Leaf, rule: Any) -> bool:
    """Returns whether a rule is asked about a leaf."""
    if leaf.follows is None or not leaf.follows.base or not hasattr(rule, "bind"):
        return True
    return isinstance(rule, Zero) or (isinstance(rule, Fsdp) and not leaf.follows.is_scale)


def _apply(leaf: Leaf, source: str, pick: Any) -> Leaf:
    try:
        opinion = pick(leaf)
    except Exception as error:
        error.add_note(f"raised by the rule {source!r} for the leaf {leaf.path!r}")
        raise
    if opinion is None:
        return leaf
    if not isinstance(opinion, Opinion):
        opinion = Opinion(require_spec(opinion, f"rule {source!r} at {leaf.path!r}"))
    elif opinion.spec is not None:
        require_spec(opinion.spec, f"rule {source!r} at {leaf.path!r}")
    for spec in (opinion.moments, opinion.gradients):
        if spec is not None:
            require_spec(spec, f"rule {source!r} at {leaf.path!r}")
    opinion = dataclasses.replace(opinion, source=source)
    trail = (*leaf.trail, opinion)
    if opinion.moments is not None or opinion.gradients is not None:
        leaf = dataclasses.replace(
            leaf,
            moments=leaf.moments if opinion.moments is None else opinion.moments,
            gradients=leaf.gradients if opinion.gradients is None else opinion.gradients,
        )
        if opinion.spec is None:
            return dataclasses.replace(
                leaf,
                reason=f"{leaf.reason}; {source}: {opinion.reason}",
                trail=trail,
                left=opinion.left or leaf.left,
                intentional=leaf.intentional or opinion.intentional,
            )
    if opinion.spec is None:
        # Until a rule decides, the best reason available is why the last one did not.
        undecided = opinion.reason and all(earlier.spec is None for earlier in leaf.trail)
        reason = f"{source}: {opinion.reason}" if undecided else leaf.reason
        return dataclasses.replace(leaf, reason=reason, trail=trail, left=opinion.left or leaf.left)
    reason = f"{source}: {opinion.reason}" if opinion.reason else source
    if opinion.refines and leaf.spec != P():
        reason = f"{leaf.reason}; then {reason}"
    kept = leaf.gathered if opinion.refines else frozenset()
    return dataclasses.replace(
        leaf,
        spec=opinion.spec,
        reason=reason,
        trail=trail,
        gathered=kept | opinion.gathered,
        intentional=opinion.intentional,
        left=opinion.left,
        stacked=tuple(sorted({*leaf.stacked, *opinion.stacked})),
    )


def require_layout(layout: Any) -> Layout:
    """Returns `layout` if it is one.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(layout, Layout):
        raise ValueError(f"the layout is of type {type(layout).__name__}: make one with sw.layout")
    return layout


def _dead_patterns(
    named: Sequence[tuple[str, Any]], leaves: Sequence[Leaf]
) -> tuple[tuple[str, str], ...]:
    rules = [rule for _, rule in named if isinstance(rule, Patterns)]
    return tuple(pair for rule in rules for pair in _dead(rule, leaves))


def _dead(rule: Patterns, leaves: Sequence[Leaf]) -> list[tuple[str, str]]:
    alive = {pattern for leaf in leaves for pattern, _ in rule.matches(leaf)}
    paths = [leaf.path for leaf in leaves]
    found = []
    for pattern in rule.specs:
        if pattern not in alive:
            near = difflib.get_close_matches(pattern, paths, n=1, cutoff=0.3)
            found.append((pattern, near[0] if near else ""))
    return found
