"""Compiling steps: collectives derived by hand, memory against live arrays, and findings."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._compile.findings import _INVOLUNTARY
from shardwise._step.blueprint import make_blueprint

WIDTH, HIDDEN = 64, 128


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def make():
    return Mlp(nnx.Rngs(0))


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def recipe(batch=4096, **options):
    given = {"model": make, "loss": loss, "optimizer": optax.sgd(0.1)}
    shape = (batch, WIDTH) if isinstance(batch, int) else batch
    given["batch"] = jax.ShapeDtypeStruct(shape, "float32")
    return sw.Recipe(**{**given, **options})


def layout_of(axes, rules, on="cpu:8", model=make, batch=4096):
    inputs = jax.ShapeDtypeStruct((batch, WIDTH), "float32")
    return sw.layout(model, sw.mesh(axes, on=on), rules, inputs=inputs)


FSDP = sw.fsdp("data", min_bytes=0)
KERNEL = WIDTH * HIDDEN * 4
SHARD = KERNEL // 8


def ring(size, devices):
    return 2 * (devices - 1) * size // devices


def counted(compiled):
    """Arrays and bytes by axis and kind, since compilers put several arrays into one collective."""
    found = {}
    for row in compiled.collectives:
        key = (",".join(row.axes), row.kind)
        arrays, sent = found.get(key, (0, 0))
        found[key] = (arrays + row.arrays * row.times, sent + row.total_bytes)
    return found


# --- collectives by hand --------------------------------------------------------------------------


def test_data_parallel():
    """Both gradients and the loss are summed over data."""
    compiled = sw.compile(recipe(), layout_of("data=8", "dp"))
    assert counted(compiled) == {("data", "all-reduce"): (3, ring(2 * KERNEL + 4, 8))}


def test_fsdp():
    """Each kernel is gathered once, and its gradient summed (the CPU has no reduce-scatter)."""
    compiled = sw.compile(recipe(), layout_of("data=8", FSDP))
    assert counted(compiled) == {
        ("data", "all-gather"): (2, 2 * 7 * SHARD),
        ("data", "all-reduce"): (3, ring(2 * KERNEL + 4, 8)),
    }
    gathers = {row.source.leaf for row in compiled.collectives if row.kind == "all-gather"}
    assert gathers == {"up.kernel", "down.kernel"}


def test_tensor():
    """The activation is summed once forward; backward, nobody asks for the input's gradient."""
    compiled = sw.compile(recipe(), layout_of("data=1,model=8", sw.tensor("model")))
    assert counted(compiled) == {("model", "all-reduce"): (1, ring(4096 * WIDTH * 4, 8))}
    (row,) = compiled.collectives
    assert row.source.module == "down" and "test_compile.py:" in row.source.place
    assert not row.source.backward


