"""Every collective of the simulated shard_map against the real one."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from simulated import (
    AB,
    EVERY,
    MESHES,
    clipped,
    compare,
    names,
    numbers,
    real,
    refusal,
    same,
    simulated,
    stacked,
    vary,
    with_types,
)

import shardwise as sw

CHOICES = {
    "a=8": ["a"],
    "a=2,b=4": [("b", "a"), "b", ("a", "b")],
    "a=2,b=2,c=2": [("b", "a", "c"), ("c", "a")],
    "a=2,b=1,c=2,d=2": [("d", "a", "c"), ("d", "b")],
}


def _reduce(x, axes, n):
    return [f(x, axes) for f in (lax.psum, lax.pmean)] + [lax.psum({"x": x, "y": (x * 2,)}, axes)]


def _extreme(x, axes, n):
    x = lax.stop_gradient(x)
    return [lax.pmax(x, axes), lax.pmin(x, axes)]


def _gather(x, axes, n):
    tiled = [lax.all_gather(x, axes, axis=d, tiled=True) for d in (0, -1)]
    return [*tiled, *(lax.all_gather(x, axes, axis=d) for d in (0, 1, 2))]


def _scatter(x, axes, n):
    tiled = [lax.psum_scatter(x, axes, scatter_dimension=d, tiled=True) for d in (0, 1)]
    return tiled + [
        lax.psum_scatter(x[:n], axes),
        lax.psum_scatter(x[:, :n], axes, scatter_dimension=1),
    ]


def _permute(x, axes, n):
    if not isinstance(axes, str):
        axes = tuple(sorted(axes))  # the mesh's order; another test covers other orders
    turn = [(i, (i + 1) % n) for i in range(n)]
    others = [[(0, n - 1)], [(i, i + 1) for i in range(n - 1)], []]
    out = [lax.ppermute(x, axes, perm) for perm in (turn, *others)]
    return [*out, lax.pshuffle(x, axes, range(n)[::-1])]


def _all_to_all(x, axes, n):
    tiled = [lax.all_to_all(x, axes, s, c, tiled=True) for s in (0, 1) for c in (0, 1)]
    # JAX's own derivative of these fails if the two dims differ.
    cut = lax.stop_gradient(x[:n, :n])
    plain = [lax.all_to_all(cut, axes, s, c) for s in (0, 1) for c in (0, 1)]
    last = lax.all_to_all(lax.stop_gradient(x[:n, :, None]), axes, 0, 2)
    one = [lax.all_to_all(x[:n], axes, 0, 0), lax.all_to_all(x[:, :n], axes, 1, 1)]
    swapped = [lax.pswapaxes(cut, axes, 0), lax.pswapaxes(cut, axes, 1)]
    return [*tiled, *plain, last, *one, *swapped]


def _index(x, axes, n):
    assert lax.axis_size(axes) == n
    return [lax.axis_index(axes), x * lax.axis_index(axes), jnp.float32(lax.axis_size(axes))]


FAMILIES = {
    "reduce": _reduce,
    "extreme": _extreme,
    "gather": _gather,
    "scatter": _scatter,
    "permute": _permute,
    "all_to_all": _all_to_all,
    "index": _index,
}


PLACES = {
    "reduce": MESHES[1:3],
    "extreme": MESHES[:2],
    "gather": (MESHES[1], MESHES[3]),
    "scatter": (MESHES[1], MESHES[3]),
    "permute": MESHES[1:3],
    "all_to_all": (MESHES[1], MESHES[3]),
    "index": MESHES[:3],
}


@with_types(
    [(f, m) for f, meshes in PLACES.items() for m in meshes],
    [(f, AB) for f in ("reduce", "gather", "scatter", "permute")],
)
def test_collective(name, vma):
    family, mesh = name
    every, sizes = names(mesh), sw.mesh(mesh, on="none").shape

    @stacked
    def body(x, w):
        out = []
        # A value that varies along all axes, one that varies along some, and one along none.
        values = [x, vary(w, every, vma), vary(lax.psum(x, every), every, vma)]
        for i, axes in enumerate(CHOICES[mesh]):
            n = math.prod(sizes[a] for a in ((axes,) if isinstance(axes, str) else axes))
            out.append(FAMILIES[family](values[i], axes, n))
        return vary(out, every, vma)

    x, w = numbers(8 * 8, 8), numbers(8 * sizes[every[0]], 8, start=7)
    specs = ((P(every), P(every[0])), P(every))
    compare(body, mesh, *specs, x, w, tolerance=2e-4, check_vma=vma)


@pytest.mark.parametrize("mesh", ["a=8", "a=2,b=4"])
def test_collectives_of_values_typed_as_invariant(mesh):
    every = names(mesh)
    last = every[-1]

    def body(x):
        total = lax.psum(x, last)
        whole = lax.all_gather(x, last, axis=1, tiled=True, to="invarying")
        again = lax.psum(lax.pcast(total, last, to="varying"), last)
        moved = lax.ppermute(lax.pcast(total, last, to="varying"), last, [(0, 1), (1, 0)])
        return total, whole, again, moved[None]

    left = P(every[:-1])
    out_specs = (left, left, left, P(last, every[:-1]))
    compare(body, mesh, P(every[:-1], last), out_specs, numbers(4, 8))


@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "bool"])
def test_collective_of_dtype(dtype):
    # JAX's own CPU backend does not sum booleans correctly.
    families = [f for f in FAMILIES if (dtype, f) not in (("bool", "scatter"), ("bool", "reduce"))]

    @stacked
    def body(x):
        return vary([FAMILIES[family](x, "b", 4) for family in families], EVERY)

    x = numbers(64, 8, dtype=dtype)
    compare(body, AB, P(EVERY), P(EVERY), x, grad=False)


GROUPS = {
    "pairs": [[0, 1], [2, 3]],
    "across": [[0, 2], [3, 1]],
    "all": [[3, 1, 0, 2]],
    "alone": [[0], [1], [2], [3]],
}


@pytest.mark.parametrize(
    "mesh, groups",
    [
        ("data=2,x=4", "pairs"),
        ("group=2,x=4", "across"),
        ("x=4,member=2", "all"),
        ("data=2,x=4", "alone"),
    ],
)
def test_collective_in_groups(mesh, groups):
    options = {"axis_index_groups": GROUPS[groups]}
    n = len(GROUPS[groups][0])
    every = names(mesh)

    @stacked
    def body(x, w):
        return (
            lax.psum(x, "x", **options),
            lax.pmean(w, "x", **options),
            lax.pmax(lax.stop_gradient(x), "x", **options),
            lax.all_gather(w, "x", axis=1, **options),
            lax.all_gather(x, "x", axis=1, tiled=True, **options),
            lax.psum_scatter(x, "x", tiled=True, **options),
            lax.psum_scatter(w[:n], "x", **options),
            lax.all_to_all(x, "x", 0, 1, tiled=True, **options),
            lax.all_to_all(lax.stop_gradient(x[:n]), "x", 0, 1, **options),
        )

    args = (numbers(64, 2), numbers(8, 2, start=3))
    compare(body, mesh, (P(every), P()), P(every), *args, check_vma=False)


PERMUTATIONS = {
    "back": [(i, i - 1) for i in range(8)],
    "from the last": [(-1, 0), (0, 1)],
    "to the last": [(0, -1)],
    "one to two": [(0, 1), (0, 2)],
    "two to one": [(0, 1), (2, 1)],
    "two to one, by another name": [(0, 7), (2, -1)],
    "to none": [(i, i + 1) for i in range(8)],
    "from none": [(9, 0)],
}


@with_types(PERMUTATIONS, ["back"])
def test_permutation(name, vma):
    def body(x, w):
        return lax.ppermute(x, "a", PERMUTATIONS[name]), lax.ppermute(w, "a", PERMUTATIONS[name])

    args = (body, "a=8", (P("a"), P()), P("a"))
    x, w = numbers(8) + 10, numbers(2) + 5
    if vma:
        args = (lambda x, w: body(x, vary(w, "a")), *args[1:])
    try:
        want = jax.jit(real(*args, check_vma=vma))(x, w)
    except Exception:
        refusal(simulated(*args, check_vma=vma), x, w)
    else:
        same(jax.jit(simulated(*args, check_vma=vma))(x, w), want)


@pytest.mark.parametrize("axes", [("b", "a"), ("c", "a"), ("c", "b", "a"), ("b", "c", "a")])
def test_permutation_over_axes_in_another_order(axes):
    # JAX 0.10 takes the axes in the mesh's order, and newer JAX raises.
    n = 2 ** len(axes)

    def body(x):
        return lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])

    args = (body, "a=2,b=2,c=2", P(("a", "b", "c")), P(("a", "b", "c")))
    try:
        want = jax.jit(real(*args))(numbers(8))
    except Exception:
        refusal(simulated(*args), numbers(8))
    else:
        same(simulated(*args)(numbers(8)), want)


def test_broadcast_from_one_device():
    # The CPU backend has no such collective: the expected result comes from numpy.
    def body(x):
        return lax.pbroadcast(x, "b", 2)

    x = numbers(4, 8)
    got = simulated(body, AB, P("a", "b"), P("a", "b"))(x)
    np.testing.assert_array_equal(got, np.tile(np.asarray(x)[:, 4:6], (1, 4)))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bfloat16", "float32"])
@pytest.mark.parametrize("mesh", ["x=256", "a=32,b=16"])
def test_sum_of_many_equal_values(mesh, dtype):
    every = names(mesh)
    x = jnp.asarray([1, 2, 3], dtype)
    f = simulated(lambda v: lax.psum(v, every), mesh, P(), P(), check_vma=False)
    count = sw.mesh(mesh, on="none").size
    want = (np.asarray(x).astype(np.float64) * count).astype(np.int64)
    got = f(x)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, np.asarray(want).astype(x.dtype))


def test_extremes_cannot_be_differentiated():
    for f in (lax.pmax, lax.pmin):
        for made in (real, simulated):
            g = made(lambda x, f=f: f(x, "a"), "a=8", P("a"), P())
            error = refusal(jax.grad(lambda x, g=g: g(x).sum()), numbers(8))
            assert isinstance(error, NotImplementedError)


PLANS = [
    tuple(zip("abcd", sizes, strict=False))
    for sizes in [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (2, 1, 4), (2, 1, 2, 2), (2, 2, 1, 2)]
]
LOCAL = {
    "sin": lambda v, w: jnp.sin(v * 1.3),
    "matmul": lambda v, w: v @ w,
    "add": lambda v, w: v + w[0],
    "flip": lambda v, w: v[::-1] * 0.7,
    "cumsum": lambda v, w: jnp.cumsum(v, 0) * 0.3,
    "index": lambda v, w: v[jnp.array([1, 1, 0, 3, 2, 5, 7, 6])],
    "set": lambda v, w: v.at[2].add(w[1]).at[0].set(w[0]),
    "relu": lambda v, w: jax.nn.relu(v) + 0.1 * v,
    "bfloat16": lambda v, w: v.astype("float16").astype("float32"),
}


def run_steps(steps, v, w, every, sizes, vma):
    for step in steps:
        v = run_step(step, v, w, every, sizes, vma)
    return v


def run_step(step, v, w, every, sizes, vma):
    kind, *rest = step
    if kind == "local":
        return LOCAL[rest[0]](v, w)
    if kind in ("scan", "remat", "jit", "cond", "vmap", "clip"):
        inner = functools.partial(run_steps, rest[0], w=w, every=every, sizes=sizes, vma=vma)

        def full(v):
            return vary(inner(vary(v, every, vma)), every, vma)

        v = vary(v, every, vma)
        if kind == "scan":
            return lax.scan(lambda c, k: (full(c) * k, None), v, jnp.array([0.7, 1.1]))[0]
        if kind == "remat":
            return jax.checkpoint(full)(v)
        if kind == "jit":
            return jax.jit(full)(v)
        if kind == "clip":
            return clipped(full(v)) * 1.5
        if kind == "vmap":
            return jax.vmap(full)(jnp.stack([v, -v])).sum(0)
        return lax.cond(lax.psum(v.sum(), every) > 0, full, lambda v: v * 0.5, v)
    axes = rest[0]
    if kind in ("permute", "some"):
        axes = tuple(sorted(axes))
    n = math.prod(sizes[a] for a in axes)
    v = vary(v, axes, vma)
    if kind == "psum":
        return v + 0.2 * lax.psum(jnp.sin(v), axes)
    if kind == "mean":
        return lax.pmean(v, axes)
    if kind == "max":
        return v - lax.pmax(lax.stop_gradient(v), axes)
    if kind == "permute":
        return lax.ppermute(v, axes, [(i, (i + rest[1]) % n) for i in range(n)]) + 0.1 * v
    if kind == "some":
        return v + lax.ppermute(v, axes, [(0, n - 1)])
    if kind == "all_to_all":
        return lax.all_to_all(v, axes, 0, 0, tiled=True)
    if kind == "scatter":
        return lax.all_gather(lax.psum_scatter(v, axes, tiled=True) * 0.5, axes, tiled=True)
    if kind == "gather":
        return jnp.sin(lax.all_gather(v, axes, axis=1)).mean(1) + v
    if kind == "where":
        return v * (1.0 + lax.axis_index(axes))
    if kind == "branch":
        return lax.cond(lax.axis_index(axes) % 2 == 0, jnp.sin, lambda v: v * 0.5, v)
    raise AssertionError(kind)


KINDS = ("psum", "mean", "max", "some", "all_to_all", "scatter", "gather", "where", "branch")


@st.composite
def programs(draw):
    plan = draw(st.sampled_from(PLANS))
    every = [a for a, _ in plan]
    subsets = st.lists(st.sampled_from(every), min_size=1, unique=True).map(tuple)
    leaf = st.one_of(
        st.tuples(st.just("local"), st.sampled_from(sorted(LOCAL))),
        st.tuples(st.sampled_from(KINDS), subsets),
        st.tuples(st.sampled_from(KINDS), subsets),
        st.tuples(st.just("permute"), subsets, st.integers(0, 3)),
    )
    wrapped = st.tuples(
        st.sampled_from(("scan", "remat", "jit", "cond", "vmap", "clip")),
        st.lists(leaf, min_size=1, max_size=2),
    )
    steps = draw(st.lists(st.one_of(leaf, leaf, wrapped), min_size=1, max_size=3))
    split_axes = draw(st.lists(st.sampled_from(every), unique=True))
    cut = draw(st.integers(0, len(split_axes)))
    spec = P(tuple(split_axes[:cut]), tuple(split_axes[cut:]))
    return plan, steps, spec, draw(st.booleans())


@given(programs())
@settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_any_program(program):
    plan, steps, spec, vma = program
    sizes, every = dict(plan), tuple(a for a, _ in plan)
    mesh = ",".join(f"{a}={n}" for a, n in plan)

    def body(x, w):
        v = run_steps(steps, x, w, every, sizes, vma)
        whole = vary(v, every, vma)
        return whole[None], lax.psum(jnp.sin(whole), every)

    ways = [math.prod(sizes[a] for a in entry or ()) for entry in spec]
    x, w = numbers(8 * ways[0], 2 * ways[1]), numbers(2, 2, start=5)
    compare(body, mesh, (spec, P()), (P(every), P()), x, w, tolerance=2e-3, check_vma=vma)
