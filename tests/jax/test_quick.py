"""Tracing takes a time that grows with the model, not with its square."""

import inspect
import sys
import threading

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.core import Tracer

import shardwise as sw
from shardwise._jax.quick import quick_tracing


class Many(nnx.Module):
    """So many linear layers, each of which asks for two random keys."""

    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(layers)])


def _calls(run) -> int:
    """Returns how many Python functions `run` calls, those of comprehensions too."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def test_the_work_of_a_layout_grows_with_the_leaves() -> None:
    mesh = sw.mesh("fsdp=8", on="none")

    def build(layers: int) -> int:
        return _calls(lambda: sw.check(sw.layout(lambda: Many(layers, nnx.Rngs(0)), mesh, "fsdp")))

    build(2)  # what is done once
    small, large = build(50), build(200)
    assert large < 5 * small


def test_a_tracer_still_says_that_it_has_no_sharding() -> None:
    said = []

    def ask(x):
        with pytest.raises(AttributeError) as error:
            _ = x.sharding
        said.append(str(error.value))
        return x

    with quick_tracing():
        jax.make_jaxpr(ask)(jnp.zeros(3))
    assert "'sharding' attribute is not available on traced array" in said[0]


def test_jax_is_left_as_it_was() -> None:
    before = inspect.getattr_static(Tracer, "sharding")
    inside, leave = threading.Barrier(2), threading.Event()

    def enter() -> None:
        with quick_tracing():
            inside.wait(10)
            leave.wait(10)

    other = threading.Thread(target=enter)
    other.start()
    with pytest.raises(RuntimeError, match="ours"), quick_tracing():
        inside.wait(10)
        raise RuntimeError("ours")
    leave.set()
    other.join()
    assert inspect.getattr_static(Tracer, "sharding") is before
