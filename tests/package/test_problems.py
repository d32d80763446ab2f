"""The seeds' four problems: the values that their documents state, and the real thing beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardwise import problems


def x(rows=8, columns=4):
    return jax.random.normal(jax.random.key(7), (rows, columns))


@pytest.mark.parametrize("seed,columns,features", [(0.0, 4, 8.0), (3.0, 1, 16.0), (-1.0, 9, 24.9)])
def test_state_to_sharded_layout(seed, columns, features):
    got = problems.state_to_sharded_layout(seed, x(8, columns), features)
    assert got.shape == (1,) and got.tolist() == [2.0]
    assert problems.state_to_sharded_layout_for_real(seed, x(8, columns), features).tolist() == [
        2.0
    ]


@pytest.mark.parametrize("devices,rows,columns", [(1, 3, 5), (2, 7, 8), (4, 8, 16), (8, 1, 8)])
def test_partition_spec_layout(devices, rows, columns):
    got = problems.partition_spec_layout(float(devices), float(rows), float(columns))
    assert got.shape == (2,) and got.dtype == jnp.float32
    assert got.tolist() == [rows, columns // devices]
    real = problems.partition_spec_layout_for_real(devices, rows, columns)
    assert real.tolist() == got.tolist()


def test_partition_spec_layout_needs_no_devices():
    assert problems.partition_spec_layout(4096.0, 8.0, 8192.0).tolist() == [8.0, 2.0]


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_shard_map_simulate(shards):
    got = problems.shard_map_simulate(3.0, x(), float(shards), 5.0)
    whole = nnx.Linear(4, 5, rngs=nnx.Rngs(3))(x())
    assert got.shape == (8 * 5,)
    np.testing.assert_allclose(got, whole.reshape(-1), rtol=1e-6, atol=1e-6)
    real = problems.shard_map_simulate_for_real(3.0, x(), float(shards), 5.0)
    np.testing.assert_allclose(got, real, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("features,axes", [(8, 8), (16, 4), (3, 1)])
def test_mesh_init_simulate(features, axes):
    got = problems.mesh_init_simulate(0.0, x(), float(features), float(axes))
    assert got.shape == (3,) and got.tolist() == [features, axes, 2.0]
    real = problems.mesh_init_simulate_for_real(0.0, x(), float(features), float(axes))
    assert real.tolist() == got.tolist()


def test_mesh_init_simulate_states_no_divisibility():
    assert problems.mesh_init_simulate(0.0, x(), 5.0, 3.0).tolist() == [5.0, 3.0, 2.0]


NAN, INF = float("nan"), float("inf")
BAD = {
    "nan seed": (
        problems.state_to_sharded_layout,
        (NAN, x(), 8.0),
        "seed is nan: give a finite number",
    ),
    "huge seed": (
        problems.state_to_sharded_layout,
        (1e30, x(), 8.0),
        "seed is 1e+30: give a number that fits 64 bits",
    ),
    "nan features": (
        problems.state_to_sharded_layout,
        (0.0, x(), NAN),
        "features is nan: give a finite number",
    ),
    "no features": (
        problems.mesh_init_simulate,
        (0.0, x(), 0.5, 2.0),
        "features is 0.5: give a number of at least 1",
    ),
    "vector": (
        problems.state_to_sharded_layout,
        (0.0, jnp.ones(4), 8.0),
        "x has shape (4,): give an array of two dims, (N, in_dim), not empty",
    ),
    "rank 3": (
        problems.shard_map_simulate,
        (0.0, jnp.ones((2, 2, 2)), 1.0, 8.0),
        "x has shape (2, 2, 2): give an array of two dims, (N, in_dim), not empty",
    ),
    "empty": (
        problems.shard_map_simulate,
        (0.0, jnp.ones((0, 2)), 1.0, 8.0),
        "x has shape (0, 2): give an array of two dims, (N, in_dim), not empty",
    ),
    "text": (
        problems.shard_map_simulate,
        (0.0, np.array([["a"]]), 1.0, 8.0),
        "x has dtype <U1: give an array of real numbers",
    ),
    "uneven rows": (
        problems.shard_map_simulate,
        (0.0, x(), 3.0, 8.0),
        "x has 8 rows, which 3 shards cannot split evenly: give a multiple of num_shards",
    ),
    "no shards": (
        problems.shard_map_simulate,
        (0.0, x(), 0.0, 8.0),
        "num_shards is 0.0: give a number of at least 1",
    ),
    "negative shards": (
        problems.shard_map_simulate,
        (0.0, x(), -2.0, 8.0),
        "num_shards is -2.0: give a number of at least 1",
    ),
    "uneven kernel": (
        problems.partition_spec_layout,
        (3.0, 8.0, 8.0),
        "kernel_out is 8, which 3 devices cannot split evenly: give a multiple of num_devices",
    ),
    "negative kernel": (
        problems.partition_spec_layout,
        (2.0, -8.0, 8.0),
        "kernel_in is -8.0: give a number of at least 1",
    ),
    "infinite kernel": (
        problems.partition_spec_layout,
        (2.0, 8.0, INF),
        "kernel_out is inf: give a finite number",
    ),
    "not a number": (
        problems.partition_spec_layout,
        ("two", 8.0, 8.0),
        "num_devices is 'two': give one number",
    ),
    "nan axes": (
        problems.mesh_init_simulate,
        (0.0, x(), 8.0, NAN),
        "mesh_axes is nan: give a finite number",
    ),
    "too many devices": (
        problems.partition_spec_layout_for_real,
        (16, 8, 16),
        "on='cpu:16' needs 16 CPU devices, but JAX has already started with 8",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_inputs_outside_the_domain(case):
    function, args, message = BAD[case]
    with pytest.raises(ValueError) as caught:
        function(*args)
    assert str(caught.value).startswith(message)
