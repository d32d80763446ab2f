"""What a step would take, from the partitioned program."""

import dataclasses

import jax
import optax
import pytest
from flax import nnx
from mlp_step import compiled_step

import shardwise as sw
from shardwise import models
from shardwise._compile import job_of, lowered_job
from shardwise._estimate.kernels.fused import Block
from shardwise._estimate.program.invariants import read_inside, read_outside
from shardwise._estimate.program.partitioning import Op, Program, partition
from shardwise._estimate.program.simplify import simplified
from shardwise._estimate.program.visits import in_order_of_need, in_own_order
from shardwise._hlo import Shape, unpartitioned
from shardwise._jax import mlir_bindings


@pytest.fixture
def compiled():
    return compiled_step()


def test_an_estimate_agrees_with_the_compiler(compiled):
    recipe, layout, full = compiled
    found = sw.estimate(recipe, layout)
    sent = {axis: sum(b for _, b in kinds.values()) for axis, kinds in full.by_axis.items()}
    mine = {axis: sum(b for _, b in kinds.values()) for axis, kinds in found.by_axis.items()}
    assert mine.keys() == sent.keys()
    assert mine["data"] == pytest.approx(sent["data"], rel=0.05)
    assert found.seconds == pytest.approx(full.time.seconds, rel=0.35)
    assert found.peak_bytes == pytest.approx(full.memory.peak, rel=0.35)
    assert found.state_bytes == full.memory.arguments
    assert found.low < found.seconds < found.high
    assert str(found).startswith("fits: needs about")


def test_no_estimate_without_chips(compiled):
    recipe, layout, _ = compiled
    bare = layout.on(sw.mesh("data=8", on="none"))
    with pytest.raises(ValueError, match="no chips with known rates"):
        sw.estimate(recipe, bare)


DECODER = models.Config(layers=4, width=512, hidden=1024, heads=8, vocab=1024, scan=True)


