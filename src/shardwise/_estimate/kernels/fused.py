"""Groups the operations of a partitioned step into kernels, as the compilers fuse them.

Products, collectives, loops and library calls are kernels of their own. What lies between them is
fused: each value that must be in memory (an operand of such a kernel, a result of the step, a
reduction) is made by one kernel, which computes everything from what is in memory already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ..program import Op, Orders, Program, numbers_of
from .graph import COLLECTIVES, Kernel, captured, levels_of, neighbours
from .merging import Merger
from .scattering import ALIASES, scattered
from .tpu import filters_last, mark_windows, relaid, sums_last

# Made again wherever they are read.
_TRANSPARENT = {"constant", "iota", "broadcast_in_dim", "partition_id", "replica_id"}
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
# What takes more operations than this, one after the other, is random.
_LONG = 60


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
        self.kernels = self._ordered(Merger(self).merged(self._grouped()))
        if is_ring is not None:
            mark_windows(self.kernels, program.shapes, self.maker, is_ring, devices)
            self.kernels = filters_last(relaid(self.kernels, self.shapes, self.maker))
            self.kernels = sums_last(self.kernels, self.shapes, self.maker)

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
        depth: dict[int, int] = defaultdict(int)  # operations, one after the other
        for op in self.ops:
            if op.kind in _HEAVY or op.kind in ("reduce", "dynamic_update_slice"):
                continue
            cone: dict[int, int] = {}
            own = 0 if op.kind in ALIASES | _TRANSPARENT else _COSTLY.get(op.kind, 1)
            longest = max((depth[v] for v in op.operands if v not in self.kept), default=0)
            depth.update(dict.fromkeys(op.results, own + longest))
            for operand in op.operands:
                for source, size in self.cone(operand).items():
                    cone[source] = max(cone.get(source, 0), size)
            for value in op.results:
                size = self.shapes[value].nbytes
                if op.kind in _SLICES:
                    cone = {source: min(read, size) for source, read in cone.items()}
                plain = op.kind not in ALIASES | _TRANSPARENT
                large = sum(cone.values()) > 1.01 * size or (self.gpu and op.kind in _ONCE)
                # A mask of random bits takes a byte where they take hundreds of operations.
                large |= depth[value] > _LONG and self.shapes[value].dtype == "pred"
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
        early = levels_of(kernels)
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
