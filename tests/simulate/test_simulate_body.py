"""Loops, branches and derivatives inside a body, simulated against real."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from simulated import (
    AB,
    BOTH,
    EVERY,
    all_vary,
    clipped,
    compare,
    layer_args,
    loss,
    numbers,
    real,
    same,
    scaled,
    simulated,
    stacked,
    vary,
    with_types,
)


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
    # The carried value starts out the same on all devices, and varies after one step.
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
    # Inside a branch, JAX would cast w to varying there, and sum its gradient there: a deadlock.
    w = all_vary(w)
    return lax.cond(x.sum() > 0, lambda v, w: jnp.sin(v) * w, lambda v, w: v * v - w, x, w)


def b_cond_across(x, w):
    # The devices that meet in the psum, those at the same place along a, take the same branch.
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
    # A value that does not vary along an axis is stored once: here it meets one that does.
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
def test_inside_the_body(name, vma):
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
    # The devices that meet in the psum run the loop equally often.
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
        # With types the two functions change what varies, and JAX adds the sums by itself.
        def body(x, w, v):
            return lax.psum(jnp.tanh(lax.pcast(x, "b", to="varying") @ w) @ v, "b")

    specs = (P("a"), P(None, "b"), P("b"))
    compare(body, AB, specs, P("a"), *layer_args(), check_vma=vma)


def test_gradient_inside_a_megatron_body():
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
    # Each device clips its cotangent, which must be the one that a real device gets.
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
