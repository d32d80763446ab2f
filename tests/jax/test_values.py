"""Values in messages: short, and with shapes instead of contents."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._jax.values import show_value

BIG = np.zeros((4, 1024, 8, 128), "float32")
SHOWN = {
    "array": (BIG, "float32[4,1024,8,128]"),
    "abstract": (jax.ShapeDtypeStruct((2, 6), "int32"), "int32[2,6]"),
    "variable": (nnx.Param(jnp.zeros(3)), "float32[3]"),
    "tuple": ((BIG, True), "(float32[4,1024,8,128], True)"),
    "one": ((3,), "(3,)"),
    "nested": ({"a": [BIG, None]}, "{'a': [float32[4,1024,8,128], None]}"),
    "many": ([BIG] * 30, "[" + "float32[4,1024,8,128], " * 4 + "… 26 more]"),
    "module": (models.Mlp(4, 4, nnx.Rngs(0)), "Mlp(...)"),
    "spec": (P(None, "model"), "P(None, 'model')"),
    "number": (np.float32(2), repr(np.float32(2))),
    "text": ("x" * 100, "'" + "x" * 58 + "…"),
}


@pytest.mark.parametrize("case", SHOWN)
def test_a_value_in_a_sentence(case):
    value, wanted = SHOWN[case]
    assert show_value(value) == wanted


def test_a_value_is_never_longer_than_its_limit():
    assert len(show_value({f"layer {i}": {"k": BIG, "v": BIG} for i in range(40)})) <= 160


MESH = sw.mesh("data=2,model=4", on="none")


def make():
    return models.Mlp(16, 32, nnx.Rngs(0))


# Arguments that may be an array, or many arrays, by mistake.
REFUSED = {
    "a rule": lambda: sw.layout(make, MESH, {"**": BIG}),
    "a rule's answer": lambda: sw.layout(make, MESH, lambda leaf: BIG),
    "rules": lambda: sw.layout(make, MESH, [[BIG]]),
    "logical": lambda: sw.layout(make, MESH, logical={"mlp": BIG}),
    "mesh": lambda: sw.layout(make, BIG),
    "optimizer": lambda: sw.layout(make, MESH).for_optimizer({"mu": BIG}),
    "inputs": lambda: sw.layout(make, MESH, "tensor", inputs=(BIG, {"cache": [BIG] * 30})),
    "method": lambda: sw.layout(make, MESH, "tensor", inputs=BIG, method=[BIG]),
    "clip": lambda: sw.Recipe(model=make, loss=len, optimizer=optax.sgd(1), batch=BIG, clip=BIG),
    "batch": lambda: sw.Recipe(model=make, loss=len, optimizer=optax.sgd(1), batch=["x" * 10**4]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_error_never_prints_an_array(case):
    with pytest.raises(ValueError) as caught:
        REFUSED[case]()
    message = str(caught.value)
    assert len(message) < 700
    assert "0." not in message and "\n" not in message
