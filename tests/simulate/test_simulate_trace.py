"""Traces of a simulated shard_map against its loops and the compiled program."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from simulated import (
    AB,
    EVERY,
    X,
    all_vary,
    clipped,
    line_of,
    numbers,
    real,
    scaled,
    simulated,
    vary,
)


def t_line(x):
    y = lax.psum(x, "a")  # 1
    z = lax.all_gather(x, "b", tiled=True)  # 2
    u = lax.psum_scatter(z, "b", tiled=True)  # 3
    v = lax.ppermute(u, "a", [(0, 1), (1, 0)])  # 4
    w = lax.all_to_all(z, "b", 0, 1, tiled=True)  # 5
    k = lax.pmax(x.astype("bfloat16"), ("b", "a"))  # 6
    n = lax.pmin(x, "b")  # 7
    return y.sum() + z.sum() + u.sum() + v.sum() + w.sum() + k.sum() + n.sum()


def test_trace_of_a_straight_line():
    # Local (2, 2) float32: 16 bytes; gathered over b: 64.
    f = simulated(t_line, AB, X, P(), check=False, check_vma=False)
    trace = f.trace(numbers(4, 8))
    rows = [(e.kind, e.axes, e.devices, e.shape, e.dtype, e.times, e.sent_bytes) for e in trace]
    assert rows == [
        ("psum", ("a",), 2, (2, 2), "float32", 1, 16),
        ("all_gather", ("b",), 4, (2, 2), "float32", 1, 48),
        ("psum_scatter", ("b",), 4, (8, 2), "float32", 1, 48),
        ("ppermute", ("a",), 2, (2, 2), "float32", 1, 16),
        ("all_to_all", ("b",), 4, (8, 2), "float32", 1, 48),
        ("pmax", ("b", "a"), 8, (2, 2), "bfloat16", 1, 14),
        ("pmin", ("b",), 4, (2, 2), "float32", 1, 24),
    ]
    assert [e.line for e in trace] == [line_of(t_line, f"# {i}") for i in range(1, 8)]
    assert trace.total_bytes == sum(row[-1] for row in rows)
    assert trace[1].total_bytes == 48
    assert len(trace) == 7
    text = str(trace)
    assert "7 collectives on a=2,b=4" in text
    assert "all_gather" in text
    assert "<table" in trace._repr_html_()


HLO = {
    "psum": "all-reduce",
    "all_gather": "all-gather",
    "psum_scatter": "reduce-scatter",
    "ppermute": "collective-permute",
    "all_to_all": "all-to-all",
    "pmax": "all-reduce",
}


@pytest.mark.parametrize("kind", HLO)
@pytest.mark.parametrize("count", [1, 3])
def test_trace_against_the_compiled_program(kind, count):
    calls = {
        "psum": lambda x: x * lax.psum(x, "b"),
        "pmax": lambda x: x * lax.pmax(x, "a"),
        "all_gather": lambda x: x + lax.all_gather(x, "b").sum(0) ** 2,
        "psum_scatter": lambda x: (
            x * lax.psum_scatter(jnp.concatenate([x, x**2]), "b", tiled=True)[0]
        ),
        "ppermute": lambda x: x * lax.ppermute(x, "b", [(0, 1), (1, 2)]),
        "all_to_all": lambda x: (
            x * lax.all_to_all(jnp.concatenate([x, x**2]), "b", 0, 0, tiled=True)[:2]
        ),
    }

    def body(x):
        for _ in range(count):
            x = jnp.sin(calls[kind](x))
        return x

    x = numbers(4, 8)
    text = jax.jit(real(body, AB, X, X)).lower(x).as_text()
    word = HLO[kind].replace("-", "_")
    found = len(re.findall(rf"stablehlo\.{word}\b", text))
    trace = simulated(body, AB, X, X).trace(x)
    assert [e.kind for e in trace] == [kind] * found
    assert found == count


def t_loops(x):
    def inner(c, _):
        return c + all_vary(lax.psum(c, "b")), None  # in the inner

    def outer(c, _):
        c = lax.scan(inner, c, None, length=3)[0]
        return lax.ppermute(c, "a", [(0, 1)]), None  # in the outer

    return lax.scan(outer, x, None, length=2)[0]


def t_while(x):
    def body(c):
        return c[0] + 1, lax.ppermute(c[1], "a", [(0, 1)])  # in the body

    def go(c):
        return lax.psum(c[0], "b") < 20  # in the condition

    return lax.while_loop(go, body, (vary(0, "b"), x))[1]


def t_cond(x):
    go = lax.psum(x.sum(), EVERY) < 1e9  # before
    return lax.cond(
        go,
        lambda v: lax.ppermute(v, "b", [(0, 1)]),  # taken
        lambda v: all_vary(lax.psum(v, "a")),  # not taken
        x,
    )


def t_across(x):
    def step(c, i):
        go = (lax.axis_index("a") == 1) & (i < 2)
        return lax.cond(go, lambda v: all_vary(lax.psum(v, "b")), lambda v: v, c), None  # in one

    return lax.scan(step, x, jnp.arange(5))[0]


def t_called(x):
    @jax.jit
    def twice(v):
        return v * lax.psum(v, "b")  # in jit

    return jax.checkpoint(twice)(twice(x))


def t_vmap(x):
    return jax.vmap(lambda row: row * lax.psum(row, "b"))(x)  # in vmap


def t_grad(x):
    return jax.grad(lambda v: jnp.sum(jnp.sin(lax.all_gather(v, "b"))))(x)  # in grad


def t_custom(x):
    return clipped(jax.nn.relu(scaled(x)))


TRACES = {
    "loops": (t_loops, [("psum", "in the inner", 6), ("ppermute", "in the outer", 2)]),
    "while": (t_while, [("psum", "in the condition", 6), ("ppermute", "in the body", 5)]),
    "cond": (t_cond, [("psum", "before", 1), ("ppermute", "taken", 1)]),
    "across": (t_across, [("psum", "in one", 2)]),
    "called": (t_called, [("psum", "in jit", 1)] * 2),
    "vmap": (t_vmap, [("psum", "in vmap", 1)]),
    "grad": (t_grad, [("all_gather", "in grad", 1), ("psum_scatter", "in grad", 1)]),
    "none": (lambda x: x, []),
}


@pytest.mark.parametrize("name", TRACES)
def test_trace_counts(name):
    body, want = TRACES[name]
    trace = simulated(body, AB, X, X).trace(numbers(4, 8))
    got = [(e.kind, e.line, e.times) for e in trace]
    if name == "while":  # the condition is evaluated once before the first iteration
        seen = {}
        for kind, line, times in got:
            seen[kind, line] = seen.get((kind, line), 0) + times
        got = [(*place, times) for place, times in seen.items()]
    at = {text: line_of(body, f"# {text}") for _, text, _ in want}
    if name == "cond":
        at["taken"] = line_of(body, ",  # taken")
    assert got == [(kind, at[text], times) for kind, text, times in want]


def test_trace_of_custom_derivatives():
    trace = simulated(t_custom, AB, X, X).trace(numbers(4, 8))
    assert [(e.kind, e.times) for e in trace] == [("psum", 1)]
    assert trace[0].line == line_of(scaled, "return lax.psum(x")


def test_trace_of_groups_and_of_one_device():
    groups = [[0, 1], [2, 3], [4, 5], [6, 7]]
    f = simulated(
        lambda x: lax.psum(x, "a", axis_index_groups=groups), "a=8", P("a"), P("a"), check_vma=False
    )
    (event,) = f.trace(numbers(8, 16))
    assert (event.devices, event.sent_bytes) == (2, 64)
    (event,) = simulated(lambda x: lax.psum(x, "a"), "a=1", P("a"), P()).trace(numbers(8))
    assert (event.devices, event.sent_bytes) == (1, 0)
