"""Shared by the tests of the simulated shard_map: the real one, and how to compare the two."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._base import show_line

MESHES = ("a=8", "a=2,b=4", "a=2,b=2,c=2", "a=2,b=1,c=2,d=2")
AB = "a=2,b=4"
BOTH = pytest.mark.parametrize("vma", [True, False], ids=["typed", "untyped"])


def with_types(names, untyped):
    """Returns a mark for each name with `check_vma`, and for those in `untyped` also without."""
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
    """Returns distinct numbers of both signs, none of them an integer."""
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
    """Asserts equal trees, shapes and dtypes, and equal numbers up to rounding."""
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
    """Returns a scalar to which every number of the results contributes differently."""
    total = jnp.float32(0)
    for leaf in jax.tree.leaves(tree):
        if is_float(leaf):
            wide = leaf.astype("float32")
            total += jnp.sum(jnp.sin(wide + 0.37 * jnp.arange(wide.size).reshape(wide.shape)))
    return total


def with_gradient(fn):
    """Returns the results of a function, and the gradients with respect to its float arguments."""

    def run(*args):
        floats = tuple(i for i, a in enumerate(args) if all(map(is_float, jax.tree.leaves(a))))

        def scalar(*args):
            out = fn(*args)
            return loss(out), out

        grads, out = jax.grad(scalar, floats, has_aux=True)(*args)
        return out, grads

    return run


def compare(body, mesh, in_specs, out_specs, *args, grad=True, wrap=None, tolerance=2e-5, **opts):
    """Asserts that the simulated results and gradients equal the real ones."""
    wrap = wrap or (with_gradient if grad else lambda fn: fn)
    want = jax.jit(wrap(real(body, mesh, in_specs, out_specs, **opts)))(*args)
    got = jax.jit(wrap(simulated(body, mesh, in_specs, out_specs, **opts)))(*args)
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
    """Returns the body with a leading device dim on each result, so that any can be returned."""

    @functools.wraps(body)
    def run(*args):
        return jax.tree.map(lambda out: jnp.asarray(out)[None], body(*args))

    return run


def refusal(fn, *args):
    """Returns the error of a call, or of the work that it left pending."""
    with pytest.raises(Exception) as info:
        jax.block_until_ready(fn(*args))
        jax.effects_barrier()
    return info.value


def line_of(body, text):
    """Returns the file and line of a line in a function, as a trace shows it."""
    lines, start = inspect.getsourcelines(body)
    (at,) = (i for i, line in enumerate(lines) if text in line)
    return show_line(inspect.getsourcefile(inspect.unwrap(body)), start + at)


def layer_args():
    return numbers(4, 3), numbers(3, 8, start=5), numbers(8, 2, start=9)


EVERY = ("a", "b")


def all_vary(value):
    return vary(value, EVERY)


X = P("a", "b")


@jax.custom_jvp
def scaled(x):
    return lax.psum(x, "b") * jnp.sin(x)


@scaled.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    total = lax.psum(x, "b")
    return total * jnp.sin(x), 2.0 * lax.psum(t, "b") * jnp.sin(x) + total * t


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
