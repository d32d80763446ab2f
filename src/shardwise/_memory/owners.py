"""What a temporary is for: a gradient, an activation, what a collective brings, or work in between."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

from .._hlo import Instruction, Module, Source, collective_kind

# How a gradient is combined over devices: the result is the gradient still.
_REDUCTIONS = ("all-reduce", "reduce-scatter")
# What only moves or casts a value; a fusion of the step's arguments alone does nothing else in a
# backward pass.
_MOVERS = ("bitcast", "convert", "copy", "fusion", "reshape", "transpose")


@dataclasses.dataclass(frozen=True)
class Kinds:
    """Tells what a value is for by where it comes from, and by the shapes of the model's leaves.

    A value of the backward pass that has the shape of a leaf, in part or whole, is taken for its
    gradient: that is a reading of the program, not the compiler's word.

    Attributes:
        leaves: the shapes that leaves have on one device, split or gathered, each sorted.
    """

    leaves: frozenset[tuple[int, ...]]

    @classmethod
    def by_leaves(cls, shapes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Kinds:
        """Returns what tells kinds of a model by the full and the local shape of each leaf."""
        found: set[tuple[int, ...]] = set()
        for full, local in dict.fromkeys((tuple(a), tuple(b)) for a, b in shapes):
            for partly in itertools.product(
                *(dict.fromkeys(pair) for pair in zip(full, local, strict=True))
            ):
                # Of stacked layers, the gradient of one.
                for dims in (partly, partly[1:]) if len(partly) > 2 else (partly,):
                    found.update(_sorted(merged) for merged in _merged(dims))
        return cls(frozenset(dims for dims in found if math.prod(dims) > 1))

    def of(
        self,
        module: Module,
        computation: str,
        instruction: Instruction,
        source: Source,
        shape: str,
    ) -> str:
        """Returns the kind of a value.

        Args:
            module: the program.
            computation: where its instruction stands.
            instruction: what fills it.
            source: where that comes from.
            shape: its shape, such as `f32[8,16]`.
        """
        inside = shape.partition("[")[2].rstrip("]")
        dims = _sorted(int(n) for n in inside.split(",") if n)
        kind = _collective(module, computation, instruction)
        if dims in self.leaves and (kind in _REDUCTIONS or (source.backward and not kind)):
            # A weight in another dtype or order, for the backward pass, is no gradient.
            moved = not kind and _is_moved_argument(module, computation, instruction)
            return "temporaries" if moved else "gradients"
        if kind:
            return "collectives"
        op_name = instruction.op_name
        repeated = "rematted_computation" in op_name
        if (source.module or source.place) and (repeated or not source.backward):
            return "activations"
        return "temporaries"


def _collective(module: Module, computation: str, instruction: Instruction) -> str:
    """Returns the kind of collective that an instruction is, ends, or is fused with."""
    if instruction.opcode.endswith("-done"):
        own = module.by_name[computation]
        begun = own.get(instruction.operands[0]) if instruction.operands else None
        return collective_kind(module, computation, begun) if begun is not None else ""
    if kind := collective_kind(module, computation, instruction):
        return kind
    if instruction.opcode not in ("fusion", "async-start"):
        return ""
    inner = [(c, i) for c in instruction.called for i in module.computations.get(c, ())]
    return next((kind for c, i in inner if (kind := collective_kind(module, c, i))), "")


def _is_moved_argument(module: Module, computation: str, instruction: Instruction) -> bool:
    """Returns whether a value is one of the step's arguments, cast, copied or transposed."""
    own = module.by_name[computation]
    read = [own[name].opcode for name in instruction.operands if name in own]
    return (
        computation == module.entry
        and instruction.opcode in _MOVERS
        and "parameter" in read
        and {*read} <= {"parameter", "constant"}
    )


def _sorted(dims: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(n for n in dims if n != 1))


def _merged(dims: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    """Yields dims with neighbours made one in every way, as products see heads and their depth."""
    if len(dims) > 5:
        yield dims
        return
    for cuts in itertools.product((False, True), repeat=max(0, len(dims) - 1)):
        made = [dims[0]] if dims else []
        for size, cut in zip(dims[1:], cuts, strict=True):
            if cut:
                made.append(size)
            else:
                made[-1] *= size
        yield tuple(made)
