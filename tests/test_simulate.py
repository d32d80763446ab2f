"""The simulated shard_map against the real one, on eight virtual devices."""

import functools
import inspect
import math
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw

MESHES = ("a=8", "a=2,b=4", "a=2,b=2,c=2", "a=2,b=1,c=2,d=2")
AB = "a=2,b=4"
BOTH = pytest.mark.parametrize("vma", [True, False], ids=["typed", "untyped"])


# --- helpers ------------------------------------------------------------------------------------

# Most of the time goes into compiling: quickly is better than well.
compiled = functools.partial(
    jax.jit,
    compiler_options={
        "xla_llvm_disable_expensive_passes": True,
        "xla_backend_optimization_level": 0,
    },
)


def with_types(names, untyped):
    """Returns a mark for each name with `check_vma`, and for some of them without too."""
    cases = [(n, v) for n in names for v in (True, False) if v or n in untyped]
    texts = [n if isinstance(n, str) else "-".join(n) for n, _ in cases]
    ids = [f"{t}-{'typed' if v else 'untyped'}" for t, (_, v) in zip(texts, cases, strict=True)]
    return pytest.mark.parametrize("name, vma", cases, ids=ids)


@functools.cache
def devices(text):
    return sw.mesh(text, on="cpu:8")


def names(text):
    return tuple(sw.mesh(text, on="none").axis_names)


def real(body, mesh, in_specs, out_specs, **options):
    given_mesh = devices(mesh) if isinstance(mesh, str) else mesh
    return jax.shard_map(body, mesh=given_mesh, in_specs=in_specs, out_specs=out_specs, **options)


