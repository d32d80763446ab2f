"""Naming modules in the program leaves the user's own modules as they are."""

import pickle

import jax
import optax
import pytest
from flax import nnx

import shardwise as sw


class Base(nnx.Module):
    def __init__(self):
        self.inner = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.inner(x)


class Block(Base):
    def __call__(self, x):
        assert isinstance(self, Block) and type(self).__name__ == "Block"
        if x.shape[0] == 16:
            raise KeyError("the user's")
        return super().__call__(x)


class Net(nnx.Module):
    def __init__(self):
        self.block = Block()

    def __call__(self, x):
        return self.block(x)


def classes(model):
    return [type(module) for _, module in nnx.iter_modules(model)]


def test_modules_keep_their_classes_after_compiling_and_after_a_failure():
    model = Net()
    before = classes(model)
    layout = sw.layout(model, sw.mesh("data=8", on="cpu:8"), "dp")
    sw.compile(model, layout, inputs=jax.ShapeDtypeStruct((8, 8), "float32"), show=False)
    assert classes(model) == before and {Net, Block, nnx.Linear} == set(before)
    with pytest.raises(ValueError, match='KeyError: "the user\'s"'):
        sw.compile(model, layout, inputs=jax.ShapeDtypeStruct((16, 8), "float32"), show=False)
    assert classes(model) == before
    assert type(pickle.loads(pickle.dumps(model.block))) is Block


@pytest.mark.parametrize("remat", [None, {"block": "nothing_saveable"}], ids=["plain", "remat"])
def test_modules_that_a_loss_closes_over_keep_theirs_too(remat):
    teacher = Net()
    before = classes(teacher)
    recipe = sw.Recipe(
        model=Net,
        loss=lambda model, x: ((model(x) - teacher(x)) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((8, 8), "float32"),
        remat=remat,
    )
    layout = sw.layout(Net, sw.mesh("data=8", on="cpu:8"), "dp")
    sw.compile(recipe, layout, show=False)
    assert classes(teacher) == before


def test_an_input_that_the_data_axes_do_not_divide_is_refused_unless_its_sharding_is_given():
    layout = sw.layout(Net, sw.mesh("data=8", on="cpu:8"), "dp")
    bare = jax.ShapeDtypeStruct((6, 8), "float32")
    with pytest.raises(ValueError, match=r"shape \(6, 8\) cannot be split 8 ways over data: make"):
        sw.compile(Net, layout, inputs=bare, show=False)
    replicated = jax.sharding.NamedSharding(layout.mesh, jax.P())
    given = jax.ShapeDtypeStruct((6, 8), "float32", sharding=replicated)
    found = sw.compile(Net, layout, inputs=given, show=False)
    assert found.memory.batch == 6 * 8 * 4
