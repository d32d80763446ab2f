"""Which operations a GPU's compiler computes in one kernel, on small programs."""

import dataclasses

import pytest

from shardwise._estimate.costs import Costs
from shardwise._estimate.kernels.combining import combined, paired
from shardwise._estimate.kernels.fused import Block
from shardwise._estimate.kernels.memory import peak_of
from shardwise._estimate.kernels.rewrites import rewritten
from shardwise._estimate.program.partitioning import Op, Program
from shardwise._estimate.program.simplify import simplified
from shardwise._hlo import Shape

AXES = (("data", 8),)


class Made:
    """A program that is written down operation by operation."""

    def __init__(self):
        self.shapes: dict[int, Shape] = {}
        self.ops: list[Op] = []
        self.arguments: list[int] = []

    def given(self, dtype, *dims):
        self.shapes[len(self.shapes)] = Shape(dtype, dims)
        self.arguments.append(len(self.shapes) - 1)
        return self.arguments[-1]

    def op(self, kind, operands, dtype, *dims, axes=(), places=(), **attributes):
        value = len(self.shapes)
        self.shapes[value] = Shape(dtype, dims)
        self.ops.append(
            Op(kind, tuple(operands), (value,), attributes=attributes, axes=axes, dims=places)
        )
        return value

    def dot(self, left, right, dtype, *dims, over):
        numbers = (
            "#stablehlo.dot<lhs_contracting_dimensions = [{}], rhs_contracting_dimensions = [{}]>"
        )
        return self.op(
            "dot_general", (left, right), dtype, *dims,
            dot_dimension_numbers=numbers.format(*over),
        )  # fmt: skip

    def program(self, *outputs):
        return Program(self.ops, self.shapes, tuple(self.arguments), tuple(outputs), frozenset())

    def block(self, *outputs):
        return Block(self.program(*outputs), self.ops, outputs)


def summed(made, value, dims, *, over):
    return made.op(
        "reduce", (value,), "f32", *dims, dimensions=f"array<i64: {str(list(over))[1:-1]}>"
    )


def test_a_sum_over_columns_is_computed_with_what_writes_its_elements():
    """As the gradient of a norm's scale, and that of its input, which waits for sums of rows."""
    made = Made()
    x, y = made.given("bf16", 4096, 1024), made.given("bf16", 4096, 1024)
    product = made.op("multiply", (x, y), "f32", 4096, 1024)
    columns = summed(made, product, (1024,), over=(0,))
    rows = summed(made, product, (4096,), over=(1,))
    spread = made.op("broadcast_in_dim", (rows,), "f32", 4096, 1024)
    out = made.op("subtract", (product, spread), "bf16", 4096, 1024)
    block = made.block(columns, out)
    (kernel,) = block.kernels
    assert {columns, out} <= kernel.writes.keys()


def test_rows_are_summed_and_read_again_in_one_kernel():
    made = Made()
    x = made.given("f32", 64, 2048)
    largest = summed(made, x, (64,), over=(1,))
    spread = made.op("broadcast_in_dim", (largest,), "f32", 64, 2048)
    out = made.op("subtract", (x, spread), "bf16", 64, 2048)
    assert len(made.block(out).kernels) == 1


def test_what_is_read_in_float32_too_is_kept_in_its_own_dtype():
    """The residual after a sum over devices: read by a norm's sum, the norm and the next residual."""
    made = Made()
    x, y = made.given("bf16", 4096, 1024), made.given("bf16", 4096, 1024)
    residual = made.op("add", (x, y), "bf16", 4096, 1024)
    wide = made.op("convert", (residual,), "f32", 4096, 1024)
    rows = summed(made, wide, (4096,), over=(1,))
    spread = made.op("broadcast_in_dim", (rows,), "f32", 4096, 1024)
    out = made.op("multiply", (wide, spread), "f32", 4096, 1024)
    assert residual in made.block(out).kept


def test_a_gather_of_few_elements_is_computed_with_what_else_reads_the_array():
    made = Made()
    x, w = made.given("bf16", 512, 256), made.given("bf16", 256, 32000)
    places = made.given("s32", 512, 1)
    logits = made.dot(x, w, "f32", 512, 32000, over=(1, 0))
    chosen = made.op("gather", (logits, places), "f32", 512, 1)
    largest = summed(made, logits, (512,), over=(1,))
    block = made.block(chosen, largest)
    (both,) = [k for k in block.kernels if chosen in k.writes]
    assert largest in both.writes and not both.heavy


