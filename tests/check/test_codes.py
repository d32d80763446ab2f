"""Every code: its page, a case with the finding and a case without, and the text that it prints."""

import dataclasses
import json
import os
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pages
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._base import show_line
from shardwise._check.findings import CODES

PAGES = Path(__file__).parents[2] / "docs" / "codes"
SECTIONS = ["What it finds", "Why it is bad", "Example", "Instead"]
COLUMN, ROW = P(None, "model"), P("model")
STACK = {nnx.PARTITION_NAME: None}


def none(axes):
    return sw.mesh(axes, on="none")


def cpu(axes):
    return sw.mesh(axes, on="cpu:8")


def rngs():
    return nnx.Rngs(0)


def mlp():
    return models.Mlp(16, 32, rngs())


def linear(inner=8, outer=16, *, names=None, bias=False, param_dtype="float32", **metadata):
    """Returns a factory of one layer, its kernel annotated with `names`."""
    init = nnx.initializers.lecun_normal()
    if names is not None:
        init = nnx.with_partitioning(init, names, **metadata)
    options = {"use_bias": bias, "kernel_init": init, "param_dtype": param_dtype}
    return lambda: nnx.Linear(inner, outer, **options, rngs=rngs())


def lora():
    return nnx.LoRALinear(8, 16, lora_rank=4, use_bias=False, rngs=rngs())


def stack(names, *, bias=False, **options):
    """Returns a factory of three layers stacked by nnx.vmap."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0, **options)
    def layers(rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
        return nnx.Linear(8, 16, kernel_init=init, use_bias=bias, rngs=rngs)

    return lambda: layers(rngs())


def check(make, axes, rules=None, *, logical=None, **options):
    return sw.check(sw.layout(make, none(axes), rules, logical=logical), **options)


def audit(planned, live, rules="dp", live_rules="dp"):
    """Audits a model that is sharded by `live_rules` against a layout by `rules`."""
    layout = sw.layout(planned, cpu("data=8"), rules)
    return sw.audit(layout, sw.init(live, sw.layout(live, cpu("data=8"), live_rules)))


def simulated(body, *axes, **options):
    """Checks a simulated shard_map of four devices, each with two numbers."""
    how = {"mesh": "data=4", "in_specs": P("data"), "out_specs": P(*axes)}
    return sw.simulate(body, **how, **options).check(jnp.arange(8.0))


def preflight(saved, wanted, *, rules="dp", tx=None, wanted_tx=None):
    """Checks a checkpoint of one model before it is restored as another."""

    def recipe(make, tx):
        return sw.Recipe(
            model=make,
            loss=lambda model, x: model(x).mean(),
            optimizer=tx or optax.sgd(0.1),
            batch=jax.ShapeDtypeStruct((8, 8), "float32"),
        )

    before, after = recipe(saved, tx), recipe(wanted, wanted_tx)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = sw.Checkpoints(folder)
        checkpoints.save(0, sw.train_state(before, sw.layout(saved, cpu("data=8"), "dp")))
        checkpoints.close()
        layout = sw.layout(wanted, cpu("data=8"), rules)
        return checkpoints.preflight(after, layout).findings


def weights(saved, wanted, *, damage=None, **options):
    """Checks the weights of one model before they are loaded as another."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights"
        sw.save_weights(saved(), path, **options.pop("saving", {}))
        if damage is not None:
            damage(path)
        found = sw.check_weights(wanted, sw.layout(wanted, none("data=8"), "dp"), path, **options)
    return [dataclasses.replace(f, path=f.path.removeprefix(f"{path}/")) for f in found.findings]


def shorten(path):
    """Cuts off the last bytes of a file."""
    os.truncate(path / "model.safetensors", 200)


def ints():
    init = nnx.initializers.ones
    return nnx.Linear(8, 16, use_bias=False, param_dtype="int8", kernel_init=init, rngs=rngs())


TURNED = {"w": sw.Name("kernel", permute=(1, 0))}


def compiled(make, axes, rules, inputs, on="cpu:8"):
    """Returns the findings of a compiled forward pass.

    Sizes are other than on the pages: JAX keeps one program for both, with the lines of the first.
    """
    given = jax.ShapeDtypeStruct(inputs, "float32")
    layout = sw.layout(make, sw.mesh(axes, on=on), rules, inputs=given)
    return sw.compile(make, layout, inputs=given).findings


def trained(make, axes, rules):
    """Returns the findings of a compiled training step."""
    recipe = sw.Recipe(
        model=make,
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((512, 64), "float32"),
    )
    return sw.compile(recipe, sw.layout(make, cpu(axes), rules)).findings


class Calling(nnx.Module):
    """A layer, and what is done with its output."""

    def __init__(self, then):
        self.up = nnx.Linear(64, 128, use_bias=False, rngs=rngs())
        self.then = then

    def __call__(self, x):
        return self.then(self.up, x)


def ordered(layer, x):
    """Sorts the whole batch."""
    return (y := layer(x))[jnp.argsort(y[:, 0])]


def moved(layer, x):
    """Changes from one sharding to another, which XLA cannot do directly."""
    x = jax.lax.with_sharding_constraint(layer(x), P("x", None, "y"))
    return jax.lax.with_sharding_constraint(jnp.sin(x), P(None, ("y", "x")))


def kept(layer, x):
    """Keeps one sharding."""
    x = jax.lax.with_sharding_constraint(layer(x), P("x", None, "y"))
    return jax.lax.with_sharding_constraint(jnp.sin(x), P("x", None, "y"))


def line(function, number):
    """Returns the location of a function's line, as findings show it from any folder."""
    code = function.__code__
    return show_line(code.co_filename, code.co_firstlineno + number)


