"""Merging: adapters into the kernels that they adapt, each kernel in its shards."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._base import count, public
from .._nnx import Follows, Leaf, abstract_model, adapter_scale, dequantised, leaves_of, plain_path

Scale = float | Callable[[str], float]


@public
def merge_adapters(
    model: nnx.Module, make: Callable[[], nnx.Module], *, scale: Scale | None = None
) -> nnx.Module:
    """Returns the plain model: a model's adapters (LoRA) added to its kernels, in their shards.

    Quantised kernels are dequantised. What has no adapter is not copied.

    Args:
        model: a model with adapters of `nnx.LoRA`, `nnx.LoRALinear` or qwix, and with arrays.
        make: a function without arguments that returns the model without adapters.
        scale: what the product of an adapter's halves is multiplied by; or a function of the path
            of a kernel that returns it. By default 1 for adapters of Flax, and `alpha / rank` of the
            qwix rule for those of qwix.

    Raises:
        ValueError: `make` returns another model, or an adapter cannot be merged.

    Example:
        >>> import shardwise as sw
        >>> from flax import nnx
        >>> tuned = nnx.LoRALinear(16, 32, lora_rank=4, rngs=nnx.Rngs(0))
        >>> plain = sw.merge_adapters(tuned, lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0)))
        >>> type(plain).__name__, sorted(nnx.to_pure_dict(nnx.state(plain)))
        ('Linear', ['bias', 'kernel'])
    """
    adapted = abstract_model(model)
    leaves = leaves_of(adapted, {})
    arrays = dict(
        zip((leaf.path for leaf in leaves), jax.tree.leaves(nnx.split(model)[1]), strict=True)
    )
    plain = abstract_model(make)
    wanted = leaves_of(plain, {})
    if any(_is_adapter(leaf) for leaf in wanted):
        raise ValueError(
            "make returns a model with adapters: give the function that returns it without them"
        )
    pairs = _pairs(leaves)
    bases = {plain_path(leaf): leaf for leaf in leaves if not leaf.follows}
    _require_same(bases, wanted)
    merged = []
    for leaf in wanted:
        base = bases[leaf.path]
        array = arrays[base.path]
        pair = pairs.get(base.path)
        if isinstance(array, jax.ShapeDtypeStruct):
            raise ValueError(f"{base.path} is abstract: give a model with arrays")
        whole = dequantised(base, model)
        if pair is None and whole is None:
            merged.append(array if array.dtype == leaf.dtype else array.astype(leaf.dtype))
            continue
        stack = len(base.stacked)
        one = array if whole is None else _dequantise(whole, array.sharding, stack)
        if pair is not None:
            a, b = pair
            times = _scale(scale, base, a, model)
            assert a.follows is not None and b.follows is not None
            one = _added(
                one, arrays[a.path], arrays[b.path], jnp.float32(times),
                follows=(a.follows, b.follows), dtype=leaf.dtype, sharding=array.sharding,
            )  # fmt: skip
        merged.append(one.astype(leaf.dtype))
    return nnx.merge(plain.graphdef, jax.tree.unflatten(jax.tree.structure(plain.state), merged))


def _is_adapter(leaf: Leaf) -> bool:
    return leaf.follows is not None and not leaf.follows.is_scale


def _pairs(leaves: list[Leaf]) -> dict[str, tuple[Leaf, Leaf]]:
    """Returns both halves of each adapter, by the path of its base."""
    halves: dict[tuple[str, str], Leaf] = {}
    for leaf in leaves:
        if not _is_adapter(leaf):
            continue
        assert leaf.follows is not None
        if not leaf.follows.base:
            raise ValueError(
                f"{leaf.path} is an adapter of no kernel that is known: merge it yourself"
            )
        if leaf.follows.role == "magnitude":
            raise ValueError(
                f"{leaf.path} is a magnitude (DoRA), which models normalise each in their own way: "
                f"merge it yourself"
            )
        if halves.setdefault((leaf.follows.base, leaf.follows.role), leaf) is not leaf:
            raise ValueError(f"{leaf.follows.base} has two adapters: merge one of them yourself")
    bases = {base for base, _ in halves}
    return {base: (halves[base, "lora_a"], halves[base, "lora_b"]) for base in bases}


def _require_same(bases: Mapping[str, Leaf], wanted: list[Leaf]) -> None:
    wrong = [f"{leaf.path} has no counterpart" for leaf in wanted if leaf.path not in bases]
    wrong += [
        f"{leaf.path} is {leaf.shape}, but {bases[leaf.path].path} is {bases[leaf.path].shape}"
        for leaf in wanted
        if leaf.path in bases and leaf.shape != bases[leaf.path].shape
    ]
    own = {leaf.path for leaf in wanted}
    wrong += [
        f"{leaf.path} is not in it"
        for path, leaf in bases.items()
        if path not in own and not leaf.kind.startswith("Rng")
    ]
    if wrong:
        more = f", and {count(len(wrong) - 1, 'more difference')}" if len(wrong) > 1 else ""
        raise ValueError(
            f"make returns another model than the one that was adapted: {wrong[0]}{more}"
        )


def _scale(given: Scale | None, base: Leaf, half: Leaf, model: nnx.Module) -> float:
    found = given(plain_path(base)) if callable(given) else given
    found = adapter_scale(half, model) if found is None else found
    if found is None:
        raise ValueError(
            f"the scale of {half.path} is not known: give scale=alpha / rank, what the product with "
            f"this adapter is multiplied by"
        )
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise ValueError(f"the scale of {half.path} must be a number, got {found!r}")
    return found


def _dequantise(whole: Any, sharding: Any, stack: int) -> jax.Array:
    array, run = whole
    for _ in range(stack):
        run = jax.vmap(run)
    return jax.jit(run, out_shardings=sharding)(array)


@functools.partial(jax.jit, static_argnames=("follows", "dtype", "sharding"))
def _added(
    base: jax.Array,
    a: jax.Array,
    b: jax.Array,
    scale: jax.Array,
    *,
    follows: tuple[Follows, Follows],
    dtype: Any,
    sharding: Any,
) -> jax.Array:
    """Returns the base plus the product of an adapter's halves, added in float32."""
    letters = string.ascii_lowercase[: base.ndim]
    operands, subscripts = [], []
    for half, dims in zip((a, b), follows, strict=True):
        shape, text = [], ""
        for dim, along in enumerate(dims.dims):
            # Dims that are joined in the adapter are those of the base again.
            shape += [base.shape[d] for d in along] or [half.shape[dim]]
            text += "".join(letters[d] for d in along) or "z"
        operands.append(half.astype(jnp.float32).reshape(shape))
        subscripts.append(text)
    product = jnp.einsum(f"{','.join(subscripts)}->{letters}", *operands)
    merged = (base.astype(jnp.float32) + scale * product).astype(dtype)
    return jax.lax.with_sharding_constraint(merged, sharding)