def test_pipeline():
    """At each tick activations go to the next stage, and batches in and out of the pipeline."""
    stages, micro, rows = 4, 8, 64

    class Stage(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return nnx.relu(self.linear(x))

    class Staged(nnx.Module):
        def __init__(self, rngs):
            self.stages = nnx.List([Stage(rngs) for _ in range(stages)])

        def __call__(self, x):
            return sw.pipeline(self.stages, axis="stage", microbatches=micro)(x)

    def staged():
        return Staged(nnx.Rngs(0))

    mesh = sw.mesh("stage=4", on="cpu:4")
    planned = sw.layout(staged, mesh, {"**": P()})
    compiled = sw.compile(recipe(micro * rows, model=staged), planned)
    ticks = micro + stages - 1
    sent = [r for r in compiled.collectives if r.times == ticks and r.sent_bytes > 1024]
    assert {(row.kind, row.axes) for row in sent} == {("collective-permute", ("stage",))}
    # One microbatch each: to the next stage, in and out, forward and backward.
    assert {row.sent_bytes for row in sent} == {rows * WIDTH * 4}
    assert 2 <= len(sent) <= 7


def test_times_are_multiplied_by_loops():
    """Accumulation over 4 parts sums the activation 4 times."""
    once = sw.compile(recipe(), layout_of("data=1,model=8", sw.tensor("model")))
    parts = sw.compile(recipe(accumulate=4), layout_of("data=1,model=8", sw.tensor("model")))
    assert sum(row.times for row in parts.collectives) == 4
    assert parts.flops == once.flops
    assert sum(r.total_bytes for r in parts.collectives) == sum(
        r.total_bytes for r in once.collectives
    )


def test_flops_are_those_of_the_arithmetic():
    """6·N·rows, but for the first layer's input, whose gradient is not needed."""
    compiled = sw.compile(recipe(), layout_of("data=8", "dp"))
    assert compiled.flops == (6 * 2 - 2) * WIDTH * HIDDEN * 4096 // 8


# --- memory ---------------------------------------------------------------------------------------

STATES = [("data=8", "dp"), ("data=8", FSDP), ("data=2,model=4", [sw.tensor("model"), FSDP])]


@pytest.mark.parametrize(("axes", "rules"), STATES, ids=["dp", "fsdp", "fsdp+tensor"])
def test_parts_are_the_bytes_of_live_arrays(axes, rules):
    given = recipe(optimizer=optax.adamw(1e-3), ema=0.9)
    planned = layout_of(axes, rules)
    compiled = sw.compile(given, planned)
    state = sw.train_state(given, planned)

    def held(tree):
        shards = (x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
        return sum(shards)

    memory = compiled.memory
    assert memory.parameters == held(state.model)
    assert memory.optimizer == held((state.optimizer, state.ema))
    assert memory.batch == 4096 * WIDTH * 4 // planned.mesh.shape["data"]
    whole = memory.parameters + memory.optimizer + memory.batch + 4  # and the step's number
    assert memory.arguments == pytest.approx(whole, rel=0.005)
    assert memory.aliased == memory.parameters + memory.optimizer + 4
    assert memory.peak == (memory.arguments + memory.outputs - memory.aliased + memory.temporaries)


def test_it_is_the_program_that_runs():
    """The very program of train_step, by its text."""
    given, planned = recipe(), layout_of("data=8", FSDP)
    step = sw.train_step(given, planned)
    plan = make_blueprint(given, planned)
    running = step.jitted.lower(plan.abstract, plan.batch).compile()
    planned_text = sw.compile(given, planned).hlo

    def program(text):
        # All but the lines of the tests from which the two were asked for.
        computations = text[text.index("\n%") :]
        return re.sub(r" stack_frame_id=\d+|backend_config=\{.*", "", computations)

    assert program(running.as_text()) == program(planned_text)


def test_largest_buffers_are_named():
    compiled = sw.compile(recipe(), layout_of("data=8", "dp"))
    first = compiled.buffers[0]
    assert first.shape == f"f32[512,{HIDDEN}]" and first.bytes == 512 * HIDDEN * 4
    assert first.source.module == "up" and "test_compile.py:" in first.source.place
    sizes = [row.total_bytes for row in compiled.buffers if row.shape != "other"]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) <= 10
    assert {row.label for row in compiled.buffers} == {"compiled"}
    assert sum(row.total_bytes for row in compiled.buffers) == compiled.memory.temporaries


def test_a_device_of_unknown_size_gets_no_verdict():
    compiled = sw.compile(recipe(), layout_of("data=8", "dp"))
    assert compiled.fits is None and compiled.spare_bytes is None
    assert compiled.verdict.startswith("needs ") and compiled.verdict.endswith("cpu (compiled)")


def test_forward_alone():
    planned = layout_of("data=1,model=8", sw.tensor("model"))
    inputs = jax.ShapeDtypeStruct((32, WIDTH), "float32")
    compiled = sw.compile(make, planned, inputs=inputs)
    assert compiled.flops == 2 * 2 * WIDTH * HIDDEN * 32 // 8
    assert compiled.memory.optimizer == 0
    assert counted(compiled) == {("model", "all-reduce"): (1, ring(32 * WIDTH * 4, 8))}


# --- findings -------------------------------------------------------------------------------------


def small_memory(compiled, capacity):
    """The same compilation on a device of another size, and what is found there."""
    memory = dataclasses.replace(compiled.memory, capacity=capacity)
    return dataclasses.replace(compiled, memory=memory, platform="gpu", target="h100:1x8")


def test_a_whole_batch_on_every_device_is_found():
    """A constraint that loses the batch's split, as an embedding lookup does."""

    def whole_loss(model, x):
        hidden = nnx.relu(model.up(x))
        hidden = jax.lax.with_sharding_constraint(hidden, P(None, None))
        return jnp.mean(model.down(hidden) ** 2)

    compiled = sw.compile(recipe(loss=whole_loss), layout_of("data=8", "dp"))
    found = [finding for finding in compiled.findings if finding.code == "SW302"]
    assert any(f"f32[4096,{HIDDEN}] holds the global batch" in f.message for f in found)
    assert "test_compile.py:" in found[0].path
    clean = sw.compile(recipe(), layout_of("data=8", "dp"))
    assert not [finding for finding in clean.findings if finding.code == "SW302"]


def test_xla_s_own_warning_is_parsed():
    line = (
        "W1116 spmd_partitioner.cc:652] [SPMD] Involuntary full rematerialization. The compiler was "
        "not able to go from sharding {devices=[1,8]<=[8]} to {devices=[8,1]<=[8]} without doing a "
        "full rematerialization of the tensor for HLO operation: %gather = f32[64,512]{1,0} "
        'gather(%p), metadata={op_name="jit(step)/gather" source_file="/a/model.py" source_line=3}.'
    )
    assert _INVOLUNTARY.search(line)


class Torn(nnx.Module):
    """Splits an activation by its features, and then by its sequence, in each of some layers."""

    def __init__(self, layers=1):
        self.up = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
        self.layers = layers

    def __call__(self, x):
        def layer(x, _):
            hidden = jax.lax.with_sharding_constraint(self.up(x), P("data", None, "model"))
            return jax.lax.with_sharding_constraint(jnp.sin(hidden), P("data", "model")), None

        return jax.lax.scan(layer, x, length=self.layers)[0]


@pytest.mark.parametrize("layers", [1, 3])
def test_both_specs_of_an_activation_are_named(layers):
    layout = sw.layout(lambda: Torn(layers), sw.mesh("data=2,model=4"), {"up.*": P(None, "model")})
    inputs = jax.ShapeDtypeStruct((16, 32, 64), "float32")
    found = sw.compile(lambda: Torn(layers), layout, inputs=inputs).findings
    (torn,) = [f for f in found if "produced as P('data', None, 'model')" in f.message]
    assert torn.code == "SW304" and torn.path.endswith(line_of(Torn.__call__, 3))
    assert f"{layers} all-to-all over 'model'" in torn.message
    assert "an array of shape [16, 32, 64]" in torn.message
    assert torn.message.endswith("used as P('data', 'model')")


class Crossed(nnx.Module):
    """The features of one product are split over two axes, those of the next in the other order."""

    def __init__(self):
        features = {"use_bias": False, "rngs": nnx.Rngs(0)}
        self.up, self.down = nnx.Linear(64, 128, **features), nnx.Linear(128, 64, **features)
        self.out = nnx.Linear(64, 64, **features)

    def __call__(self, x):
        x = jnp.sin(self.up(jax.lax.with_sharding_constraint(x, P())))
        return self.out(jax.lax.with_sharding_constraint(self.down(x), P(("data", "fsdp"))))


def test_a_permute_of_a_product_over_fsdp_axes_is_a_mismatch_where_shardy_has_one():
    recipe = sw.Recipe(
        model=Crossed,
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((64, 64), "float32"),
    )
    crossed = {"up.kernel": P(None, ("data", "fsdp")), "down.kernel": P(("fsdp", "data"))}
    rules = [crossed, sw.fsdp("data", "fsdp", min_bytes=0)]
    compiled = sw.compile(recipe, sw.layout(recipe, sw.mesh("data=2,fsdp=4", on="cpu:8"), rules))
    permutes = [row for row in compiled.collectives if row.kind == "collective-permute"]
    assert len(permutes) == 2 and "dot_general" in {row.source.op for row in permutes}
    found = [f.message for f in compiled.findings if "collective-permute" in f.message]
    assert len(found) == 2
    assert any("produced as P(None, ('fsdp', 'data')) and used as" in text for text in found)


class Grouped(nnx.Module):
    def __init__(self):
        groups = {"feature_group_count": 8, "use_bias": False}
        self.conv = nnx.Conv(8, 32, (3, 3), rngs=nnx.Rngs(0), **groups)

    def __call__(self, x):
        return self.conv(x)


def compile_convolution(rules, batch_spec=None):
    recipe = sw.Recipe(
        model=Grouped,
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((16, 16, 16, 8), "float32"),
        batch_spec=batch_spec,
    )
    return sw.compile(recipe, sw.layout(recipe, sw.mesh("data=2,model=4", on="cpu:8"), rules))


def test_a_convolution_that_moves_shards_names_its_kernel_and_spec():
    rule = {"conv.kernel": P(None, None, None, "data")}
    (found,) = [f for f in compile_convolution(rule).findings if f.code == "SW304"]
    assert "the convolution with conv.kernel, of shape [3, 3, 1, 32]" in found.message
    assert found.message.endswith("stored as P(None, None, None, 'data')")
    assert found.help.startswith("store conv.kernel as P()")
    assert "SW304" not in {f.code for f in compile_convolution({"conv.kernel": P()}).findings}


def test_the_borders_of_a_batch_split_in_space_are_no_mismatch():
    compiled = compile_convolution("dp", P("data", "model"))
    assert "collective-permute" in {row.kind for row in compiled.collectives}
    assert not [f for f in compiled.findings if f.code == "SW304"]


def line_of(function, after):
    return f"{Path(__file__).name}:{function.__code__.co_firstlineno + after}"


# --- saved, compared ------------------------------------------------------------------------------


def test_saved_and_compared(tmp_path):
    one = sw.compile(recipe(), layout_of("data=8", "dp"))
    two = sw.compile(recipe(), layout_of("data=8", FSDP))
    one.save(tmp_path / "one.json")
    again = sw.load_compiled(tmp_path / "one.json")
    assert not sw.diff(again, one) and str(sw.diff(again, one)) == "no difference"
    assert again.memory == one.memory and again.collectives == one.collectives
    found = sw.diff(again, two)
    assert found and found.memory["parameters"] == (2 * KERNEL, 2 * SHARD)
    assert sorted(row.source.leaf for row, _ in found.added) == ["down.kernel", "up.kernel"]
    text = str(found)
    assert "parameters 64.0 KiB -> 8.0 KiB (-56.0 KiB, compiled)" in text
    assert "+ 1 all-gather over data of " in text and "up.kernel" in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it is empty"),
        ("{", "it is not JSON"),
        ("[]", "it contains a list instead of an object"),
        ("{}", "it has no 'format'"),
        ('{"format": 99}', "it has format 99, but this version reads 2"),
        ('{"format": 1, "target": "cpu"}', "it has no 'memory'"),
        ('{"format": 1, "mesh": {}, "leaves": []}', "it is a layout, for sw.load_layout"),
    ],
)
def test_a_file_of_something_else(tmp_path, text, told):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path} is not a saved compilation: {told}")):
        sw.load_compiled(path)
    with pytest.raises(ValueError, match="none.json is not a saved compilation: No such file"):
        sw.load_compiled(tmp_path / "none.json")


