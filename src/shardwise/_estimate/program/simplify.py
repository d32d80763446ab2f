"""Removes what every compiler removes first: operations nobody reads, and second copies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from .idle import idle_used
from .partitioning import Op, Program

# Alike if their operands, axes and shapes are: no other attribute tells two of them apart.
_MERGED = {"all-gather", "all-reduce", "reduce-scatter", "convert", "dynamic_slice", "reshape"}
# What a loop's body does to the same array in each iteration is done once, before the loop.
_HOISTED = {"all-gather", "convert", "transpose", "reshape"}
_CAST = {"convert", "transpose", "reshape"}
_PERMUTE = "collective-permute"
_MOVED = {"all-gather", "all-to-all", "collective-permute", "all_slice"}
_REPEATS = _MOVED | {"broadcast_in_dim", "reshape", "convert", "transpose", "sharding_constraint"}
_EFFECTS = {"custom_call_has_side_effect", "send", "recv", "outfeed", "infeed"}


def simplified(program: Program, *, gpu: bool = False) -> Program:
    """Returns the program without operations that are dead, or done before.

    Args:
        program: the program.
        gpu: whether a GPU's compiler does so, which moves no gathers out of loops.
    """
    names: dict[int, int] = {}
    ops = _unrolled(program.ops, names)
    outputs = tuple(names.get(value, value) for value in program.outputs)
    program = dataclasses.replace(program, ops=ops, outputs=outputs)
    ops = _broadcast_last(program, _uniform(_reshaped(program, program.ops), set()))
    ops = _hoisted(
        program, _sliced_first(program, ops), _HOISTED - {"all-gather"} if gpu else _HOISTED
    )
    ops = _live(_added_first(program, ops), program.outputs)
    renamed: dict[int, int] = {}
    ops = _summed_first(program, _merged(program, ops, renamed))
    ops = idle_used(program, ops)
    outputs = tuple(renamed.get(value, value) for value in program.outputs)
    return dataclasses.replace(program, ops=_live(ops, outputs), outputs=outputs)


def _unrolled(ops: Sequence[Op], names: dict[int, int]) -> list[Op]:
    """Returns the operations with the bodies of loops that run once in place of these loops.

    Args:
        ops: the operations.
        names: filled with the values that are other values then.
    """
    found: list[Op] = []
    for op in ops:
        op = dataclasses.replace(op, operands=tuple(names.get(v, v) for v in op.operands))
        if op.kind == "while" and op.trips == 1:
            names.update(zip(op.inside, op.operands, strict=True))
            found += _unrolled(op.body, names)
            names.update(zip(op.results, (names.get(v, v) for v in op.after), strict=True))
            continue
        if op.kind == "while":
            body = _unrolled(op.body, names)
            after = tuple(names.get(v, v) for v in op.after)
            op = dataclasses.replace(op, body=body, after=after)
        found.append(op)
    return found


def _hoisted(program: Program, ops: Sequence[Op], kinds: Collection[str]) -> list[Op]:
    """Returns the operations with gathers of what a loop does not change in front of the loop."""
    kept: list[Op] = []
    for op in ops:
        if op.kind != "while":
            kept.append(op)
            continue
        body = _hoisted(program, op.body, kinds)
        outer = {
            inside: operand
            for inside, operand, after in zip(op.inside, op.operands, op.after, strict=True)
            if inside == after
        }
        made = {value for each in body for value in each.results} | (set(op.inside) - outer.keys())
        rest: list[Op] = []
        for each in body:
            fixed = not made.intersection(each.operands)
            if fixed and each.kind in kinds and len(each.results) == 1 and each.operands:
                made.discard(each.results[0])
                operands = tuple(outer.get(value, value) for value in each.operands)
                kept.append(dataclasses.replace(each, operands=operands))
            else:
                rest.append(each)
        loop, sums = _summed_after(program, dataclasses.replace(op, body=rest))
        kept += [loop, *sums]
    return kept


def _summed_after(program: Program, loop: Op) -> tuple[Op, list[Op]]:
    """Returns a loop that adds up parts, and the all-reduces of their sums in place of those inside."""
    shapes = program.shapes
    made = {value: each for each in loop.body for value in each.results}
    users: dict[int, int] = {}
    for each in loop.body:
        for value in {*each.operands, *(_read(each.body) if each.body else ())}:
            users[value] = users.get(value, 0) + 1
    for value in loop.after:
        users[value] = users.get(value, 0) + 1
    results, sums, gone = list(loop.results), [], {}
    for place, (inside, after) in enumerate(zip(loop.inside, loop.after, strict=True)):
        total = made.get(after)
        if total is None or total.kind != "add" or inside not in total.operands:
            continue
        value = next((v for v in total.operands if v != inside), inside)
        while (part := made.get(value)) is not None and part.kind in _CAST and users[value] == 1:
            value = part.operands[0]
        if part is None or part.kind != "all-reduce" or len(part.results) != 1:
            continue
        if users[value] != 1 or users[inside] != 1 or users[after] != 1:
            continue
        gone[value] = part.operands[0]
        results[place] = len(shapes)
        shapes[results[place]] = shapes[loop.results[place]]
        sums.append(
            dataclasses.replace(part, operands=(results[place],), results=(loop.results[place],))
        )
    body = [
        dataclasses.replace(each, operands=tuple(gone.get(v, v) for v in each.operands))
        for each in loop.body
        if not (each.kind == "all-reduce" and each.results[0] in gone)
    ]
    return dataclasses.replace(loop, body=body, results=tuple(results)), sums


def _live(ops: Sequence[Op], outputs: Collection[int]) -> list[Op]:
    wanted, kept = set(outputs), []
    for op in reversed(ops):
        if not any(value in wanted for value in op.results) and op.kind not in _EFFECTS:
            continue
        if op.kind == "while":
            op = _live_loop(op, wanted)
            wanted |= _read(op.body) - set(op.inside)
        wanted |= set(op.operands)
        kept.append(op)
    return kept[::-1]


def _uniform(ops: Sequence[Op], known: set[int]) -> list[Op]:
    """Returns the operations without collectives of arrays that are one number throughout."""
    kept = []
    for op in ops:
        if op.kind == "while":
            op = dataclasses.replace(op, body=_uniform(op.body, set(known)))
        elif op.kind == "constant" or (
            op.kind in _REPEATS and all(value in known for value in op.operands)
        ):
            known.update(op.results)
            if op.kind in _MOVED:
                op = dataclasses.replace(op, kind="broadcast_in_dim", axes=(), dims=())
        kept.append(op)
    return kept


def _broadcast_last(program: Program, ops: Sequence[Op]) -> list[Op]:
    """Returns the operations with gathers of what is repeated before it is repeated."""
    made = {value: op for op in ops for value in op.results}
    shapes = program.shapes
    kept: list[Op] = []
    for op in ops:
        if op.kind == "while":
            op = dataclasses.replace(op, body=_broadcast_last(program, op.body))
        elif op.kind == "all-gather" and len(op.results) == len(op.dims) == 1:
            source = made.get(op.operands[0])
            while source is not None and source.kind == "convert":
                source = made.get(source.operands[0])
            if source is not None and source.kind == "broadcast_in_dim" and source.dims:
                (value,), (result,) = source.operands, op.results
                if shapes[value].size < shapes[source.results[0]].size:
                    found, value = _small(op, source, value, program)
                    kept += found
                    op = dataclasses.replace(source, operands=(value,), results=(result,))
        kept.append(op)
    return kept


def _small(gather: Op, repeat: Op, value: int, program: Program) -> tuple[list[Op], int]:
    """Returns the cast and the gather of what is repeated, and what they make."""
    shapes, (dim,) = program.shapes, gather.dims
    found, dtype = [], shapes[gather.results[0]].dtype
    if shapes[value].dtype != dtype:
        cast = len(shapes)
        shapes[cast] = dataclasses.replace(shapes[value], dtype=dtype)
        found.append(Op("convert", (value,), (cast,), location=repeat.location))
        value = cast
    place = repeat.dims.index(dim) if dim in repeat.dims else None
    if place is not None and shapes[value].dims[place] == shapes[gather.operands[0]].dims[dim]:
        whole, dims = len(shapes), list(shapes[value].dims)
        dims[place] = shapes[gather.results[0]].dims[dim]
        shapes[whole] = dataclasses.replace(shapes[value], dims=tuple(dims))
        found.append(
            dataclasses.replace(gather, operands=(value,), results=(whole,), dims=(place,))
        )
        value = whole
    return found, value


def _added_first(program: Program, ops: Sequence[Op]) -> list[Op]:
    """Returns the operations with updates added where they are, and the sums scattered then.

    Shardy gathers the updates of a scatter whose result is split, such as an embedding's gradient.
    XLA's partitioner takes what needs less memory: all updates on every device, or the whole table.
    """
    made = {value: op for op in ops for value in op.results}
    shapes = program.shapes
    kept: list[Op] = []
    for op in ops:
        if op.kind == "while":
            op = dataclasses.replace(op, body=_added_first(program, op.body))
        gathers = [made.get(value) for value in op.operands[1:]] if op.kind == "scatter" else []
        if len(gathers) != 2 or any(g is None or g.kind != "all-gather" for g in gathers):
            kept.append(op)
            continue
        indices, updates = gathers
        assert indices is not None and updates is not None
        local = shapes[op.results[0]]
        ways = math.prod(size for _, size in op.axes)
        given = sum(shapes[gather.results[0]].nbytes for gather in (indices, updates))
        if not local.dims or local.nbytes * ways >= given:
            kept.append(op)
            continue
        mine, total = len(shapes), len(shapes) + 1
        shapes[mine] = shapes[total] = dataclasses.replace(
            local, dims=(local.dims[0] * ways, *local.dims[1:])
        )
        own = (op.operands[0], indices.operands[0], updates.operands[0])
        kept.append(dataclasses.replace(op, operands=own, results=(mine,), axes=()))
        kept.append(
            dataclasses.replace(updates, kind="all-reduce", operands=(mine,), results=(total,))
        )
        kept.append(
            dataclasses.replace(
                updates,
                kind="all_slice",
                operands=(total,),
                results=op.results,
                axes=op.axes,
                dims=(0,),
            )  # fmt: skip
        )
    return kept


def _reshaped(program: Program, ops: Sequence[Op]) -> list[Op]:
    """Returns the operations with reshapes in place of sums over dims of one element."""
    found = []
    for op in ops:
        if op.kind == "while":
            op = dataclasses.replace(op, body=_reshaped(program, op.body))
        elif op.kind == "reduce" and len(op.results) == 1:
            given, made = (program.shapes[v] for v in (op.operands[0], op.results[0]))
            if given.size == made.size:
                op = Op("reshape", op.operands[:1], op.results, location=op.location)
        found.append(op)
    return found


def _sliced_first(program: Program, ops: Sequence[Op]) -> list[Op]:
    """Returns the operations with gathers of the slices that are read, in place of stacks of them.

    Shardy gathers a stack of which a loop reads one layer at a time; the compilers gather the layer.
    """
    shapes = program.shapes
    users: dict[int, list[Op]] = {}
    for op in ops:
        for value in {*op.operands, *(_read(op.body) if op.kind == "while" else ())}:
            users.setdefault(value, []).append(op)
    late: dict[int, Op] = {}  # gathers that wait for a slice of their result, by this result
    kept: list[Op] = []
    for op in ops:
        (result,) = op.results if len(op.results) == 1 else (-1,)
        if op.kind == "all-gather" and _only_sliced(op, users, shapes):
            late[result] = op
            continue
        gather = late.get(op.operands[0]) if op.operands else None
        if gather is not None and op.kind in ("dynamic_slice", "reshape"):
            dims = gather.dims if op.kind == "dynamic_slice" else _kept_dims(gather, op, shapes)
            part, ways = len(shapes), math.prod(size for _, size in gather.axes)
            whole = shapes[result].dims
            small = tuple(n // ways if d in dims else n for d, n in enumerate(whole))
            shapes[part] = dataclasses.replace(shapes[result], dims=small)
            kept.append(
                dataclasses.replace(
                    op, operands=(gather.operands[0], *op.operands[1:]), results=(part,)
                )
            )
            made = dataclasses.replace(gather, operands=(part,), results=(result,), dims=dims)
            if _only_sliced(made, users, shapes):
                late[result] = made
            else:
                kept.append(made)
            continue
        if op.kind == "while":
            op = _gathered_inside(op, late, shapes)
            op = dataclasses.replace(op, body=_sliced_first(program, op.body))
        kept.append(op)
    return kept


def _only_sliced(gather: Op, users: dict[int, list[Op]], shapes: Any) -> bool:
    """Returns whether nothing but slices of a gathered array is read, along other dims."""
    if len(gather.results) != 1 or len(gather.dims) != 1:
        return False
    (value,), (dim,) = gather.results, gather.dims
    found = users.get(value, [])
    for op in found:
        if op.kind == "dynamic_slice" and op.operands[0] == value:
            if shapes[op.results[0]].dims[dim] != shapes[value].dims[dim]:
                return False
        elif op.kind == "reshape":
            dims = _kept_dims(gather, op, shapes)
            inner = dataclasses.replace(gather, results=op.results, dims=dims)
            if not _only_sliced(inner, users, shapes):
                return False
        elif op.kind == "while" and op.operands.count(value) == 1:
            place = op.operands.index(value)
            inside = op.inside[place]
            if value in _read(op.body) or op.after[place] != inside:
                return False
            own: dict[int, list[Op]] = {}
            for each in op.body:
                for one in {*each.operands, *(_read(each.body) if each.body else ())}:
                    own.setdefault(one, []).append(each)
            if not _only_sliced(dataclasses.replace(gather, results=(inside,)), own, shapes):
                return False
        else:
            return False
    return bool(found)


def _kept_dims(gather: Op, reshape: Op, shapes: Any) -> tuple[int, ...]:
    """Returns where the gathered dim is after a reshape; nothing if it is split or joined."""
    old, new = shapes[reshape.operands[0]].dims, shapes[reshape.results[0]].dims
    (dim,) = gather.dims
    after = math.prod(old[dim + 1 :])
    return tuple(
        d for d, n in enumerate(new) if n == old[dim] and math.prod(new[d + 1 :]) == after
    )[:1]


def _gathered_inside(loop: Op, late: dict[int, Op], shapes: Any) -> Op:
    """Returns a loop that gathers what was to be gathered before it."""
    operands, inside, after, first = (
        list(loop.operands), list(loop.inside), list(loop.after), [],
    )  # fmt: skip
    for place, value in enumerate(loop.operands):
        gather = late.get(value)
        if gather is None:
            continue
        small = len(shapes)
        shapes[small] = shapes[gather.operands[0]]
        first.append(dataclasses.replace(gather, operands=(small,), results=(loop.inside[place],)))
        operands[place], inside[place], after[place] = gather.operands[0], small, small
        shapes[loop.results[place]] = shapes[small]
    return dataclasses.replace(
        loop, operands=tuple(operands), inside=tuple(inside), after=tuple(after),
        body=[*first, *loop.body],
    )  # fmt: skip


def _read(ops: Sequence[Op]) -> set[int]:
    found: set[int] = set()
    for op in ops:
        found |= set(op.operands) | _read(op.body)
    return found


def _live_loop(loop: Op, wanted: set[int]) -> Op:
    """Returns a loop with the arguments that something after it needs, and their dependencies."""
    needed = {i for i, value in enumerate(loop.results) if value in wanted}
    while True:
        body = _live(loop.body, {loop.after[i] for i in needed})
        read = _read(body) | {loop.after[i] for i in needed}
        more = {i for i, value in enumerate(loop.inside) if value in read}
        if more <= needed:
            break
        needed |= more
    order = sorted(needed)
    return dataclasses.replace(
        loop,
        body=body,
        operands=tuple(loop.operands[i] for i in order),
        results=tuple(loop.results[i] for i in order),
        inside=tuple(loop.inside[i] for i in order),
        after=tuple(loop.after[i] for i in order),
    )


def _summed_first(program: Program, ops: Sequence[Op]) -> list[Op]:
    """Returns the operations with one all-reduce of a sum in place of a sum of all-reduces."""
    users: dict[int, int] = {}
    for op in ops:
        for value in op.operands:
            users[value] = users.get(value, 0) + 1
    made: dict[int, Op] = {}
    kept: list[Op] = []
    for op in ops:
        if op.kind == "while":
            op = dataclasses.replace(op, body=_summed_first(program, op.body))
        parts = [made.get(value) for value in op.operands] if op.kind == "add" else []
        if len(parts) == 2 and all(
            part is not None and part.axes == parts[0].axes and users[part.results[0]] == 1  # pyright: ignore[reportOptionalMemberAccess]
            for part in parts
        ):
            one, other = parts
            assert one is not None and other is not None
            kept = [each for each in kept if each is not one and each is not other]
            total = len(program.shapes)
            program.shapes[total] = program.shapes[op.results[0]]
            inner = dataclasses.replace(
                op, operands=(one.operands[0], other.operands[0]), results=(total,)
            )
            op = dataclasses.replace(one, operands=(total,), results=op.results)
            kept.append(inner)
        kept.append(op)
        if op.kind == "all-reduce" and len(op.results) == 1:
            made[op.results[0]] = op
    return kept


def _merged(program: Program, ops: Sequence[Op], renamed: dict[int, int]) -> list[Op]:
    seen: dict[Any, Op] = {}
    kept = []
    for op in ops:
        op = dataclasses.replace(op, operands=tuple(renamed.get(v, v) for v in op.operands))
        if op.kind == "while":
            body = _merged(program, op.body, renamed)
            after = tuple(renamed.get(v, v) for v in op.after)
            op = dataclasses.replace(op, body=body, after=after)
        elif op.kind in _MERGED or (op.kind == _PERMUTE and "pairs" in op.attributes):
            shapes = tuple(program.shapes[value] for value in op.results)
            key = (op.kind, op.operands, op.axes, shapes, op.attributes.get("pairs"))
            if key in seen:
                renamed.update(zip(op.results, seen[key].results, strict=True))
                continue
            seen[key] = op
        kept.append(op)
    return kept
