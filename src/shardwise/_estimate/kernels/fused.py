"""Groups the operations of a partitioned step into kernels, as the compilers fuse them.

Products, collectives, loops and library calls are kernels of their own. What lies between them is
fused: each value that must be in memory (an operand of such a kernel, a result of the step, a
reduction) is made by one kernel, which computes everything from what is in memory already.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..._hlo import Shape
from ..program import Op, Orders, Program, dims_of, numbers_of
from .scattering import ALIASES, scattered
from .windows import Kernel, filters_last, mark_windows, relaid

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
# What a GPU's compiler computes once, though that takes memory.
_ONCE = ("tanh", "erf")
# A row of a normalisation that one kernel still holds.
_ROW = 16384
# A gather that takes less than this part of an array is computed with what else reads it.
_FEW = 64


class Block:
    """The kernels of a list of operations, in the order in which a compiler would run them."""

    def __init__(
        self,
        program: Program,
        ops: Sequence[Op],
        outputs: Sequence[int],
        *,
        is_ring: Callable[[Op], bool] | None = None,
        devices: int = 0,
    ):
        """Groups the operations.

        Args:
            program: the step.
            ops: the operations of it, or of a loop's body.
            outputs: the values that are used afterwards.
            is_ring: for TPUs, whether products are computed in parts over the devices of a
                collective. None for GPUs, where products read arrays in some orders alone.
            devices: how many devices the mesh has.
        """
        gpu = is_ring is None
        self.shapes, self.gpu = program.shapes, gpu
        self.ops = scattered(list(ops), self.shapes, 0 if gpu else devices, is_ring)
        self.maker = {value: op for op in self.ops for value in op.results}
        self.results = outputs
        self.outputs = {self.root(value) for value in outputs}
        self.narrow: set[int] = set()
        # The bytes of each value in memory that a value is computed from.
        self.cones: dict[int, dict[int, int]] = {}
        self.orders = Orders(self.shapes, self.ops, gpu)
        self.kept = self._needed(outputs)
        self._spread()
        self.kernels = self._ordered(self._merged(self._grouped()))
        if is_ring is not None:
            mark_windows(self.kernels, program.shapes, self.maker, is_ring, devices)
            self.kernels = filters_last(relaid(self.kernels, self.shapes, self.maker))

    def root(self, value: int) -> int:
        """Returns the value whose memory this one shares."""
        seen = value
        while (op := self.maker.get(seen)) is not None:
            if op.kind in ALIASES or op.kind == "dynamic_update_slice":
                seen = op.operands[0]
            elif op.kind == "while":
                begin = self.root(op.operands[op.results.index(seen)])
                if self.made_again(begin):
                    break  # a stack that the loop fills: each has its own memory
                seen = begin
            else:
                break
        return seen

    def made_again(self, value: int) -> bool:
        """Returns whether no kernel writes a value, because it is made wherever it is read."""
        op = self.maker.get(value)
        return op is not None and op.kind in _TRANSPARENT

    def constant(self, value: int) -> tuple[Any, ...] | None:
        """Returns what tells a constant from others, or None if a value is none."""
        shape, base = self.shapes[value], value
        while (op := self.maker.get(base)) is not None and op.kind in ALIASES | _TRANSPARENT:
            if op.kind == "constant":
                return base, shape.dtype, shape.size
            if len(op.operands) != 1:
                break
            base = op.operands[0]
        return None

    def _behind(self, value: int) -> list[int]:
        """Returns the values that a value only renames, repeats or rearranges."""
        op = self.maker.get(value)
        if op is not None and op.kind in ALIASES | _TRANSPARENT:
            return [found for operand in op.operands for found in self._behind(operand)]
        return [value]

    def _needed(self, outputs: Sequence[int]) -> set[int]:
        """Returns the values that must be in memory: operands of other kernels, and results."""
        found = {v for value in outputs for v in self._behind(value)}
        for op in self.ops:
            if op.kind not in _HEAVY:
                continue
            inside = captured(op) if op.kind == "while" else set()
            found |= {v for operand in (*op.operands, *inside) for v in self._behind(operand)}
            if op.kind == "dot_general":
                self._mixed(op)
        return found

    def _mixed(self, op: Op) -> None:
        """Notes the wider operand of a product, which a compiler stores in the narrower dtype."""
        left, right = (self._behind(v) for v in op.operands[:2])
        if len(left) != 1 or len(right) != 1:
            return
        sizes = [self.shapes[v[0]].nbytes / max(1, self.shapes[v[0]].size) for v in (left, right)]
        if sizes == [4, 2] or sizes == [2, 4]:
            self.narrow |= {(left if sizes[0] == 4 else right)[0]}

    def _spread(self) -> None:
        """Works out what each value is computed from, and keeps what is dear to compute again."""
        users: dict[int, int] = defaultdict(int)
        for op in reversed(self.ops):
            # What reads an array in a wider dtype reads the array.
            widened = self.gpu and op.kind == "convert" and self._widens(op)
            for operand in set(op.operands):
                if op.kind not in ALIASES | _TRANSPARENT:
                    for value in self._behind(operand):
                        users[value] += max(1, users[op.results[0]]) if widened else 1
        for op in self.ops:
            if op.kind in _HEAVY or op.kind in ("reduce", "dynamic_update_slice"):
                continue
            cone: dict[int, int] = {}
            for operand in op.operands:
                for source, size in self.cone(operand).items():
                    cone[source] = max(cone.get(source, 0), size)
            for value in op.results:
                size = self.shapes[value].nbytes
                if op.kind in _SLICES:
                    cone = {source: min(read, size) for source, read in cone.items()}
                plain = op.kind not in ALIASES | _TRANSPARENT
                large = sum(cone.values()) > 1.01 * size or (self.gpu and op.kind in _ONCE)
                dear = users[value] > 1 and large
                if plain and (dear or value in self.kept):
                    self.kept.add(value)
                self.cones[value] = cone

    def _widens(self, cast: Op) -> bool:
        return self.shapes[cast.results[0]].nbytes > self.shapes[cast.operands[0]].nbytes

    def cone(self, value: int) -> dict[int, int]:
        """Returns the values in memory that a value is read or computed from, each with bytes."""
        if value in self.kept or value not in self.cones:
            return {value: self.nbytes(value)}
        return self.cones[value]

    def nbytes(self, value: int) -> int:
        """Returns the bytes of a value as it is stored."""
        size = self.shapes[value].nbytes
        return size // 2 if value in self.narrow else size

    def _grouped(self) -> list[Kernel]:
        kernels: list[Kernel] = []
        # By value and order: the value arranged so, or the value itself if it was made so.
        arranged: dict[Any, int] = {}
        for op in self.ops:
            if op.kind in _HEAVY:
                kernel = self._alone(op)
                if op.kind == "dot_general":
                    kernels += self._arranged(op, kernel, arranged)
                kernels.append(kernel)
            elif op.kind in ("reduce", "dynamic_update_slice") or any(
                value in self.kept for value in op.results
            ):
                if op.kind not in ALIASES | _TRANSPARENT:
                    kernels.append(self._fusion(op))
        return self._cast_apart(kernels) if self.gpu else kernels

    def sums_of(self, kernels: Sequence[Kernel]) -> dict[int, set[int]]:
        """Returns what each sum is of, also through other sums, by its value."""
        found: dict[int, set[int]] = {}
        for kernel in kernels:
            if any(op.kind == "reduce" for op in kernel.ops):
                read = {self.root(value) for value in kernel.reads}
                read = read.union(*(found.get(value, ()) for value in read))
                for value in kernel.writes:
                    found[self.root(value)] = read
        return found

    def _cast_apart(self, kernels: list[Kernel]) -> list[Kernel]:
        """Returns the kernels with casts of their own for what products read in several orders.

        Where rows are summed and read again, as in the gradient of a softmax, one kernel does so and
        writes in the dtype that it computes in. It casts for products that read its own order alone.
        """
        sums = self.sums_of(kernels)
        found = list(kernels)
        for kernel in kernels:
            reads = {self.root(value) for value in kernel.reads}
            if not any(sums.get(value, set()) & reads for value in reads):
                continue
            for value in kernel.writes.keys() & self.narrow:
                readers = [k for k in found if value in k.reads and k is not kernel]
                turned = [k for k in readers if k.op.kind == "transpose"]
                if not turned:
                    continue
                half = self.nbytes(value)
                self.narrow.discard(value)
                kernel.writes[value] = self.nbytes(value)
                straight = [k for k in readers if k.op.kind == "dot_general"]
                for reader in turned:
                    reader.reads[value] = self.nbytes(value)
                if straight:
                    cast = len(self.shapes)
                    self.shapes[cast] = self.shapes[value]
                    self.narrow.add(cast)
                    for reader in straight:
                        del reader.reads[value]
                        reader.reads[cast] = half
                    made = Kernel(
                        [Op("convert", (value,), (cast,))],
                        False,
                        {value: self.nbytes(value)},
                        {cast: half},
                    )
                    found.insert(found.index(straight[0]), made)
        return found

    def _alone(self, op: Op) -> Kernel:
        kernel = Kernel([op], True)
        for operand in op.operands:
            for source, size in self.cone(operand).items():
                if op.kind == "gather":
                    size = min(size, self.shapes[op.results[0]].nbytes)
                elif op.kind == "scatter" and operand == op.operands[0]:
                    size = self.shapes[op.operands[-1]].nbytes
                elif op.kind == "while":
                    size = 0
                kernel.reads[source] = max(kernel.reads.get(source, 0), size)
        if op.kind == "while":
            for value in captured(op):
                for source in self.cone(value):
                    kernel.reads.setdefault(source, 0)
            return kernel
        for value in op.results:
            size = self.shapes[op.operands[-1] if op.kind == "scatter" else value].nbytes
            kernel.writes[value] = size
        return kernel

    def _arranged(self, op: Op, kernel: Kernel, known: dict[Any, int]) -> list[Kernel]:
        """Returns the copies that a product needs of operands in an order that it cannot read."""
        numbers = numbers_of(op)
        copies = []
        for side, operand in enumerate(op.operands[:2]):
            source = self._behind(operand)
            batch, summed = numbers[2 + side], numbers[side]
            if len(source) != 1 or self.orders.suits(operand, batch, summed):
                continue
            maker = self.maker.get(source[0])
            if maker is not None and maker.kind == "all-gather" and not self.gpu:
                continue
            flexible = maker is not None and maker.kind not in _HEAVY and source[0] in self.kept
            order = (source[0], self.orders.of(operand), tuple(batch), tuple(summed))
            if order not in known:
                if flexible and not any(key[0] == source[0] for key in known):
                    known[order] = source[0]  # its own kernel writes it so
                else:
                    made = len(self.shapes)
                    self.shapes[made] = self.shapes[source[0]]
                    known[order] = made
                    if source[0] in self.narrow:
                        self.narrow.add(made)
                    size = self.nbytes(source[0])
                    copy = Op("transpose", (source[0],), (made,))
                    copies.append(Kernel([copy], False, {source[0]: size}, {made: size}))
            if (value := known[order]) != source[0]:
                kernel.reads[value] = kernel.reads.pop(source[0], self.nbytes(source[0]))
        return copies

    def _fusion(self, op: Op) -> Kernel:
        kernel = Kernel([], False)
        seen: set[int] = set()
        todo = [op]
        while todo:
            each = todo.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            kernel.ops.append(each)
            if each.kind not in ALIASES | _TRANSPARENT:
                first = each.operands if each.kind == "reduce" else each.results
                costs = _COSTLY.get(each.kind, 1)
                kernel.operations += costs * self.shapes[first[0]].size if first else 0
            for operand in each.operands:
                maker = self.maker.get(operand)
                if operand in self.cones and operand not in self.kept and maker is not None:
                    todo.append(maker)
        kernel.ops.reverse()
        updates = op.kind == "dynamic_update_slice"
        for operand in op.operands[1:] if updates else op.operands:
            for source, size in self.cone(operand).items():
                kernel.reads[source] = max(kernel.reads.get(source, 0), size)
        if updates:
            for source in self.cone(op.operands[0]):
                kernel.reads.setdefault(source, 0)
        for value in op.results:
            kernel.writes[value] = (
                self.shapes[op.operands[1]].nbytes if updates else self.nbytes(value)
            )
        if op.kind in _SLICES:
            kernel.reads = {v: min(n, self.nbytes(op.results[0])) for v, n in kernel.reads.items()}
        first = op.operands[1:] if updates else op.operands if op.kind == "reduce" else op.results
        kernel.size = self.shapes[first[0]].size if first else 0
        return kernel

    def _merged(self, kernels: list[Kernel]) -> list[Kernel]:
        """Returns the kernels with those in one that a compiler fuses though each writes a value."""
        for _ in range(4):
            before = len(kernels)
            kernels = self._siblings(self._rows(kernels))
            if len(kernels) == before:
                break
        if not self.gpu:
            return kernels
        return self._updated(self._added(self._picked(self._columns(kernels))))

    def _updated(self, kernels: list[Kernel]) -> list[Kernel]:
        """Merges casts of parameters with their updates, if these do not depend on what is cast.

        As of filters that the gradient of a convolution reads in reverse, which are not cast, then,
        before the sum of their own gradient has come.
        """
        owner = _makers(kernels)
        given: dict[int, list[Kernel]] = defaultdict(list)
        for kernel in kernels:
            for value in kernel.reads if not kernel.heavy else ():
                if value not in owner:
                    given[value].append(kernel)
        gone: set[Kernel] = set()
        for kernel in kernels:
            if kernel.heavy or not kernel.size or len(kernel.reads) != 1:
                continue
            (value,) = kernel.reads
            cast = owner.get(value)
            if cast is not None and not cast.heavy and len(cast.reads) == 1:
                (value,) = cast.reads
            for other in given[value]:
                alike = other is not kernel and other is not cast and other.size == kernel.size
                if alike and other not in gone and not _waits_for(other.reads, kernel, owner):
                    kernel.reads = {value: other.reads[value]}
                    _join(other, kernel, set(), keep=True)
                    owner |= dict.fromkeys(kernel.writes, other)
                    gone.add(kernel)
                    break
        return [kernel for kernel in kernels if kernel not in gone]

    def _added(self, kernels: list[Kernel]) -> list[Kernel]:
        """Merges scatters with what makes the updates that they alone read."""
        owner = _makers(kernels)
        users = Counter(value for kernel in kernels for value in kernel.reads)
        gone: set[Kernel] = set()
        for kernel in kernels:
            if kernel.op.kind != "scatter":
                continue
            for value in [v for v in kernel.reads if v in owner and users[v] == 1]:
                made = owner[value]
                light = not made.heavy or made.op.kind == "gather"
                if light and len(made.writes) == 1 and self.root(value) not in self.outputs:
                    del kernel.reads[value]
                    kernel.reads = made.reads | kernel.reads
                    kernel.ops = [*made.ops, *kernel.ops]
                    gone.add(made)
        return [kernel for kernel in kernels if kernel not in gone]

    def _picked(self, kernels: list[Kernel]) -> list[Kernel]:
        """Merges gathers of few elements with what reads the array too."""
        owner = _makers(kernels)
        gone: set[Kernel] = set()
        for kernel in kernels:
            source = self.root(kernel.op.operands[0]) if kernel.op.kind == "gather" else -1
            if source not in owner or _FEW * kernel.writes[kernel.op.results[0]] > self.nbytes(
                source
            ):
                continue
            for other in kernels:
                if (
                    not other.heavy
                    and source in other.reads
                    and not _waits_for(other.reads, kernel, owner)
                    and not _waits_for(kernel.reads, other, owner)
                ):
                    _join(other, kernel, set(), keep=True)
                    owner |= dict.fromkeys(kernel.writes, other)
                    gone.add(kernel)
                    break
        return [kernel for kernel in kernels if kernel not in gone]

    def _columns(self, kernels: list[Kernel]) -> list[Kernel]:
        """Merges sums over columns with what writes an array of the same elements."""
        owner = _makers(kernels)
        gone: set[Kernel] = set()
        for kernel in kernels:
            if kernel.op.kind != "reduce" or not kernel.size or self._by_row(kernel.op):
                continue
            for other in kernels:
                if other.heavy or other.size != kernel.size or other.op.kind == "reduce":
                    continue
                shared = sum(n for v, n in kernel.reads.items() if v in other.reads)
                if (
                    2 * shared >= sum(kernel.reads.values())
                    and shared
                    and not _waits_for(other.reads, kernel, owner)
                    and not _waits_for(kernel.reads, other, owner)
                ):
                    _join(other, kernel, set(), keep=True)
                    owner |= dict.fromkeys(kernel.writes, other)
                    gone.add(kernel)
                    break
        return [kernel for kernel in kernels if kernel not in gone]

    def _rows(self, kernels: list[Kernel]) -> list[Kernel]:
        """Merges kernels with those that read their results next, over the same elements.

        A reduction of rows, with the kernel that reads the rows again (as in a softmax); and what
        writes an array, with a reduction of it.
        """
        readers: dict[int, list[Kernel]] = defaultdict(list)
        owner = _makers(kernels)
        for kernel in kernels:
            for value in kernel.reads:
                readers[value].append(kernel)
        gone: set[Kernel] = set()
        for kernel in kernels:
            if kernel.heavy or not kernel.size:
                continue
            made = set(kernel.writes)
            found = dict.fromkeys(k for value in made for k in readers[value])
            users = [k for k in found if k is not kernel and k not in gone]
            alike = [k for k in users if not k.heavy and k.size == kernel.size]
            reduces = kernel.op.kind == "reduce"
            if reduces:
                if not self._by_row(kernel.op):
                    continue
                if len(users) > 1:
                    alike = [k for k in alike if k.op.kind == "reduce" and self._by_row(k.op)]
            else:
                alike = [k for k in alike if k.op.kind == "reduce"]
            for other in alike:
                rest = {v: n for v, n in other.reads.items() if v not in made}
                largest = max(kernel.reads.values(), default=0)
                new = any(8 * n > largest and v not in kernel.reads for v, n in rest.items())
                if (reduces and new) or _waits_for(rest, kernel, owner):
                    continue
                _join(other, kernel, made, keep=len(users) > 1 or not reduces)
                gone.add(kernel)
                owner |= dict.fromkeys(kernel.writes, other)
                for value in kernel.reads:
                    others = [k for k in readers[value] if k is not kernel and k is not other]
                    readers[value] = [*others, other]
                break
        return [k for k in kernels if k not in gone]

    def _by_row(self, op: Op) -> bool:
        """Returns whether a reduction sums the fastest dims, few enough for one kernel to hold."""
        dims, source = dims_of(op, "dimensions"), op.operands[0]
        order = self.orders.of(source)
        row = math.prod(self.shapes[source].dims[d] for d in dims)
        return bool(dims) and set(order[len(order) - len(dims) :]) == set(dims) and row <= _ROW

    def _siblings(self, kernels: list[Kernel]) -> list[Kernel]:
        """Merges kernels that read the same arrays in the same shape, none waiting for another."""
        level = _levels(kernels)
        places: dict[tuple[int, int], list[Kernel]] = defaultdict(list)
        kept = []
        for kernel, at in zip(kernels, level, strict=True):
            if kernel.heavy or not kernel.size:
                kept.append(kernel)
                continue
            for other in places[at, kernel.size]:
                if self.gpu and self._sums_alike(kernel, other) is False:
                    continue  # rows are summed in one kernel, columns in another
                shared = sum(n for v, n in kernel.reads.items() if v in other.reads)
                if 2 * shared >= sum(kernel.reads.values()) and shared:
                    _join(other, kernel, set(), keep=True)
                    break
            else:
                places[at, kernel.size].append(kernel)
                kept.append(kernel)
        return kept

    def _sums_alike(self, kernel: Kernel, other: Kernel) -> bool | None:
        """Returns whether two sums are both of rows or both of columns; None if one is no sum."""
        if kernel.op.kind != "reduce" or other.op.kind != "reduce":
            return None
        return self._by_row(kernel.op) == self._by_row(other.op)

    def post_order(self) -> list[int]:
        """Returns for each kernel its place if each comes right after the first visit of its operands."""
        owner = {v: i for i, k in enumerate(self.kernels) for op in k.ops for v in op.results}
        owner |= {value: i for i, k in enumerate(self.kernels) for value in k.writes}
        near = [
            list(dict.fromkeys(owner[v] for v in reads if owner.get(v, i) != i))
            for i, kernel in enumerate(self.kernels)
            # A fusion has its operands in the order in which producers were fused, the last first.
            for reads in [list(kernel.reads) if kernel.heavy else list(reversed(kernel.reads))]
        ]
        roots = [owner[v] for value in self.results for v in self._behind(value) if v in owner]
        places = [-1] * len(near)
        seen: set[int] = set()
        count = 0
        stack = [(i, False) for i in reversed([*roots, *range(len(near))])]
        while stack:
            i, left = stack.pop()
            if left:
                places[i], count = count, count + 1
            elif i not in seen:
                seen.add(i)
                stack.append((i, True))
                stack += [(j, False) for j in reversed(near[i]) if j not in seen]
        return places

    def _ordered(self, kernels: list[Kernel]) -> list[Kernel]:
        """Returns the kernels as late as their users allow, results of the step as early."""
        _, after = neighbours(kernels)
        early = _levels(kernels)
        late = list(early)
        for i in sorted(range(len(kernels)), key=lambda i: -early[i]):
            if after[i]:
                late[i] = min(late[j] for j in after[i]) - 1
        for kernel, level in zip(kernels, late, strict=True):
            kernel.level = level
        return [
            kernels[i]
            for i in sorted(range(len(kernels)), key=lambda i: (late[i], not kernels[i].heavy, i))
        ]


def _makers(kernels: Sequence[Kernel]) -> dict[int, Kernel]:
    """Returns what makes each value in memory."""
    owner = {value: kernel for kernel in kernels if kernel.heavy for value in kernel.op.results}
    return owner | {value: kernel for kernel in kernels for value in kernel.writes}


def _waits_for(values: Iterable[int], kernel: Kernel, owner: Mapping[int, Kernel]) -> bool:
    """Returns whether some values are made of what a kernel makes, through any others."""
    todo = [owner[value] for value in values if value in owner]
    seen = set(todo)
    while todo:
        each = todo.pop()
        if each is kernel:
            return True
        near = {owner[value] for value in each.reads if value in owner} - seen
        seen |= near
        todo += near
    return False


def _join(into: Kernel, kernel: Kernel, made: set[int], *, keep: bool) -> None:
    for value in made:
        into.reads.pop(value, None)
    for value, size in kernel.reads.items():
        into.reads[value] = max(into.reads.get(value, 0), size)
    into.operations += kernel.operations
    into.ops = [*kernel.ops, *into.ops]
    if keep:
        into.writes |= kernel.writes
    elif not into.writes.keys() & kernel.writes.keys():
        into.writes |= {value: 0 for value in kernel.writes}


def neighbours(kernels: Sequence[Kernel]) -> tuple[list[set[int]], list[set[int]]]:
    """Returns for each kernel the numbers of those that it waits for, and of those that wait for it."""
    owner = {value: i for i, k in enumerate(kernels) for op in k.ops for value in op.results}
    owner |= {value: i for i, k in enumerate(kernels) for value in k.writes}
    before: list[set[int]] = [set() for _ in kernels]
    after: list[set[int]] = [set() for _ in kernels]
    for i, kernel in enumerate(kernels):
        for value in kernel.reads:
            j = owner.get(value)
            if j is not None and j != i:
                before[i].add(j)
                after[j].add(i)
    return before, after


def _levels(kernels: list[Kernel]) -> list[int]:
    """Returns for each kernel the length of the longest chain that it waits for."""
    before, after = neighbours(kernels)
    waiting = [len(b) for b in before]
    ready = [i for i, n in enumerate(waiting) if not n]
    level = [0] * len(kernels)
    while ready:
        i = ready.pop()
        for j in after[i]:
            level[j] = max(level[j], level[i] + 1)
            waiting[j] -= 1
            if not waiting[j]:
                ready.append(j)
    return level


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


def size_of(shapes: dict[int, Shape], op: Op) -> int:
    """Returns the bytes of the larger of what a collective takes and gives."""
    taken = sum(shapes[v].nbytes for v in op.operands)
    return max(taken, sum(shapes[v].nbytes for v in op.results))