def lonely(x):
    """Calls a collective on some devices only."""
    some = jax.lax.axis_index("data") > 1
    return jax.lax.cond(some, lambda v: v + jax.lax.psum(v, "data"), lambda v: v, x)


def codes(findings):
    return [f.code for f in findings]


def only(findings, code):
    (found,) = [f for f in findings if f.code == code]
    return found


@pytest.mark.parametrize("code", CODES)
def test_page_runs(code):
    page = PAGES / f"{code}.md"
    name, severity = CODES[code]
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[:4] == [f"# {code} {name}", "", f"Severity: {severity}", ""]
    assert [line[3:] for line in lines if line.startswith("## ")] == SECTIONS
    (kind, example), (shown, text), (other, instead) = pages.blocks(page)
    assert (kind, shown, other) == ("python", "text", "python")
    assert pages.run(example, "example.py") == text
    assert f"{severity}[{code}] {name}: " in text
    assert example.splitlines()[-1].startswith(
        (
            "print(sw.check(",
            "print(sw.audit(",
            "print(f.check(",
            "print(checkpoints.preflight(",
            "print(sw.compile(",
            "print(sw.check_weights(",
        )
    )
    assert "\nassert " in instead
    assert pages.run(instead, "example.py") == ""


def test_every_code_has_a_page_and_both_cases():
    assert {page.stem for page in PAGES.glob("SW*.md")} == set(CODES)
    assert set(POSITIVE) == set(NEGATIVE) == set(CODES)
    row = re.compile(r"^\| \[(\w+)\]\((\w+)\.md\) \| ([\w-]+) \| (\w+) \| .+ \|$", re.MULTILINE)
    rows = row.findall((PAGES / "index.md").read_text(encoding="utf-8"))
    assert rows == [(code, code, *CODES[code]) for code in CODES]


