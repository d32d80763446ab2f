"""What XLA's partitioner makes of products and rotations, where Shardy alone would send other bytes.

All bytes are those that the GPU compiler of jax 0.12 made of the step.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardwise as sw
from shardwise import models
from shardwise._estimate.program import partition


def decoder(batch=(32, 512), accumulate=1, **config):
    sizes = models.Config(
        **{"layers": 2, "width": 1024, "hidden": 2816, "heads": 8, "vocab": 8192, "scan": True,
           "remat": "nothing_saveable"} | config
    )  # fmt: skip
    return sw.Recipe(
        model=lambda: models.Decoder(sizes, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adamw(1e-4),
        batch=jax.ShapeDtypeStruct(batch, "int32"),
        compute_dtype="bfloat16",
        accumulate=accumulate,
    )


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4096, 4096, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


class Convolutions(nnx.Module):
    """Filters of one pixel and more, of all features and of single ones, larger than their images."""

    def __init__(self, rngs):
        self.first = nnx.Conv(3, 256, (4, 4), strides=4, rngs=rngs)
        self.deep = nnx.Conv(256, 256, (7, 7), feature_group_count=256, rngs=rngs)
        self.wide = nnx.Conv(256, 1024, (1, 1), rngs=rngs)
        self.last = nnx.Conv(1024, 512, (3, 3), strides=2, rngs=rngs)
        self.head = nnx.Linear(512, 512, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.wide(self.deep(self.first(x))))
        return self.head(self.last(x).mean((1, 2)))


def small(model, shape):
    return sw.Recipe(
        model=model,
        loss=lambda model, x: (model(x).astype(jnp.float32) ** 2).mean(),
        optimizer=optax.adam(1e-3),
        batch=jax.ShapeDtypeStruct(shape, "float32"),
        compute_dtype="bfloat16",
    )


# By name: the recipe, its layout, and what is sent over axes.
STEPS = {
    # Slots of microbatches are rotated by all-to-alls.
    "eight stages": (
        lambda: decoder(layers=8, width=768, hidden=2048, heads=6),
        "pipe=8,data=2", "fsdp+pipeline", "h100:2x8", {"pipe": 290783807, "data": 718940160},
    ),
    "two rounds": (
        lambda: decoder(layers=8, rounds=2),
        "pipe=2,data=4", "fsdp+pipeline", "h100:1x8", {"pipe": 277905714, "data": 2650300416},
    ),
    # How weights are split is known in loops before how activations are; casts follow all-to-alls.
    "eight microbatches": (
        lambda: decoder(layers=8, microbatches=8),
        "pipe=4,data=2", "fsdp+pipeline", "h100:1x8", {"pipe": 349176061, "data": 1443545088},
    ),
    # What both parts gather is gathered twice, and sums of rows that were looked up are scattered.
    "two parts": (
        lambda: decoder(layers=3, hidden=4096, vocab=16384, accumulate=2),
        "data=4,model=2", "fsdp+tensor", "h100:1x8", {"data": 465647628, "model": 142655488},
    ),
    # Weights that `model` does not split move to it and are gathered over it.
    "six heads": (
        lambda: decoder((16, 512), width=768, hidden=2048, heads=6, scan=False, remat=None),
        "data=2,model=4", "fsdp+tensor", "h100:1x8",
        {"data": 19282948, "data,model": 3538944, "model": 173481984},
    ),
    "ten heads": (
        lambda: decoder(layers=4, width=1280, hidden=3072, heads=10),
        "data=4,model=4", "fsdp+tensor", "h100:2x8",
        {"data": 105254406, "data,model": 19660800, "model": 637083648},
    ),
    "two heads of keys": (
        lambda: decoder(layers=4, hidden=3072, kv_heads=2),
        "data=4,model=4", "fsdp+tensor", "h100:2x8", {"data": 78698502, "model": 323559424},
    ),
    # The rows that were looked up are gathered, as they are smaller than the table.
    "large table": (
        lambda: decoder((16, 512), vocab=65536), "data=8", "fsdp", "h100:1x8", {"data": 399207431},
    ),
    # Weights are gathered though they are larger than what they are multiplied with.
    "few tokens": (
        lambda: decoder((8, 64), hidden=4096, vocab=16384),
        "data=8", "fsdp", "h100:1x8", {"data": 232167943},
    ),
    "few rows": (
        lambda: small(lambda: Mlp(nnx.Rngs(0)), (64, 4096)),
        "data=8", "fsdp", "h100:1x8", {"data": 236486663},
    ),
    "convolutions": (
        lambda: small(lambda: Convolutions(nnx.Rngs(0)), (64, 64, 64, 3)),
        "data=8", "fsdp", "h100:1x8", {"data": 22237831},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_products_and_rotations_send_what_the_compiled_step_sends(name):
    make, mesh, strategy, chips, sent = STEPS[name]
    recipe = make()
    inputs = recipe.batch if "tensor" in strategy else None
    layout = sw.layout(recipe.model, sw.mesh(mesh, on=chips), strategy, inputs=inputs)
    kinds = sw.estimate(recipe, layout).by_axis
    found = {axis: sum(size for _, size in kinds[axis].values()) for axis in sent}
    assert found == pytest.approx(sent, rel=0.01)
    assert "pipe" in sent or set(kinds) == set(sent)


def test_experts_that_split_the_batch_gather_the_words_once():
    recipe = decoder(
        (32, 1024), layers=4, hidden=2048, heads=16, vocab=32000, experts=8, capacity=1.25
    )
    layout = sw.layout(
        recipe.model,
        sw.mesh("data=4,expert=4", on="h100:2x8"),
        "fsdp",
        logical={"experts": "expert"},
    )
    kinds = sw.estimate(recipe, layout).by_axis["data"]
    assert sum(size for _, size in kinds.values()) == pytest.approx(547749888, rel=0.01)


@pytest.mark.parametrize(
    ("sizes", "kind"), [({"data": 4, "model": 2}, "all-gather"), ({"data": 8}, "all-to-all")]
)
@pytest.mark.parametrize("product", [True, False])
def test_a_product_moves_between_dims_by_a_gather_where_another_axis_is_idle(sizes, kind, product):
    mesh = jax.sharding.AbstractMesh(
        tuple(sizes.values()), tuple(sizes), (jax.sharding.AxisType.Auto,) * len(sizes)
    )

    def split(*spec):
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    def step(x, w, shift):
        y = x @ w if product else x + 1.0
        rows = jax.lax.with_sharding_constraint(y, split("data", None))
        return rows, rows * shift

    args = [jax.ShapeDtypeStruct((64, 64), "float32")] * 3
    given = (split("data", None), split(None, None), split(None, "data"))
    made = (split("data", None), split(None, "data"))
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(step, in_shardings=given, out_shardings=made).trace(*args)
    lowered = traced.lower(lowering_platforms=("cuda",))
    program = partition(lowered.compiler_ir("stablehlo"), sizes)
    expected = kind if product else "all-to-all"
    assert [
        op.kind for op in program.ops if op.kind.startswith("all-") and "slice" not in op.kind
    ] == [expected]
