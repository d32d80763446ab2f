"""Single rules of what the compilers make of a step, each compared with what they made (libtpu of jax 0.12)."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.experimental.custom_partitioning import custom_partitioning

import shardwise as sw
from shardwise import models
from shardwise._estimate.kernels.scattering import in_tiles
from shardwise._estimate.program.orders import forward_of, written
from shardwise._estimate.program.partitioning import partition
from shardwise._hlo import Shape, convolution_flops

# Dtype, sum, which dim each device keeps a part of, over how many devices; whether v5p scatters it.
SCATTERED = [
    ("f32", (4000, 2048), 1, 2, True),
    ("f32", (6288, 1536), 1, 2, False),  # 786 rows of tiles: six large chunks, or 131
    ("f32", (12576, 1536), 1, 2, False),
    ("f32", (12576, 1536), 1, 4, True),  # twelve chunks
    ("f32", (2096, 1536), 1, 2, False),
    ("f32", (6272, 1536), 1, 2, True),
    ("f32", (4000, 1536), 0, 2, True),
    ("bf16", (1024, 32000), 1, 2, False),  # 125 tiles have no halves
    ("bf16", (1024, 31744), 1, 2, True),
    ("f32", (1024, 32000), 1, 2, True),
    ("bf16", (1024, 32000), 0, 2, True),
    ("bf16", (4096, 32000), 0, 8, True),
    ("bf16", (2048, 4000), 0, 2, True),
    ("bf16", (1536, 6288), 0, 2, False),
    ("f32", (25152, 1536), 1, 8, False),  # no whole tiles
    ("f32", (32000, 3072), 1, 8, True),
    ("bf16", (12, 16, 1536), 2, 2, True),
    ("bf16", (16, 2048, 12, 128), 3, 8, False),
    ("bf16", (3, 3, 128, 128), 2, 8, True),
    ("bf16", (3, 3, 192, 192), 2, 8, False),  # 24 rows, of which two fill one of a tile
    ("bf16", (3, 3, 384, 384), 2, 8, True),
]


@pytest.mark.parametrize(("dtype", "dims", "dim", "parts", "scattered"), SCATTERED)
def test_a_tpu_scatters_sums_that_divide_into_tiles(dtype, dims, dim, parts, scattered):
    part = tuple(n // parts if d == dim else n for d, n in enumerate(dims))
    assert in_tiles(Shape(dtype, dims), Shape(dtype, part), parts) is scattered


def decoder(**config):
    sizes = models.Config(**config)
    return sw.Recipe(
        model=lambda: models.Decoder(sizes, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adamw(1e-4),
        batch=jax.ShapeDtypeStruct((64, 1024), "int32"),
        compute_dtype="bfloat16",
    )


def test_the_logits_and_their_gradient_are_kept_beside_each_other_near_products_in_loops():
    recipe = decoder(layers=8, width=1024, hidden=4096, heads=16, vocab=32000, scan=True,
                     remat="nothing_saveable")  # fmt: skip
    found = sw.estimate(recipe, sw.layout(recipe.model, sw.mesh("data=16", on="v5p:2x2x4"), "fsdp"))
    assert found.peak_bytes == pytest.approx(964954304, rel=0.1)


def lowered_halves(n):
    """Returns a loop that sends what `n` stages hold to the next ones, lowered for `n` devices."""
    mesh = sw.mesh(f"pipe={n}", on=f"cpu:{n}")
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("pipe"))

    def body(x, _):
        return jnp.roll(jax.lax.with_sharding_constraint(jnp.sin(x), place), 1, 0), None

    x = jax.ShapeDtypeStruct((n, 256), "float32", sharding=place)
    return jax.jit(lambda x: jax.lax.scan(body, x, length=3)[0]).lower(x).compiler_ir("stablehlo")


@pytest.mark.parametrize("stages", [2, 4])
def test_what_a_loop_rotates_is_sent_alike_between_two_stages_and_more(stages):
    program = partition(lowered_halves(stages), {"pipe": stages})
    (loop,) = (op for op in program.ops if op.kind == "while")
    assert sum(op.kind == "collective-permute" for op in loop.body) == 2


@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_and_their_gradients_do_the_same_work(stride):
    x = jax.ShapeDtypeStruct((8, 32, 32, 16), "bfloat16")
    k = jax.ShapeDtypeStruct((2, 2, 16, 64), "bfloat16")

    def loss(x, k):
        labels = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, k, (stride, stride), "VALID", dimension_numbers=labels)
        return (y.astype("float32") ** 2).sum()

    program = partition(jax.jit(jax.grad(loss, (0, 1))).lower(x, k).compiler_ir("stablehlo"), {})
    found = {}
    for op in program.ops:
        if op.kind == "convolution":
            left, right = (program.shapes[v] for v in op.operands)
            out = program.shapes[op.results[0]]
            made = written(op, out)
            forward, _, target = forward_of(made, left, right)
            found[target] = convolution_flops(made, left, right, out)
            assert forward.attribute("dim_labels") == "b01f_01io->b01f"
    size = (32 - 2) // stride + 1
    flops = 2 * 8 * size * size * 2 * 2 * 16 * 64
    assert found == dict.fromkeys(("convForward", "BackwardFilter", "BackwardInput"), flops)


class Mystery(nnx.Module):
    def __call__(self, x):
        call = jax.ffi.ffi_call("mystery", jax.ShapeDtypeStruct(x.shape, x.dtype))
        return call(jnp.sin(x))


def test_an_unknown_custom_call_is_named_and_widens_the_bound():
    layout = sw.layout(Mystery, sw.mesh("data=4", on="h100:1x4"), "dp")
    x = jax.ShapeDtypeStruct((4096, 4096), "float32")
    found = sw.estimate(Mystery, layout, inputs=x)
    assert found.unpriced == {"mystery": 1}
    assert found.parts["unknown"] > 0
    assert found.high - found.seconds > 10 * found.parts["unknown"]
    assert str(found).splitlines()[2] == "not priced, only the memory that they move: mystery"


class Attends(nnx.Module):
    """Attention by a function that partitions itself, as JAX hands cuDNN's over."""

    def __call__(self, q):
        call = custom_partitioning(lambda q, k, v: q + k + v)
        call.def_partition(
            partition=lambda mesh, given, made: (mesh, None, made.sharding, ()),
            sharding_rule="b l h d, b s h d, b s h d -> b l h d",
        )
        return call(q, jnp.sin(q), jnp.cos(q))