def _without(name):
    return lambda saved: saved.pop(name)


def _memory_as(value):
    return lambda saved: saved["memory"].update(peak=value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_without("mesh"), "it has no 'mesh'"),
        (_memory_as("4"), "'peak' of memory is '4'"),
        (_memory_as(4), "it is damaged: its numbers do not agree"),
        (lambda saved: saved.update(memory=[]), "its 'memory' is a list instead of an object"),
        (lambda saved: saved.update(collectives=[]), "its 'by_axis' does not agree"),
        (lambda saved: saved.update(collectives=None), "its 'by_axis' does not agree"),
        (lambda saved: saved.update(flops=None), "its 'by_axis' does not agree"),
        (lambda saved: saved["collectives"][0].pop("times"), "collectives[0] has no 'times'"),
        (lambda saved: saved["collectives"][0].update(source=1), "source' is an int"),
        (lambda saved: saved["buffers"].append(3), "is an int instead of an object"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, change, told):
    path = tmp_path / "saved.json"
    sw.compile(recipe(), layout_of("data=8", "dp")).save(path)
    saved = json.loads(path.read_text())
    change(saved)
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        sw.load_compiled(path)
    assert str(error.value).startswith(f"{path} is not a saved compilation: ")
    path.write_text(path.read_text()[:-40])
    with pytest.raises(ValueError, match="it is not JSON"):
        sw.load_compiled(path)


