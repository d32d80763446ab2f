"""Ring attention against JAX's own: values, gradients, messages and compiled memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw


def arrays(length, key_length=None, heads=4, key_heads=None, dim=8, dtype="float32", batch=2):
    draw = np.random.default_rng(length)  # JAX would compile a program for each shape
    shapes = [(length, heads)] + [(key_length or length, key_heads or heads)] * 2
    return tuple(
        jnp.asarray(draw.normal(size=(batch, n, h, dim)).astype(jnp.dtype(dtype)))
        for n, h in shapes
    )


def plain(causal, scale=None):
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def grads(fn, args):
    def scalar(*args):
        out = fn(*args)
        return jnp.sum(jnp.sin(3 * out.astype("float32"))), out

    return jax.jit(jax.value_and_grad(scalar, (0, 1, 2), has_aux=True))(*args)


def assert_near(got, want, tolerance=2e-4):
    def near(a, b):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=tolerance, atol=tolerance)

    jax.tree.map(near, got[0][1], want[0][1])
    jax.tree.map(near, got[1], want[1])


CASES = {
    "causal": (True, arrays(32)),
    "not causal": (False, arrays(32)),
    "grouped": (True, arrays(32, heads=6, key_heads=2)),
    "one key head": (True, arrays(16, heads=4, key_heads=1)),
    "other length of keys": (False, arrays(16, 48, heads=4, key_heads=2)),
}
MESHES = {
    "simulated": lambda: "seq=4,data=2",
    "real": lambda: sw.mesh("seq=4,data=2"),
    "eight": lambda: sw.mesh("seq=8"),
    "one": lambda: "seq=1",
}


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        ("causal", "simulated"),
        ("not causal", "eight"),
        ("grouped", "simulated"),
        ("grouped", "real"),
        ("one key head", "one"),
        ("other length of keys", "real"),
    ],
)
def test_global_arrays_on_a_mesh(case, mesh):
    causal, args = CASES[case]
    given_mesh = MESHES[mesh]()

    def run(*args):
        how = {"axis": "seq", "causal": causal, "mesh": given_mesh, "block": 3}
        return sw.sequence_parallel_attention(*args, **how)

    assert_near(grads(run, args), grads(plain(causal), args))


@pytest.mark.parametrize("run", [sw.simulate, jax.shard_map], ids=["simulated", "real"])
@pytest.mark.parametrize(
    ("check_vma", "key_heads"), [(False, 2), (True, 1)], ids=["heads split", "key heads replicated"]
)
def test_in_a_body_with_data_and_tensor_axes(run, check_vma, key_heads):
    args = arrays(16, heads=4, key_heads=key_heads)
    spec = P("data", "seq", "model")
    key_spec = spec if key_heads > 1 else P("data", "seq")

    def body(*args):
        return sw.sequence_parallel_attention(*args, axis="seq", causal=True)

    fn = run(
        body,
        mesh=sw.mesh("data=2,seq=2,model=2"),
        in_specs=(spec, key_spec, key_spec),
        out_specs=spec,
        check_vma=check_vma,
    )
    assert_near(grads(fn, args), grads(plain(True), args))


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 9),
)
def test_any_shape(devices, part, key_heads, group, causal, block):
    args = arrays(devices * part, heads=key_heads * group, key_heads=key_heads, dim=4, batch=1)

    def run(*args):
        how = {"axis": "seq", "causal": causal, "mesh": f"seq={devices}", "block": block}
        return sw.sequence_parallel_attention(*args, **how)

    assert_near(grads(run, args), grads(plain(causal), args))


def test_low_precision_and_scale():
    args = arrays(32, heads=4, key_heads=2, dtype="bfloat16")

    def run(*args):
        how = {"axis": "seq", "causal": True, "scale": 0.5, "mesh": "seq=4"}
        return sw.sequence_parallel_attention(*args, **how)

    exact = [a.astype("float32") for a in args]
    got, want = grads(run, args), grads(plain(True, 0.5), exact)
    assert {a.dtype for a in got[1]} == {jnp.dtype("bfloat16")}
    for a, b in zip((got[0][1], *got[1]), (want[0][1], *want[1]), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0.05, atol=0.06)


def test_large_scores_do_not_overflow():
    q, k, v = arrays(16)

    def run(*args):
        return sw.sequence_parallel_attention(*args, axis="seq", causal=True, mesh="seq=4")

    assert_near(grads(run, (200 * q, 200 * k, v)), grads(plain(True), (200 * q, 200 * k, v)), 2e-2)


def test_keys_and_values_go_round_once():
    def body(q, k, v):
        return sw.sequence_parallel_attention(q, k, v, axis="seq")

    spec = P(None, "seq")
    trace = sw.simulate(body, mesh="seq=4", in_specs=(spec,) * 3, out_specs=spec).trace(*arrays(16))
    assert [(e.kind, e.times, e.shape) for e in trace] == [("ppermute", 3, (2, 4, 4, 8))] * 2


def test_memory_of_a_device_falls_as_the_axis_grows():
    found = []
    for devices in (1, 2, 4, 8):
        mesh = sw.mesh({"seq": devices}, on=f"cpu:{devices}")
        whole = jax.ShapeDtypeStruct((1, 2048, 4, 32), "float32")
        sharding = NamedSharding(mesh, P(None, "seq"))

        def loss(*args, mesh=mesh):
            how = {"axis": "seq", "causal": True, "mesh": mesh, "block": 128}
            return sw.sequence_parallel_attention(*args, **how).sum()

        step = jax.jit(jax.grad(loss, (0, 1, 2)), in_shardings=sharding, out_shardings=sharding)
        memory = step.lower(whole, whole, whole).compile().memory_analysis()
        found.append(memory.temp_size_in_bytes + memory.argument_size_in_bytes)
    for devices, bytes_ in zip((2, 4, 8), found[1:], strict=True):
        assert bytes_ <= 1.35 * found[0] / devices, found


@pytest.mark.parametrize(
    ("shapes", "options", "text"),
    [
        ([(2, 8, 8)] * 3, {}, r"the query has shape \(2, 8, 8\), expected \(batch, length, heads"),
        ([(2, 8, 4, 8), (2, 8, 3, 8), (2, 8, 3, 8)], {}, "4 query heads cannot be divided"),
        ([(2, 8, 4, 8), (2, 8, 4, 8), (2, 4, 4, 8)], {}, "differ in batch, length or heads"),
        ([(2, 8, 4, 8), (2, 8, 4, 4), (2, 8, 4, 4)], {}, "differ in batch or head_dim"),
        (
            [(2, 8, 4, 8), (2, 4, 4, 8), (2, 4, 4, 8)],
            {"causal": True},
            "causal attention needs one sequence",
        ),
        ([(2, 6, 4, 8)] * 3, {}, "the query has length 6, which cannot be split evenly over"),
        ([(2, 8, 4, 8)] * 3, {"axis": "sq"}, "axis 'sq' is not on the mesh seq=4"),
        ([(2, 8, 4, 8)] * 3, {"mesh": None}, "is called outside of any mesh with axis 'seq'"),
        ([(2, 8, 4, 8)] * 3, {"block": 0}, "block must be a positive integer, got 0"),
    ],
)
def test_errors(shapes, options, text):
    with pytest.raises(ValueError, match=text):
        sw.sequence_parallel_attention(
            *(jnp.ones(s) for s in shapes), **({"axis": "seq", "mesh": "seq=4"} | options)
        )