def decoder(batch=(16, 256)):
    return sw.Recipe(
        model=lambda: models.Decoder(DECODER, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adamw(1e-4),
        batch=jax.ShapeDtypeStruct(batch, "int32"),
        compute_dtype="bfloat16",
    )


def test_recomputation_is_no_work_of_the_model():
    """The MFU of an estimate means what that of a compiled step does."""
    found = {}
    for remat in (None, "nothing_saveable"):
        config = dataclasses.replace(DECODER, remat=remat)
        recipe = dataclasses.replace(
            decoder(), model=lambda config=config: models.Decoder(config, rngs=nnx.Rngs(0))
        )
        layout = sw.layout(recipe.model, sw.mesh("data=8", on="h100:1x8"), "fsdp")
        found[remat] = sw.estimate(recipe, layout)
    plain, again = found.values()
    assert plain.flops == plain.model_flops == again.model_flops < again.flops
    assert again.mfu == again.model_flops / (again.seconds * again.peak_flops)
    compiled = sw.compile(recipe, layout, show=False).time
    # A compiler may compute a product of attention twice rather than store it.
    assert again.model_flops == pytest.approx(compiled.model_flops, rel=0.05)
    assert again.tokens_per_second == 16 * 256 / again.seconds


def partitioned(recipe, layout):
    mesh = layout.mesh
    lowered = lowered_job(job_of(recipe, layout, None), mesh.abstract_device)
    return partition(lowered.compiler_ir("stablehlo"), dict(mesh.shape))


def test_the_order_and_the_loops_of_the_compilers_are_undone():
    recipe = decoder()
    layout = sw.layout(recipe.model, sw.mesh("data=8", on="h100:1x8"), "fsdp")
    lowered = lowered_job(job_of(recipe, layout, None), layout.mesh.abstract_device)
    ir, _ = mlir_bindings()
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        own = unpartitioned(module)
        before = str(own)
        in_order_of_need(own, ir)
        read_outside(own)
        assert str(own) != before and own.operation.verify()
        read_inside(own)
        in_own_order(own, ir)
        assert str(own) == before


def test_loops_have_their_trips_and_local_shapes():
    recipe = decoder()
    program = partitioned(recipe, sw.layout(recipe.model, sw.mesh("data=8", on="h100:1x8"), "fsdp"))
    loops = [op for op in program.ops if op.kind == "while"]
    assert [op.trips for op in loops] == [4, 4]
    shapes = program.shapes
    local = sum(shapes[value].nbytes for value in program.arguments)
    # An eighth of the state and of the batch; norms are replicated.
    full = 3 * 4 * (2 * 1024 * 512 + 4 * (4 * 512 * 512 + 3 * 512 * 1024)) + 16 * 256 * 4
    assert local == pytest.approx(full / 8, rel=0.02)


def test_tensor_parallel_reduces_over_its_axis_alone():
    recipe = decoder()
    layout = sw.layout(
        recipe.model, sw.mesh("data=2,model=4", on="h100:1x8"), "tensor", inputs=recipe.batch
    )
    found = sw.estimate(recipe, layout)
    assert "all-reduce" in found.by_axis["model"]
    assert set(found.by_axis["data"]) == {"all-reduce"}
    assert found.tokens == 16 * 256 and found.tokens_per_second > 0


@pytest.mark.parametrize(("channels", "groups"), [(640, 640), (64, 2), (24, 3)])
@pytest.mark.parametrize("on", ["h100:1x8", "v5e:2x4"])
def test_groups_of_channels_need_not_be_as_many_as_devices(channels, groups, on):
    def make():
        rngs = nnx.Rngs(0)
        conv = nnx.Conv(channels, channels, (5,), feature_group_count=groups, rngs=rngs)
        return nnx.Sequential(nnx.Linear(8, channels, rngs=rngs), conv)

    recipe = sw.Recipe(
        model=make,
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((16, 32, 8), "float32"),
    )
    layout = sw.layout(make, sw.mesh("data=8", on=on), sw.fsdp("data", min_bytes=0))
    assert sw.estimate(recipe, layout).seconds > 0


def test_what_nobody_reads_is_not_priced():
    recipe = decoder()
    program = partitioned(recipe, sw.layout(recipe.model, sw.mesh("data=8", on="h100:1x8"), "fsdp"))
    short = simplified(program)
    assert len(short.ops) < len(program.ops)
    used = {value for op in short.ops for value in op.operands} | set(short.outputs)
    inside = {v for op in short.ops if op.kind == "while" for b in op.body for v in b.operands}
    for op in short.ops:
        assert any(value in used | inside for value in op.results), op.kind


def test_every_kernel_runs_after_what_it_reads():
    recipe = decoder()
    program = simplified(
        partitioned(recipe, sw.layout(recipe.model, sw.mesh("data=8", on="h100:1x8"), "fsdp"))
    )
    block = Block(program, program.ops, program.outputs)
    made = set()
    for kernel in block.kernels:
        own = {value for op in kernel.ops for value in op.results}
        for value in kernel.reads:
            assert value not in block.maker or value in made | own
        made |= own


def test_a_sum_is_not_fused_with_what_it_waits_for_through_a_product():
    square, sums = Shape("f32", (128, 128)), Shape("f32", (128,))
    contracted = "lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [0]"
    ops = [
        Op("add", (0, 0), (1,)),
        Op("dot_general", (1, 0), (2,), {"dot_dimension_numbers": contracted}),
        Op("exponential", (2,), (3,)),
        Op("multiply", (1, 3), (4,)),
        Op("reduce", (4,), (5,), {"dimensions": "array<i64: 1>"}),
    ]
    shapes = dict.fromkeys(range(5), square) | {5: sums}
    program = Program(ops, shapes, (0,), (3, 5), frozenset())
    made = set()
    for kernel in Block(program, ops, program.outputs).kernels:
        assert kernel.reads.keys() <= {0} | made | set(kernel.writes)
        made |= set(kernel.writes)
    assert made == {1, 2, 3, 5}


@pytest.mark.parametrize(
    "on", ["h100:1x8", "v5e:2x4", "tpu7x:2x2x1", "a100:1x8", "b200:1x8", "gb200:1x8"]
)
def test_every_kind_of_chip(on):
    recipe = decoder()
    found = sw.estimate(recipe, sw.layout(recipe.model, sw.mesh("data=8", on=on), "fsdp"))
    assert found.seconds > 0 and found.fits and found.by_axis["data"]


def test_a_larger_batch_takes_longer_and_more_memory():
    small, large = (
        sw.estimate(r, sw.layout(r.model, sw.mesh("data=8", on="h100:1x8"), "fsdp"))
        for r in (decoder((16, 256)), decoder((64, 512)))
    )
    assert large.seconds > 1.5 * small.seconds and large.peak_bytes > 2 * small.peak_bytes
