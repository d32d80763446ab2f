"""Models as people write them: arrays in helper objects, and axes named while building."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardwise as sw


class Rope:
    """A helper that is not a module, as rotary embeddings often are."""

    def __init__(self, size):
        self.sin = jnp.sin(jnp.arange(size) * 1.0)

    def __call__(self, x):
        return x + self.sin


class Slotted:
    __slots__ = ("tables",)

    def __init__(self, size):
        self.tables = ({"sin": jnp.sin(jnp.arange(size) * 1.0)},)

    def __call__(self, x):
        return x + self.tables[0]["sin"]


def in_object(size, rngs):
    return Rope(size)


def in_slots(size, rngs):
    return Slotted(size)


def in_closure(size, rngs):
    sin = jnp.sin(jnp.arange(size) * 1.0)
    return lambda x: x + sin


def in_default(size, rngs):
    return lambda x, sin=jnp.sin(jnp.arange(size) * 1.0): x + sin  # noqa: B008


def in_partial(size, rngs):
    return functools.partial(jnp.add, jnp.sin(jnp.arange(size) * 1.0))


def in_jitted(size, rngs):
    return jax.jit(in_closure(size, rngs))


def in_method(size, rngs):
    return Rope(size).__call__


def random_values(size, rngs):
    return functools.partial(jnp.add, jax.random.normal(rngs.params(), (size,)))


def in_module_of_helper(size, rngs):
    class Holder:
        def __init__(self):
            self.inner = nnx.Linear(size, size, rngs=rngs)

        def __call__(self, x):
            return self.inner(x)

    return Holder()


HOLDERS = [
    in_object,
    in_slots,
    in_closure,
    in_default,
    in_partial,
    in_jitted,
    in_method,
    random_values,
    in_module_of_helper,
]


class WithHelper(nnx.Module):
    def __init__(self, holder, rngs):
        self.first = nnx.Linear(32, 32, rngs=rngs)
        self.first.note = "static"
        self.helper = holder(32, rngs)
        self.second = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        return self.second(self.helper(self.first(x)))


def recipe_of(make, shape=(8, 32)):
    return sw.Recipe(
        model=make,
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct(shape, "float32"),
    )


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda f: f.__name__)
def test_arrays_of_helpers_are_constants_of_the_model(holder):
    def make():
        return WithHelper(holder, nnx.Rngs(0))

    x = np.linspace(0, 1, 8 * 32, dtype="float32").reshape(8, 32)
    layout = sw.layout(
        make,
        sw.mesh("data=8", on="cpu:8"),
        sw.fsdp("data", min_bytes=0),
        inputs=jax.ShapeDtypeStruct((8, 32), "float32"),
    )
    assert not [leaf.path for leaf in layout.leaves if leaf.path.startswith("helper")]
    eager = make()
    np.testing.assert_allclose(sw.init(make, layout)(x), eager(x), rtol=1e-5, atol=1e-6)
    recipe = recipe_of(make)
    state = sw.train_state(recipe, layout)
    state, metrics = sw.train_step(recipe, layout)(state, x)
    np.testing.assert_allclose(metrics["loss"], (eager(x) ** 2).mean(), rtol=1e-5)
    np.testing.assert_allclose(state.to_model(make)(x), _trained(eager, x)(x), rtol=1e-4, atol=1e-5)
    assert sw.compile(recipe, layout).memory.peak > 0


def _trained(model, x):
    """Returns the model after one step of Flax's own loop."""
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    grads = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return model


@pytest.mark.parametrize("container", [tuple, list, lambda xs: {"sin": xs[0]}])
def test_a_container_of_arrays_is_rejected_as_in_flax(container):
    class Model(nnx.Module):
        def __init__(self):
            self.tables = container([jnp.ones(4)])

    with pytest.raises(ValueError):
        Model()
    with pytest.raises(ValueError, match=r"tables of Model is a \w+ of arrays.*nnx\.data"):
        sw.layout(Model, sw.mesh("data=8", on="none"))


def test_a_container_that_is_data_is_state():
    class Model(nnx.Module):
        def __init__(self):
            self.tables = nnx.data((jnp.ones(4), jnp.ones(8)))

    layout = sw.layout(Model, sw.mesh("data=8", on="none"))
    assert [leaf.path for leaf in layout.leaves] == ["tables.0", "tables.1"]


def test_a_factory_that_builds_another_helper_each_time_is_refused():
    sizes = iter(range(4, 100))

    class Model(nnx.Module):
        def __init__(self):
            self.rope = Rope(next(sizes))

    with pytest.raises(ValueError, match="the array at rope.sin differs"):
        sw.layout(Model, sw.mesh("data=8", on="none"))


class NamesAxes(nnx.Module):
    def __init__(self, rngs):
        key = rngs.params
        self.w = nnx.Param(jnp.zeros((8, 16), out_sharding=P(None, "model")))
        self.u = nnx.Param(jax.random.normal(key(), (8, 16), out_sharding=P("data")))
        self.l = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.l(x) @ (self.w[...] + self.u[...])


def names_axes():
    return NamesAxes(nnx.Rngs(0))


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("ambient", [False, True])
def test_a_model_may_name_axes_while_it_is_built(explicit, ambient):
    mesh = sw.mesh("data=2,model=4", on="cpu:8", explicit=explicit)
    typed = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(typed):
        wanted = names_axes()
    with jax.set_mesh(typed) if ambient else contextlib.nullcontext():
        layout = sw.layout(names_axes, mesh)
        model = sw.init(names_axes, layout)
    assert layout["w"].shard_shape == (8, 4)
    assert layout["u"].shard_shape == (4, 16)
    assert layout["w"].reason.startswith("annotation")
    assert not sw.audit(layout, model)
    for name in ("w", "u"):
        np.testing.assert_array_equal(
            np.asarray(getattr(model, name)[...]), np.asarray(getattr(wanted, name)[...])
        )


