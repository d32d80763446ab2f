"""Groups the operations of a partitioned step into kernels, as the compilers fuse them.

Products, collectives, loops and library calls are kernels of their own. What lies between them is
fused: operations of one level that feed each other stream through memory once, where the level of
an operation counts the kernels and reductions that its values must wait for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence

from .._hlo import Access, Shape
from .partition import Op, Program

# Other names for the same memory.
_ALIASES = {
    "reshape",
    "transpose",
    "bitcast_convert",
    "optimization_barrier",
    "copy",
    "sharding_constraint",
}
# Made again wherever they are read.
_TRANSPARENT = {"constant", "iota", "broadcast_in_dim", "partition_id", "replica_id"}
COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"}
_HEAVY = COLLECTIVES | {
    "dot_general", "convolution", "custom_call", "while", "sort", "scatter", "gather", "fft",
    "cholesky", "triangular_solve", "rng_bit_generator", "rng", "ragged_dot", "select_and_scatter",
    "reduce_window",
}  # fmt: skip
_SLICES = {"slice", "dynamic_slice", "all_slice"}
_COSTLY = {"exponential": 8, "tanh": 14, "logistic": 12, "log": 14, "divide": 8, "erf": 24,
           "power": 30, "sine": 20, "cosine": 20, "rsqrt": 6, "sqrt": 8}  # fmt: skip


@dataclasses.dataclass(slots=True)
class Kernel:
    """One kernel, collective or loop.

    Attributes:
        ops: its operations.
        heavy: whether it is a single operation that is never fused.
        reads: the values that it reads, each with the bytes of it that are read.
        writes: the values that it writes, each with its bytes.
        operations: its scalar operations.
        level: how late it can run.
    """

    ops: list[Op]
    heavy: bool
    reads: dict[int, int] = dataclasses.field(default_factory=dict)
    writes: dict[int, int] = dataclasses.field(default_factory=dict)
    operations: int = 0
    level: int = 0

    @property
    def op(self) -> Op:
        """Its last operation."""
        return self.ops[-1]

    @property
    def access(self) -> Access:
        """What it moves through memory."""
        return Access(sum(self.reads.values()), sum(self.writes.values()), self.operations)


class Block:
    """The kernels of a list of operations, in the order in which a compiler would run them."""

    def __init__(self, program: Program, ops: Sequence[Op], outputs: Sequence[int]):
        """Groups the operations.

        Args:
            program: the step.
            ops: the operations of it, or of a loop's body.
            outputs: the values that are used afterwards.
        """
        self.shapes = program.shapes
        self.ops = _scattered(list(ops))
        self.maker = {value: op for op in self.ops for value in op.results}
        self.given = set(outputs)
        self.outputs = {self.root(value) for value in outputs}
        self.kernels = self._ordered(self._grouped())

    def root(self, value: int) -> int:
        """Returns the value whose memory this one shares."""
        seen = value
        while (op := self.maker.get(seen)) is not None:
            if op.kind in _ALIASES or op.kind == "dynamic_update_slice":
                seen = op.operands[0]
            elif op.kind == "while":
                seen = op.operands[op.results.index(seen)]
            else:
                break
        return seen

    def sources(self, value: int) -> list[int]:
        """Returns the values in memory that a value is made of wherever it is read."""
        op = self.maker.get(value)
        if op is not None and (op.kind in _TRANSPARENT | _ALIASES or self._widens(op)):
            return [found for operand in op.operands for found in self.sources(operand)]
        return [value]

    def _widens(self, op: Op) -> bool:
        """Returns whether an operation only casts to a wider dtype, wherever its result is read."""
        if op.kind != "convert":
            return False
        given, made = self.shapes[op.operands[0]], self.shapes[op.results[0]]
        return made.nbytes > given.nbytes and not self._fed.get(op.results[0])

    @functools.cached_property
    def _fed(self) -> dict[int, bool]:
        """Whether each value is an operand of a kernel that is never fused, or is returned."""
        found = dict.fromkeys(
            (v for op in self.ops if op.kind in _HEAVY for v in op.operands), True
        )
        found |= dict.fromkeys(self.given, True)
        return found

    def _fusible(self, op: Op) -> bool:
        return (
            not self._widens(op)
            and op.kind not in _HEAVY
            and op.kind not in _TRANSPARENT
            and op.kind not in _ALIASES
        )

    def _grouped(self) -> list[Kernel]:
        level: dict[int, int] = {}
        at: dict[int, int] = {}
        group: dict[int, int] = {}

        def find(i: int) -> int:
            while group[i] != i:
                group[i] = group[group[i]]
                i = group[i]
            return i

        number = {id(op): i for i, op in enumerate(self.ops)}
        for i, op in enumerate(self.ops):
            base = max((level.get(v, 0) for v in op.operands), default=0)
            at[i] = base
            ends = op.kind in _HEAVY or op.kind in ("reduce", "dynamic_update_slice")
            for value in op.results:
                level[value] = base + 1 if ends else base
            if not self._fusible(op):
                continue
            group[i] = i
            for operand in op.operands:
                for source in self.sources(operand):
                    maker = self.maker.get(source)
                    j = number.get(id(maker), -1)
                    if (
                        j in group
                        and at[j] == base
                        and self.maker[source].kind not in ("reduce", "dynamic_update_slice")
                    ):
                        group[find(i)] = find(j)
        members: dict[int, list[Op]] = defaultdict(list)
        kernels = []
        for i, op in enumerate(self.ops):
            if i in group:
                members[find(i)].append(op)
            elif op.kind in _HEAVY:
                kernels.append(Kernel([op], True))
        kernels += [Kernel(ops, False) for ops in members.values()]
        self._fill(kernels)
        return [k for k in kernels if k.heavy or k.writes or k.operations]

    def _fill(self, kernels: list[Kernel]) -> None:
        owner = {value: i for i, k in enumerate(kernels) for op in k.ops for value in op.results}
        used: dict[int, set[int]] = defaultdict(set)
        for i, kernel in enumerate(kernels):
            for op in kernel.ops:
                for operand in op.operands:
                    for source in self.sources(operand):
                        if owner.get(source) != i:
                            used[source].add(i)
                            self._read(kernel, op, source)
                if op.kind == "while":
                    for value in captured(op):
                        for source in self.sources(value):
                            used[source].add(i)
                            kernel.reads.setdefault(source, 0)
                if not kernel.heavy:
                    costs = _COSTLY.get(op.kind, 1)
                    first = op.operands if op.kind == "reduce" else op.results
                    kernel.operations += costs * self.shapes[first[0]].size if first else 0
        for kernel in kernels:
            for op in kernel.ops:
                for value in op.results:
                    if op.kind == "while":
                        continue
                    kept = value in used or value in self.outputs
                    if not (kernel.heavy or kept):
                        continue
                    if op.kind == "dynamic_update_slice":
                        kernel.writes[value] = self.shapes[op.operands[1]].nbytes
                    elif op.kind == "scatter":
                        kernel.writes[value] = self.shapes[op.operands[-1]].nbytes
                    else:
                        kernel.writes[value] = self.shapes[value].nbytes

    def made_again(self, value: int) -> bool:
        """Returns whether no kernel writes a value, because it is made wherever it is read."""
        op = self.maker.get(value)
        return op is not None and op.kind in _TRANSPARENT

    def _read(self, kernel: Kernel, op: Op, source: int) -> None:
        size = self.shapes[source].nbytes
        if op.kind in _SLICES | {"gather"}:
            size = min(size, self.shapes[op.results[0]].nbytes)
        elif op.kind == "dynamic_update_slice" and source in self.sources(op.operands[0]):
            size = 0
        elif op.kind == "scatter" and source in self.sources(op.operands[0]):
            size = self.shapes[op.operands[-1]].nbytes
        elif op.kind == "while":
            size = 0
        kernel.reads[source] = min(
            self.shapes[source].nbytes, max(kernel.reads.get(source, 0), size)
        )

    def _ordered(self, kernels: list[Kernel]) -> list[Kernel]:
        """Returns the kernels as late as their users allow, results of the step as early."""
        owner = {value: i for i, k in enumerate(kernels) for op in k.ops for value in op.results}
        before: list[set[int]] = [set() for _ in kernels]
        after: list[set[int]] = [set() for _ in kernels]
        for i, kernel in enumerate(kernels):
            for value in kernel.reads:
                j = owner.get(value)
                if j is not None and j != i:
                    before[i].add(j)
                    after[j].add(i)
        waiting = [len(b) for b in before]
        ready = [i for i, n in enumerate(waiting) if not n]
        order = []
        while ready:
            i = ready.pop()
            order.append(i)
            for j in after[i]:
                waiting[j] -= 1
                if not waiting[j]:
                    ready.append(j)
        early = [0] * len(kernels)
        for i in order:
            early[i] = max((early[j] + 1 for j in before[i]), default=0)
        late = list(early)
        for i in reversed(order):
            if after[i]:
                late[i] = min(late[j] for j in after[i]) - 1
        for i, kernel in enumerate(kernels):
            kernel.level = late[i]
        done = set(order)
        return [kernels[i] for i in sorted(done, key=lambda i: (late[i], not kernels[i].heavy, i))]


def captured(loop: Op) -> set[int]:
    """Returns the values that a loop's body reads from outside, other than its arguments."""
    inside = set(loop.inside)
    used: set[int] = set()
    for op in loop.body:
        used |= set(op.operands)
        inside |= set(op.results)
        if op.kind == "while":
            used |= captured(op)
    return used - inside


def _scattered(ops: list[Op]) -> list[Op]:
    """Returns the operations with a reduce-scatter for each all-reduce of which a part is kept."""
    users: dict[int, list[Op]] = defaultdict(list)
    for op in ops:
        for operand in op.operands:
            users[operand].append(op)
    found, gone = [], set()
    for op in ops:
        if id(op) in gone:
            continue
        if op.kind == "all-reduce" and len(op.results) == 1:
            value, through, user = op.results[0], [], users[op.results[0]]
            while len(user) == 1 and user[0].kind in _ALIASES | {"convert"}:
                through.append(user[0])
                value = user[0].results[0]
                user = users[value]
            if len(user) == 1 and user[0].kind == "all_slice" and not through:
                found.append(
                    dataclasses.replace(op, kind="reduce-scatter", results=user[0].results)
                )
                gone.add(id(user[0]))
                continue
        found.append(op)
    return found


def size_of(shapes: dict[int, Shape], op: Op) -> int:
    """Returns the bytes of the larger of what a collective takes and gives."""
    taken = sum(shapes[v].nbytes for v in op.operands)
    return max(taken, sum(shapes[v].nbytes for v in op.results))
