"""Adapters and quantised arrays: which leaf each belongs to, and along which of its dims."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flax import nnx
from jax.sharding import PartitionSpec as P

from .._mesh import Axes, make_spec, padded, show_spec
from .leaf import Follows, Leaf, Opinion
from .paths import Keys

if TYPE_CHECKING:
    from .abstract import AbstractModel

Dims = tuple[tuple[int, ...], ...]

_LORA = re.compile(r"(?:(?P<of>.+)_)?lora_?(?P<half>[ab])", re.IGNORECASE)
_MAGNITUDE = re.compile(r"(?:(?P<of>.+?)_)?(?:(?:lora|dora)_)?(?:magnitude|dora_m|dora_scale)")
# Where nnx.LoRA keeps what it wraps.
WRAPPED = "base_module"


def with_bases(leaves: Sequence[Leaf], model: AbstractModel) -> list[Leaf]:
    """Returns the leaves, each adapter and each scale with the leaf that it follows.

    Adapters are those of `nnx.LoRA` and `nnx.LoRALinear`, of qwix (`kernel_lora_a` beside
    `kernel`), and of modules of users with such names. The parts of a quantised array are called
    `qvalue`, `scale` and `zero_point`, as those of a qwix `QArray`.
    """
    by_keys = {leaf.keys: leaf for leaf in leaves}
    by_path = {leaf.path: leaf for leaf in leaves}
    found: dict[Keys, Follows] = {}
    for leaf in leaves:
        follows = _of_values(leaf, by_keys)
        if follows is not None:
            found[leaf.keys] = follows
    for one, other, bases in _pairs(leaves, by_keys):
        found |= _follow_one(one, other, bases, model)
    halves = {keys: follows for keys, follows in found.items() if follows.role == "lora_b"}
    for leaf in leaves:
        if halves and leaf.keys not in found:
            follows = _of_magnitude(leaf, by_path, halves)
            if follows is not None:
                found[leaf.keys] = follows
    return [_marked(leaf, found.get(leaf.keys), by_path) for leaf in leaves] if found else [*leaves]


def follow(leaf: Leaf, base: Leaf) -> Opinion:
    """Returns the spec of an adapter or a scale: that of its base, dim by dim.

    Axes over which FSDP only stores the base are left out of an adapter's spec, since it is gathered
    for itself; a scale is stored as its values are.
    """
    follows = leaf.follows
    assert follows is not None
    if base.faults:
        return Opinion(None, f"follows {base.path}, whose spec does not fit it")
    taken = padded(base.spec, base.ndim)
    stored = frozenset() if follows.is_scale else base.gathered
    entries: list[Axes] = []
    parts: list[str] = []
    for dim, bases in enumerate(follows.dims):
        along = _outermost(bases, base.shape)
        axes = () if along is None else tuple(a for a in taken[along] if a not in stored)
        ways = math.prod(leaf.sizes[axis] for axis in axes)
        if leaf.shape[dim] % ways:
            parts.append(
                f"dim {dim} (size {leaf.shape[dim]}) cannot be split {ways} ways as its dim {along}"
            )
            axes = ()
        elif axes:
            parts.append(f"dim {dim} as its dim {along}")
        entries.append(axes)
    spec = make_spec(entries)
    reason = f"follows {base.path} {show_spec(base.spec)}: {', '.join(parts) or 'no dim is split'}"
    if follows.rank is not None:
        reason += f"; its rank, dim {follows.rank}, never is"
    split = any(a not in base.gathered for entry in taken for a in entry)
    used = frozenset(axis for entry in entries for axis in entry)
    return Opinion(
        spec, reason, intentional=base.intentional or split, gathered=used & base.gathered
    )


def followed(leaf: Leaf, base: Leaf) -> Leaf:
    """Returns an adapter or a scale with the spec that follows its base.

    Axes over which FSDP stores the leaf itself are kept where they fit.
    """
    opinion = follow(leaf, base)
    earlier = tuple(o for o in leaf.trail if o.source != SOURCE)
    opinion = dataclasses.replace(opinion, source=SOURCE)
    if opinion.spec is None:
        return dataclasses.replace(
            leaf, spec=P(), reason=f"{SOURCE}: {opinion.reason}", trail=(*earlier, opinion)
        )
    entries = padded(opinion.spec, leaf.ndim)
    reason = f"{SOURCE}: {opinion.reason}"
    gathered = set(opinion.gathered)
    if not leaf.faults:
        used = {axis for entry in entries for axis in entry}
        for dim, own in enumerate(padded(leaf.spec, leaf.ndim)):
            more = tuple(a for a in own if a in leaf.gathered and a not in used)
            ways = math.prod(leaf.sizes[a] for a in (*entries[dim], *more))
            if more and leaf.shape[dim] % ways == 0:
                entries[dim] = (*entries[dim], *more)
                gathered |= {*more}
                last = next(o for o in reversed(earlier) if o.gathered & {*more})
                reason += f"; then {last.source}: {last.reason}"
    return dataclasses.replace(
        leaf,
        spec=make_spec(entries),
        reason=reason,
        trail=(*earlier, opinion),
        gathered=frozenset(gathered),
        intentional=opinion.intentional,
        stacked=_stacked(leaf, base),
    )


# The name of this rule in explanations.
SOURCE = "adapter"


def _is_inherited(leaf: Leaf, base: Leaf) -> bool:
    """Returns whether an adapter's annotation is its base's, as qwix copies it."""
    if leaf.names is None or base.names is None or leaf.follows is None:
        return False
    if leaf.follows.is_scale:
        return True
    padded_names = (*base.names, *(None,) * base.ndim)
    own = tuple(padded_names[dims[0]] if dims else None for dims in leaf.follows.dims)
    return tuple(leaf.names) == own


def _outermost(dims: tuple[int, ...], shape: Sequence[int]) -> int | None:
    """Returns the dim whose axes split several dims that are joined in one."""
    return next((dim for dim in dims if shape[dim] > 1), dims[0] if dims else None)


def _marked(leaf: Leaf, follows: Follows | None, by_path: Mapping[str, Leaf]) -> Leaf:
    if follows is None:
        return leaf
    leaf = dataclasses.replace(leaf, follows=follows)
    base = by_path.get(follows.base)
    # An annotation that qwix copied is the base's, and says nothing of its own.
    names = None if base is not None and _is_inherited(leaf, base) else leaf.names
    return dataclasses.replace(leaf, names=names, stacked=_stacked(leaf, base))


def _stacked(leaf: Leaf, base: Leaf | None) -> tuple[int, ...]:
    """Returns the dims of an adapter or a scale that are stacks of layers, as its base's are."""
    assert leaf.follows is not None
    stacks = set() if base is None else {*base.stacked}
    more = (d for d, dims in enumerate(leaf.follows.dims) if dims and {*dims} <= stacks)
    return tuple(sorted({*leaf.stacked, *more} - {leaf.follows.rank}))


