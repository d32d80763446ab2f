"""Where a step's arrays are resharded, from which spec to which, according to Shardy.

Shardy, the partitioner of both compilers, is part of jaxlib: its propagation runs here on the
same program, and shows where an operation needs its operand split differently.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from .._jax import mlir_bindings
from .lowered import unpartitioned
from .source import user_place

_PASSES = (
    "builtin.module(sdy-propagation-pipeline,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true}))"
)
_FRAME = re.compile(r'"([^"]*)"\("([^"]*)":(\d+):')

Split = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Reshard:
    """One change of spec.

    Attributes:
        place: the user's line, such as `file.py:12`, or empty.
        shape: the global shape of the array.
        before: the axes that split each dim before,
        after: and after.
    """

    place: str
    shape: tuple[int, ...]
    before: Split
    after: Split


def reshards(module: Any) -> list[Reshard]:
    """Returns every change of spec in a lowered program.

    Args:
        module: what `lowered.compiler_ir("stablehlo")` returns; it is not changed.
    """
    ir, passmanager = mlir_bindings()
    with module.context:
        own = unpartitioned(module)
        try:
            passmanager.PassManager.parse(_PASSES).run(own.operation)
        except (ValueError, ir.MLIRError):
            return []  # in this jaxlib the passes have other names; their result is optional
        return list(_found(own.operation, ir))


def _found(operation: Any, ir: Any) -> Iterator[Reshard]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                one = inner.operation
                if one.name == "sdy.reshard":
                    before, after = _split(one.operands[0], ir), _split(one.results[0], ir)
                    if before is not None and after is not None and before != after:
                        frames = _FRAME.findall(str(one.location))
                        place = user_place([(file, int(line), name) for name, file, line in frames])
                        shape = tuple(ir.RankedTensorType(one.results[0].type).shape)
                        yield Reshard(place, shape, before, after)
                yield from _found(one, ir)


def _split(value: Any, ir: Any) -> Split | None:
    """Returns the axes of each dim, as annotated on the value's producer or its function."""
    owner, number = value.owner, 0
    if isinstance(owner, ir.Block):
        number, owner = ir.BlockArgument(value).arg_number, owner.owner
        if "arg_attrs" in owner.attributes:
            given: Any = ir.ArrayAttr(owner.attributes["arg_attrs"])[number]
            return _axes(str(given["sdy.sharding"]), 0) if "sdy.sharding" in given else None
    elif len(owner.results) > 1:
        number = ir.OpResult(value).result_number
    name = "sharding" if owner.name == "sdy.reshard" else "sdy.sharding"
    return _axes(str(owner.attributes[name]), number) if name in owner.attributes else None


def _axes(text: str, number: int) -> Split | None:
    """Returns the axes of each dim in the `number`th sharding of `<@mesh, [{"data"}, {}]>`."""
    each = re.findall(r"<@\w+, \[([^\[\]]*)\]", text)
    if number >= len(each):
        return None
    # A part of an axis, written "data":(1)2, counts as the axis.
    dims = re.findall(r"\{([^}]*)\}", each[number])
    return tuple(tuple(re.findall(r'"(\w+)"', dim)) for dim in dims)