def simulated(body, mesh, in_specs, out_specs, **options):
    return sw.simulate(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def numbers(*shape, dtype="float32", start=0):
    """Returns numbers of both signs, none of them twice, none a whole."""
    count = math.prod(shape)
    flat = np.sin(np.arange(start, start + count) * 1.7 + 0.3) * 2 + 0.01 * np.arange(count)
    if dtype == "bool":
        flat = flat > 0
    elif dtype.startswith(("int", "uint")):
        flat = np.round(flat * 5)
    return jnp.asarray(flat.reshape(shape)).astype(dtype)


def plain(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array if array.dtype.kind in "biuc" else array.astype(np.float64)


def same(got, want, tolerance=2e-5):
    """Asserts one tree, one set of shapes and dtypes, and the same numbers up to rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert getattr(ours, "weak_type", None) == getattr(theirs, "weak_type", None)
        if ours.size == 0 or ours.dtype == jax.dtypes.float0:
            continue
        one, two = plain(ours), plain(theirs)
        if one.dtype.kind in "biu":
            np.testing.assert_array_equal(one, two)
        else:
            coarse = 0.03 if theirs.dtype == jnp.bfloat16 else tolerance
            scale = np.abs(two[np.isfinite(two)]).max(initial=1.0)
            np.testing.assert_allclose(one, two, rtol=coarse, atol=coarse * scale)


def is_float(leaf):
    return jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)


def loss(tree):
    """Returns a scalar to which every number of the results adds in its own way."""
    total = jnp.float32(0)
    for leaf in jax.tree.leaves(tree):
        if is_float(leaf):
            wide = leaf.astype("float32")
            total += jnp.sum(jnp.sin(wide + 0.37 * jnp.arange(wide.size).reshape(wide.shape)))
    return total


def with_gradient(fn):
    """Returns the results of a function and the gradients with respect to its float arguments."""

    def run(*args):
        floats = tuple(i for i, a in enumerate(args) if all(map(is_float, jax.tree.leaves(a))))

        def scalar(*args):
            out = fn(*args)
            return loss(out), out

        grads, out = jax.grad(scalar, floats, has_aux=True)(*args)
        return out, grads

    return run


def compare(body, mesh, in_specs, out_specs, *args, grad=True, wrap=None, tolerance=2e-5, **opts):
    """Asserts that the simulated results and gradients are the real ones."""
    wrap = wrap or (with_gradient if grad else lambda fn: fn)
    want = compiled(wrap(real(body, mesh, in_specs, out_specs, **opts)))(*args)
    got = compiled(wrap(simulated(body, mesh, in_specs, out_specs, **opts)))(*args)
    same(got, want, tolerance)
    return got


def varying(value):
    return jax.typeof(value).manual_axis_type.varying


def vary(value, axes, vma=True):
    """Returns a value that varies along all of `axes`, whatever it varied along."""

    def one(leaf):
        leaf = jnp.asarray(leaf)
        more = tuple(a for a in axes if a not in varying(leaf)) if vma else ()
        return lax.pcast(leaf, more, to="varying") if more else leaf

    return jax.tree.map(one, value)


def stacked(body):
    """Returns the body with a dim for the devices before each result: any of them can be returned."""

    @functools.wraps(body)
    def run(*args):
        return jax.tree.map(lambda out: jnp.asarray(out)[None], body(*args))

    return run


def refusal(fn, *args):
    """Returns the error of a call and of what it left to be done."""
    with pytest.raises(Exception) as info:
        jax.block_until_ready(fn(*args))
        jax.effects_barrier()
    return info.value


def line_of(body, text):
    """Returns where a line of a function of this file is, as a trace tells it."""
    lines, start = inspect.getsourcelines(body)
    (at,) = (i for i, line in enumerate(lines) if text in line)
    return f"{os.path.basename(__file__)}:{start + at}"


# --- every collective ---------------------------------------------------------------------------

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
        axes = tuple(sorted(axes))  # the mesh's order: see the test of any other
    turn = [(i, (i + 1) % n) for i in range(n)]
    others = [[(0, n - 1)], [(i, i + 1) for i in range(n - 1)], []]
    out = [lax.ppermute(x, axes, perm) for perm in (turn, *others)]
    return [*out, lax.pshuffle(x, axes, range(n)[::-1])]


def _all_to_all(x, axes, n):
    tiled = [lax.all_to_all(x, axes, s, c, tiled=True) for s in (0, 1) for c in (0, 1)]
    # JAX's own derivative of these fails where the two dims differ.
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
        # What differs everywhere, what differs along some axes, and what is the same everywhere.
        values = [x, vary(w, every, vma), vary(lax.psum(x, every), every, vma)]
        for i, axes in enumerate(CHOICES[mesh]):
            n = math.prod(sizes[a] for a in ((axes,) if isinstance(axes, str) else axes))
            out.append(FAMILIES[family](values[i], axes, n))
        return vary(out, every, vma)

    x, w = numbers(8 * 8, 8), numbers(8 * sizes[every[0]], 8, start=7)
    specs = ((P(every), P(every[0])), P(every))
    compare(body, mesh, *specs, x, w, tolerance=2e-4, check_vma=vma)


@pytest.mark.parametrize("mesh", ["a=8", "a=2,b=4"])
def test_collectives_of_values_that_jax_knows_to_be_the_same(mesh):
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
    # Of truth values, what JAX's own CPU backend adds up is no number.
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
    # JAX 0.10 takes the axes in the mesh's order, and newer JAX refuses.
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
    # The CPU backend has no such collective: the expectation is numpy's.
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


# --- from outside: derivatives and other transformations ------------------------------------------


def layer(x, w, v):
    """A layer of tensor and data parallelism with one collective of each kind."""
    h = jnp.tanh(x @ w)
    y = lax.psum(h @ v, "b")
    y = y + lax.pmean(lax.all_gather(x.sum(1), "a", tiled=True).sum(), "a")
    z = lax.ppermute(y, "a", [(0, 1), (1, 0)])
    part = lax.psum_scatter(z, "a", scatter_dimension=1, tiled=True)
    return y + lax.all_gather(part, "a", axis=1, tiled=True)


LAYER = (AB, (P("a"), P(None, "b"), P("b")), P("a"))


def layer_args():
    return numbers(4, 3), numbers(3, 8, start=5), numbers(8, 2, start=9)


@functools.cache
def layer_results():
    """Returns the real results of the layer and their gradients, on one device."""
    out = compiled(with_gradient(real(layer, *LAYER)))(*layer_args())
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), out)


def _jvp(f):
    return lambda *a: jax.jvp(f, a, tuple(jnp.cos(x) for x in a))


def _vjp(f):
    def run(*args):
        out, back = jax.vjp(f, *args)
        return back(jnp.cos(out))

    return run


def _linear(f):
    def run(*args):
        out, push = jax.linearize(f, *args)
        return out, push(*args)

    return run


def _scan(f):
    def run(x, w, v):
        def step(carry, scale):
            y = f(carry, w, v) * scale
            return jnp.tanh(carry + y.sum()), y

        return lax.scan(step, x, jnp.arange(1.0, 4.0))

    return with_gradient(run)


def _closed(f):
    def run(x, w, v):
        return jax.grad(lambda w: loss(jax.jit(lambda x: f(x, w, v * w.sum()))(x)))(w)

    return run


WRAPS = {
    "gradient": with_gradient,
    "jvp": _jvp,
    "vjp": _vjp,
    "linearize": _linear,
    "jacfwd": lambda f: jax.jacfwd(f, 1),
    "jacrev": lambda f: jax.jacrev(f, 2),
    "hessian": lambda f: jax.hessian(lambda *a: loss(f(*a)), 1),
    "vmap": lambda f: (
        lambda x, w, v: jax.vmap(f, (0, None, 1))(
            jnp.stack([x, x * 2]), w, jnp.stack([v, v + 1], 1)
        )
    ),
    "vmap_of_grad": lambda f: (
        lambda x, w, v: jax.vmap(jax.grad(lambda *a: loss(f(*a)), (0, 1)), (None, 0, None))(
            x, jnp.stack([w, -w]), v
        )
    ),
    "scan": _scan,
    "checkpoint": lambda f: with_gradient(jax.checkpoint(f)),
    "closed": _closed,
}


@with_types(WRAPS, ["gradient", "jvp", "vmap_of_grad", "closed"])
def test_transformed(name, vma):
    compare(layer, *LAYER, *layer_args(), wrap=WRAPS[name], tolerance=2e-4, check_vma=vma)


def test_transformed_without_jit():
    same(with_gradient(simulated(layer, *LAYER))(*layer_args()), layer_results())


def test_shapes_alone():
    args = layer_args()
    f = simulated(layer, *LAYER)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    assert jax.eval_shape(f, *shapes) == jax.eval_shape(real(layer, *LAYER), *shapes)


# --- within the body ----------------------------------------------------------------------------

EVERY = ("a", "b")


def all_vary(value):
    return vary(value, EVERY)


def b_jit(x, w):
    @jax.jit
    def inner(x, scale):
        return lax.psum(x * scale, "b") * x + lax.axis_index("a")

    return inner(x, 2.0) + jax.jit(inner)(w * x, 3.0)


def b_vmap(x, w):
    one = jax.vmap(lambda row: lax.psum(row * w, "b") + lax.all_gather(row, "a").sum(0))(x)
    two = jax.vmap(lambda col: lax.ppermute(col, "b", [(0, 1), (1, 2)]), 1, 1)(x)
    three = jax.vmap(lambda r: lax.all_to_all(jnp.tile(r, 2), "b", 0, 0, tiled=True))(x)
    four = jax.vmap(lambda r: lax.psum_scatter(jnp.tile(r, 2), "b", tiled=True))(x)
    return one, two, three, four


def b_vmap_named(x, w):
    one = jax.vmap(lambda r: r * lax.axis_index(("a", "v")), axis_name="v")(x)
    return one + jax.vmap(lambda r: r * w * lax.axis_size("v"), axis_name="v")(x)


def b_scan(x, w):
    def step(carry, row):
        carry = all_vary(jnp.tanh(carry + lax.psum(row * w, "a")))
        return carry, (carry * row, lax.pmean(carry, "b"))

    init = all_vary(jnp.zeros_like(w))
    out = lax.scan(step, init, x)
    back = lax.scan(step, init, jnp.concatenate([x, x + 1]), reverse=True, unroll=2)
    return out, back


def b_scan_grows(x, w):
    # The carried value starts out the same everywhere, and differs after one step.
    def step(carry, i):
        return all_vary(carry * 0.5 + x[0] * i + lax.psum(carry, "a")), carry.sum()

    return lax.scan(step, all_vary(jnp.ones(2)), jnp.arange(3.0))


def b_scan_nested(x, w):
    def inner(c, _):
        return c + 0.1 * all_vary(lax.psum(c, "b")), None

    def outer(c, k):
        return lax.scan(inner, c * k, None, length=2)

    return lax.scan(outer, x, jnp.arange(1.0, 4.0))[0]


def b_fori(x, w):
    return lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + all_vary(lax.psum(c, "a")) * i, x)


def b_cond_same(x, w):
    total = lax.psum(x.sum(), EVERY)
    one = lax.cond(total > 0, lambda v: all_vary(lax.psum(v, "a")), lambda v: v * jnp.sin(v), x)
    two = lax.cond(total <= 0, lambda v: lax.ppermute(v, "b", [(0, 1)]), lambda v: v * w, x)
    return one, two


def b_cond_varies(x, w):
    # Within a branch, JAX would make w vary there, and add up its gradient there: for ever.
    w = all_vary(w)
    return lax.cond(x.sum() > 0, lambda v, w: jnp.sin(v) * w, lambda v, w: v * v - w, x, w)


def b_cond_across(x, w):
    # The devices that meet in the psum all go the same way: those with the same place along a.
    w = all_vary(w)
    return lax.cond(
        lax.axis_index("a") == 0,
        lambda v: all_vary(lax.psum(v * w, "b")) + lax.axis_index("a"),
        lambda v: v - lax.axis_index("b") * lax.axis_index("a"),
        x,
    )


def b_cond_nested(x, w):
    def inner(v):
        return lax.cond(lax.axis_index("b") < 2, jnp.sin, lambda v: v * lax.axis_index("a"), v)

    return lax.cond(lax.axis_index("a") == 0, inner, lambda v: v * 3, x)


def b_switch(x, w):
    i, w = lax.axis_index("a") + lax.axis_index("b"), all_vary(w)
    return lax.switch(i, [jnp.sin, jnp.cos, lambda v: v * w, lambda v: v**3], x)


def b_cond_nan(x, w):
    safe = lax.axis_index("b") > 0
    return lax.cond(safe, lambda v: jnp.sqrt(v), lambda v: v * 2, jnp.abs(x) * safe)


def b_remat(x, w):
    @jax.checkpoint
    def inner(x, w):
        return jnp.sin(lax.psum(x * w, "b")) * x

    return inner(x, w) + jax.checkpoint(inner)(x * 2, w)


def b_remat_policy(x, w):
    from jax.ad_checkpoint import checkpoint_name

    def inner(x, w):
        h = checkpoint_name(jnp.sin(x) * w, "h")
        return (
            checkpoint_name(lax.all_gather(h, "a", tiled=True), "g").sum(0) * x @ jnp.eye(2) * 0.3
        )

    policies = jax.checkpoint_policies
    out = x
    for policy in (
        policies.dots_saveable,
        policies.everything_saveable,
        policies.nothing_saveable,
        policies.save_only_these_names("h"),
    ):
        out = jax.checkpoint(inner, policy=policy)(out, w)
    return out


def b_remat_scan(x, w):
    @jax.checkpoint
    def step(c, _):
        return jnp.tanh(all_vary(lax.psum(c * w, "b"))) + c, None

    return lax.scan(step, x, None, length=3)[0]


@jax.custom_jvp
def scaled(x):
    return lax.psum(x, "b") * jnp.sin(x)


@scaled.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    total = lax.psum(x, "b")
    return total * jnp.sin(x), 2.0 * lax.psum(t, "b") * jnp.sin(x) + total * t


def b_custom_jvp(x, w):
    return scaled(x * w), jax.nn.relu(x), jax.nn.gelu(x), jax.nn.logsumexp(x, 1)


@jax.custom_vjp
def megatron_f(x):
    return x


megatron_f.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "b"),))


@jax.custom_vjp
def megatron_g(x):
    return lax.psum(x, "b")


megatron_g.defvjp(lambda x: (lax.psum(x, "b"), None), lambda _, g: (g,))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def normed(axis, x, y, n):
    return x * y * n / lax.psum(jnp.sum(x * x), axis)


def _normed_forward(axis, x, y, n):
    size = lax.psum(jnp.sum(x * x), axis)
    return x * y * n / size, (x, y, size)


def _normed_backward(axis, kept, g):
    x, y, size = kept
    return g * y / size, jnp.tanh(g * x) / size, None


normed.defvjp(_normed_forward, _normed_backward)


def b_clipped(x, w):
    return clipped(x * 3) * 2 + clipped(w) * clipped(jnp.sin(x))


def b_custom_vjp(x, w):
    w = all_vary(w)
    return normed("a", x, x + w, 3), normed("a", x[0], w, lax.axis_index("b"))


def b_grad(x, w):
    def inner(x, w):
        return jnp.sum(jnp.sin(lax.psum(x * w, "b")) * x)

    return jax.grad(inner, (0, 1))(x, w)


def b_grad_of_mean(x, w):
    # A training step: the gradient of a mean loss with respect to what all devices share.
    def inner(w):
        return lax.pmean(jnp.mean((x @ jnp.outer(w, w)) ** 2), EVERY)

    return jax.value_and_grad(inner)(w)


def b_grad_gather(x, w):
    def inner(w):
        whole = lax.all_gather(w, "b", tiled=True)
        moved = lax.ppermute(x, "a", [(0, 1), (1, 0)])
        return jnp.sum(jnp.sin(moved @ whole.reshape(2, 4)) ** 2)

    return jax.grad(inner)(w)


def b_jvp(x, w):
    return jax.jvp(lambda v: lax.psum(jnp.sin(v) * w, "a"), (x,), (x * 2,))


def b_hessian(x, w):
    return jax.hessian(lambda v: jnp.sum(jnp.sin(v) * lax.psum(v * w, "a")))(x[0])


def b_indexing(x, w):
    y = x.at[0].add(w).at[:, 1].set(3.0).at[1, 0].multiply(2.0).at[0, 0].max(1.0)
    i = lax.axis_index("b") % 2
    return y, x[i], lax.dynamic_slice_in_dim(x, i, 1), jnp.take(x, jnp.array([1, 0, 1]), 0)


def b_indexing_grad(x, w):
    def inner(table):
        rows = table[jnp.array([0, 1, 1])]
        return jnp.sum(jnp.sin(rows) * lax.axis_index("a"))

    return jax.grad(inner)(x), jax.grad(lambda v: jnp.sum(jnp.sort(v) * w))(x)


def b_linalg(x, w):
    a = x @ x.T + jnp.eye(2)
    return jnp.linalg.solve(a, w), jnp.linalg.inv(a), jnp.linalg.cholesky(a)


def b_library(x, w):
    return (
        jnp.cumsum(x, 1),
        jnp.argmax(x, 1),
        jnp.einsum("ij,ik->jk", x, x),
        jax.nn.softmax(x),
        jnp.sort(x, 1),
        lax.top_k(x, 1),
        lax.reduce(lax.stop_gradient(x), 0.0, lambda a, b: a + b * 1.0, (0,)),
        lax.associative_scan(lambda a, b: a * b + a, x, axis=0),
        jnp.where(x > 0, x, 0.0),
        jnp.zeros(x.shape).at[0].set(x[1]),
        x.astype("bfloat16"),
        jnp.abs(jnp.fft.fft(x)),
    )


def b_closure(x, w):
    table = jnp.arange(4.0)

    def outer(k):
        def inner(v):
            return v * table[:2] * k + np.float32(2) * w

        return inner

    return outer(x)(x) + outer(w)(w)


def b_side_by_side(x, w):
    # What does not differ along an axis is kept once: mixed with what does.
    return x + w, w * lax.axis_index("a"), lax.psum(w, "b") + x, jnp.outer(w, x[0])


def b_optimizer(x, w):
    tx = optax.adam(1e-2)
    state = tx.init(w)
    grads = jax.grad(lambda w: jnp.sum((x * w) ** 2))(w)
    updates, state = tx.update(lax.pmean(grads, "a"), state)
    return optax.apply_updates(w, updates)


BODIES = {name.removeprefix("b_"): f for name, f in globals().items() if name.startswith("b_")}


UNTYPED = {
    "cond_across",
    "custom_jvp",
    "clipped",
    "custom_vjp",
    "grad",
    "grad_of_mean",
    "grad_gather",
    "indexing_grad",
    "vmap_named",
}


@with_types(BODIES, UNTYPED)
def test_within_the_body(name, vma):
    @stacked
    def body(x, w):
        return vary(BODIES[name](x, w), EVERY, vma)

    x, w = numbers(4, 8), numbers(8, start=3)
    compare(body, AB, (P("a", "b"), P("b")), P(EVERY), x, w, tolerance=1e-4, check_vma=vma)


def w_same(x, w):
    def go(c):
        return lax.psum(c[0].sum(), EVERY) < 40.0

    return lax.while_loop(go, lambda c: (c[0] + 1.0, all_vary(lax.psum(c[0], "b"))), (x, x))


def w_varies(x, w):
    n = lax.axis_index("a") * 2 + lax.axis_index("b")
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1]) + w), (n * 0, x))


def w_across(x, w):
    # Those that meet in the psum go round equally often.
    n = lax.axis_index("a") + 1

    def body(c):
        return c[0] + 1, c[1] + 0.5 * all_vary(lax.psum(c[1], "b"))

    return lax.while_loop(lambda c: c[0] < n, body, (n * 0, x))


def w_fori(x, w):
    return lax.fori_loop(0, lax.axis_index("b"), lambda i, c: c * 1.5 + i, x)


def w_nested(x, w):
    n = lax.axis_index("b")

    def inner(c):
        return lax.while_loop(lambda v: v[1].sum() < n + 3.0, lambda v: (v[0] + 1, v[1] + 1), c)

    def outer(c):
        k, (count, v) = c
        return k + 1, inner((count, v * 0.5))

    return lax.while_loop(lambda c: c[0] <= n, outer, (n * 0, (n * 0, x)))


def w_no_steps(x, w):
    return lax.while_loop(lambda c: c.sum() < -1e9, lambda c: c * 2, x)


def w_keys(x, w):
    key = all_vary(jax.random.key(3))
    n = lax.axis_index("b")

    def body(c):
        return c[0] + 1, jax.random.fold_in(c[1], c[0])

    return jax.random.key_data(lax.while_loop(lambda c: c[0] < n, body, (n * 0, key))[1])


WHILES = {name.removeprefix("w_"): f for name, f in globals().items() if name.startswith("w_")}


@pytest.mark.parametrize("name", WHILES)
def test_while(name):
    def wrap(f):
        return lambda x, w: (f(x, w), jax.jvp(f, (x, w), (x * 2, w)))

    body = stacked(lambda x, w: all_vary(WHILES[name](x, w)))
    x, w = numbers(4, 8), numbers(8, start=3)
    compare(body, AB, (P("a", "b"), P("b")), P(EVERY), x, w, wrap=wrap, tolerance=1e-4)


@BOTH
@pytest.mark.parametrize("order", ["fg", "gf"])
def test_megatron_layer(order, vma):
    def body(x, w, v):
        first, last = (megatron_f, megatron_g) if order == "fg" else (lambda x: x, megatron_g)
        return last(jnp.tanh(first(x) @ w) @ v)

    if vma:
        # With types the two functions change what varies, and JAX adds the sums itself.
        def body(x, w, v):
            return lax.psum(jnp.tanh(lax.pcast(x, "b", to="varying") @ w) @ v, "b")

    specs = (P("a"), P(None, "b"), P("b"))
    compare(body, AB, specs, P("a"), *layer_args(), check_vma=vma)


def test_gradient_within_a_body_of_megatron():
    def body(x, w, v):
        def scalar(w, v):
            return jnp.sum(jnp.sin(megatron_g(jnp.tanh(megatron_f(x) @ w) @ v)))

        return jax.grad(scalar, (0, 1))(w, v)

    specs = (P(), P(None, "b"), P("b"))
    out = (P(None, "b"), P("b"))
    compare(body, AB, specs, out, *layer_args(), grad=False, check_vma=False)


@BOTH
@pytest.mark.parametrize("out", ["each", "sum", "same"])
def test_backward_pass_that_is_not_linear(out, vma):
    # Each device clips the cotangent that reaches it: it must be the one that a real device gets.
    def body(x, w):
        y = clipped(jnp.sin(w)) * (clipped(x) if out == "each" else 1.0)
        if out == "sum":
            return lax.psum(clipped(y.sum() * x), EVERY)
        return clipped(lax.psum(y, "a") if out == "each" else y * 0.02)

    specs = {"each": P(None, "b"), "sum": P(), "same": P("b")}
    compare(body, AB, (P("a", "b"), P("b")), specs[out], numbers(4, 8), numbers(8), check_vma=vma)


def test_gradient_of_closed_over_arrays():
    x, w = numbers(8, 2), numbers(2, start=4)

    def total(made):
        def run(w, x):
            def body(x):
                return lax.psum(jnp.sin(x * w), "a") * w + x

            return loss(made(body, "a=8", P("a"), P("a"))(x))

        return run

    for wrap in (lambda f: jax.grad(f, (0, 1)), lambda f: jax.jit(jax.grad(jax.jit(f)))):
        same(wrap(total(simulated))(w, x), wrap(total(real))(w, x))
    stacked_w = jnp.stack([w, -w, w * 2])
    want = jax.jit(jax.vmap(jax.grad(total(real)), (0, None)))(stacked_w, x)
    same(jax.jit(jax.vmap(jax.grad(total(simulated)), (0, None)))(stacked_w, x), want)


# --- random numbers, prints and callbacks ---------------------------------------------------------

IMPLS = ["threefry2x32", "rbg", "unsafe_rbg"]


@pytest.mark.parametrize("impl", IMPLS)
def test_random_numbers(impl):
    def body(key, x):
        own = jax.random.fold_in(key, lax.axis_index("a"))
        one, two = jax.random.split(own)
        common = all_vary(jax.random.normal(key, (2,)))
        return stacked(
            lambda: [
                jax.random.normal(one, (3,)),
                jax.random.bernoulli(two, 0.5, (4,)),
                jax.random.permutation(one, 5),
                jax.random.categorical(two, x[0]),
                jax.random.key_data(own),
                all_vary(common) + x[0],
                jax.random.uniform(jax.random.fold_in(own, lax.axis_index("b")), (2,)),
            ]
        )()

    def every(key, x):
        return all_vary(body(key, x))

    key = jax.random.key(7, impl=impl)
    compare(every, AB, (P(), P("a", "b")), P(EVERY), key, numbers(4, 8), grad=False)


@pytest.mark.parametrize("impl", IMPLS)
def test_keys_as_arguments_and_results(impl):
    def body(keys):
        (key,) = keys
        return jax.random.normal(key, (1, 3)), jax.random.split(key, 2), keys

    keys = jax.random.split(jax.random.key(1, impl=impl), 8)
    compare(body, "a=8", P("a"), P("a"), keys, grad=False)
    same(simulated(lambda k: k, "a=8", P("a"), P("a"))(keys), keys)


def test_keys_that_differ_are_refused():
    keys = jax.random.split(jax.random.key(1), 8)
    f = simulated(lambda k: k[0], "a=8", P("a"), P())
    assert refusal(f, keys).findings[0].code == "SW501"
    assert "SW501" in str(refusal(jax.jit(f), keys))


def _print_index(x):
    jax.debug.print("at {} {}", lax.axis_index("a"), lax.axis_index("b"))
    return x


def _print_constant(x):
    jax.debug.print("value {}", 1.5)
    return x


def _print_nothing(x):
    jax.debug.print("here")
    return x


def _print_in_scan(x):
    def step(c, i):
        jax.debug.print("step {} {}", i, lax.axis_index("b"))
        return c, None

    return lax.scan(step, x, jnp.arange(2))[0]


def _print_in_cond(x):
    def yes(x):
        jax.debug.print("yes {}", lax.axis_index("b"))
        return x

    return lax.cond(lax.axis_index("a") == 1, yes, lambda x: x, x)


def _print_in_while(x):
    n = lax.axis_index("b")

    def step(c):
        jax.debug.print("round {} of {}", c[0], n)
        return c[0] + 1, c[1]

    return lax.while_loop(lambda c: c[0] < n, step, (n * 0, x))[1]


PRINTS = [
    _print_index,
    _print_constant,
    _print_nothing,
    _print_in_scan,
    _print_in_cond,
    _print_in_while,
]


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("body", PRINTS, ids=lambda f: f.__name__.removeprefix("_print_"))
def test_every_device_prints(body, jit, capfd):
    told = []
    for made in (real, simulated):
        f = made(body, AB, P("a", "b"), P("a", "b"))
        jax.block_until_ready((jax.jit(f) if jit or made is real else f)(numbers(4, 8)))
        jax.effects_barrier()
        told.append(sorted(capfd.readouterr().out.splitlines()))
    assert told[1] == told[0]


def test_callbacks():
    def body(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        one = jax.pure_callback(lambda v: np.sin(v), shape, x, vmap_method="sequential")
        two = jax.experimental.io_callback(lambda v: np.asarray(v) * 2, shape, x)
        return one + two

    compare(body, AB, P("a", "b"), P("a", "b"), numbers(4, 8), grad=False)


# --- arguments and results ------------------------------------------------------------------------


def linear(bias=True):
    return nnx.Linear(8, 4, use_bias=bias, rngs=nnx.Rngs(0))


X = P("a", "b")
ARGUMENTS = {
    "dict": (lambda d: d, (X,), X, lambda: ({"p": numbers(4, 8), "q": (numbers(2, 4),)},)),
    "deep prefix": (
        lambda d: {"u": [d["p"], (d["q"][1],)]},
        ({"p": X, "q": P("b")},),
        {"u": [X, P("b")]},
        lambda: ({"p": numbers(4, 8), "q": (numbers(4), numbers(8, 3))},),
    ),
    "none leaf": (lambda d: d, (X,), X, lambda: ({"p": numbers(4, 8), "q": None},)),
    "none for none": (lambda x, n: x, (X, None), X, lambda: (numbers(4, 8), None)),
    "none as a spec": (lambda x, y: x + y.sum(), (X, None), X, lambda: (numbers(4, 8), numbers(2))),
    "none for all": (lambda x: x.sum(), None, P(), lambda: (numbers(4, 8),)),
    "none returned": (lambda x: (x, None), X, (X, None), lambda: (numbers(4, 8),)),
    "nothing returned": (lambda x: (), X, (), lambda: (numbers(4, 8),)),
    "nothing under a spec": (lambda x: None, X, P(), lambda: (numbers(4, 8),)),
    "no arguments": (lambda: lax.axis_index("b")[None], (), P("b"), lambda: ()),
    "constant": (lambda x: (jnp.ones(3), 1.5, np.ones(2), 2), X, P(), lambda: (numbers(4, 8),)),
    "constant, stacked": (lambda x: np.ones(3), X, P("b"), lambda: (numbers(4, 8),)),
    "python numbers": (
        lambda x, s, i: (x * s, i + 1),
        (X, P(), P()),
        (X, P()),
        lambda: (numbers(4, 8), 2.0, 3),
    ),
    "weak sum": (lambda x: (lax.psum(3.0, "a"), 2.5), X, P(), lambda: (numbers(4, 8),)),
    "weak": (lambda s, x: (s + 1, x * s), (P(), X), (P(), X), lambda: (2.0, numbers(4, 8))),
    "bool": (lambda s, x: x * s, (P(), X), X, lambda: (True, numbers(4, 8))),
    "numpy": (lambda x, s: x * s, (X, P()), X, lambda: (np.ones((4, 8)), np.float64(2))),
    "numpy integers": (lambda s: s * 2, P(), P(), lambda: (np.arange(4),)),
    "scalar result": (lambda x: lax.psum(x.sum(), EVERY), X, P(), lambda: (numbers(4, 8),)),
    "no elements": (
        lambda x: (x, lax.psum(x, "a"), x.sum()[None, None]),
        X,
        (X, P(None, "b"), X),
        lambda: (jnp.zeros((4, 0)),),
    ),
    "no elements, split": (lambda x: x * 2, X, X, lambda: (jnp.zeros((0, 8)),)),
    "axes in another order": (
        lambda x: x * lax.axis_index("a"),
        P(("b", "a")),
        P(None, ("b", "a")),
        lambda: (numbers(8, 3),),
    ),
    "empty entries": (lambda x: x, P(("a",), ()), P(None, ("a",)), lambda: (numbers(4, 8),)),
    "complex": (lambda x: lax.psum(x * 2, "a"), X, P(None, "b"), lambda: (numbers(4, 8) + 1j,)),
    "float8": (lambda x: x + x, X, X, lambda: (numbers(4, 8).astype("float8_e4m3fn"),)),
    "a module": (
        lambda m, x: lax.psum(x @ m.kernel[...][: x.shape[1]] + m.bias[...], "b"),
        (P(), X),
        P("a"),
        lambda: (linear(), numbers(4, 8)),
    ),
    "a module, split": (
        lambda m, x: lax.psum(x @ m.kernel[...], "b"),
        (P("b"), X),
        P("a"),
        lambda: (linear(bias=False), numbers(4, 8)),
    ),
    "a module, called": (
        lambda m, x: m(x),
        (P(), P("a")),
        P("a"),
        lambda: (linear(), numbers(4, 8)),
    ),
    "a state": (
        lambda s, x: (s, x @ s["kernel"][...]),
        (P(), P("a")),
        (P(), P("a")),
        lambda: (nnx.split(linear())[1], numbers(4, 8)),
    ),
    "a module returned": (lambda m: m, P(), P(), lambda: (linear(),)),
}


@with_types(ARGUMENTS, ["constant"])
def test_arguments_and_results(name, vma):
    body, in_specs, out_specs, make = ARGUMENTS[name]
    args = make()
    want = compiled(real(body, AB, in_specs, out_specs, check_vma=vma))(*args)
    same(compiled(simulated(body, AB, in_specs, out_specs, check_vma=vma))(*args), want)


def test_training_of_a_module():
    tx = optax.sgd(0.1)

    def body(model, state, x):
        graph, params = nnx.split(model)

        def scalar(params):
            return lax.pmean(jnp.mean(nnx.merge(graph, params)(x) ** 2), EVERY)

        grads = jax.grad(scalar)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state

    model = linear()
    args = (model, tx.init(nnx.split(model)[1]), numbers(16, 8))
    compare(body, AB, (P(), P(), P(EVERY)), P(), *args, grad=False)


REFUSED = {
    "text": (lambda x, s: x, (X, P()), X, lambda: (numbers(4, 8), "text")),
    "too few specs": (lambda x, y: x, (X,), X, lambda: (numbers(4, 8), numbers(4, 8))),
    "too many specs": (lambda x: (x, x), (X,), (X, X, X), lambda: (numbers(4, 8),)),
    "no spec for a result": (lambda x: (x, x), (X,), (X, None), lambda: (numbers(4, 8),)),
    "another tree": (lambda d: d, ({"q": X},), X, lambda: ({"p": numbers(4, 8)},)),
    "no spec": (lambda x: x, ("a",), X, lambda: (numbers(4, 8),)),
    "a list of specs": (lambda x: x, [X], X, lambda: (numbers(4, 8),)),
    "not an axis": (lambda x: x, (P("q"),), X, lambda: (numbers(4, 8),)),
    "not an axis, returned": (lambda x: x, (X,), P("q"), lambda: (numbers(4, 8),)),
    "an axis twice": (lambda x: x, (P("a", "a"),), X, lambda: (numbers(4, 8),)),
    "too long": (lambda x: x, (P("a", None, "b"),), X, lambda: (numbers(4, 8),)),
    "too long, returned": (lambda x: x.sum(), (X,), P("a"), lambda: (numbers(4, 8),)),
    "uneven": (lambda x: x, (P("b"),), P("b"), lambda: (numbers(6, 8),)),
    "shapes that do not fit": (lambda x: x @ x, (X,), X, lambda: (numbers(4, 32),)),
    "a carry that changes type": (
        lambda x: lax.scan(lambda c, _: (c + x, None), jnp.zeros((2, 2)), None, length=2)[0],
        (X,),
        X,
        lambda: (numbers(4, 8),),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_jax_refuses_is_refused(name):
    body, in_specs, out_specs, make = REFUSED[name]
    args = make()
    refusal(lambda *a: real(body, AB, in_specs, out_specs)(*a), *args)
    error = refusal(lambda *a: simulated(body, AB, in_specs, out_specs)(*a), *args)
    assert isinstance(error, (ValueError, TypeError))
    assert len(str(error)) > 20


@pytest.mark.parametrize(
    "options, message",
    [
        ({"body": 3}, "takes a function"),
        ({"mesh": 3}, "give a mesh"),
        ({"axis_names": {"q"}}, "not on the mesh"),
        ({"mesh": "a"}, "where an axis should be"),
    ],
    ids=["body", "mesh", "axis_names", "mesh text"],
)
def test_wrong_use(options, message):
    options = {"body": lambda x: x, "mesh": AB, "in_specs": X, "out_specs": X, **options}
    with pytest.raises(ValueError, match=message):
        sw.simulate(options.pop("body"), **options)


# --- findings -----------------------------------------------------------------------------------


def codes(findings):
    return [finding.code for finding in findings]


BAD = {
    "unknown axis": (P("q"), ["SW101"]),
    "twice": (P("a", "a"), ["SW102"]),
    "rank": (P(None, None, "a"), ["SW103"]),
    "uneven": (P(None, "b"), ["SW104"]),
    "all at once": (P(("q", "b", "b"), "b", "a"), ["SW101", "SW102", "SW103", "SW104", "SW104"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_specs(name):
    spec, want = BAD[name]
    x = numbers(6, 6)
    with pytest.raises(Exception):  # noqa: B017
        real(lambda x: x, AB, spec, spec)(x)
    f = simulated(lambda first: first, AB, spec, P())
    assert codes(f.check(x)) == want
    error = refusal(f, x)
    assert isinstance(error, sw.LayoutError)
    assert codes(error.findings) == want
    assert {finding.path for finding in error.findings} == {"first"}


def test_bad_specs_of_all_arguments_are_told_at_once():
    def body(model, x, *rest):
        return x

    specs = (P("q"), P("b"), P("a"))
    f = simulated(body, AB, specs, P())
    found = f.check({"w": numbers(4), "v": [numbers(2)]}, numbers(6), numbers(3))
    assert [(f.code, f.path) for f in found] == [
        ("SW101", "model.v.0"),
        ("SW101", "model.w"),
        ("SW104", "x"),
        ("SW104", "args.2"),
    ]
    out = simulated(lambda x: {"p": x, "q": x.sum()}, AB, P(), {"p": P("q"), "q": P("a")})
    assert [(f.code, f.path) for f in out.check(numbers(4))] == [
        ("SW101", "output.p"),
        ("SW103", "output.q"),
    ]


UNBOUND = {
    "psum": lambda x: lax.psum(x, "q"),
    "pmax": lambda x: lax.pmax(x, "q"),
    "all_gather": lambda x: lax.all_gather(x, "q"),
    "psum_scatter": lambda x: lax.psum_scatter(x, "q"),
    "ppermute": lambda x: lax.ppermute(x, "q", [(0, 1)]),
    "axis_index": lambda x: x * lax.axis_index("q"),
    "axis_size": lambda x: x * lax.axis_size("q"),
    "two": lambda x: lax.psum(x, ("a", "q")),
}


@with_types(UNBOUND, ["psum", "all_gather", "axis_index"])
def test_unknown_axis_in_the_body(name, vma):
    x = numbers(4, 8)
    refusal(real(UNBOUND[name], AB, X, X, check_vma=vma), x)
    f = simulated(UNBOUND[name], AB, X, X, check_vma=vma)
    error = refusal(f, x)
    assert isinstance(error, sw.LayoutError)
    assert codes(error.findings) == ["SW101"]
    assert "'q'" in str(error)
    assert codes(f.check(x)) == ["SW101"]


def test_another_name_error_is_left_alone():
    def body(x):
        return not_defined  # noqa: F821

    with pytest.raises(NameError, match="not_defined"):
        simulated(body, AB, X, X)(numbers(4, 8))


def test_disagreement_is_told_with_devices_values_and_place():
    x = np.asarray(numbers(8, 12)).copy()
    f = simulated(lambda x: x[0] * 2, AB, P(EVERY), P("a"))
    error = refusal(f, x)
    assert isinstance(error, sw.LayoutError)
    (found,) = error.findings
    held = x.reshape(2, 4, 12) * 2
    off = np.abs(held - held[:, :1])
    a, b, i = np.unravel_index(off.argmax(), off.shape)
    assert found.code == "SW501"
    assert found.path == "output"
    assert "axis 'b'" in found.message
    assert "axis 'a'" not in found.message
    assert f"device (a={a}, b=0) has {held[a, 0, i]:.6g}" in found.message
    assert f"device (a={a}, b={b}) has {held[a, b, i]:.6g}" in found.message
    assert f"at index ({i},)" in found.message
    assert f"a difference of {off.max():.6g}" in found.message
    assert codes(f.check(x)) == ["SW501"]


@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b")], ids=",".join)
def test_disagreement_names_the_axes(axes):
    def body(x):
        return x[0, 0] + sum(lax.axis_index(a) for a in axes)

    f = simulated(body, AB, P(), P())
    (found,) = f.check(numbers(1, 1))
    for axis in EVERY:
        assert (f"axis {axis!r}" in found.message or f"and {axis!r}" in found.message) == (
            axis in axes
        )


VALUES = {
    "nan": (jnp.asarray([1.0, jnp.nan]), "SW501"),
    "nan twice": (jnp.asarray([jnp.nan, jnp.nan]), "SW502"),
    "inf": (jnp.asarray([jnp.inf, jnp.inf]), "SW502"),
    "inf and minus inf": (jnp.asarray([jnp.inf, -jnp.inf]), "SW501"),
    "integers": (jnp.asarray([7, 8]), "SW501"),
    "large integers": (jnp.asarray([2**31 - 1, 2**31 - 2], "int32"), "SW501"),
    "bools": (jnp.asarray([True, False]), "SW501"),
    "complex": (jnp.asarray([1 + 1j, 1 + 2j]), "SW501"),
    "float32": (jnp.asarray([1.0, 1.0001]), "SW501"),
    "float32, rounding": (jnp.asarray([1.0, 1.0 + 2e-7]), "SW502"),
    "float16": (jnp.asarray([1.0, 1.05], "float16"), "SW501"),
    "bfloat16": (jnp.asarray([1.0, 1.2], "bfloat16"), "SW501"),
    "bfloat16, tenth": (jnp.asarray([1.0, 1.1], "bfloat16"), "SW501"),
    "bfloat16, rounding": (jnp.asarray([1.0, 1.0078125], "bfloat16"), "SW502"),
    "float8": (jnp.asarray([1.0, 2.0], "float8_e4m3fn"), "SW501"),
    "zeros": (jnp.asarray([0.0, -0.0]), "SW502"),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_is_a_disagreement(name):
    values, want = VALUES[name]
    f = simulated(lambda x: x[0], "a=2", P("a"), P())
    assert codes(f.check(values)) == [want]
    if want == "SW501":
        assert "SW501" in str(refusal(f, values))
        loose = simulated(lambda x: x[0], "a=2", P("a"), P(), check=False)
        np.testing.assert_array_equal(plain(loose(values)), plain(values[0]))


def test_sums_in_another_order_agree():
    # Each device adds up the same numbers, beginning with its own.
    def body(x):
        i = lax.axis_index("a")
        whole = lax.all_gather(x, "a", tiled=True)
        return lax.fori_loop(0, 64, lambda k, s: s + whole[(i * 8 + k) % 64], vary(0.0, "a"))

    x = numbers(64) * 100
    f = simulated(body, "a=8", P("a"), P())
    np.testing.assert_allclose(f(x), np.asarray(x).sum(), rtol=1e-4)
    assert codes(f.check(x)) == ["SW502"]


SURFACES = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None]),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (c, f(c)), x, None, length=2),
    "checkpoint": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
}


@pytest.mark.parametrize("name", SURFACES)
def test_disagreement_surfaces_under(name):
    f = simulated(lambda x: x[0], "a=8", P("a"), P())
    text = str(refusal(SURFACES[name](f), numbers(8, 2)))
    assert "SW501" in text
    assert "device (a=0)" in text
    ok = simulated(lambda x: lax.pmean(x[0], "a"), "a=8", P("a"), P())
    jax.block_until_ready(SURFACES[name](ok)(numbers(8, 2)))
    jax.effects_barrier()


@pytest.mark.parametrize("vma", [True, False])
def test_without_check_the_first_device_is_returned(vma):
    def body(x):
        return x * 2, x.sum()

    x = numbers(4, 8)
    got = jax.jit(simulated(body, AB, X, (P("a"), P()), check=False, check_vma=vma))(x)
    want = jax.jit(real(body, AB, X, (P("a"), P()), check_vma=False))(x)
    same(got, want)


def test_gradient_without_check_is_that_of_the_real_one():
    # The loss is linear: real devices would each go on with what it holds itself.
    def wrap(f):
        def total(x, w):
            return sum(jnp.sum(o * jnp.cos(jnp.arange(o.size)).reshape(o.shape)) for o in f(x, w))

        return jax.jit(jax.grad(total, (0, 1)))

    def body(x, w):
        return jnp.sin(x) * 2 + w, (x * w).sum(), w * 3

    x, w = numbers(4, 8), numbers(8)
    specs = ((X, P("b")), (P("a"), P(), P()))
    got = wrap(simulated(body, AB, *specs, check=False, check_vma=False))(x, w)
    same(got, wrap(real(body, AB, *specs, check_vma=False))(x, w))


AGREED = {
    "all_gather": (lambda x: lax.all_gather(x, "b", tiled=True, axis=1), P("a"), ["SW502"]),
    "gathered and not": (
        lambda x: (lax.all_gather(x, "b", tiled=True, axis=1), lax.psum(x, "b")),
        P("a"),
        ["SW502"],
    ),
    "constant times index": (lambda x: 0 * lax.axis_index("b"), P(), ["SW502"]),
    "psum": (lambda x: lax.psum(x, "b"), P("a"), []),
    "pmax": (lambda x: lax.pmax(lax.psum(x, "a"), "b"), P(), []),
    "stacked": (lambda x: x, X, []),
    "constant": (lambda x: jnp.ones(3), P(), []),
    "invarying": (
        lambda x: lax.all_gather(x, "b", tiled=True, axis=1, to="invarying"),
        P("a"),
        [],
    ),
}


@pytest.mark.parametrize("name", AGREED)
def test_agreement_that_jax_cannot_prove(name):
    body, out_specs, want = AGREED[name]
    x = numbers(4, 8)
    f = simulated(body, AB, X, out_specs)
    found = f.check(x)
    assert codes(found) == want
    if want:
        assert all(finding.severity == "warning" for finding in found)
        assert isinstance(refusal(real(body, AB, X, out_specs), x), ValueError)
        # It is right all the same, as the real one is without the proof.
        same(f(x), real(body, AB, X, out_specs, check_vma=False)(x))
        assert codes(simulated(body, AB, X, out_specs, check_vma=False).check(x)) == []
    else:
        same(f(x), real(body, AB, X, out_specs)(x))


def d_cond(x):
    return lax.cond(x.sum() > 0, lambda v: all_vary(lax.psum(v, "b")), lambda v: v, x)


def d_permute_elsewhere(x):
    # A permute along b waits for all devices, those along a too.
    go = lax.axis_index("a") == 0
    return lax.cond(go, lambda v: lax.ppermute(v, "b", [(0, 1)]), lambda v: v, x)


def d_switch(x):
    return lax.switch(
        lax.axis_index("b"), [lambda v: v, lambda v: v * lax.pmax(v.sum(), "b")] * 2, x
    )


def d_while(x):
    def body(c):
        return c[0] + 1, c[1] + 0 * all_vary(lax.psum(c[1], "b"))

    n = lax.axis_index("b")
    return lax.while_loop(lambda c: c[0] < n, body, (n * 0, x))[1]


def d_while_later(x):
    # They agree before the first round.
    def body(c):
        return c + lax.axis_index("b") + 0 * all_vary(lax.psum(c, "b"))

    return lax.while_loop(lambda c: c.sum() < 100.0, body, x * 0 + 1.0)


def d_nested(x):
    def inner(v):
        return jax.jit(
            lambda v: lax.scan(lambda c, _: (all_vary(lax.psum(c, "b")), None), v, None, 2)
        )(v)[0]

    return lax.cond(lax.axis_index("b") == 0, inner, lambda v: v, x)


DIVERGING = {name.removeprefix("d_"): f for name, f in globals().items() if name.startswith("d_")}


@pytest.mark.parametrize("name", DIVERGING)
def test_devices_that_would_wait_for_ever(name):
    x = numbers(4, 8)
    f = simulated(DIVERGING[name], AB, X, X)
    error = refusal(f, x)
    assert isinstance(error, sw.LayoutError)
    assert codes(error.findings) == ["SW503"]
    assert error.findings[0].path.startswith(os.path.basename(__file__))
    assert codes(f.check(x)) == ["SW503"]


@pytest.mark.parametrize("name", DIVERGING)
def test_devices_that_would_wait_for_ever_under_jit(name):
    f = jax.jit(simulated(DIVERGING[name], AB, X, X))
    assert "SW503" in str(refusal(f, numbers(4, 8)))


def test_predicates_that_agree_by_chance_are_fine():
    # JAX takes the predicate to differ; it does not, so that real devices do not wait either.
    def body(x):
        go = x.sum() * 0 < 1
        return lax.cond(go, lambda v: all_vary(lax.psum(v, "b")), lambda v: v, x)

    compare(body, AB, X, X, numbers(4, 8))


# --- traces -------------------------------------------------------------------------------------


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
    if name == "while":  # the condition is looked at once before the first round
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


# --- shards -------------------------------------------------------------------------------------


def local_parts(array, mesh, spec):
    """Returns what each device of a mesh holds of an array, by its coordinates."""
    placed = jax.device_put(array, NamedSharding(mesh, spec))
    by_device = {s.device: np.asarray(s.data) for s in placed.addressable_shards}
    return {at: by_device[mesh.devices[at]] for at in np.ndindex(*mesh.devices.shape)}


@pytest.mark.parametrize("mesh", ["a=2,b=4", "a=2,b=2,c=2"])
def test_shards(mesh):
    every = names(mesh)
    specs = [P("a", "b"), P(("b", "a")), P(None, every[-1]), P()]
    args = [numbers(8, 8, start=i) for i in range(4)]

    def body(*args):
        return {"whole": lax.psum(args[0], ("a", "b")), "own": [args[1] * 2, args[2]]}

    out_specs = {"whole": P(), "own": [specs[1], specs[2]]}
    shards = simulated(body, mesh, tuple(specs), out_specs).shards(*args)
    out = real(body, mesh, tuple(specs), out_specs)(*args)
    there = devices(mesh)
    inputs = [local_parts(a, there, s) for a, s in zip(args, specs, strict=True)]
    flat_specs = jax.tree.leaves(out_specs, is_leaf=lambda s: isinstance(s, P))
    outputs = [
        local_parts(o, there, s) for o, s in zip(jax.tree.leaves(out), flat_specs, strict=True)
    ]
    assert list(shards) == list(np.ndindex(*there.devices.shape))
    assert len(shards) == 8
    for at in shards:
        shard = shards[at]
        assert shard.device == dict(zip(every, at, strict=True))
        assert isinstance(shard.inputs, tuple)
        for got, want in zip(shard.inputs, inputs, strict=True):
            np.testing.assert_array_equal(got, want[at])
        assert jax.tree.structure(shard.outputs) == jax.tree.structure(out)
        for got, want in zip(jax.tree.leaves(shard.outputs), outputs, strict=True):
            np.testing.assert_allclose(got, want[at], rtol=1e-5)
    by_name = shards[dict(zip(every, (1,) * len(every), strict=True))]
    np.testing.assert_array_equal(by_name.inputs[0], inputs[0][(1,) * len(every)])


def test_shards_show_what_differs_where_the_result_hides_it():
    shards = simulated(lambda x: x.sum(), "a=4", P("a"), P()).shards(jnp.arange(8.0))
    assert [float(shards[i].outputs) for i in range(4)] == [1.0, 5.0, 9.0, 13.0]
    assert "4 devices on a=4" in str(shards)
    assert "a=3" in str(shards)
    assert "<table" in shards._repr_html_()
    keys = simulated(lambda k: k, "a=4", P("a"), P("a")).shards(
        jax.random.split(jax.random.key(0), 4)
    )
    assert "a=3" in str(keys)


@pytest.mark.parametrize(
    "at",
    [
        8,
        (0,),
        (0, 4),
        (2, 0),
        (-1, 0),
        (0, 0, 0),
        {"a": 0},
        {"a": 0, "b": 0, "c": 0},
        "a",
        None,
        (0, 1.0),
    ],
)
def test_no_such_device(at):
    shards = simulated(lambda x: x, AB, X, X).shards(numbers(4, 8))
    with pytest.raises(KeyError, match="is no device of the mesh a=2,b=4"):
        shards[at]


# --- meshes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["x=256", "a=16,b=16"])
def test_more_devices_than_there_are(mesh):
    every = names(mesh)
    n = 256
    x = np.random.default_rng(0).normal(size=(n, n)).astype("float32")

    def body(x):
        i = lax.axis_index(every)
        total = lax.psum(x, every)
        after = lax.ppermute(x, every, [(k, (k + 1) % n) for k in range(n)])
        turned = lax.all_to_all(x, every, 1, 0, tiled=True)
        return total, after, turned, x * i, lax.all_gather(x[0, :1], every, tiled=True)

    specs = (P(), P(every), P(None, every), P(every), P())
    f = jax.jit(simulated(body, mesh, P(every), specs))
    total, after, turned, scaled_x, column = f(x)
    np.testing.assert_allclose(total[0], x.sum(0), rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(after, np.roll(x, 1, 0))
    np.testing.assert_array_equal(turned, x)
    np.testing.assert_allclose(scaled_x, x * np.arange(n)[:, None], rtol=1e-6)
    np.testing.assert_array_equal(column, x[:, 0])
    grad = jax.jit(jax.grad(lambda x: jnp.sum(f(x)[0] ** 2)))(x)
    np.testing.assert_allclose(grad, np.tile(2 * x.sum(0), (n, 1)), rtol=1e-3, atol=1e-3)


def test_rows_and_columns_of_a_large_mesh():
    x = np.random.default_rng(1).normal(size=(32, 48)).astype("float32")

    def body(x):
        rows = lax.psum(x.sum(1), "b")
        cols = lax.psum(x.sum(0), "a")
        return rows, cols, lax.psum_scatter(jnp.ones(16) * x.sum(), "a", tiled=True)

    f = simulated(body, "a=16,b=16", P("a", "b"), (P("a"), P("b"), P(("b", "a"))))
    rows, cols, parts = f(x)
    np.testing.assert_allclose(rows, x.sum(1), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(cols, x.sum(0), rtol=1e-3, atol=1e-4)
    each = x.reshape(16, 2, 16, 3).sum((0, 1, 3))
    np.testing.assert_allclose(parts, np.repeat(each, 16), rtol=1e-3, atol=1e-4)


FORMS = {
    "text": lambda: AB,
    "abstract": lambda: AbstractMesh((2, 4), ("a", "b")),
    "abstract explicit": lambda: AbstractMesh(
        (2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2
    ),
    "devices": lambda: devices(AB),
    "explicit": lambda: sw.mesh(AB, on="cpu:8", explicit=True),
    "half explicit": lambda: sw.mesh(AB, on="cpu:8", explicit=["a"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_mesh(form):
    f = simulated(layer, FORMS[form](), *LAYER[1:])
    same(compiled(with_gradient(f))(*layer_args()), layer_results())
    assert f.mesh.shape == {"a": 2, "b": 4}
    assert repr(f) == "simulate(layer, mesh='a=2,b=4')"


@pytest.mark.parametrize("other, explicit", [(AB, False), (AB, True), ("p=8", True)])
def test_under_a_mesh_that_is_set(other, explicit):
    want = layer_results()
    with jax.set_mesh(sw.mesh(other, on="cpu:8", explicit=explicit)):
        f = simulated(layer, *LAYER)
        same(compiled(with_gradient(f))(*layer_args()), want)
        assert len(f.trace(*layer_args())) == 6


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("explicit", [False, True])
def test_arguments_that_are_sharded(explicit, jit):
    mesh = sw.mesh(AB, on="cpu:8", explicit=explicit)
    specs = LAYER[1]
    plain_args = layer_args()
    want, _ = layer_results()
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(a, NamedSharding(mesh, s))
            for a, s in zip(plain_args, specs, strict=True)
        ]
        f = simulated(layer, mesh, *LAYER[1:])
        got = (jax.jit(f) if jit else f)(*args)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@BOTH
@pytest.mark.parametrize("manual", ["a", "b"])
def test_some_axes_only(manual, vma):
    n = devices(AB).shape[manual]

    def body(x, w):
        y = lax.psum(x @ w, manual) + lax.axis_index(manual)
        z = lax.with_sharding_constraint(x * 2, P())
        return vary((y, lax.ppermute(z, manual, [(0, n - 1)])), (manual,), vma)

    x, w = numbers(8, 8), numbers(8, 4, start=3)
    compare(body, AB, (P(manual), P()), P(manual), x, w, axis_names={manual}, check_vma=vma)
    f = simulated(lambda x: x, AB, P(manual), P(manual), axis_names={manual})
    assert len(f.shards(x)) == n
    rest = "b" if manual == "a" else "a"
    assert isinstance(
        refusal(simulated(lambda x: x, AB, P(rest), P(), axis_names={manual}), x), ValueError
    )


def test_a_decorated_name_and_documentation_are_kept():
    def body(x):
        """Says."""
        return x

    f = simulated(body, AB, X, X)
    assert (f.__name__, f.__doc__) == ("body", "Says.")
    part = simulated(functools.partial(lambda k, x: x * k, 2), AB, X, X)
    same(part(numbers(4, 8)), numbers(4, 8) * 2)
    assert "partial" in repr(part)


# --- any program --------------------------------------------------------------------------------

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
    max_examples=40,
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