def _of_values(leaf: Leaf, by_keys: Mapping[Keys, Leaf]) -> Follows | None:
    """Returns how a scale or zero point follows its values, dim by dim."""
    role = leaf.keys[-1] if leaf.keys else None
    if role not in ("scale", "zero_point"):
        return None
    values = by_keys.get((*leaf.keys[:-1], "qvalue"))
    if values is None or values.ndim != leaf.ndim:
        return None
    pairs = list(zip(leaf.shape, values.shape, strict=True))
    if any(mine == 0 or theirs % mine for mine, theirs in pairs):
        return None
    dims = tuple((d,) if mine > 1 or theirs == 1 else () for d, (mine, theirs) in enumerate(pairs))
    return Follows(values.path, role, dims)


def _pairs(
    leaves: Sequence[Leaf], by_keys: Mapping[Keys, Leaf]
) -> Iterator[tuple[Leaf, Leaf, list[Leaf]]]:
    """Yields the two halves of each adapter, with the leaves that it may belong to, likeliest first."""
    kernels: dict[Keys, list[Leaf]] | None = None
    for leaf in leaves:
        match = _LORA.fullmatch(str(leaf.keys[-1])) if leaf.keys else None
        if match is None or match["half"].lower() != "a":
            continue
        name = str(leaf.keys[-1])
        half = "b" if match["half"] == "a" else "B"
        place = match.start("half")
        other = by_keys.get((*leaf.keys[:-1], name[:place] + half + name[place + 1 :]))
        if other is None:
            continue
        inside = leaf.keys[:-1]
        if match["of"] is not None:
            roots = [(*inside, match["of"])]
        else:
            # Within what it wraps, beside it, or beside its module.
            roots = [(*inside, WRAPPED), inside, inside[:-1]] if inside else [inside]
        kernels = _kernels(leaves) if kernels is None else kernels
        yield leaf, other, [base for root in roots for base in kernels.get(root, ())]


def _kernels(leaves: Sequence[Leaf]) -> dict[Keys, list[Leaf]]:
    """Returns, by the keys of a variable or of its module, the leaves that an adapter may adapt."""
    found: dict[Keys, list[Leaf]] = {}
    for leaf in leaves:
        name = leaf.keys[-1] if leaf.keys else ""
        if leaf.ndim < 2 or _LORA.fullmatch(str(name)):
            continue
        # The values of a quantised array are one or two steps below its variable's name.
        deep = 4 if name == "qvalue" else 2
        for depth in range(max(0, len(leaf.keys) + 1 - deep), len(leaf.keys) + 1):
            found.setdefault(leaf.keys[:depth], []).append(leaf)
    for root, kernels in found.items():
        depth = len(root)
        # Flax's name for what a layer multiplies by comes first.
        named = [leaf for leaf in kernels if "kernel" in leaf.keys[depth:]]
        found[root] = [*named, *(leaf for leaf in kernels if leaf not in named)]
    return found


