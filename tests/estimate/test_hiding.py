"""The order in which a GPU's compiler runs kernels beside collectives."""

import pytest

from shardwise._estimate.kernels.hiding import hiding_order
from shardwise._estimate.kernels.windows import Kernel
from shardwise._estimate.program.partitioning import Op


def kernel(kind, reads, writes):
    made = Op(kind, tuple(reads), tuple(writes))
    return Kernel([made], True, dict.fromkeys(reads, 1), dict.fromkeys(writes, 1))


def steps(*, sent):
    """Returns a loss, the gradients towards the head and what is before it, and a loop over the rest.

    `sent` is how long the head's gradient takes to be scattered.
    """
    found = {
        "loss": (kernel("dot_general", [0], [1]), 5.0),
        "head": (kernel("dot_general", [1], [2]), 5.0),
        "inner": (kernel("dot_general", [1], [3]), 5.0),
        "norm": (kernel("reduce", [3], [4]), 0.5),
        "loop": (kernel("while", [3], [5]), 0.0),
        "scatter": (kernel("reduce-scatter", [2], [6]), sent),
        "sum": (kernel("all-reduce", [4], [7]), 0.1),
        "update": (kernel("add", [5, 6, 7], [8]), 1.0),
    }
    kernels, seconds = zip(*found.values(), strict=True)
    order, ends = hiding_order(kernels, seconds, {list(found).index("loop")})
    names = {id(k): name for name, (k, _) in found.items()}
    run = [names[id(k)] for k in order]
    return run, {name: run[end] for name, end in zip(run, ends, strict=True)}


@pytest.mark.parametrize(("sent", "late"), [(9.0, True), (0.1, False)], ids=["long", "short"])
def test_a_gradient_runs_beside_a_sum_after_the_loop_if_its_own_transfer_is_long(sent, late):
    run, beside = steps(sent=sent)
    assert (run.index("head") > run.index("loop")) == late
    if late:
        assert beside["sum"] == "head"
    assert run[-1] == "update" and run[0] == "loss"


def test_collectives_that_are_combined_run_once_all_their_operands_are_there():
    parts = [
        kernel("dot_general", [0], [1]),
        kernel("dot_general", [1], [2]),
        kernel("reduce-scatter", [1], [3]),
        kernel("reduce-scatter", [2], [4]),
    ]
    order, ends = hiding_order(parts, [1.0, 1.0, 0.0, 2.0], set(), [[2, 3]])
    assert order == parts and ends == [0, 1, 3, 3]


def test_kernels_that_wait_for_each_other_all_run():
    parts = [kernel("add", [0, 2], [1]), kernel("add", [1], [2])]
    assert {id(k) for k in hiding_order(parts, [1.0, 1.0], set())[0]} == {id(k) for k in parts}
