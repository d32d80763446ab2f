"""Arguments, results, random numbers and prints, simulated against real."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from simulated import (
    AB,
    EVERY,
    X,
    all_vary,
    compare,
    numbers,
    real,
    refusal,
    same,
    simulated,
    stacked,
    with_types,
)

import shardwise as sw

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


def test_keys_that_differ_are_an_error():
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


def linear(bias=True):
    return nnx.Linear(8, 4, use_bias=bias, rngs=nnx.Rngs(0))


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
    want = jax.jit(real(body, AB, in_specs, out_specs, check_vma=vma))(*args)
    same(jax.jit(simulated(body, AB, in_specs, out_specs, check_vma=vma))(*args), want)


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
def test_what_jax_rejects_is_rejected(name):
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
        ({"mesh": 3}, "mesh must be a mesh"),
        ({"axis_names": {"aa"}}, "not on the mesh: did you mean 'a'"),
        ({"mesh": "a"}, "where an axis is expected"),
    ],
    ids=["body", "mesh", "axis_names", "mesh text"],
)
def test_wrong_use(options, message):
    options = {"body": lambda x: x, "mesh": AB, "in_specs": X, "out_specs": X, **options}
    with pytest.raises(ValueError, match=message):
        sw.simulate(options.pop("body"), **options)
