"""Measuring the devices of this machine."""

import jax
import jax.numpy as jnp
import pytest

from shardwise._measure import measure
from shardwise._measure.measuring import _collectives, seconds_of


def test_devices_without_a_model_are_not_measured():
    with pytest.raises(ValueError, match="no model to calibrate for"):
        measure(1.0, lambda text: None)


def test_more_work_takes_longer():
    square = jax.jit(jnp.matmul)
    small, large = (
        seconds_of(square, x, x, least=0.01) for x in (jnp.ones((64, 64)), jnp.ones((1024, 1024)))
    )
    assert 0 < small < large


def test_collectives_of_every_group_size_are_measured(monkeypatch):
    monkeypatch.setattr("shardwise._measure.measuring._BYTES", (2**16, 2**18))
    said = []
    rows = list(_collectives(jax.devices()[:2], float("inf"), said.append))
    assert {(kind, count) for kind, count, _, _ in rows} == {
        (kind, 2) for kind in ("all-gather", "all-reduce", "reduce-scatter")
    }
    assert all(seconds > 0 for *_, seconds in rows) and len(said) == len(rows)