# --- what is not known ----------------------------------------------------------------------------


def test_what_is_not_known_is_not_nothing(tmp_path):
    """A compilation of which no program was seen: nothing of it is 0, and no budget is kept."""
    full = sw.compile(recipe(), layout_of("data=8", "dp"))
    bare = dataclasses.replace(
        full, memory=None, collectives=(), buffers=(), flops=None, bytes_accessed=None, hlo=""
    )
    assert bare.fits is None and not bare.has_program
    assert bare.verdict.startswith("needs unknown memory on each of 8 devices of cpu")
    assert "collectives, flops and memory traffic unknown: there is no program" in str(bare)
    shown = bare.to_dict()
    assert [shown[n] for n in ("collectives", "by_axis", "flops", "bytes_accessed")] == [None] * 4
    bare.save(tmp_path / "bare.json")
    again = sw.load_compiled(tmp_path / "bare.json")
    assert not again.has_program and not sw.diff(again, bare)
    assert "flops unknown -> 41.9 MFLOP (compiled)" in str(sw.diff(bare, full))
    for budget in (
        {"flops": 10**15},
        {"collectives": {"data": {"all-reduce": 9}}},
        {"collective_bytes": {"data": 10**15}},
        {"peak_bytes": 10**15},
        {"temporaries_bytes": 10**15},
    ):
        sw.assert_budget(full, **budget)
        with pytest.raises(AssertionError, match="unknown"):
            sw.assert_budget(bare, **budget)


