"""Every snippet of the quick reference (seed 001) and of the other seeds, in today's APIs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw


class Annotated(nnx.Module):
    """The document's parameter: dim 0 on 'model', dim 1 replicated."""

    def __init__(self, rngs, spelling="sharding"):
        init = nnx.with_metadata(nnx.initializers.lecun_normal(), **{spelling: ("model", None)})
        self.kernel = nnx.Param(init(rngs.params(), (16, 8)))
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(x @ self.kernel))


def make():
    return Annotated(nnx.Rngs(0))


def mesh():
    return sw.mesh("data=2,model=4", on="cpu:8")


def test_primitives_mesh_spec_and_named_sharding():
    ours = sw.mesh("data=2,model=4", on="cpu:8")
    theirs = Mesh(mesh_utils.create_device_mesh((2, 4)), ("data", "model"))
    assert ours == theirs and ours.axis_names == ("data", "model")
    kernel = jax.device_put(jnp.zeros((8, 16)), NamedSharding(ours, P(None, "model")))
    assert kernel.addressable_shards[0].data.shape == (8, 4)
    layout = sw.layout(
        lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), ours, {"kernel": P(None, "model")}
    )
    assert layout["kernel"].shard_shape == (8, 4)


@pytest.mark.parametrize(
    "spec",
    [
        P(None, "model"),
        P("model", None),
        P("data", None),
        P("data", "model"),
        P(
            ("data", "model"),
        ),
    ],
)
def test_standard_layouts_of_the_third_document(spec):
    layout = sw.layout(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), mesh(), {"kernel": spec})
    placed = jax.device_put(jnp.zeros((8, 16)), NamedSharding(mesh(), spec))
    assert layout["kernel"].shard_shape == placed.addressable_shards[0].data.shape


def test_with_sharding_constraint_inside_the_model():
    class Constrained(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(8, 16, rngs=rngs)
            self.down = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            h = jax.lax.with_sharding_constraint(self.up(x), P("data", "model"))
            return self.down(nnx.relu(h))

    layout = sw.layout(
        lambda: Constrained(nnx.Rngs(0)),
        mesh(),
        "tensor",
        inputs=jax.ShapeDtypeStruct((4, 8), "float32"),
    )
    assert layout["up.kernel"].spec == P(None, "model") and layout["down.kernel"].spec == P("model")


@pytest.mark.parametrize("spelling", ["sharding", "sharding_names", "out_sharding"])
def test_annotating_parameters(spelling):
    layout = sw.layout(lambda: Annotated(nnx.Rngs(0), spelling), mesh())
    assert layout["kernel"].spec == P("model", None)
    assert layout["kernel"].reason == "annotation: the model's annotation P('model', None)"
    assert layout["out.kernel"].spec == P()


def test_with_partitioning():
    kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    layout = sw.layout(lambda: nnx.Linear(8, 16, kernel_init=kernel_init, rngs=nnx.Rngs(0)), mesh())
    assert layout["kernel"].spec == P(None, "model")


@pytest.mark.bitwise
def test_sharded_initialisation_equals_the_documents():
    layout = sw.layout(make, mesh())
    model = sw.init(make, layout)

    @nnx.jit
    def create_sharded_model():
        model = make()
        state = nnx.state(model)
        pspecs = nnx.spmd.get_partition_spec(state)
        nnx.update(model, jax.lax.with_sharding_constraint(state, pspecs))
        return model

    with jax.set_mesh(mesh()):
        theirs = create_sharded_model()
    assert model.kernel.sharding.is_equivalent_to(theirs.kernel.sharding, 2)
    np.testing.assert_array_equal(model.kernel[...], theirs.kernel[...])
    # jit may move what the document leaves without a constraint; the layout says where it lies.
    assert not sw.audit(layout, model)


def test_training_loop_of_the_document():
    layout = sw.layout(make, mesh(), [sw.fsdp("data", min_bytes=0)])
    model = sw.init(make, layout)
    with jax.set_mesh(mesh()):  # Flax wants it to make annotated variables of its own
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    batch = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    x = jax.device_put(batch, NamedSharding(mesh(), P("data", None)))

    @nnx.jit
    def train_step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(train_step(model, optimizer, x, jnp.ones((8, 4)))) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert not sw.audit(layout, model)  # flax#5172: the update leaves the model where it was


def test_optimizer_state_is_laid_out_like_its_parameters():
    layout = sw.layout(make, mesh(), sw.fsdp("data", min_bytes=0))
    tx = optax.adamw(1e-3)
    plan = layout.for_optimizer(tx)
    params = nnx.state(sw.init(make, layout), nnx.Param)
    state = jax.jit(tx.init, out_shardings=plan.shardings)(params)
    assert not sw.audit(plan, state)
    assert plan["0.mu.kernel"].spec == layout["kernel"].spec


@pytest.mark.bitwise
@pytest.mark.parametrize("axes", ["data=2,model=4", "data=4,model=2", "data=1,model=8"])
def test_checkpoint_restores_straight_into_the_shards_of_another_mesh(tmp_path, axes):
    layout = sw.layout(make, mesh())
    state = nnx.state(sw.init(make, layout))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", state)
        checkpointer.wait_until_finished()
        other = sw.layout(make, sw.mesh(axes, on="cpu:8"))
        restored = checkpointer.restore(tmp_path / "a", other.abstract)  # flax#5110
    assert not sw.audit(other, restored)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(a, b)


def test_paired_pytrees_of_the_first_document():
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    layout = sw.layout(model, mesh(), sw.by_rank({2: P(None, "model"), 1: P("model")}))
    assert len(jax.tree_util.tree_leaves(layout.specs)) == 2
    sharded = jax.tree_util.tree_map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh(), spec)), state, layout.specs
    )
    merged = nnx.merge(graphdef, sharded)
    assert not sw.audit(layout, merged)
    assert not sw.audit(layout, sw.shard(model, layout))
    x = jnp.ones((2, 8))
    np.testing.assert_allclose(merged(x), model(x), rtol=1e-6)
