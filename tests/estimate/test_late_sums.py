"""Which gradients of weights a TPU's compiler computes late, and what thin products take."""

import math

import pytest

from shardwise._chips import parse_chips
from shardwise._estimate.kernels.tpu.windows import Kernel, sums_last
from shardwise._estimate.program.partitioning import Op
from shardwise._hlo import Shape
from shardwise._time.cycles import TpuPricer

KEPT, MADE, SUMMED, STACK, CHAIN, LOOP = range(6)


def kernel(kind, reads, writes, shapes, heavy=True):
    each = [{v: shapes[v].nbytes for v in values} for values in (reads, writes)]
    return Kernel([Op(kind, tuple(reads), tuple(writes))], heavy, *each)


def order(rows, ends, stacked=0, windowed=0):
    """Returns the kinds of a block with one gradient of `rows` rows, in the order of its kernels."""
    shapes = dict.fromkeys(range(6), Shape("bf16", (rows, 1024)))
    shapes[LOOP] = Shape("bf16", (max(1, stacked), rows, 1024))
    loop = Op("while", (LOOP,), (CHAIN,))
    kernels = [
        kernel("dot_general", [KEPT], [MADE], shapes),
        kernel("reduce-scatter", [MADE], [SUMMED], shapes),
        kernel(ends, [SUMMED], [STACK], shapes, heavy=False),
        Kernel([loop], True) if stacked else kernel("all-reduce", [KEPT], [CHAIN], shapes),
    ]
    kernels[1].windowed = windowed
    return [k.op.kind for k in sums_last(kernels, shapes, {LOOP: Op("while", (), (LOOP,))})]


@pytest.mark.parametrize(
    ("rows", "windowed", "late"), [(1024, 0, True), (1024, 4, False), (4096, 0, False)]
)
def test_a_loop_sums_small_gradients_last(rows, windowed, late):
    kinds = order(rows, "dynamic_update_slice", windowed=windowed)
    assert (kinds[0] == "all-reduce") is late


@pytest.mark.parametrize(
    ("layers", "windowed", "late"), [(2, 0, False), (3, 0, True), (3, 4, False), (4, 4, True)]
)
def test_a_head_waits_for_a_loop_over_a_larger_stack(layers, windowed, late):
    assert (order(4096, "add", stacked=layers, windowed=windowed)[0] == "while") is late


def test_products_of_few_columns_take_what_their_arrays_take():
    pricer = TpuPricer(None, parse_chips("v5p:2x2x4"))
    # Rows, what is summed, columns; microseconds that the compiler estimates on v5p.
    for rows, summed, columns, compiled in [
        (65536, 128, 4096, 885), (65536, 4096, 128, 408), (65536, 512, 4096, 1060),
        (32768, 128, 1024, 125), (16384, 256, 1024, 73),
    ]:  # fmt: skip
        shapes = [Shape("bf16", (rows, summed)), Shape("bf16", (summed, columns))]
        moved = sum(s.nbytes for s in shapes) + 2 * rows * columns
        flops = 2 * math.prod((rows, summed, columns))
        price = pricer.dot(shapes, [[1], [0], []], flops, moved)
        assert price.seconds == pytest.approx(compiled * 1e-6, rel=0.2)