def test_a_scatter_computes_what_it_adds():
    made = Made()
    table, places = made.given("f32", 1000, 64), made.given("s32", 4096, 1)
    x, y = made.given("bf16", 4096, 64), made.given("bf16", 4096, 64)
    rows = made.op("add", (x, y), "bf16", 4096, 64)
    added = made.op("convert", (rows,), "f32", 4096, 64)
    out = made.op("scatter", (table, places, added), "f32", 1000, 64)
    (kernel,) = made.block(out).kernels
    assert {x, y} <= kernel.reads.keys() and added not in kernel.reads


def test_a_filter_that_is_turned_around_waits_for_its_own_update():
    """XLA fuses what reads a parameter with its update, if no update depends on it."""
    made = Made()
    weight, gradient = made.given("f32", 512, 512), made.given("f32", 512, 512)
    turned = made.op("reverse", (weight,), "bf16", 512, 512)
    gathered = made.op("all-gather", (turned,), "bf16", 4096, 512, axes=AXES, places=(0,))
    total = made.op("reduce-scatter", (gradient,), "f32", 512, 512, axes=AXES, places=(0,))
    update = made.op("add", (weight, total), "f32", 512, 512)
    block = made.block(gathered, update)
    (both,) = [k for k in block.kernels if turned in k.writes]
    assert update in both.writes
    order = [k.op.kind for k in block.kernels]
    assert order.index("reduce-scatter") < order.index("all-gather")


def test_a_cast_that_its_update_depends_on_does_not_wait():
    made = Made()
    weight, x = made.given("f32", 512, 512), made.given("bf16", 512, 512)
    cast = made.op("convert", (weight,), "bf16", 512, 512)
    product = made.dot(cast, x, "f32", 512, 512, over=(1, 0))
    update = made.op("add", (weight, product), "f32", 512, 512)
    block = made.block(update)
    assert [k for k in block.kernels if cast in k.writes and update in k.writes] == []


@pytest.mark.parametrize(("sizes", "groups"), [((8, 8, 8), 1), ((16, 8, 8), 2)])
def test_gathers_are_combined_up_to_30_mib(sizes, groups):
    made = Made()
    gathered = []
    for size in sizes:
        part = made.given("bf16", size * 2**16, 1)
        gathered.append(
            made.op("all-gather", (part,), "bf16", size * 2**19, 1, axes=AXES, places=(0,))
        )
    block = made.block(*gathered)
    found = combined(block, range(len(block.kernels)), set())
    assert sorted(len(group) for group in found) == sorted([3] if groups == 1 else [2, 1])


def test_collectives_that_wait_for_each_other_through_groups_are_not_combined():
    made = Made()
    a, b = made.given("f32", 4096), made.given("f32", 4096)

    def total(value, axes):
        return made.op("all-reduce", (value,), "f32", 4096, axes=axes)

    other = (("model", 8),)
    first, second = total(a, AXES), total(b, other)
    # A sum over `model` that waits for one over `data`, and the other way round.
    third = total(made.op("negate", (first,), "f32", 4096), other)
    fourth = total(made.op("negate", (second,), "f32", 4096), AXES)
    block = made.block(third, fourth)
    found = combined(block, (), set())
    together = [sorted(group) for group in found if len(group) > 1]
    assert len(together) <= 1


def test_products_with_an_operand_in_common_run_as_one():
    made = Made()
    x = made.given("bf16", 512, 256)
    weights = [made.given("bf16", 256, 128) for _ in range(3)]
    out = [made.dot(x, w, "bf16", 512, 128, over=(1, 0)) for w in weights]
    assert paired(made.block(*out), []) == [[0, 1]]


