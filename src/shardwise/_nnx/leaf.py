"""One array of a model's state: what it is, how it is split, and which rule decided so."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jax.sharding import PartitionSpec as P

from .._base import public
from .._mesh import Fault, faults, shard_shape, show_spec, spec_axes, ways

# Why a strategy left a leaf unsplit.
Left = Literal["", "small", "indivisible"]


@public
@dataclasses.dataclass(frozen=True, slots=True)
class Opinion:
    """What one rule says about one leaf, and why.

    A rule may return an `Opinion` instead of a bare spec to give its reason, or, with
    `spec=None`, to explain why it leaves the leaf alone.

    Attributes:
        spec: the spec that the rule wants; None for no opinion.
        reason: one sentence.
        source: the rule's name; filled in by `layout`.
        refines: whether it adds to the spec of earlier rules, rather than replacing it.
        intentional: whether replication is on purpose, and therefore not a finding.
        gathered: axes over which the leaf is only stored in shards and gathered before
            use (FSDP), so that its neighbours need not match it.
        clashes: why this opinion is ambiguous: `(pattern, spec)` pairs that disagree.
        left: why a strategy left the leaf unsplit: it is `small` or `indivisible`; otherwise
            empty.
        stacked: dims that the rule knows to be stacks of layers.
        moments: the spec that the rule wants for the leaf's optimizer state; None for no opinion.
        gradients: the spec that it wants for the leaf's gradient; None for no opinion.
    """

    spec: P | None
    reason: str = ""
    source: str = ""
    refines: bool = False
    intentional: bool = False
    gathered: frozenset[str] = frozenset()
    clashes: tuple[tuple[str, P], ...] = ()
    left: Left = ""
    stacked: tuple[int, ...] = ()
    moments: P | None = None
    gradients: P | None = None

    @property
    def verdict(self) -> str:
        """The spec that the rule wants, in words."""
        if self.spec is not None:
            return show_spec(self.spec)
        return "no opinion" if self.moments is None and self.gradients is None else "unchanged"


@public
@dataclasses.dataclass(frozen=True, slots=True)
class Follows:
    """The leaf that an adapter or a quantised array's scale belongs to: its base.

    Attributes:
        base: the path of the base; empty for an adapter whose base is not known.
        role: `lora_a`, `lora_b`, `magnitude` (of DoRA), `scale` or `zero_point`.
        dims: for each dim, the dims of the base that it runs along: several where they are joined
            in one, and none for the rank and for what is the same along the base's dim.
        rank: the dim of the adapter's rank, which is never split; None if it has none.

    Example:
        >>> import shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.LoRALinear(16, 32, lora_rank=4, rngs=nnx.Rngs(0))
        >>> sw.layout(make, sw.mesh("model=4", on="none"))["lora.lora_b"].follows
        Follows(base='kernel', role='lora_b', dims=((), (1,)), rank=0)
    """

    base: str
    role: str
    dims: tuple[tuple[int, ...], ...]
    rank: int | None = None

    @property
    def is_scale(self) -> bool:
        """Whether it is a part of a quantised array, rather than of an adapter."""
        return self.role in ("scale", "zero_point")


@public
@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One array of the model's state, with its place in the layout.

    Attributes:
        path: dotted path, `layers.0.mlp.up.kernel`.
        keys: the same path as a tuple of keys.
        shape: global shape.
        dtype: dtype.
        kind: name of the variable's type, such as `Param`.
        sizes: the mesh's axes and their sizes.
        spec: how it is split.
        reason: which rule decided the spec, and why.
        names: the entries of the model's own annotation, or None if it has none.
        stacked: dims along which layers are stacked (by `nnx.vmap` or `nnx.scan`), or that are
            named `layers`.
        trail: every rule's opinion, in order.
        gathered: axes over which FSDP splits it, to be gathered before use.
        intentional: whether it is replicated on purpose.
        left: why a strategy left it unsplit: `small`, `indivisible`, or empty.
        moments: how the optimizer's state of it is split, where a rule chose that (`zero1`); None
            if that follows `spec`.
        gradients: how its gradient is split, where a rule chose that (`zero2`); None if that
            follows `spec`.
        follows: the leaf that it belongs to, of an adapter or a quantised array's scale.
    """

    path: str
    keys: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: Any
    kind: str
    sizes: Mapping[str, int]
    spec: P = P()
    reason: str = "no rule: replicated on every device"
    names: tuple[Any, ...] | None = None
    stacked: tuple[int, ...] = ()
    trail: tuple[Opinion, ...] = ()
    gathered: frozenset[str] = frozenset()
    intentional: bool = False
    left: Left = ""
    moments: P | None = None
    gradients: P | None = None
    follows: Follows | None = None

    @property
    def ndim(self) -> int:
        """How many dims the array has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements the global array has."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the global array in device memory, with 4-bit elements packed (exact)."""
        return array_bytes(self.shape, self.dtype)

    @property
    def faults(self) -> list[Fault]:
        """Why the spec cannot be applied to this shape on this mesh; empty if it can."""
        names, stacked = self.annotation_names, self.stacked
        return faults(self.shape, self.spec, self.sizes, names, stacked=stacked)

    @property
    def annotation_names(self) -> frozenset[str]:
        """The names that the model's own annotation uses."""
        flat = (n if isinstance(n, tuple) else (n,) for n in self.names or ())
        return frozenset(name for entry in flat for name in entry if name is not None)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of what one device holds.

        Raises:
            ValueError: the spec has faults.
        """
        self._require_sound()
        return shard_shape(self.shape, self.spec, self.sizes)

    @property
    def shard_bytes(self) -> int:
        """Bytes of what one device holds (exact)."""
        return array_bytes(self.shard_shape, self.dtype)

    @property
    def resident_bytes(self) -> int:
        """As `shard_bytes`; a leaf whose spec has faults counts in full, as if replicated."""
        return self.bytes if self.faults else self.shard_bytes

    @property
    def update_spec(self) -> P:
        """How its optimizer state is split, which is how its update is computed."""
        return self.spec if self.moments is None else self.moments

    @property
    def update_axes(self) -> tuple[str, ...]:
        """The axes that split its optimizer state but not the leaf itself, in the mesh's order."""
        used, more = (
            {a for dim in spec_axes(s) for a in dim} for s in (self.spec, self.update_spec)
        )
        return tuple(axis for axis in self.sizes if axis in more - used)

    @property
    def update_faults(self) -> list[Fault]:
        """Why the specs of its optimizer state and gradient cannot be applied; empty if they can."""
        specs = {"optimizer state": self.moments, "gradient": self.gradients}
        found: dict[str, Fault] = {}
        for what, spec in specs.items():
            for fault in faults(self.shape, spec, self.sizes) if spec is not None else ():
                named = dataclasses.replace(fault, message=f"its {what}: {fault.message}")
                found.setdefault(fault.message, named)
        return [] if self.faults else list(found.values())

    @property
    def is_replicated(self) -> bool:
        """Whether each of several devices holds a full copy."""
        return not self.faults and self.copies == math.prod(self.sizes.values()) > 1

    @property
    def copies(self) -> int:
        """How many devices hold the same shard."""
        self._require_sound()
        return math.prod(self.sizes.values()) // ways(self.spec, self.sizes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the leaf as plain data, as JSON and lockfiles have it.

        What one device holds is None where the spec cannot be applied. `moments` and `gradients`
        are there only where a rule chose them, `follows` only for adapters and scales.
        """
        sound = not self.faults
        chosen = {"moments": self.moments, "gradients": self.gradients}
        return {
            "path": self.path,
            "kind": self.kind,
            "shape": list(self.shape),
            "dtype": str(self.dtype),
            "spec": show_spec(self.spec),
            "shard_shape": list(self.shard_shape) if sound else None,
            "shard_bytes": self.shard_bytes if sound else None,
            "copies": self.copies if sound else None,
            "reason": self.reason,
            **{name: show_spec(spec) for name, spec in chosen.items() if spec is not None},
            **({} if self.follows is None else {"follows": dataclasses.asdict(self.follows)}),
        }

    def _require_sound(self) -> None:
        found = self.faults
        if found:
            raise ValueError(
                f"{self.path}: {found[0].message} "
                f"(shape {self.shape}, spec {show_spec(self.spec)}); {found[0].help}"
            )


# NumPy stores one element per byte; XLA packs them, on every platform.
_PACKED_BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}


def array_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Returns the bytes of an array in device memory, with sub-byte elements packed.

    This is what compiled programs take and return. `nbytes` of a JAX array counts a byte per
    element, as NumPy does, and JAX 0.10 stores arrays that way on CPU devices between programs.
    """
    packed = _PACKED_BITS.get(str(dtype))
    bits: int = packed if packed is not None else 8 * dtype.itemsize
    return -(-math.prod(shape) * bits // 8)
