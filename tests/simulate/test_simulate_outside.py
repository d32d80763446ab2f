"""The simulated shard_map against the real one, under JAX's transformations and on many meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from simulated import (
    AB,
    BOTH,
    X,
    compare,
    devices,
    layer_args,
    loss,
    names,
    numbers,
    real,
    refusal,
    same,
    simulated,
    vary,
    with_gradient,
    with_types,
)

import shardwise as sw


def layer(x, w, v):
    """A layer with tensor and data parallelism, and one collective of each kind."""
    h = jnp.tanh(x @ w)
    y = lax.psum(h @ v, "b")
    y = y + lax.pmean(lax.all_gather(x.sum(1), "a", tiled=True).sum(), "a")
    z = lax.ppermute(y, "a", [(0, 1), (1, 0)])
    part = lax.psum_scatter(z, "a", scatter_dimension=1, tiled=True)
    return y + lax.all_gather(part, "a", axis=1, tiled=True)


LAYER = (AB, (P("a"), P(None, "b"), P("b")), P("a"))


@functools.cache
def layer_results():
    """Returns the real results of the layer and their gradients, on one device."""
    out = jax.jit(with_gradient(real(layer, *LAYER)))(*layer_args())
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


def test_shapes_only():
    args = layer_args()
    f = simulated(layer, *LAYER)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    assert jax.eval_shape(f, *shapes) == jax.eval_shape(real(layer, *LAYER), *shapes)


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
    same(jax.jit(with_gradient(f))(*layer_args()), layer_results())
    assert f.mesh.shape == {"a": 2, "b": 4}
    assert repr(f) == "simulate(layer, mesh='a=2,b=4')"


@pytest.mark.parametrize("other, explicit", [(AB, False), (AB, True), ("p=8", True)])
def test_under_a_mesh_that_is_set(other, explicit):
    want = layer_results()
    with jax.set_mesh(sw.mesh(other, on="cpu:8", explicit=explicit)):
        f = simulated(layer, *LAYER)
        same(jax.jit(with_gradient(f))(*layer_args()), want)
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
def test_only_some_axes(manual, vma):
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


def local_parts(array, mesh, spec):
    """Returns each device's shard of an array, by mesh coordinates."""
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


def test_shards_show_differences_that_the_result_hides():
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
    with pytest.raises(KeyError, match="no device .* on the mesh a=2,b=4"):
        shards[at]
