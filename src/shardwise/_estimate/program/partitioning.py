"""The step as Shardy partitions it: operations with their shapes on one device, and collectives.

Shardy, the partitioner of both compilers, is part of jaxlib: its propagation and its explicit
reshards run here on the lowered step, so that collectives are those that it inserts. The compilers
run its propagation only, and insert collectives by older code, which chooses otherwise for products.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..._hlo import Shape, unpartitioned
from ..._jax import mlir_bindings
from .gathers import gather_for_products, mark_products
from .invariants import read_inside, read_outside
from .products import match_products
from .visits import in_order_of_need, in_own_order

_PROPAGATION = "builtin.module(sdy-propagation-pipeline)"
_RESHARDS = "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))"
_COLLECT = "builtin.module(func.func(sdy-reshard-to-collectives))"
_FRAME = re.compile(r'"([^"]*)"\("([^"]*)":(\d+):')
_SPLIT = re.compile(r"<@?[\w<>\[\]\"=, ]*?, \[([^\[\]]*)\]")  # how its dims are, by value
_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')
_TYPES = {"i1": "pred", "ui8": "u8", "ui32": "u32", "ui64": "u64", "ui16": "u16"}
_COLLECTIVES = {
    "sdy.all_gather": ("all-gather", "gathering_axes"),
    "sdy.all_reduce": ("all-reduce", "reduction_axes"),
    "sdy.reduce_scatter": ("reduce-scatter", "reduce_scatter_axes"),
    "sdy.all_to_all": ("all-to-all", "params"),
    "sdy.collective_permute": ("collective-permute", "out_sharding"),
}


# Inside a `shard_map`, collectives name devices in place of axes.
_WRITTEN = {
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "collective_permute": "collective-permute",
}


@dataclasses.dataclass(slots=True)
class Op:
    """One operation of the partitioned step.

    Attributes:
        kind: its name without the dialect, such as `dot_general`; collectives have HLO's names.
        operands: the values it reads.
        results: the values it makes.
        attributes: what its price depends on, such as contracted dims.
        axes: the mesh axes of a collective, each with the size of the part that it runs over; of a
            scatter, those that split the rows of its result; of a slice or a concatenation, those
            that split the dim along which it moves data; of a product, those that split nothing.
        dims: the dims that a collective gathers or splits; of those two, that dim; of a broadcast,
            where the dims of its operand are.
        location: where it comes from, as MLIR writes it.
        body: the operations of a loop's body; `inside` its arguments, `after` what they become.
        trips: how many times a loop runs.
        manual: whether it is in the body of a `shard_map`.
    """

    kind: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    axes: tuple[tuple[str, int], ...] = ()
    dims: tuple[int, ...] = ()
    location: str = ""
    body: list[Op] = dataclasses.field(default_factory=list)
    inside: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    trips: int = 1
    manual: bool = False

    @property
    def frames(self) -> list[tuple[str, int, str]]:
        """File, line and function of each Python frame, innermost first."""
        return [(file, int(line), name) for name, file, line in _FRAME.findall(self.location)]


@dataclasses.dataclass(slots=True)
class Program:
    """A partitioned step: its operations in order, and the shape of each value on one device.

    Attributes:
        ops: the operations.
        shapes: by value.
        arguments: the values that the step is given.
        outputs: the values that it returns.
        donated: the arguments whose memory outputs reuse.
        host: the values in the memory of the hosts.
    """

    ops: list[Op]
    shapes: dict[int, Shape]
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: frozenset[int]
    host: frozenset[int] = frozenset()


def partition(module: Any, mesh: Mapping[str, int]) -> Program:
    """Returns a lowered step as one device of a mesh runs it.

    Args:
        module: what `lowered.compiler_ir("stablehlo")` returns; it is not changed.
        mesh: the sizes of the mesh's axes by name.

    Raises:
        ValueError: the partitioner of the installed jaxlib rejects it.
    """
    ir, passmanager = mlir_bindings()
    with module.context:
        own = unpartitioned(module)
        try:
            in_order_of_need(own, ir)
            read_outside(own)
            passmanager.PassManager.parse(_PROPAGATION).run(own.operation)
            read_inside(own)
            in_own_order(own, ir)
            match_products(own, mesh, ir)
            mark_products(own, ir)
            passmanager.PassManager.parse(_RESHARDS).run(own.operation)
            gather_for_products(own, mesh, ir)
            passmanager.PassManager.parse(_COLLECT).run(own.operation)
        except (ValueError, ir.MLIRError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"Shardy cannot partition this step: {first}") from error
        return _Reader(ir, mesh).program(own)


class _Reader:
    def __init__(self, ir: Any, mesh: Mapping[str, int]):
        self.ir, self.mesh = ir, mesh
        self.shapes: dict[int, Shape] = {}
        self.constants: dict[int, int] = {}
        # The axes that split each value.
        self.split: dict[int, frozenset[tuple[str, int]]] = {}
        # The axes over which types are local already, inside a `shard_map`.
        self.manual: frozenset[str] = frozenset()

    def program(self, module: Any) -> Program:
        (main,) = (op for op in module.body.operations if op.operation.name == "func.func")
        block = main.regions[0].blocks[0]
        known: dict[Any, int] = {}
        given = (
            self.ir.ArrayAttr(main.attributes["arg_attrs"])
            if "arg_attrs" in main.attributes
            else None
        )
        arguments, donated, host = [], set(), set()
        for number, argument in enumerate(block.arguments):
            text = str(given[number]) if given is not None else ""
            value = self._new(argument.type, text if "sdy.sharding" in text else "", 0)
            known[argument] = value
            arguments.append(value)
            if "tf.aliasing_output" in text or "jax.buffer_donor" in text:
                donated.add(value)
            if '"pinned_host"' in text:
                host.add(value)
        ops, outputs = self._block(block, known)
        return Program(
            ops, self.shapes, tuple(arguments), tuple(outputs), frozenset(donated), frozenset(host)
        )

    def _new(self, kind: Any, sharding: str, number: int) -> int:
        value = len(self.shapes)
        self.shapes[value] = self._local(kind, sharding, number)
        each = _SPLIT.findall(sharding)
        self.split[value] = frozenset(self._axes(each[number]) if number < len(each) else ())
        return value

    def _local(self, kind: Any, sharding: str, number: int) -> Shape:
        try:
            ranked = self.ir.RankedTensorType(kind)
        except (ValueError, TypeError):
            return Shape("token", ())
        name = str(ranked.element_type)
        found = re.fullmatch(r"complex<f(\d+)>", name)
        name = f"c{2 * int(found[1])}" if found else _TYPES.get(name, name)
        name = re.sub(r"^i(\d+)$", r"s\1", name)
        name = re.sub(
            r"^f(\d+)E(\d+)M(\d+)(\w*)$", lambda m: f"f{m[1]}e{m[2]}m{m[3]}{m[4].lower()}", name
        )
        dims = list(ranked.shape)
        each = _SPLIT.findall(sharding)
        if number < len(each):
            for dim, text in enumerate(re.findall(r"\{([^}]*)\}", each[number])[: len(dims)]):
                axes = [size for name, size in self._axes(text) if name not in self.manual]
                ways = math.prod(axes)
                dims[dim] = -(-dims[dim] // ways)
        return Shape(name, tuple(dims))

    def _axes(self, text: str) -> tuple[tuple[str, int], ...]:
        found = []
        for name, _, part in _AXIS.findall(text):
            if name in self.mesh:
                found.append((name, int(part) if part else self.mesh[name]))
        return tuple(found)

    def _idle(self, split: Sequence[frozenset[tuple[str, int]]]) -> tuple[tuple[str, int], ...]:
        """Returns the axes that split none of some values, and what is left of those that partly do."""
        found = []
        for name, size in self.mesh.items():
            used = max((part for each in split for axis, part in each if axis == name), default=1)
            if used < size:
                found.append((name, size // used))
        return tuple(found)

    def _block(self, block: Any, known: dict[Any, int]) -> tuple[list[Op], list[int]]:
        ops: list[Op] = []
        for each in block.operations:
            op = each.operation
            if op.name in ("func.return", "stablehlo.return", "sdy.return"):
                return ops, [known[value] for value in op.operands]
            ops += self._op(op, known)
        return ops, []

    def _op(self, op: Any, known: dict[Any, int]) -> Iterator[Op]:
        name = op.name
        operands = tuple(known[value] for value in op.operands if value in known)
        if name == "sdy.manual_computation":
            yield from self._shard_map(op, operands, known)
            return
        if name == "stablehlo.reverse" and self._is_same(op):
            known[op.results[0]] = operands[0]
            return
        sharding = ""
        for attribute in ("sdy.sharding", "out_sharding", "sharding"):
            if attribute in op.attributes:
                sharding = str(op.attributes[attribute])
                break
        results = []
        for number, result in enumerate(op.results):
            value = self._new(result.type, sharding, number)
            known[result] = value
            results.append(value)
        kind = name.partition(".")[2]
        made = Op(
            kind, operands, tuple(results), location=str(op.location), manual=bool(self.manual)
        )
        if name in _COLLECTIVES:
            made.kind, attribute = _COLLECTIVES[name]
            text = str(op.attributes[attribute])
            made.axes, made.dims = self._axes(text), _split_dims(text)
            if kind == "collective_permute":
                made.axes = made.axes or tuple(self.mesh.items())
        elif name.startswith("stablehlo.") and kind in _WRITTEN:
            made.kind, made.axes = _WRITTEN[kind], self._spanned(op)
            if "source_target_pairs" in op.attributes:
                made.attributes = {"pairs": str(op.attributes["source_target_pairs"])}
        elif name == "sdy.all_slice":
            text = str(op.attributes["slicing_axes"])
            made.axes, made.dims = self._axes(text), _split_dims(text)
        elif name == "stablehlo.while":
            yield self._while(op, made, known)
            return
        elif kind == "scatter" and results:
            each = re.findall(r"<@?[\w<>\[\]\"=, ]*?, \[\{([^}]*)\}", sharding)
            made.axes = self._axes(each[0]) if each else ()
        elif kind in ("slice", "concatenate") and results:
            axes, made.dims = self._shifted(op, sharding)
            for _ in range(self._permutes(op, kind) if axes else 0):
                shape = self.shapes[results[0]]
                moved = len(self.shapes)
                self.shapes[moved], self.split[moved] = shape, self.split[results[0]]
                source = made.operands[0]
                yield Op(
                    "collective-permute", (source,), (moved,), axes=axes, location=made.location
                )
                made.operands = (moved, *made.operands[1:])
            # What a GPU's compiler makes of it depends on where both halves of a rotation are from.
            made.axes = axes
            if kind == "slice":
                made.attributes = {"start_indices": str(op.attributes["start_indices"])}
        elif kind == "broadcast_in_dim":
            made.dims = tuple(self.ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
        elif name in ("stablehlo.constant", "sdy.constant"):
            made.kind = "constant"
            # JAX's bindings cannot read attributes of every dtype, such as complex numbers.
            if results and self.shapes[results[0]].dtype in ("s32", "s64", "u32", "u64"):
                found = re.search(r"dense<(-?\d+)> : tensor<", str(op.attributes["value"]))
                if found:
                    self.constants[results[0]] = int(found[1])
        elif name in ("stablehlo.case", "stablehlo.if"):
            ops, outputs = self._block(op.regions[0].blocks[0], known)
            yield from ops
            for result, value in zip(op.results, outputs, strict=False):
                known[result] = value
            return
        elif len(op.regions) == 0:
            made.attributes = (
                {named.name: named.attr for named in _named(op)} if kind in _PRICED else {}
            )
            made.attributes = {key: str(value) for key, value in made.attributes.items()}
            if kind in ("dot_general", "convolution") and not self.manual:
                split = [self.split[value] for value in (*operands, *results)]
                made.attributes["split"] = split
                made.axes = self._idle(split)
        elif kind in _PRICED:
            made.attributes = {named.name: str(named.attr) for named in _named(op)}
        yield made

    def _is_same(self, reverse: Any) -> bool:
        """Returns whether only dims of size 1 are reversed, as of a filter of one pixel."""
        sizes = list(self.ir.RankedTensorType(reverse.results[0].type).shape)
        return all(
            sizes[d] == 1 for d in self.ir.DenseI64ArrayAttr(reverse.attributes["dimensions"])
        )

    def _shifted(
        self, op: Any, sharding: str
    ) -> tuple[tuple[tuple[str, int], ...], tuple[int, ...]]:
        """Returns the split dim along which an operation moves data, if there is one, after its axes."""
        each = _SPLIT.findall(sharding)
        dims = re.findall(r"\{([^}]*)\}", each[0]) if each else []
        before, after = (
            list(self.ir.RankedTensorType(v.type).shape) for v in (op.operands[0], op.results[0])
        )
        for dim, text in enumerate(dims[: len(after)]):
            axes = [(n, s) for n, s in self._axes(text) if n not in self.manual and s > 1]
            if axes and before[dim] != after[dim]:
                return tuple(axes), (dim,)
        return (), ()

    def _permutes(self, op: Any, kind: str) -> int:
        """Returns how many permutes move what is cut off or joined along a split dim."""
        if kind == "slice":
            # The two halves of a rotation are moved when they are joined.
            users = [use.owner.name for use in op.results[0].uses]
            return 0 if users and all(n == "stablehlo.concatenate" for n in users) else 1
        first, last = (
            math.prod(self.ir.RankedTensorType(v.type).shape)
            for v in (op.operands[0], op.operands[len(op.operands) - 1])
        )
        if first == last:
            # Rotated by half, in either direction: what a loop carries goes to the next stage.
            users = [use.owner.name for use in op.results[0].uses]
            return 2 if "stablehlo.return" in users else 1
        return 1 if first > last else 2

    def _shard_map(self, op: Any, operands: tuple[int, ...], known: dict[Any, int]) -> Iterator[Op]:
        block = op.regions[0].blocks[0]
        inner = dict(known) | dict(zip(block.arguments, operands, strict=True))
        outside = self.manual
        self.manual = outside | {name for name, _ in self._axes(str(op.attributes["manual_axes"]))}
        ops, outputs = self._block(block, inner)
        self.manual = outside
        yield from ops
        for result, value in zip(op.results, outputs, strict=True):
            known[result] = value

    def _spanned(self, op: Any) -> tuple[tuple[str, int], ...]:
        """Returns the axes that the devices of a collective differ in."""
        names = ("replica_groups", "source_target_pairs")
        text = next((str(op.attributes[n]) for n in names if n in op.attributes), "")
        if "mesh_axes" in text:
            return self._axes(text)
        groups = re.findall(r"\[([\d, ]+)\]", text.partition(":")[0])
        sizes = tuple(self.mesh.values())
        spans: set[int] = set()
        for group in groups[: math.prod(sizes)]:
            devices = [int(n) for n in group.split(",")]
            places = np.array(np.unravel_index(devices, sizes))
            spans |= {i for i, row in enumerate(places) if len(set(row.tolist())) > 1}
        return tuple(item for i, item in enumerate(self.mesh.items()) if i in spans)

    def _while(self, op: Any, made: Op, known: dict[Any, int]) -> Op:
        condition, body = op.regions[0].blocks[0], op.regions[1].blocks[0]
        inner = dict(known)
        inside = []
        for argument, outer in zip(body.arguments, made.operands, strict=True):
            value = len(self.shapes)
            self.shapes[value], self.split[value] = self.shapes[outer], self.split[outer]
            inner[argument] = value
            inside.append(value)
        for result, outer in zip(made.results, made.operands, strict=True):
            self.shapes[result], self.split[result] = self.shapes[outer], self.split[outer]
        checked = dict(known)
        for argument, outer in zip(condition.arguments, made.operands, strict=True):
            checked[argument] = outer
        ops, _ = self._block(condition, checked)
        bounds = [
            self.constants[v] for o in ops for v in (*o.operands, *o.results) if v in self.constants
        ]
        made.trips = max([1, *bounds])
        made.body, after = self._block(body, inner)
        made.inside, made.after = tuple(inside), tuple(after)
        return made


_PRICED = {
    "dot_general",
    "convolution",
    "custom_call",
    "reduce",
    "transpose",
    "pad",
    "gather",
    "sort",
}


def _split_dims(text: str) -> tuple[int, ...]:
    """Returns the dims of a list of axes by dim that has any."""
    return tuple(dim for dim, axes in enumerate(re.findall(r"\{([^}]*)\}", text)) if axes)


def _named(op: Any) -> Iterator[Any]:
    for number in range(len(op.attributes)):
        yield op.attributes[number]
