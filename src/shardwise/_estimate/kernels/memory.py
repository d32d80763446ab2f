"""How much memory temporary arrays take at most, as kernels run one after the other; and where.

Some values of a partitioned step are in the memory of the hosts, and not on the device.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

from ..._hlo import MOVES
from ..program import Op, Program
from .fused import Block
from .graph import Kernel
from .tpu import LANES, PRODUCTS, filled

# Products in up to so many parts are no loop: they compute their operands like whole ones.
_UNROLLED = 4
# What writes its result over an operand that nothing reads later.
_IN_PLACE = {"all-reduce", "scatter", "sort"}
# What they make is where their first operand is.
_STAYS = {"dynamic_update_slice", "dynamic_slice", "slice", "reshape", "transpose", "copy"}
_STAYS |= {"optimization_barrier", "sharding_constraint"}


def peak_of(
    block: Block,
    kernels: Sequence[Kernel],
    ends: Sequence[int],
    inner: Callable[[Kernel], int],
    host: Collection[int] = (),
    near: Collection[int] = (),
) -> tuple[int, int]:
    """Returns the most bytes alive at once, as scheduled, and if nothing were freed early.

    Args:
        block: the operations.
        kernels: their kernels, in the order in which they run.
        ends: for each kernel, the number of the last one that runs beside it.
        inner: returns the bytes that the body of a loop takes.
        host: the values in the memory of the hosts.
        near: the values beside a TPU's cores, in a memory of their own.
    """
    last: dict[int, int] = {}
    for kernel, end in zip(kernels, ends, strict=True):
        for value in kernel.reads:
            root = block.root(value)
            last[root] = max(last.get(root, -1), end)
    sizes, inlined = _sizes(block)
    sizes |= dict.fromkeys(near, 0)
    for kernel in reversed(kernels):
        # What products compute for themselves is read when they run.
        for value in kernel.writes.keys() & inlined:
            for source in kernel.reads:
                root = block.root(source)
                last[root] = max(last.get(root, -1), last.get(block.root(value), -1))
    # Near products in loops, a TPU's fusions write beside what they read, even if nothing reads
    # that later; without such loops they are in the products.
    reuses = block.gpu or not any(kernel.windowed > _UNROLLED for kernel in kernels)
    # What is gathered again for a later use is not kept until then.
    again = {
        block.root(value): sizes.get(value, block.nbytes(value))
        for kernel in kernels
        if kernel.op.kind == "all-gather" and kernel.repeats > 1
        for value in kernel.writes
    }
    sums = block.sums_of(kernels) if block.gpu else {}
    alive: dict[int, int] = {}
    peak = total = most = 0
    for number, kernel in enumerate(kernels):
        ending = {v: size for v, size in alive.items() if last.get(v, -1) <= number}
        inside = 0
        if kernel.op.kind == "while":
            inside = inner(kernel)
            constants = set()
            for place, value in enumerate(kernel.op.results):
                # Stacks that the loop fills begin as a constant, which is written once. A TPU's
                # compiler makes constants in the loop.
                same = kernel.op.after[place] == kernel.op.inside[place]
                if same and not block.gpu and block.made_again(kernel.op.operands[place]):
                    continue
                constant = block.constant(kernel.op.operands[place]) if same else None
                if constant is not None and constant in constants:
                    continue
                constants.add(constant)
                if block.root(value) == value and value not in block.outputs:
                    alive[value] = 0 if value in host else block.shapes[value].nbytes
                    total += alive[value]
        in_place = kernel.op.kind in _IN_PLACE or (reuses and not kernel.heavy)
        over = dict(ending) if in_place else {}
        # A GPU sums along rows and uses the sums in one kernel, which reads its rows twice. Nor does
        # what sums write over what it reads.
        rows = {v for value in kernel.reads for v in sums.get(block.root(value), ())}
        sums_too = block.gpu and any(
            op.kind == "reduce" and len(block.shapes[op.results[0]].dims) == 1 for op in kernel.ops
        )
        over = {} if sums_too else {v: size for v, size in over.items() if v not in rows}
        reused = 0
        for value, size in kernel.writes.items():
            root = block.root(value)
            # What is made of something outside stays there, but for copies in another order.
            outside = root not in block.maker and root != value
            kept = root in alive or root in again or outside
            if kept or not size or root in block.outputs or value in block.outputs:
                continue
            alive[root] = 0 if root in host else sizes.get(value, block.nbytes(value))
            total += alive[root]
            most += 0 if root in host else size
            below = next((v for v, n in over.items() if n == alive[root]), None)
            if below is not None:
                reused += over.pop(below)
        inside += sum(again.get(root, 0) for root in {block.root(v) for v in kernel.reads})
        peak = max(peak, total - reused + inside)
        for value in [v for v in alive if last.get(v, -1) <= number]:
            total -= alive.pop(value)
    return peak, max(peak, min(most, 4 * peak))


def _sizes(block: Block) -> tuple[dict[int, int], set[int]]:
    """Returns the values that take other memory on a TPU than their bytes, and those in products.

    What a product makes for one kernel after it is computed in the same one, and what is computed
    from arrays in memory for products alone, in each of them. Of what is gathered
    for a product in parts, or scattered after it, there are a few shards. What attention kernels
    read and write fills whole registers along its last dim, and all others along the dim that
    leaves least of them empty.
    """
    if block.gpu:
        return {}, set()
    readers: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in block.kernels:
        for value in kernel.reads:
            readers[value].append(kernel)
    found: dict[int, int] = {}
    products = {
        value
        for kernel in block.kernels
        if kernel.op.kind in PRODUCTS
        for value in kernel.writes
        if len(readers[value]) == 1
    }
    inlined: set[int] = set()
    for kernel in block.kernels:
        if kernel.op.kind in PRODUCTS and kernel.cut is None:
            for value in kernel.writes:
                after = readers[value]
                if len(after) == 1 and after[0].absorbed:
                    found[value] = 0
                elif len(after) == 1 and after[0].windowed and after[0].op.kind == "reduce-scatter":
                    found[value] = 2 * block.nbytes(value) // after[0].windowed
        elif _is_elementwise(kernel) and not kernel.reads.keys() & products:
            (value,) = kernel.writes
            near = readers[value]
            if near and all(k.op.kind in PRODUCTS and k.windowed <= _UNROLLED for k in near):
                found[value] = 0
                inlined.add(value)
        elif kernel.cut is not None and kernel.cut.gradient:
            for value in kernel.writes:
                found[value] = 2 * block.nbytes(value) // kernel.windowed
        elif kernel.windowed and kernel.op.kind == "all-gather":
            for value in kernel.writes:
                found[value] = 3 * block.nbytes(value) // kernel.windowed
        elif kernel.op.kind == "custom_call":
            for value in (*kernel.reads, *kernel.writes):
                dims = block.shapes[value].dims
                if len(dims) >= 3 and 1 < dims[-1] < LANES:
                    found[value] = block.nbytes(value) * LANES // dims[-1]
    for kernel in block.kernels:
        for value in kernel.writes:
            if value not in found and len(block.shapes[value].dims) > 1:
                found[value] = int(block.nbytes(value) * filled(block.shapes[value].dims))
    return found, inlined


def _is_elementwise(kernel: Kernel) -> bool:
    """Returns whether a kernel makes one array, each element from the same ones of others."""
    kinds = {op.kind for op in kernel.ops}
    return not (
        kernel.heavy or len(kernel.writes) != 1 or kinds & {"reduce", "dynamic_update_slice"}
    )


def placed(program: Program) -> Program:
    """Returns the program with moves between memories as copies, and the values on the host."""
    moves = [
        op
        for op in _all(program.ops)
        if op.attributes.get("call_target_name", "").strip('"') in MOVES
    ]
    if not moves and not program.host:
        return program
    host = set(program.host)
    for op in moves:
        if "pinned_host" in op.attributes.get("mhlo.frontend_attributes", ""):
            host |= set(op.results)
        else:
            host |= set(op.operands)
    gone = {id(op) for op in moves}
    pairs = list(_alike(program.ops, gone))
    before = -1
    while len(host) != before:
        before = len(host)
        for one, other in pairs:
            if one in host or other in host:
                host |= {one, other}
    ops = _copied(program.ops, gone)
    return dataclasses.replace(program, ops=ops, host=frozenset(host))


def _all(ops: Sequence[Op]) -> Iterator[Op]:
    for op in ops:
        yield op
        yield from _all(op.body)


def _alike(ops: Sequence[Op], moves: set[int]) -> Iterator[tuple[int, int]]:
    """Yields pairs of values that are in the same memory."""
    for op in _all(ops):
        if op.kind == "while":
            for four in zip(op.operands, op.inside, op.after, op.results, strict=True):
                yield from zip(four, four[1:], strict=False)
        elif op.kind in _STAYS and id(op) not in moves:
            yield op.operands[0], op.results[0]
            if op.kind == "dynamic_update_slice":
                yield op.operands[0], op.operands[1]


def _copied(ops: Sequence[Op], moves: set[int]) -> list[Op]:
    kept = []
    for op in ops:
        if id(op) in moves:
            # To the host, it is read where it is; to the device, it is written there.
            away = "pinned_host" in op.attributes.get("mhlo.frontend_attributes", "")
            op = dataclasses.replace(op, kind="copy" if away else "convert", attributes={})
        elif op.kind == "while":
            op = dataclasses.replace(op, body=_copied(op.body, moves))
        kept.append(op)
    return kept