# findings, path, message, help
POSITIVE = {
    "SW101": (
        lambda: check(mlp, "data=2,model=4", {"up.kernel": P(None, "modle")}),
        "up.kernel",
        "axis 'modle' is not on the mesh",
        "did you mean 'model'? the mesh has data, model",
    ),
    "SW102": (
        lambda: check(mlp, "data=2,model=4", {"up.kernel": P("model", ("data", "model"))}),
        "up.kernel",
        "axis 'model' is used 2 times, for dim 0 and dim 1",
        "each axis may be used only once: keep one use and drop the others",
    ),
    "SW103": (
        lambda: check(mlp, "model=4", {"up.kernel": P(None, None, "model")}),
        "up.kernel",
        "the spec has 3 entries but the array has 2 dims",
        "give at most 2 entries",
    ),
    "SW104": (
        lambda: check(
            lambda: nnx.LinearGeneral(1024, (8, 12), use_bias=False, rngs=rngs()),
            "fsdp=16,tp=1",
            {"kernel": P("tp", "fsdp", None)},
        ),
        "kernel",
        "dim 1 (size 8) cannot be split 16 ways over axis 'fsdp'",
        "P('fsdp', 'tp', None) divides evenly",
    ),
    "SW105": (
        lambda: check(lambda: nnx.Embed(4096, 256, rngs=rngs()), "data=4,model=2"),
        "embedding",
        "4.0 MiB replicated on all 8 devices: 100.0% of the model's 4.0 MiB, and 28.0 MiB of extra copies",
        "P('data', 'model') would leave 512.0 KiB on each device; allow={'SW105': 'embedding'} if "
        "replication is intentional",
    ),
    "SW106": (
        lambda: check(mlp, "model=4", {"**.kernel": COLUMN, "down.bias": ROW}),
        "up.bias",
        "its spec is P(), but it is added to the output of up.kernel, which is split P('model')",
        "use P('model')",
    ),
    "SW107": (
        lambda: check(mlp, "model=4", {"**.kernel": ROW, "upp.kernel": ROW}),
        "upp.kernel",
        "this pattern matches no leaf",
        "the closest path is up.kernel",
    ),
    "SW108": (
        lambda: check(mlp, "model=4", {"**.kernel": ROW, "up.*": COLUMN, "up.bias": COLUMN}),
        "up.kernel",
        "2 patterns match and disagree: '**.kernel' says P('model'), 'up.*' says P(None, 'model')",
        "make them disjoint, or put the exception into a later rule: "
        "[{general patterns}, {exceptions}]",
    ),
    "SW109": (
        lambda: check(linear(names=("data", "mlp")), "data=2,model=4"),
        "kernel",
        "name 'mlp' in the annotation does not resolve to an axis of the mesh (data, model)",
        "map it to an axis: sw.layout(..., logical={'mlp': 'model'}), "
        "or {'mlp': None} to replicate it",
    ),
    "SW110": (  # flax#5112
        lambda: check(stack((None, "model")), "model=4"),
        "kernel",
        "the annotation has 2 entries for 3 dims: it lacks the stacked dim 0 (size 3) and is off "
        "by 1",
        "pass transform_metadata={nnx.PARTITION_NAME: None} to nnx.vmap or nnx.scan, "
        "or annotate P(None, None, 'model')",
    ),
    "SW111": (
        lambda: check(mlp, "seq=2,model=4", {"**.kernel": ROW}),
        "seq",
        "no leaf is split over axis 'seq' of size 2: each has 2 copies along it",
        "add a rule that uses it, or merge it into another axis",
    ),
    "SW112": (
        lambda: check(mlp, "model=4", {"**.kernel": ROW}, allow={"SW105": "embed.**"}),
        "embed.**",
        "SW105 is allowed here but not found",
        "remove the allowance",
    ),
    "SW113": (
        lambda: check(lora, "model=4", {"kernel": COLUMN, "**.lora_b": ROW}),
        "lora.lora_b",
        "its rank, dim 0 (size 4), is split over axis 'model'; dim 1 is not split, but runs along dim 1 "
        "of kernel, which is split over axis 'model'",
        "use P(None, 'model'), or drop the rule that chose its spec: it then follows kernel",
    ),
    "SW201": (
        lambda: audit(linear(), linear(), {"kernel": P("data")}),
        "kernel",
        "planned P('data'), but is P() on data=8: 512 B instead of 64 B, 448 B more on each device",
        "place it with sw.shard(model, layout)",
    ),
    "SW202": (
        lambda: audit(linear(bias=True), linear()),
        "bias",
        "the layout has this leaf of 64 B, but the model does not",
        "make the layout again from this model",
    ),
    "SW203": (
        lambda: audit(linear(), linear(bias=True)),
        "bias",
        "the model has this leaf of 64 B, but the layout does not",
        "make the layout again from this model",
    ),
    "SW204": (
        lambda: audit(linear(8, 16), linear(8, 32)),
        "kernel",
        "the layout has float32[8, 16], the model has float32[8, 32]",
        "make the layout again from this model",
    ),
    "SW301": (
        lambda: compiled(linear(131072, 196608), "data=4", "dp", (1024, 131072), "h100:1x4"),
        "data=4 on h100:1x4",
        "the step needs 96.3 GiB on each device, 17.1 GiB more than the 79.2 GiB that h100 has: "
        "parameters 96.0 GiB, batch 128.0 MiB, outputs and padding 192.0 MiB",
        "shard the state further: 4.0 devices hold each byte of it (sw.fsdp)",
    ),
    "SW302": (
        lambda: compiled(lambda: Calling(ordered), "data=8", "dp", (2048, 64)),
        line(ordered, 2),
        "f32[2048,128] holds the global batch on every device: 1.0 MiB, or 128.0 KiB if "
        "split 8 ways over 'data'",
        "constrain it there: jax.lax.with_sharding_constraint(x, P('data', …)); in models of "
        "shardwise.models, name its dims instead",
    ),
    "SW303": (
        lambda: compiled(lambda: Calling(moved), "x=2,y=4", sw.replicate(), (16, 64, 64)),
        line(moved, 2),
        "the compiler replicates an array whose shard is f32[8,64,32] to reshard it "
        "from P('x', None, 'y') to P(None, ('y', 'x'))",
        "move one axis at a time, with a constraint in between, or keep one spec",
    ),
    "SW304": (
        lambda: trained(linear(64, 128), "data=2,model=4", {"kernel": ROW}),
        "kernel",
        "1 all-gather over 'model' in a step, 24.0 KiB sent by each device: it is stored as "
        "P('model') and used as P()",
        "store it as P(), or use it split over 'model'",
    ),
    "SW401": (
        lambda: preflight(linear(), linear(), wanted_tx=optax.sgd(0.1, 0.9)),
        "optimizer.0.trace.kernel",
        "the recipe has float32[8, 16], but the checkpoint of step 0 has no such array",
        "resume with the optimizer that it was trained with; or restore with that optimizer, and "
        "start a new run from the restored model",
    ),
    "SW402": (
        lambda: preflight(linear(), linear(), tx=optax.sgd(0.1, 0.9)),
        "optimizer.0.trace.kernel",
        "the checkpoint has float32[8, 16], but the recipe has no such array",
        "resume with the optimizer that it was trained with; or restore with that optimizer, and "
        "start a new run from the restored model",
    ),
    "SW403": (
        lambda: preflight(linear(), linear(8, 32)),
        "kernel",
        "the checkpoint has shape (8, 16), the recipe has (8, 32)",
        "restore with the recipe that it was saved with, or restore another step",
    ),
    "SW404": (
        lambda: preflight(linear(), linear(param_dtype="bfloat16")),
        "kernel",
        "the checkpoint has float32, the recipe has bfloat16",
        "restore with the saved dtype, then cast",
    ),
    "SW405": (
        lambda: preflight(linear(), linear(), rules={"kernel": P("data")}),
        "kernel",
        "saved as P() on data=8, restored as P('data') on data=8",
        "nothing to do if this is intentional: each process reads the parts it needs",
    ),
    "SW501": (
        lambda: simulated(lambda x: x),
        "output",
        "P() says that all devices along axis 'data' hold the same value, but device (data=0) has 0 "
        "and device (data=3) has 6 at index (0,), a difference of 6",
        "name data in out_specs, or make them agree: psum, pmean or pmax over it",
    ),
    "SW502": (
        lambda: simulated(lambda x: jax.lax.all_gather(x, "data")),
        "output",
        "P() leaves out axis 'data', along which the devices agree here, but JAX cannot prove it "
        "and will raise an error",
        "pass check_vma=False to jax.shard_map, or end with a psum, pmean or pmax over it",
    ),
    "SW503": (
        lambda: simulated(lonely, "data"),
        show_line(lonely.__code__.co_filename, lonely.__code__.co_firstlineno + 3),
        "devices along axis 'data' take different branches of a cond or while_loop that contains a "
        "collective they must all reach: device (data=0) has 0 and device (data=2) has 1, a "
        "difference of 1",
        "real devices would deadlock: move the collective out, or branch on a value that is the "
        "same on all of them",
    ),
    "SW601": (
        lambda: weights(linear(bias=True), linear()),
        "bias",
        "no name matches this key of F32[16]",
        "add a name for it; if it is not needed, map it to None, or allow={'SW601': …} skips keys",
    ),
    "SW602": (
        lambda: weights(linear(), linear(bias=True)),
        "bias",
        "no key of the checkpoint goes to this leaf, float32[16]",
        "add a name for it; allow={'SW602': …} initialises leaves instead",
    ),
    "SW603": (
        lambda: weights(linear(), linear(), names={"kernel": ["kernel", "kernel"]}),
        "kernel",
        "kernel and kernel both fill all of it",
        "map one of them to None, or mark it with tie=True if it repeats the other",
    ),
    "SW604": (
        lambda: weights(linear(), linear(), saving={"names": TURNED}, names={"w": "kernel"}),
        "w",
        "F32[16, 8] does not fit kernel of shape (8, 16): it is (16, 8), where (8, 16) is needed",
        "correct the name, or build the model with the sizes of this checkpoint",
    ),
    "SW605": (
        lambda: weights(ints, linear()),
        "kernel",
        "the checkpoint has I8[8, 16], but kernel is float32[8, 16]",
        "quantised weights need a model of that dtype",
    ),
    "SW606": (
        lambda: weights(linear(), linear(param_dtype="bfloat16")),
        "kernel",
        "the checkpoint has F32, and is rounded to bfloat16",
        "build the model with the dtype of the checkpoint, if that is not intentional",
    ),
    "SW607": (
        lambda: weights(linear(), linear(), damage=shorten),
        "model.safetensors",
        "'kernel' in the header has the bytes 0 to 512 of the data, which has 96: the file is "
        "truncated, or the header is damaged",
        "download or write the file again",
    ),
    "SW608": (
        lambda: weights(
            linear(bias=True),
            linear(bias=True),
            saving={"max_file_bytes": 1},
            damage=lambda path: (path / "model-00002-of-00002.safetensors").unlink(),
        ),
        "model-00002-of-00002.safetensors",
        "the index names this file for 1 tensor, such as kernel, but it is not there",
        "copy the whole folder, or download the missing files",
    ),
}