def test_flops_that_are_not_counted_are_named():
    def loss(model, x):
        return jnp.sum(jnp.linalg.cholesky(jnp.eye(8) + 0 * x.mean())) + model(x).mean()

    compiled = sw.compile(recipe(loss=loss), layout_of("data=8", "dp"))
    (name,) = compiled.not_counted
    assert "potrf" in name or name == "cholesky"
    assert f"flops not counted: {name}" in str(compiled)
    with pytest.raises(AssertionError, match=f"cannot be confirmed: {re.escape(name)}"):
        sw.assert_budget(compiled, flops=10**15)
    with pytest.raises(AssertionError, match="over its budget of 1 FLOP by "):
        sw.assert_budget(compiled, flops=1)


def test_json_has_the_names_that_are_documented(tmp_path):
    found = json.loads(json.dumps(sw.compile(recipe(), layout_of("data=8", "dp")).to_dict()))
    assert {"fits", "memory", "collectives", "findings", "flops"} <= set(found)
    assert {"peak", "arguments", "outputs", "temporaries", "aliased", "capacity"} <= set(
        found["memory"]
    )
    assert found["by_axis"]["data"]["all-reduce"]["bytes"] == ring(2 * KERNEL + 4, 8)


# --- what is refused ------------------------------------------------------------------------------


