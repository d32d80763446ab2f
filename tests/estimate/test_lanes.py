"""What arrays of attention heads take in a TPU's memory."""

import pytest

from shardwise._estimate.kernels.graph import Kernel
from shardwise._estimate.kernels.tpu.lanes import heads_of, padded
from shardwise._estimate.program.partitioning import Op
from shardwise._hlo import Shape

ROWS = (4, 16, 1024)
ARRAY = 2 * 4 * 16 * 1024 * 64


@pytest.mark.parametrize(
    ("head", "times"), [(64, 2), (128, 1), (256, 1)], ids=["half", "whole", "two"]
)
def test_rows_of_heads_fill_registers(head, times):
    shapes = dict.fromkeys(range(3), Shape("bf16", (*ROWS, head)))
    call = Kernel([Op("custom_call", (0,), (1,))], True, {0: 0}, {1: 0})
    size = ARRAY * head // 64
    copy = Kernel([Op("transpose", (1,), (2,))], False, {1: size}, {2: size})
    heads = heads_of([call, copy], shapes)
    assert padded(copy, shapes, heads).total == 2 * times * size
    assert padded(copy, shapes, heads_of([copy], shapes)).total == 2 * size


def test_halves_of_heads_are_written_and_read_again():
    shapes = {0: Shape("bf16", (*ROWS, 128)), 1: Shape("bf16", (*ROWS, 128))}
    shapes |= {2: Shape("f32", (*ROWS, 64)), 3: Shape("f32", (*ROWS, 64))}
    ops = [Op("slice", (0,), (2,)), Op("slice", (0,), (3,)), Op("concatenate", (2, 3), (1,))]
    turned = Kernel(ops, False, {0: 2 * ARRAY}, {1: 2 * ARRAY})
    # Two halves of bfloat16, each twice as large in memory, written and read.
    assert padded(turned, shapes, {128}).total == 4 * ARRAY + 2 * 2 * 2 * ARRAY