# Close to the positive case, but without any finding.
NEGATIVE = {
    "SW101": lambda: check(mlp, "data=2,model=4", {"up.kernel": ROW, "down.kernel": P("data")}),
    "SW102": lambda: check(mlp, "data=2,model=4", {"up.kernel": P(("data", "model"))}),
    "SW103": lambda: check(mlp, "model=4", {"*.kernel": P("model", None)}),
    "SW104": lambda: check(mlp, "fsdp=16,tp=2", {"*.kernel": P("tp", "fsdp"), "*.bias": P("fsdp")}),
    "SW105": lambda: check(lambda: nnx.Embed(4096, 256, rngs=rngs()), "data=8", "fsdp"),
    "SW106": lambda: check(mlp, "model=4", {"*.kernel": COLUMN, "*.bias": ROW}),
    "SW107": lambda: check(mlp, "model=4", {"**.up.**.kernel": ROW, "d*n.kernel": ROW}),
    "SW108": lambda: check(mlp, "model=4", {"**.kernel": ROW, "up.kernel": ROW}),
    "SW109": lambda: check(linear(names=("data", "model")), "data=2,model=4"),
    "SW110": lambda: check(stack((None, "model"), transform_metadata=STACK), "model=4"),
    "SW111": lambda: check(mlp, "data=2,model=4,seq=1", {"**.kernel": ROW}),
    "SW112": lambda: check(mlp, "seq=2", allow={"SW111": "seq"}),
    "SW113": lambda: check(lora, "model=4", {"kernel": COLUMN, "**.lora_a": P()}),
    "SW201": lambda: audit(linear(), linear(), {"kernel": P("data")}, {"kernel": P("data")}),
    "SW202": lambda: audit(linear(bias=True), linear(bias=True)),
    "SW203": lambda: audit(linear(), linear()),
    "SW204": lambda: audit(linear(8, 32), linear(8, 32)),
    "SW301": lambda: compiled(
        linear(131072, 196608), "data=2,model=4", "fsdp+tensor", (1024, 131072), "h100:1x8"
    ),
    "SW302": lambda: compiled(linear(64, 128), "data=8", "dp", (4096, 64)),
    "SW303": lambda: compiled(lambda: Calling(kept), "x=2,y=4", sw.replicate(), (16, 64, 64)),
    "SW304": lambda: trained(linear(64, 128), "data=2,model=4", {"kernel": COLUMN}),
    "SW401": lambda: preflight(linear(), linear()),
    "SW402": lambda: preflight(linear(), linear(), tx=optax.adam(1), wanted_tx=optax.adam(1)),
    "SW403": lambda: preflight(linear(8, 32), linear(8, 32)),
    "SW404": lambda: preflight(linear(param_dtype="bfloat16"), linear(param_dtype="bfloat16")),
    "SW405": lambda: preflight(linear(), linear(), rules="dp"),
    "SW501": lambda: simulated(lambda x: jax.lax.psum(x, "data")),
    "SW502": lambda: simulated(lambda x: jax.lax.all_gather(x, "data"), check_vma=False),
    "SW503": lambda: simulated(lambda x: x + jax.lax.psum(x, "data"), "data"),
    "SW601": lambda: weights(linear(bias=True), linear(bias=True)),
    "SW602": lambda: weights(linear(), linear(bias=True), allow={"SW602": "bias"}),
    "SW603": lambda: weights(
        linear(), linear(), names={"kernel": ["kernel", sw.Name("kernel", tie=True)]}
    ),
    "SW604": lambda: weights(linear(), linear(), saving={"names": TURNED}, names=TURNED),
    "SW605": lambda: weights(ints, ints),
    "SW606": lambda: weights(linear(param_dtype="bfloat16"), linear()),
    "SW607": lambda: weights(linear(), linear()),
    "SW608": lambda: weights(linear(bias=True), linear(bias=True), saving={"max_file_bytes": 1}),
}


