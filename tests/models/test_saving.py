"""Activations that are saved or offloaded by name."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import shardwise as sw
from shardwise import models
from shardwise._jax import opened, sub_jaxprs
from shardwise._step import make_blueprint

SMALL = models.Config(layers=2, width=64, hidden=96, heads=2, vocab=64, scan=True)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 16)).astype("int32")


def backward(remat, tokens=TOKENS, **changes):
    """Returns the gradient of the loss as a function of the weights, and them without values."""
    config = dataclasses.replace(SMALL, remat=remat, **changes)
    model = nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)

    def loss(state):
        return models.next_token_loss(nnx.merge(graphdef, state), tokens)

    return jax.grad(loss), state


def counted(jaxpr, found=None):
    """Returns how often each primitive occurs in a program."""
    found = {} if found is None else found
    for eqn in jaxpr.eqns:
        found[eqn.primitive.name] = found.get(eqn.primitive.name, 0) + 1
        for inner in sub_jaxprs(eqn):
            counted(opened(inner)[0], found)
    return found


@functools.cache
def primitives(remat):
    gradient, state = backward(remat)
    return counted(jax.make_jaxpr(gradient)(state).jaxpr)


@pytest.mark.parametrize("names", ["q", "k", "v", "up", "q,k,v,up"])
def test_a_saved_product_is_not_computed_again(names):
    few, many = primitives(f"save:{names}"), primitives("nothing_saveable")
    assert many["dot_general"] - few["dot_general"] == len(names.split(","))


def test_what_is_offloaded_moves_to_the_host_and_back():
    moved = primitives("save:k+offload:input,q")
    assert moved["dot_general"] == primitives("save:k,q")["dot_general"]
    assert moved["device_put"] == 2 * 2 and "device_put" not in primitives("save:k,q")


@pytest.mark.parametrize("remat", ["save:q,context,down", "save:k+offload:input,out"])
def test_gradients_do_not_depend_on_what_is_saved(remat):
    draw = np.random.default_rng(1)
    results = []
    for each in (None, remat):
        gradient, state = backward(each)
        draw = np.random.default_rng(1)
        values = jax.tree.map(lambda x, d=draw: d.normal(0, 0.1, x.shape).astype("float32"), state)
        results.append(jax.tree.leaves(jax.jit(gradient)(values)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def names_in(jaxpr):
    """Yields the name of every named activation of a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        for inner in sub_jaxprs(eqn):
            yield from names_in(opened(inner)[0])


def test_attention_that_is_saved_is_not_needed_again():
    """On a TPU the kernel's two results have one name: both are saved, or neither."""
    kind = AbstractDevice(device_kind="TPU v5", num_cores=None, platform="tpu")
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,), abstract_device=kind)
    found = {}
    for remat in ("nothing_saveable", "save:context"):
        gradient, state = backward(remat, np.ones((1, 128), "int32"), width=128)
        with jax.sharding.use_abstract_mesh(mesh):
            found[remat] = list(names_in(jax.make_jaxpr(gradient)(state).jaxpr)).count("context")
    assert found["nothing_saveable"] > found["save:context"] == 2


class Own(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(checkpoint_name(self.up(x), "mixed")))


def recipe(remat):
    batch = jax.ShapeDtypeStruct((8, 16), "float32")
    return sw.Recipe(
        model=lambda: Own(nnx.Rngs(0)),
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        batch=batch,
        remat=remat,
    )


def test_names_of_any_model_are_saved_and_unknown_ones_refused():
    layout = sw.layout(recipe(None).model, sw.mesh("data=8", on="cpu:8"), "dp")
    steps = {}
    for each in ("nothing_saveable", "save:mixed", "offload:mixed"):
        blueprint = make_blueprint(recipe(each), layout)
        traced = jax.jit(blueprint.step).trace(blueprint.abstract, blueprint.batch)
        steps[each] = counted(opened(traced.jaxpr)[0])
    assert steps["save:mixed"]["dot_general"] == steps["nothing_saveable"]["dot_general"] - 1
    assert steps["offload:mixed"]["device_put"] == 2
    message = "remat saves 'blended', but the model names no such activation: it names mixed"
    with pytest.raises(ValueError, match=message):
        sw.compile(recipe("save:mixed,blended"), layout)