def test_a_mesh_of_no_devices():
    with pytest.raises(ValueError, match="mesh data=8 has no devices to compile for: make it with"):
        sw.compile(recipe(), layout_of("data=8", "dp", on="none"))


def test_a_layout_with_errors_is_refused_before():
    planned = layout_of("data=8", {"up.kernel": P("data", "data")})
    with pytest.raises(sw.LayoutError, match="SW102"):
        sw.compile(recipe(), planned)


def test_a_loss_that_cannot_be_traced_shows_the_user_s_frames_alone():
    def broken(model, x):
        return model(x) @ jnp.ones((3, 3))

    with pytest.raises(ValueError, match="the step cannot be traced") as caught:
        sw.compile(recipe(loss=broken), layout_of("data=8", "dp"))
    text = str(caught.value)
    assert "return model(x) @ jnp.ones((3, 3))" in text and "TypeError" in text
    assert "site-packages" not in text and "_step.py" not in text


class Switched(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x, y, twice=False):
        return self.linear(x + y) * (2 if twice else 1)


@pytest.mark.parametrize("inputs", [tuple, list, dict], ids=lambda kind: kind.__name__)
def test_inputs_are_given_as_a_layout_takes_them(inputs):
    array = jax.ShapeDtypeStruct((8, 8), "float32")
    given = {"x": array, "y": array, "twice": True}
    given = given if inputs is dict else inputs(given.values())
    layout = sw.layout(Switched, sw.mesh("data=8"), "dp", inputs=given)
    compiled = sw.compile(Switched, layout, inputs=given)
    assert compiled.memory.batch == 2 * 8 * 8 * 4 // 8
    assert "multiply" in compiled.hlo


def test_a_layout_that_is_none():
    with pytest.raises(ValueError, match="the layout is of type NoneType: make one with sw.layout"):
        sw.compile(recipe(), None)


def test_inputs_belong_to_models():
    planned = layout_of("data=8", "dp")
    with pytest.raises(ValueError, match="compiling a model needs inputs="):
        sw.compile(make, planned)
    with pytest.raises(ValueError, match="a recipe has its own batch"):
        sw.compile(recipe(), planned, inputs=jnp.ones((8, WIDTH)))


def test_nothing_is_printed(capfd):
    sw.compile(recipe(batch=512), layout_of("data=8", FSDP))
    told = capfd.readouterr()
    assert told.out == "" and told.err == ""
    assert np.isfinite(float(sw.train_step(recipe(batch=512), layout_of("data=8", FSDP))(
        sw.train_state(recipe(batch=512), layout_of("data=8", FSDP)), np.ones((512, WIDTH), "f4")
    )[1]["loss"]))  # fmt: skip


def test_a_loss_that_predicts_the_next_token_is_seen_too():
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.embed = nnx.Embed(512, 128, rngs=rngs)
            self.up = nnx.Linear(128, 512, rngs=rngs)

        def __call__(self, tokens):
            return self.up(self.embed(tokens))

    def loss(model, tokens):
        # What loses the split, on purpose.
        kept = jax.lax.with_sharding_constraint(model(tokens[:, :-1]), P())
        return optax.softmax_cross_entropy_with_integer_labels(kept, tokens[:, 1:]).mean()

    batch = jax.ShapeDtypeStruct((64, 33), "int32")
    recipe = sw.Recipe(model=Model, loss=loss, optimizer=optax.sgd(0.1), batch=batch)
    layout = sw.layout(Model, sw.mesh("data=8", on="cpu:8"), "dp")
    assert "SW302" in {finding.code for finding in sw.compile(recipe, layout).findings}