@pytest.mark.parametrize("code", POSITIVE)
def test_found_with_this_text(code):
    find, path, message, help_text = POSITIVE[code]
    found = only(find(), code)
    assert (found.path, found.message, found.help) == (path, message, help_text)
    assert (found.name, found.severity) == CODES[code]


@pytest.mark.parametrize("code", NEGATIVE)
def test_not_found(code):
    assert not NEGATIVE[code](), NEGATIVE[code]()


def test_sw104_suggests_padding_when_no_arrangement_divides():
    found = only(check(linear(6, 10), "model=4", {"kernel": COLUMN}), "SW104")
    assert found.help.startswith(
        "no arrangement of these axes divides (6, 10) evenly; pad dim 1 to 12, "
    )


class EmbedAndHead(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(4096, 256, rngs=rngs())
        self.head = nnx.Linear(256, 2048, use_bias=False, rngs=rngs())


def test_sw105_share_and_bytes_match_real_arrays():
    # keras-hub#2806: the pattern misses the embedding after a rename.
    layout = sw.layout(EmbedAndHead, cpu("data=8"), {"head.kernel": P(None, "data")})
    found = only(sw.check(layout), "SW105")
    assert found.message.endswith("66.7% of the model's 6.0 MiB, and 28.0 MiB of extra copies")
    assert "66.7%25 of the model's" in found.github
    embedding = sw.init(EmbedAndHead, layout).embed.embedding
    resident = [shard.data.nbytes for shard in embedding.addressable_shards]
    assert sum(resident) - embedding.nbytes == 28 * 2**20
    helped = {"head.kernel": P(None, "data"), "embed.embedding": P("data")}
    assert found.help.startswith("P('data') would leave 512.0 KiB on each device")
    model = sw.init(EmbedAndHead, sw.layout(EmbedAndHead, cpu("data=8"), helped))
    assert {s.data.nbytes for s in model.embed.embedding.addressable_shards} == {512 * 2**10}


@pytest.mark.parametrize("rules", [sw.replicate(), "dp"], ids=["replicate", "dp"])
def test_sw105_is_silent_if_replication_is_requested(rules):
    assert not check(EmbedAndHead, "data=8", rules)


class Small(nnx.Module):
    """6.5 MiB in leaves under 1 MiB."""

    def __init__(self):
        self.embed = nnx.Embed(512, 256, rngs=rngs())
        self.blocks = nnx.List([nnx.Linear(256, 256, rngs=rngs()) for _ in range(24)])


LARGEST = "blocks.{0..23}.kernel ×24 (6.0 MiB), embed.embedding (512.0 KiB), blocks.{0..23}.bias ×24 (24.0 KiB)"


@pytest.mark.parametrize(
    "rules, how",
    [(None, "sw.fsdp('data')"), (sw.fsdp("data", min_bytes=2**20), "sw.fsdp('data', min_bytes=0)")],
    ids=["no rule", "fsdp left them"],
)
def test_sw105_sums_small_leaves(rules, how):
    found = only(check(Small, "data=8", rules), "SW105")
    assert found.path == "**"
    assert found.message == (
        "49 small replicated leaves, 6.5 MiB in total: 100.0% of the 6.5 MiB on each of 8 devices"
    )
    assert found.context == f"mesh data=8  the largest: {LARGEST}"
    assert found.help == (
        f"{how} would leave 835.0 KiB on each device; allow={{'SW105': '**'}} or their paths if "
        f"replication is intentional"
    )
    helped = sw.layout(Small, sw.mesh("data=8", on="none"), sw.fsdp("data", min_bytes=0))
    assert helped.bytes_per_device == 835 * 2**10


def test_sw105_of_many_small_leaves_is_allowed_by_their_paths():
    assert not check(Small, "data=8", allow={"SW105": "**"})
    # The rest, 536 KiB, is not worth a finding.
    found = check(Small, "data=8", allow={"SW105": "blocks.*.kernel"})
    assert not found and len(found.allowed) == 24
    found = check(Small, "data=8", allow={"SW105": ["embed.*", "head.*"]})
    assert [(f.code, f.path) for f in found] == [("SW105", "**"), ("SW112", "head.*")]
    assert found[0].message.startswith("48 small replicated leaves, 6.0 MiB in total")


def test_sw105_is_silent_about_a_small_share_of_small_leaves():
    # A custom min_bytes above 1 MiB; the leaves that it leaves unsplit are a small share of the model.
    def make():
        return nnx.Sequential(*[nnx.Linear(n, 8192, rngs=rngs()) for n in (16384, 16384, 64)])

    mesh = sw.mesh("data=8", on="none")
    layout = sw.layout(make, mesh, sw.fsdp("data", min_bytes=2**22))
    assert layout["layers.2.kernel"].left == "small" and layout["layers.2.kernel"].is_replicated
    assert not sw.check(layout)
    # By default, fsdp never leaves 1 MiB unsplit.
    assert sw.layout(make, mesh, "fsdp")["layers.2.kernel"].copies == 1


PADDED = {
    "a vocabulary": (
        (50257, 250), "data=8", "fsdp",
        "47.9 MiB replicated on all 8 devices: 100.0% of the model's 47.9 MiB, and 335.5 MiB of extra copies; no free dim is divisible by 8, the size of axis 'data'",
        "pad dim 0 from 50257 to 50304, a multiple of 128, or use an axis whose size divides a dim",
    ),
    "split by one axis already": (
        (50257, 1024), "data=32,model=4", [{"**": P(None, "model")}, sw.fsdp("data")],
        "49.1 MiB on each of 128 devices, every shard on 32 of them: 100.0% of the model's 196.3 MiB, and 5.9 GiB of extra copies; no free dim is divisible by 32, the size of axis 'data'",
        "pad dim 0 from 50257 to 50304, a multiple of 128, or use an axis whose size divides a dim",
    ),
    "small dims": (
        (700, 700), "data=64", "fsdp",
        "1.9 MiB replicated on all 64 devices: 100.0% of the model's 1.9 MiB, and 117.8 MiB of extra copies; no free dim is divisible by 64, the size of axis 'data'",
        "pad dim 0 from 700 to 704, or use an axis whose size divides a dim",
    ),
    "too many devices": (
        (300, 1000), "data=4096", None,
        "1.1 MiB replicated on all 4096 devices: 100.0% of the model's 1.1 MiB, and 4.6 GiB of extra copies; no free dim is divisible by 4096, the size of axis 'data'",
        "use an axis of size 8, which divides dim 1 (size 1000)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PADDED)
def test_sw105_of_a_large_leaf_that_no_axis_divides(case):
    (rows, width), axes, rules, message, help_text = PADDED[case]
    found = only(check(lambda: nnx.Embed(rows, width, rngs=rngs()), axes, rules), "SW105")
    assert found.message == message
    assert found.help == (
        f"{help_text}; allow={{'SW105': 'embedding'}} if replication is intentional"
    )


def test_sw105_padding_that_it_suggests_is_divisible():
    layout = sw.layout(
        lambda: nnx.Embed(50304, 250, rngs=rngs()), sw.mesh("data=8", on="none"), "fsdp"
    )
    assert layout["embedding"].spec == P("data") and not sw.check(layout)


def test_sw105_threshold_is_the_callers():
    assert codes(check(linear(), "data=8", replicated_bytes=512)) == ["SW105"]
    assert not check(linear(), "data=8", replicated_bytes=513)
    many = lambda: nnx.Sequential(linear()(), linear()())  # noqa: E731
    assert [f.path for f in check(many, "data=8", replicated_bytes=1024)] == ["**"]
    assert not check(many, "data=8", replicated_bytes=1025)


@pytest.mark.parametrize(
    "rules",
    [
        sw.fsdp("data", min_bytes=512),  # the kernel's last dim, not the bias
        {"kernel": ROW},
        [{"kernel": COLUMN, "bias": ROW}, sw.fsdp("data", min_bytes=0)],
    ],
    ids=["fsdp", "row-parallel", "column-parallel and fsdp"],
)
def test_sw106_is_silent(rules):
    assert "SW106" not in codes(check(linear(bias=True), "data=2,model=4", rules))


def test_sw106_of_stacked_layers_does_not_split_the_stack():
    make = stack((None, "model"), bias=True)
    found = only(check(make, "model=4", {"kernel": P(None, None, "model")}), "SW106")
    assert found.help == "use P(None, 'model')"


@pytest.mark.parametrize(
    ("rule", "axes", "why", "help_text"),
    [
        ("fsdp", "data=8", "2 leaves have no free dim divisible by 8", "use an axis of size 2"),
        (
            sw.fsdp("data", min_bytes=1000),
            "data=2",
            "2 leaves are below min_bytes",
            "sw.fsdp('data', min_bytes=0) would leave 132 B on each device",
        ),
    ],
    ids=["indivisible", "small"],
)
def test_sw111_where_fsdp_split_nothing_of_a_small_model(rule, axes, why, help_text):
    make = linear(10, 6, bias=True)
    found = only(check(make, axes, rule), "SW111")
    assert found.path == "data" and f": {why}, 264 B on each device" in found.message
    assert found.help.startswith(help_text)
    assert not check(make, axes, rule, allow={"SW111": "data"})
    assert not check(make, axes, "dp") and not check(make, "data=2", "fsdp")


def test_sw109_suggests_an_axis_that_a_strategy_would_yield():
    init = nnx.with_partitioning(nnx.initializers.normal(), ("vocab", "embed"))
    make = lambda: nnx.Embed(64, 16, embedding_init=init, rngs=rngs())  # noqa: E731
    annotated = [f.help for f in check(make, "data=2,model=4") if f.code == "SW109"]
    assert "{'vocab': 'model'}" in annotated[0] and "{'embed': 'data'}" in annotated[1]
    refined = lambda leaf: sw.Opinion(P("vocab", ("embed", "model")), refines=True)  # noqa: E731
    assert [f.help for f in check(make, "data=2,model=4", refined)] == annotated


def test_sw109_is_one_finding_for_a_name():
    def make():
        init = nnx.with_partitioning(nnx.initializers.normal(), ("embed", "mlp"))
        named = [nnx.Linear(8, 8, kernel_init=init, rngs=rngs()) for _ in range(4)]
        return nnx.Sequential(*named)

    embed, mlp = check(make, "data=2,model=4").errors
    assert (embed.path, mlp.path) == ("layers.0.kernel", "layers.0.kernel")
    assert mlp.message == (
        "name 'mlp' in the annotation does not resolve to an axis of the mesh (data, model): it is "
        "used by 4 leaves, layers.{0..3}.kernel ×4"
    )
    found = check(make, "data=2,model=4", allow={"SW109": "layers.0.*"})
    assert [f.path for f in found.errors] == ["layers.1.kernel"] * 2 and len(found.allowed) == 2
    assert "used by 3 leaves" in found[0].message


def test_sw109_is_distinct_from_sw101():
    make = linear(names=(None, "mlp"))
    assert codes(check(make, "data=2")) == ["SW109"]
    assert codes(check(make, "data=2", logical={"mlp": "dataa"})) == ["SW101"]
    assert codes(check(make, "data=2", {"kernel": P(None, "mpl")})) == ["SW101"]


RESOLVED = (("embed", "data"), ("mlp", None))


@pytest.mark.parametrize(
    ("logical", "own", "active"),
    [(dict(RESOLVED), None, ()), (None, RESOLVED, ()), (None, None, RESOLVED)],
    ids=["logical", "the variable's own rules", "flax rules that are active"],
)
def test_sw109_is_resolved(logical, own, active):
    make = linear(names=("embed", "mlp"), **({"sharding_rules": own} if own else {}))
    with nnx.logical_axis_rules(active):
        layout = sw.layout(make, none("data=2"), logical=logical)
    assert not sw.check(layout)
    assert layout["kernel"].shard_shape == (4, 16)


@pytest.mark.parametrize(
    ("names", "rules", "found"),
    [
        ((None, "model"), None, ["SW110"]),
        (("model", None), None, ["SW104", "SW110"]),  # 3 layers do not divide 4 ways
        ((None, None, "model"), None, []),
        ((None, "model"), {"kernel": P(None, None, "model")}, []),
    ],
    ids=["silent shift", "shift onto the stack", "annotated in full", "a rule decides"],
)
def test_sw110_is_about_annotations_that_decide(names, rules, found):
    assert codes(check(stack(names), "model=4", rules)) == found


@pytest.mark.parametrize("axis", ["data", "batch", "dp", "replica", "fsdp", "model", "seq"])
def test_sw111_is_silent_for_axes_of_the_batch(axis):
    exempt = axis in ("data", "batch", "dp", "replica")
    assert codes(check(linear(), f"{axis}=2")) == ([] if exempt else ["SW111"])


# --- all at once, allowances, and how they print ------------------------------------------------


def many():
    """Returns the findings of a model with six different problems."""
    rules = {
        "embed.embedding": P("modle"),
        "head.kernel": ROW,
        "head.bias": P("model"),  # 66 does not divide 4 ways
        "norm.scale": P("model", None, None),
        "blocks.*.mlp.*.kernel": P("model", "model"),
        "blocks.*.attn.**": ROW,
    }
    make = lambda: models.Transformer(rngs(), vocab=66, layers=2, tied=False)  # noqa: E731
    return check(make, "model=4,seq=2", rules)


def test_all_findings_come_at_once():
    findings = many()
    assert set(codes(findings)) == {"SW101", "SW102", "SW103", "SW104", "SW107", "SW111"}
    assert len(findings.errors) == 9 and len(findings.warnings) == 2
    assert codes(findings.errors) + codes(findings.warnings) == codes(findings)
    assert findings.summary == "9 errors, 2 warnings"
    assert str(findings).endswith("9 errors, 2 warnings")


def test_all_errors_are_raised_together_and_warnings_are_not():
    findings = many()
    with pytest.raises(sw.LayoutError) as caught:
        findings.raise_if_errors()
    assert isinstance(caught.value, ValueError)
    assert caught.value.findings.items == findings.errors
    assert "SW104" in str(caught.value) and "SW111" not in str(caught.value)
    warnings = check(linear(), "seq=2")
    assert warnings.raise_if_errors() is warnings


def test_similar_findings_print_as_one():
    make = lambda: models.Transformer(rngs(), hidden=30, layers=4)  # noqa: E731
    findings = check(make, "model=4", {"blocks.*.mlp.up.kernel": COLUMN})
    assert codes(findings) == ["SW104"] * 4
    assert str(findings) == (
        "error[SW104] indivisible-dim: blocks.0.mlp.up.kernel\n"
        "  dim 1 (size 30) cannot be split 4 ways over axis 'model'\n"
        "  shape (16, 30)  spec P(None, 'model')  mesh model=4\n"
        "  help: P('model', None) divides evenly\n"
        "  and 3 more like it, up to blocks.3.mlp.up.kernel\n"
        "4 errors, 0 warnings"
    )


def test_a_finding_on_one_line_as_json_and_for_github():
    findings = check(linear(8, 6), "model=4", {"kernel": COLUMN})
    (found,) = findings
    line = (
        "kernel: error[SW104] dim 1 (size 6) cannot be split 4 ways over axis 'model' "
        "(help: P('model', None) divides evenly)"
    )
    assert found.concise == line
    assert found.github == f"::error title=SW104 indivisible-dim::{line}"
    fields = ("code", "name", "severity", "path", "message", "help", "context")
    row = {field: getattr(found, field) for field in fields}
    assert row["context"] == "shape (8, 6)  spec P(None, 'model')  mesh model=4"
    assert json.loads(findings.to_json()) == {"findings": [row], "errors": 1, "warnings": 0}


@pytest.mark.parametrize(
    ("allow", "kept", "allowed"),
    [
        ({"SW104": "up.kernel"}, ["SW104"], 1),
        ({"SW104": "*.kernel"}, [], 2),
        ({"SW104": ["up.**", "down.**"]}, [], 2),
        ({"SW104": ["**", "up.kernel"]}, [], 2),  # both are needed by a finding
        ({"SW101": "**"}, ["SW104", "SW104", "SW112"], 0),
        ({"SW104": ["up.**", "head.**"]}, ["SW104", "SW112"], 1),
    ],
    ids=["path", "pattern", "two patterns", "overlapping", "another code", "one unused"],
)
def test_allowances(allow, kept, allowed):
    rules = {"up.kernel": ROW, "down.kernel": COLUMN}
    findings = check(lambda: models.Mlp(6, 8, rngs()), "model=4", rules, allow=allow)
    assert (codes(findings), len(findings.allowed)) == (kept, allowed)
    assert (", 1 allowed" in findings.summary) == (allowed == 1)


def test_an_allowance_for_an_unknown_code_is_refused():
    hints = {"SW999": "the codes are SW101, SW102, .*", "SW1O4": "did you mean SW104\\?"}
    for code, hint in hints.items():
        with pytest.raises(ValueError, match=f"allow names '{code}', an unknown code: {hint}"):
            check(linear(), "data=2", allow={code: "**"})


# --- planned and live --------------------------------------------------------------------------


def test_sw201_weighs_real_shards():
    layout = sw.layout(linear(), cpu("data=8"), {"kernel": P("data")})
    model = sw.init(linear(), sw.layout(linear(), cpu("data=8"), "dp"))
    (found,) = sw.audit(layout, model)
    assert model.kernel.addressable_shards[0].data.nbytes == 512
    assert sw.shard(model, layout).kernel.addressable_shards[0].data.nbytes == 64
    assert "512 B instead of 64 B, 448 B more on each device" in found.message
    assert found.context == "shape (8, 16)  planned shard (1, 16)  live shard (8, 16)"
    (found,) = sw.audit(layout, linear()())
    assert "planned P('data'), but is on 1 device, as SingleDeviceSharding: " in found.message


@pytest.mark.parametrize("as_state", [True, False], ids=["state", "model"])
def test_sw201_of_a_numpy_array(as_state):
    layout = sw.layout(linear(), cpu("data=8"), {"kernel": P("data")})
    model = linear()()
    model.kernel = nnx.Param(np.asarray(model.kernel.get_value()))
    (found,) = sw.audit(layout, nnx.state(model) if as_state else model)
    assert found.code == "SW201"
    assert found.message.startswith("planned P('data'), ") and "ndarray" in found.message
    assert not sw.audit(layout, sw.shard(model, layout))


def test_sw201_of_another_mesh():
    model = sw.init(linear(), sw.layout(linear(), cpu("x=8"), {"kernel": P(None, "x")}))
    mesh = cpu("data=2,model=4")
    (found,) = sw.audit(sw.layout(linear(), mesh, {"kernel": COLUMN}), model)
    assert found.message == (
        "planned P(None, 'model'), but is P(None, 'x') on x=8: "
        "64 B instead of 128 B, 64 B less on each device"
    )
    alike = sw.layout(linear(), mesh, {"kernel": P(None, ("data", "model"))})
    assert not sw.audit(alike, model)


def test_sw204_of_another_dtype():
    layout = sw.layout(linear(), cpu("data=8"), "dp")
    state = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(linear()()))
    (found,) = sw.audit(layout, state)
    assert (found.code, found.path) == ("SW204", "kernel")
    assert found.message == "the layout has float32[8, 16], the model has bfloat16[8, 16]"


def test_audit_of_an_optimizer_state():
    tx = optax.adamw(1e-3)
    layout = sw.layout(linear(), cpu("data=8"), {"kernel": P("data")})
    state = tx.init(nnx.state(linear()(), nnx.Param))
    plan = layout.for_optimizer(tx)
    found = {f.path: f.message for f in sw.audit(plan, state) if f.code == "SW201"}
    for path in ("0.mu.kernel", "0.nu.kernel"):
        assert found[path].startswith("planned P('data'), ")
        assert found[path].endswith("512 B instead of 64 B, 448 B more on each device")
    assert not sw.audit(plan, sw.shard(state, plan))


def test_audit_allows_and_reports_unused_allowances():
    layout = sw.layout(linear(), cpu("data=8"), {"kernel": P("data")})
    findings = sw.audit(layout, linear()(), allow={"SW201": ["kernel", "bias"]})
    assert codes(findings) == ["SW112"] and codes(findings.allowed) == ["SW201"]


def test_patterns_and_allowances_match_numbered_steps():
    def make():
        return nnx.Sequential(*[nnx.Linear(1024, 512, rngs=rngs()) for _ in range(10)])

    layout = sw.layout(
        make, sw.mesh("model=4", on="none"), {f"layers.{i}.kernel": COLUMN for i in range(10)}
    )
    assert {leaf.spec for leaf in layout.leaves if leaf.ndim == 2} == {COLUMN}
    layout = sw.layout(make, sw.mesh("model=4", on="none"))
    assert not sw.check(layout, allow={"SW105": "layers.*.kernel", "SW111": "model"})
    assert len(sw.check(layout, allow={"SW105": "layers.3.kernel", "SW111": "model"})) == 9


def test_different_findings_are_not_folded():
    def make():
        return nnx.Sequential(
            nnx.Linear(6, 8, use_bias=False, rngs=rngs()),
            nnx.Linear(8, 6, use_bias=False, rngs=rngs()),
        )

    text = str(check(make, "model=4", {"layers.0.kernel": ROW, "layers.1.kernel": COLUMN}))
    assert "alike" not in text and text.count("SW104") == 2


def test_several_findings_of_one_array_are_not_several_arrays():
    one = check(linear(6, 10), "a=4,b=4", {"kernel": P("a", "b")})
    with pytest.raises(sw.LayoutError) as caught:
        one.raise_if_errors()
    text = caught.value.format_message()
    assert text.startswith("2 findings: kernel: SW104 dim 0 (size 6)"), text
    assert "; kernel: SW104 dim 1 (size 10)" in text and "arrays" not in text
    make = lambda: models.Transformer(rngs(), hidden=30, layers=4)  # noqa: E731
    many = check(make, "a=4,b=7", {"blocks.*.mlp.up.kernel": P("b", "a")})
    with pytest.raises(sw.LayoutError) as caught:
        many.raise_if_errors()
    text = caught.value.format_message()
    assert "8 findings: blocks.** (4 arrays, the first blocks.0.mlp.up.kernel)" in text
