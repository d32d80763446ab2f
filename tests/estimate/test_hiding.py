"""The order in which a GPU's compiler runs kernels beside collectives."""

import pytest

from shardwise._estimate.kernels.graph import Kernel
from shardwise._estimate.kernels.hiding import Step, hiding_order, lives_of
from shardwise._estimate.program.partitioning import Op


def kernel(kind, reads, writes):
    made = Op(kind, tuple(reads), tuple(writes))
    return Kernel([made], True, dict.fromkeys(reads, 1), dict.fromkeys(writes, 1))


def run_of(found, **options):
    """Returns the names of what runs, is sent (`>`) and is waited for (`<`), in order."""
    kernels, seconds = zip(*found.values(), strict=True)
    names, marks = list(found), {"run": "", "send": ">", "wait": "<"}
    steps = hiding_order(kernels, [1e-6 * s for s in seconds], **options)
    return ["+".join(marks[step.part] + names[n] for n in step.kernels) for step in steps]


def steps(*, sent):
    """Returns a loss, the gradients towards the head and what is before it, and a loop over the rest.

    `sent` is how long the sum before the loop travels, in microseconds.
    """
    found = {
        "loss": (kernel("dot_general", [0], [1]), 50.0),
        "head": (kernel("dot_general", [1], [2]), 50.0),
        "inner": (kernel("dot_general", [1], [3]), 50.0),
        "norm": (kernel("reduce", [3], [4]), 5.0),
        "total": (kernel("all-reduce", [3], [9]), sent),
        "loop": (kernel("while", [9], [5]), 0.0),
        "scatter": (kernel("reduce-scatter", [2], [6]), 90.0),
        "sum": (kernel("all-reduce", [4], [7]), 20.0),
        "update": (kernel("add", [5, 6, 7], [8]), 10.0),
    }
    return run_of(found, blocked={list(found).index("loop")})


@pytest.mark.parametrize(("sent", "late"), [(9.0, True), (90.0, False)], ids=["short", "long"])
def test_a_loop_runs_after_the_sums_that_have_travelled_less_than_what_it_waits_for(sent, late):
    run = steps(sent=sent)
    assert (run.index("<sum") > run.index("loop")) == late
    assert run[-1] == "update" and run[0] == "loss"


def test_one_collective_travels_at_a_time_beside_what_does_not_need_it():
    found = {
        "one": (kernel("dot_general", [0], [1]), 40.0),
        "first": (kernel("all-reduce", [1], [2]), 30.0),
        "two": (kernel("dot_general", [0], [3]), 40.0),
        "second": (kernel("all-reduce", [3], [4]), 30.0),
        "end": (kernel("add", [2, 4], [5]), 5.0),
    }
    run = run_of(found)
    travelling = 0
    for name in run:
        travelling += {">": 1, "<": -1}.get(name[0], 0)
        assert travelling in (0, 1)
    assert run.index(">first") < run.index("two") < run.index("<first")


def test_a_gradient_runs_where_the_next_product_is_not_ready():
    """The products of a chain are unpacked before they are read; a third one fills the gap."""
    found = {
        "a": (kernel("dot_general", [0], [1]), 40.0),
        "b": (kernel("dot_general", [1], [2]), 40.0),
        "weights": (kernel("dot_general", [0], [3]), 30.0),
        "c": (kernel("dot_general", [2], [4]), 40.0),
        "end": (kernel("add", [3, 4], [5]), 5.0),
    }
    assert run_of(found) == ["a", "b", "c", "weights", "end"]


def test_copies_begin_when_nothing_else_can_run():
    found = {
        "gradient": (kernel("dot_general", [0], [1]), 40.0),
        "chain": (kernel("dot_general", [0], [2]), 40.0),
        "store": (kernel("dynamic_update_slice", [1], [3]), 2.0),
        "end": (kernel("add", [2], [4]), 5.0),
    }
    run = run_of(found, copied={2})
    assert run.index("gradient") < run.index(">store") < run.index("chain")
    assert run_of(found).index("gradient") > 0


def test_collectives_that_are_combined_run_once_all_their_operands_are_there():
    found = {
        "a": (kernel("dot_general", [0], [1]), 1.0),
        "b": (kernel("dot_general", [1], [2]), 1.0),
        "c": (kernel("reduce-scatter", [1], [3]), 0.0),
        "d": (kernel("reduce-scatter", [2], [4]), 2.0),
    }
    assert run_of(found, combined=[[2, 3]]) == ["a", "b", ">c+>d", "<c+<d"]


def test_what_a_collective_reads_is_alive_until_it_is_waited_for():
    found = [Step((0,), "run"), Step((1,), "send"), Step((2,), "run"), Step((1,), "wait")]
    assert lives_of(found) == ([0, 1, 2], [0, 2, 2])


def test_kernels_that_wait_for_each_other_all_run():
    parts = [kernel("add", [0, 2], [1]), kernel("add", [1], [2])]
    assert {n for step in hiding_order(parts, [1.0, 1.0]) for n in step.kernels} == {0, 1}
