"""A lowered step as XLA hands it to Shardy, rather than as JAX wrote it.

Which layout Shardy chooses depends on details: it passes shardings through reshapes before it
considers products, but not through broadcasts, and functions that are called are propagated apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .._jax import mlir_bindings, module_bytes

# To the memory of the host, and back.
MOVES = ("MoveToHost", "MoveToDevice")


def unpartitioned(module: Any) -> Any:
    """Returns a copy of a lowered program with what XLA does to it before it is partitioned.

    Calls are inlined, broadcasts that only add dims of size 1 become reshapes, and moves between
    memories have the names by which Shardy knows them: it stops at others.

    Args:
        module: what `lowered.compiler_ir("stablehlo")` returns; its context must be active.
    """
    ir, _ = mlir_bindings()
    own = ir.Module.parse(module_bytes(module))
    functions = {
        ir.StringAttr(op.attributes["sym_name"]).value: op.operation
        for op in own.body.operations
        if op.operation.name == "func.func"
    }
    main = functions.pop("main")
    while calls := [op for op in _inside(main) if op.name == "func.call"]:
        for call in calls:
            name = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
            _inline(call, functions[name].clone(ip=ir.InsertionPoint(own.body)))
    for function in functions.values():
        function.erase()
    for op in [op for op in _inside(main) if op.name == "stablehlo.broadcast_in_dim"]:
        _reshape(op, ir)
    for op in [op for op in _inside(main) if op.name == "stablehlo.custom_call"]:
        _move(op, ir)
    return own


def _inside(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                yield from _inside(op.operation)


def _inline(call: Any, function: Any) -> None:
    """Puts the operations of a function in place of a call; the function is used up."""
    block = function.regions[0].blocks[0]
    for argument, operand in zip(list(block.arguments), list(call.operands), strict=True):
        argument.replace_all_uses_with(operand)
    *operations, end = [op.operation for op in block.operations]
    for op in operations:
        op.move_before(call)
    for result, value in zip(list(call.results), list(end.operands), strict=True):
        result.replace_all_uses_with(value)
    call.erase()
    function.erase()


def _move(op: Any, ir: Any) -> None:
    """Renames a move between the memories of a device and its host."""
    if ir.StringAttr(op.attributes["call_target_name"]).value == "annotate_device_placement":
        to_host = "pinned_host" in str(op.attributes["mhlo.frontend_attributes"])
        name = MOVES[0] if to_host else MOVES[1]
        op.attributes["call_target_name"] = ir.StringAttr.get(name, op.context)


def _reshape(op: Any, ir: Any) -> None:
    """Replaces a broadcast that repeats nothing."""
    before, after = (ir.RankedTensorType(v.type) for v in (op.operands[0], op.results[0]))
    dims = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
    same = math.prod(before.shape) == math.prod(after.shape)
    if not (before.shape and same and dims == sorted(dims)):
        return
    made = ir.Operation.create(
        "stablehlo.reshape",
        results=[op.results[0].type],
        operands=[op.operands[0]],
        loc=op.location,
        ip=ir.InsertionPoint(op),
    )
    op.results[0].replace_all_uses_with(made.results[0])
    op.erase()