def test_a_model_that_names_axes_trains():
    layout = sw.layout(names_axes, sw.mesh("data=2,model=4", on="cpu:8"))
    recipe = recipe_of(names_axes, (8, 8))
    state, step = sw.train_state(recipe, layout), sw.train_step(recipe, layout)
    losses = []
    for _ in range(3):
        state, metrics = step(state, np.full((8, 8), 0.1, "float32"))
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


def test_a_constraint_while_building_finds_the_mesh():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jax.lax.with_sharding_constraint(jnp.ones(8), P("data")))

    layout = sw.layout(Model, sw.mesh("data=8", on="cpu:8"), "dp")
    assert sw.init(Model, layout).w.shape == (8,)


def test_an_axis_that_the_mesh_lacks_is_named():
    with pytest.raises(ValueError, match="names mesh axes.*cannot build them on data=8.*model"):
        sw.layout(names_axes, sw.mesh("data=8", on="none"))


class Mlp(nnx.Module):
    def __init__(self, rngs, **named):
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.norm = nnx.BatchNorm(128, rngs=rngs)
        self.drop = nnx.Dropout(0.0, rngs=rngs)
        self.down = nnx.Linear(128, 64, rngs=rngs)
        self.named = named

    def __call__(self, x):
        x = self.up(x, **({"out_sharding": self.named["up"]} if self.named else {}))
        x = self.drop(self.norm(nnx.gelu(x)))
        return self.down(x, **({"out_sharding": self.named["down"]} if self.named else {}))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_fsdp_gathers_on_explicit_axes(accumulate):
    x = np.linspace(-1, 1, 16 * 64, dtype="float32").reshape(16, 64)
    make = lambda: Mlp(nnx.Rngs(0))  # noqa: E731
    losses = {}
    for explicit in (False, True):
        mesh = sw.mesh("data=8", on="cpu:8", explicit=explicit)
        layout = sw.layout(make, mesh, sw.fsdp("data", min_bytes=0))
        assert not sw.check(layout)
        recipe = sw.Recipe(
            model=make,
            loss=lambda model, x: (model(x) ** 2).mean(),
            optimizer=optax.adam(1e-2),
            batch=jax.ShapeDtypeStruct((16, 64), "float32"),
            accumulate=accumulate,
        )
        state, step = sw.train_state(recipe, layout), sw.train_step(recipe, layout)
        losses[explicit] = []
        for _ in range(3):
            state, metrics = step(state, x)
            losses[explicit].append(float(metrics["loss"]))
        # Still sharded after the step.
        kernel = state.model["up.kernel"]
        assert kernel.addressable_shards[0].data.shape == layout["up.kernel"].shard_shape
        kinds = {row.kind for row in sw.compile(recipe, layout).collectives}
        assert "all-gather" in kinds
    np.testing.assert_allclose(losses[True], losses[False], rtol=1e-4)


def test_a_model_for_explicit_axes_says_so_on_auto_ones():
    make = lambda: Mlp(nnx.Rngs(0), up=P("data", "model"), down=P("data"))  # noqa: E731
    rules = {"up.kernel": P(None, "model"), "up.bias": P("model"), "down.kernel": P("model")}
    x = np.ones((16, 64), "float32")
    recipe = recipe_of(make, (16, 64))
    for explicit in (False, True):
        mesh = sw.mesh("data=2,model=4", on="cpu:8", explicit=explicit)
        layout = sw.layout(make, mesh, rules)
        state, step = sw.train_state(recipe, layout), sw.train_step(recipe, layout)
        if explicit:
            assert np.isfinite(step(state, x)[1]["loss"])
        else:
            with pytest.raises(ValueError, match="explicit=True"):
                step(state, x)
            with pytest.raises(ValueError, match="explicit=True"):
                sw.compile(recipe, layout)


def test_a_plain_model_split_by_tensor_on_explicit_axes_is_pointed_to_auto_ones():
    make = lambda: Mlp(nnx.Rngs(0))  # noqa: E731
    mesh = sw.mesh("data=2,model=4", on="cpu:8", explicit=True)
    layout = sw.layout(make, mesh, [sw.tensor("model")])
    recipe = recipe_of(make, (16, 64))
    with pytest.raises(ValueError, match="without explicit=True"):
        sw.train_step(recipe, layout)(sw.train_state(recipe, layout), np.ones((16, 64), "float32"))


def as_condition(kernel):
    return 1 if kernel.sum() > 0 else 2


def as_number(kernel):
    return float(kernel[0, 0])


def as_numpy(kernel):
    return np.asarray(kernel)


def as_size(kernel):
    return jnp.zeros(kernel[0, 0].astype("int32"))


READS = {
    as_condition: "as a condition",
    as_number: "as a Python number",
    as_numpy: "as a NumPy array",
    as_size: "as a size",
}


@pytest.mark.parametrize("read", READS, ids=lambda f: f.__name__)
def test_a_factory_that_reads_a_traced_value_is_told_where(read):
    def make():
        model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        read(model.kernel[...])
        return model

    line = read.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match="reads the value of an array") as caught:
        sw.layout(make, sw.mesh("data=2", on="none"))
    assert f"an array {READS[read]}, at tests/nnx/test_build.py:{line}: " in str(caught.value)
    assert "jnp.where" in str(caught.value) and "racer" not in str(caught.value)