def test_attention_that_partitions_itself_is_known_by_its_shapes():
    layout = sw.layout(Attends, sw.mesh("data=4", on="h100:1x4"), "dp")
    q = jax.ShapeDtypeStruct((8, 4096, 16, 128), "bfloat16")
    found = sw.estimate(Attends, layout, inputs=q)
    assert found.unpriced == {}
    # Causal, on a quarter of the batch.
    assert found.flops == 2 * 2 * 2 * 16 * 4096 * 4096 * 128 // 2


class Narrow(nnx.Module):
    """Three products whose weights are large or small beside what they are multiplied with."""

    def __init__(self, rngs):
        sizes = [(1024, 4096), (4096, 1024), (1024, 4096)]
        self.layers = nnx.List([nnx.Linear(*s, use_bias=False, rngs=rngs) for s in sizes])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


# By mesh and rows: how many weights a GPU's compiler (XLA of jax 0.12) gathers; two of the three are
# read by the backward pass too.
GATHERED = [
    ("data=8,model=2", 8192, 5),
    ("data=8,model=2", 16384, 3),
    ("data=4,model=4", 1024, 5),
    ("data=4,model=4", 2048, 3),
    ("data=2,model=8", 512, 2),
]


@pytest.mark.parametrize(("mesh", "rows", "weights"), GATHERED)
def test_a_gpu_gathers_split_weights_again_that_are_large_beside_activations(mesh, rows, weights):
    recipe = sw.Recipe(
        model=lambda: Narrow(nnx.Rngs(0)),
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.sgd(1e-3),
        batch=jax.ShapeDtypeStruct((rows, 1024), "float32"),
        compute_dtype="bfloat16",
    )
    layout = sw.layout(
        recipe.model, sw.mesh(mesh, on="h100:2x8"), "fsdp+tensor", inputs=recipe.batch
    )
    assert sw.estimate(recipe, layout).by_axis["data"]["all-gather"][0] == weights
