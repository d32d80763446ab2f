"""What a simulated shard_map rejects, and the messages."""

import os

import jax
import jax.numpy as jnp
import numpy as np
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
    plain,
    real,
    refusal,
    same,
    simulated,
    vary,
    with_types,
)

import shardwise as sw


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


def test_bad_specs_of_all_arguments_are_reported_at_once():
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


def test_disagreement_names_devices_values_and_index():
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


def test_sums_in_a_different_order_agree():
    # Each device sums the same numbers, starting with its own.
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


def test_gradient_without_check_is_the_real_one():
    # The loss is linear, since each real device would continue with its own value.
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
        # The result is still right, as the real one is with check_vma=False.
        same(f(x), real(body, AB, X, out_specs, check_vma=False)(x))
        assert codes(simulated(body, AB, X, out_specs, check_vma=False).check(x)) == []
    else:
        same(f(x), real(body, AB, X, out_specs)(x))


def d_cond(x):
    return lax.cond(x.sum() > 0, lambda v: all_vary(lax.psum(v, "b")), lambda v: v, x)


def d_permute_elsewhere(x):
    # A permute along b waits for all devices, including those along a.
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
    # They agree before the first iteration.
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
def test_devices_that_would_deadlock(name):
    x = numbers(4, 8)
    f = simulated(DIVERGING[name], AB, X, X)
    error = refusal(f, x)
    assert isinstance(error, sw.LayoutError)
    assert codes(error.findings) == ["SW503"]
    assert error.findings[0].path.startswith(os.path.relpath(__file__))
    assert codes(f.check(x)) == ["SW503"]


@pytest.mark.parametrize("name", DIVERGING)
def test_devices_that_would_deadlock_under_jit(name):
    f = jax.jit(simulated(DIVERGING[name], AB, X, X))
    assert "SW503" in str(refusal(f, numbers(4, 8)))


def test_predicates_that_agree_by_chance_are_fine():
    # JAX considers the predicate varying, but it does not vary, so real devices would not wait.
    def body(x):
        go = x.sum() * 0 < 1
        return lax.cond(go, lambda v: all_vary(lax.psum(v, "b")), lambda v: v, x)

    compare(body, AB, X, X, numbers(4, 8))


def test_problems_of_both_specs_are_reported_at_once():
    f = simulated(lambda x: (x, x), "a=2,b=4", P("b"), (P("c"), P("a", "a")))
    error = refusal(f, numbers(6, 3))
    assert [(e.code, e.path) for e in error.findings] == [
        ("SW104", "x"),
        ("SW101", "output.0"),
        ("SW102", "output.1"),
    ]


def test_paths_of_a_state_are_those_of_layouts():
    linear = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    f = simulated(lambda model, x: model(x), "b=4", (P(None, "b"), P()), P())
    found = f.check(nnx.split(linear)[1], numbers(2, 4)).items
    assert {(e.code, e.path) for e in found} >= {("SW104", "model.kernel"), ("SW103", "model.bias")}