def test_copies_in_another_order_take_memory():
    made = Made()
    x = made.given("bf16", 64, 2048, 128)
    y = made.given("bf16", 64, 2048, 128)
    half = made.op("add", (x, y), "bf16", 64, 2048, 128)
    block = made.block(half)
    value = len(block.shapes)
    block.shapes[value] = block.shapes[half]
    copy = dataclasses.replace(block.kernels[0], reads={half: 1}, writes={value: 2**25})
    kernels = [*block.kernels, copy]
    peak, _ = peak_of(block, kernels, [0, 1], lambda kernel: 0)
    assert peak == 2**25


def test_sums_over_dims_of_one_element_are_no_sums():
    made = Made()
    x = made.given("f32", 64, 1)
    out = made.op("negate", (summed(made, x, (64,), over=(1,)),), "f32", 64)
    assert [op.kind for op in simplified(made.program(out), gpu=True).ops] == ["reshape", "negate"]


@pytest.mark.parametrize(("terms", "kind"), [(2, "reduce"), (256, "dot_general")])
def test_a_gpu_fuses_products_that_sum_a_few_terms(terms, kind):
    made = Made()
    x, w = made.given("bf16", 512, terms), made.given("bf16", terms, 512)
    out = made.dot(x, w, "bf16", 512, 512, over=(1, 0))
    (op,) = rewritten(made.program(out), gpu=True).ops
    assert op.kind == kind


class Streamed:
    """Prices by bytes and how much slower than a copy they pass."""

    def streamed(self, access, penalty=1.0):
        return Priced(penalty)


@dataclasses.dataclass(frozen=True)
class Priced:
    seconds: float


@pytest.mark.parametrize(
    ("heads", "group", "row", "slower"),
    [
        ((2, 8), 4, 4096, 1.13),  # the group is the block's rows
        ((4, 4), 3, 2048, 3.0),  # rows of eight heads
        ((1, 2), 7, 1536, 1.07),  # too few heads for that
        ((2, 8), 1, 2048, 1.3),  # no groups
    ],
)
def test_the_gradient_of_a_softmax_is_as_slow_as_its_rows_lie_apart(heads, group, row, slower):
    made = Made()
    dims = (*heads, 2048, group, row)
    x = made.given("f32", *dims)
    rows = summed(made, x, dims[:-1], over=(4,))
    spread = made.op("broadcast_in_dim", (rows,), "f32", *dims)
    out = made.op("multiply", (x, spread), "f32", *dims)
    (kernel,) = made.block(out).kernels
    costs = Costs.__new__(Costs)
    costs.shapes, costs.near, costs.pricer = made.shapes, (), Streamed()
    costs.machine = type("Machine", (), {"gpu": object()})()
    assert costs.of(kernel, ()).seconds == slower


@pytest.mark.parametrize(("rows", "longest"), [(3136, 3136), (8192, 128), (32768, 256)])
def test_long_columns_are_summed_in_two_steps(rows, longest):
    made = Made()
    x = made.given("f32", rows, 1024)
    out = summed(made, x, (1024,), over=(0,))
    (kernel,) = made.block(out).kernels
    costs = Costs.__new__(Costs)
    costs.shapes = made.shapes
    assert costs._least(kernel) == pytest.approx(longest * 32 / 24e9)


def test_gathers_of_results_alone_run_once_on_tpus():
    """As of parameters that ZeRO updates in parts."""
    made = Made()
    part = made.given("bf16", 512, 1024)
    whole = made.op("all-gather", (part,), "bf16", 4096, 1024, axes=AXES, places=(0,))
    program = made.program(whole)
    block = Block(program, made.ops, (whole,), is_ring=lambda op: True, devices=8)
    assert [kernel.repeats for kernel in block.kernels] == [1]


def test_a_gpu_scatters_into_the_other_term_of_a_sum():
    made = Made()
    x, places = made.given("f32", 512, 32000), made.given("s32", 512, 1)
    updates = made.given("f32", 512)
    zero = made.op("constant", (), "f32")
    zeros = made.op("broadcast_in_dim", (zero,), "f32", 512, 32000)
    chosen = made.op("scatter", (zeros, places, updates), "f32", 512, 32000)
    out = made.op("add", (chosen, x), "f32", 512, 32000)
    ops = rewritten(made.program(out), gpu=True).ops
    (scatter,) = [op for op in ops if op.kind in ("scatter", "add")]
    assert scatter.operands == (x, places, updates) and scatter.results == (out,)