def _follow_one(
    one: Leaf, other: Leaf, bases: Sequence[Leaf], model: AbstractModel
) -> dict[Keys, Follows]:
    """Returns how both halves follow the first of `bases` that they fit."""
    for base in bases:
        options = list(_splits(base.shape, one.shape, other.shape))
        if not options:
            continue
        inputs = _known_inputs(base, model)

        def cost(option: tuple[int, Dims, Dims], base: Leaf = base, inputs: Any = inputs) -> Any:
            shared, a, _ = option
            along = [dim for dims in a[shared:] for dim in dims]
            named = _is_inherited(
                dataclasses.replace(one, follows=Follows(base.path, "lora_a", a)), base
            )
            leading = along == list(range(shared, shared + len(along)))
            return (inputs is not None and {*along} != inputs, not named,
                    shared != len(base.stacked), not leading)  # fmt: skip

        shared, a, b = min(options, key=cost)
        return {
            one.keys: Follows(base.path, "lora_a", a, rank=one.ndim - 1),
            other.keys: Follows(base.path, "lora_b", b, rank=shared),
        }
    if one.shape and other.ndim > 1 and one.shape[-1] in other.shape[:-1]:
        rank = other.shape[:-1].index(one.shape[-1])
        return {
            one.keys: Follows("", "lora_a", ((),) * one.ndim, rank=one.ndim - 1),
            other.keys: Follows("", "lora_b", ((),) * other.ndim, rank=rank),
        }
    return {}


def _splits(
    base: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]
) -> Iterator[tuple[int, Dims, Dims]]:
    """Yields each way in which the dims of a kernel can be those of its adapter.

    Both halves may begin with dims of the kernel (stacks of layers, batch dims). What follows is
    divided between them, in order; several dims may be joined in one. Yields the number of shared
    dims, and the dims of each half.
    """
    rank = a[-1] if a else 0
    for shared in range(max(0, min(len(a), len(b)) - 1)):
        if a[:shared] != base[:shared] or b[:shared] != base[:shared] or b[shared] != rank:
            continue
        rest = range(shared, len(base))
        both = tuple((dim,) for dim in range(shared))
        for count in range(1, len(rest)):
            for inputs in itertools.combinations(rest, count):
                outputs = tuple(dim for dim in rest if dim not in inputs)
                mine = _joined(inputs, base, a[shared:-1])
                theirs = _joined(outputs, base, b[shared + 1 :])
                if mine is not None and theirs is not None:
                    yield shared, (*both, *mine, ()), (*both, (), *theirs)


def _joined(dims: Sequence[int], base: Sequence[int], shape: Sequence[int]) -> Dims | None:
    sizes = tuple(base[dim] for dim in dims)
    if tuple(shape) == sizes:
        return tuple((dim,) for dim in dims)
    return (tuple(dims),) if tuple(shape) == (math.prod(sizes),) else None


def _known_inputs(base: Leaf, model: AbstractModel) -> set[int] | None:
    """Returns the dims of a kernel that its layer contracts, if that is known."""
    keys = base.keys
    while keys and (not isinstance(keys[-1], str) or keys[-1] in ("qvalue", "array")):
        keys = keys[:-1]
    owner: Any = model.modules.get(keys[:-1])
    lead = len(base.stacked)
    match owner:
        case nnx.Linear():
            return {lead}
        case nnx.LinearGeneral():
            return {lead + len(owner.batch_axis) + d for d in range(len(owner.in_features))}
        case nnx.Conv() | nnx.ConvTranspose():
            return {*range(lead, base.ndim - 1)}
    text = getattr(owner, "einsum_str", None)
    if isinstance(text, str) and "->" in text:
        operands = text.replace(" ", "").replace("...", "").split("->")[0].split(",")
        if len(operands) == 2 and len(operands[1]) == base.ndim - lead:
            return {lead + d for d, letter in enumerate(operands[1]) if letter in operands[0]}
    return None


def _of_magnitude(
    leaf: Leaf, by_path: Mapping[str, Leaf], halves: Mapping[Keys, Follows]
) -> Follows | None:
    """Returns how the magnitude of DoRA follows the output dims of its base."""
    match = _MAGNITUDE.fullmatch(str(leaf.keys[-1])) if leaf.keys else None
    if match is None:
        return None
    inside = leaf.keys[:-1]
    for keys, follows in halves.items():
        if not follows.base or inside not in (keys[:-1], keys[:-2]):
            continue
        if match["of"] is not None and not str(keys[-1]).startswith(f"{match['of']}_"):
            continue
        base = by_path[follows.base]
        outputs = tuple(d for dims in follows.dims for d in dims)
        kept = tuple(base.shape[d] if d in outputs else 1 for d in range(base.ndim))
        if leaf.shape == kept:
            dims = tuple((d,) if d in outputs else () for d in range(base.ndim))
            return Follows(base.path, "magnitude", dims)
        shared = len(base.stacked)
        dims = _joined(outputs, base.shape, leaf.shape)
        if dims is None and leaf.shape[:shared] == base.shape[:shared]:
            inner = _joined(outputs[shared:], base.shape, leaf.shape[shared:])
            dims = inner and (*((d,) for d in range(shared)), *inner)
        if dims is not None:
            return Follows(base.path, "magnitude", dims)
    return None
