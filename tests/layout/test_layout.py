"""Layouts: leaves and paths, bytes, explanations, tables, lockfiles, and the rules behind them."""

import json
import os
import re
import tempfile
from importlib.metadata import version

import jax
import jax.numpy as jnp
import models
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardwise as sw

COLUMN, ROW = P(None, "model"), P("model")
TOKENS = jax.ShapeDtypeStruct((2, 6), "int32")


def lay(make, rules=None, axes="data=2,model=4", **options):
    return sw.layout(make, sw.mesh(axes, on="none"), rules, **options)


def rngs():
    return nnx.Rngs(0)


def linear(inner=8, outer=16, **options):
    return nnx.Linear(inner, outer, rngs=rngs(), **options)


def mlp():
    return models.Mlp(16, 32, rngs())


def named():
    """Returns a layer whose kernel is annotated with two logical names."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
    return linear(kernel_init=init)


def stack(make, layers, axis=0):
    """Returns a factory of `layers` modules stacked along dim `axis` of every leaf."""
    many = nnx.split_rngs(splits=layers)(nnx.vmap(make, in_axes=(0,), out_axes=axis))
    return lambda: many(rngs())


class Table(nnx.Variable):
    pass


class Everything(nnx.Module):
    """Every type of variable, nested in every way."""

    def __init__(self):
        self.norm = nnx.BatchNorm(8, rngs=rngs())
        self.drop = nnx.Dropout(0.1, rngs=rngs())
        self.table = Table(jnp.zeros((4,)))
        self.pair = nnx.Param({"a": jnp.zeros((2, 8)), "b": {"c": jnp.zeros((), "bfloat16")}})
        self.seen = nnx.Intermediate(jnp.zeros((3,)))
        self.bare = nnx.data(jnp.zeros((2,)))
        self.attention = nnx.MultiHeadAttention(2, 8, use_bias=False, decode=True, rngs=rngs())
        self.attention.init_cache((2, 5, 8))
        self.parts = nnx.Dict({"a.b": linear(8, 8), "list": nnx.List([linear(8, 8)])})
        self.tied = self.parts["a.b"]
        self.parts["list"][0].bias = self.tied.bias


KINDS = {
    "Cache": "attention.cache_index attention.cached_key attention.cached_value",
    "Array": "bare",
    "RngCount": "drop.rngs.count",
    "RngKey": "drop.rngs.key",
    "BatchStat": "norm.mean norm.var",
    "Intermediate": "seen",
    "Table": "table",
    "Param": "attention.key.kernel attention.out.kernel attention.query.kernel attention.value.kernel "
    "norm.bias norm.scale pair.a pair.b.c parts.['a.b'].bias parts.['a.b'].kernel parts.list.0.kernel",
}


def test_every_variable_is_a_leaf_and_tied_variables_share_one():
    layout = lay(Everything)
    wanted = {path: kind for kind, paths in KINDS.items() for path in paths.split()}
    assert {leaf.path: leaf.kind for leaf in layout.leaves} == wanted
    assert layout["parts.['a.b'].kernel"].keys == ("parts", "a.b", "kernel")
    assert layout["parts.list.0.kernel"].keys == ("parts", "list", 0, "kernel")
    assert layout["attention.cached_key"].shape == (2, 5, 2, 4)
    assert [str(layout[p].dtype) for p in ("drop.rngs.key", "pair.b.c")] == ["key<fry>", "bfloat16"]


def lora():
    layer = nnx.LoRALinear(16, 32, lora_rank=2, rngs=rngs())
    return nnx.Sequential(layer, nnx.relu, linear(32, 16))


# A factory, and the inputs with which its forward pass is traced.
ZOO = {
    "every variable": (Everything, None),
    "annotated": (named, None),
    "transformer": (lambda: models.Transformer(rngs()), TOKENS),
    "scanned": (lambda: models.Scanned(rngs()), TOKENS),
    "lora": (lora, jax.ShapeDtypeStruct((2, 16), "float32")),
    "stacked": (stack(lambda rngs: models.Block(16, 32, 4, rngs), 3), None),
    "empty": (nnx.Module, None),
}


@pytest.mark.parametrize("case", ZOO)
def test_a_factory_a_live_and_an_abstract_model_give_the_same_layout_and_create_no_array(case):
    make, inputs = ZOO[case]
    with nnx.use_eager_sharding(False):
        model, shapes = make(), nnx.eval_shape(make)
    rules = [sw.tensor("model"), sw.fsdp("data", min_bytes=64)]
    logical = {"embed": None, "mlp": "model"}
    before = jax.live_arrays()
    found = [lay(m, rules, inputs=inputs, logical=logical) for m in (make, model, shapes)]
    assert len(jax.live_arrays()) == len(before)
    assert found[0].leaves == found[1].leaves == found[2].leaves
    state = nnx.split(model)[1]
    arrays = jax.tree.leaves(state)
    assert [leaf.shape for leaf in found[0].leaves] == [array.shape for array in arrays]
    assert found[0].total_bytes == sum(array.nbytes for array in arrays)
    for tree in (found[1].specs, found[1].shardings, found[1].abstract):
        assert jax.tree.structure(tree) == jax.tree.structure(state)


def test_bytes_per_device_match_live_arrays():
    mesh = sw.mesh("data=2,model=4", on="cpu:8", explicit=("data",))
    layout = sw.layout(Everything, mesh, [{"norm.*": ROW}, sw.fsdp("data", min_bytes=8)])
    arrays = jax.tree.leaves(nnx.state(sw.init(Everything, layout)))
    resident = dict.fromkeys(mesh.devices.flat, 0)
    for shard in (shard for array in arrays for shard in array.addressable_shards):
        resident[shard.device] += shard.data.nbytes
    assert set(resident.values()) == {layout.bytes_per_device}
    assert layout.bytes_per_device < layout.total_bytes == sum(array.nbytes for array in arrays)
    for want, array in zip(jax.tree.leaves(layout.abstract), arrays, strict=True):  # flax#5110
        assert (want.shape, want.dtype, want.sharding) == (array.shape, array.dtype, array.sharding)
        assert want.sharding.mesh.axis_types == (AxisType.Explicit, AxisType.Auto)


class Large(nnx.Module):
    """The leaves of a decoder of 405 billion parameters."""

    def __init__(self):
        half = {"use_bias": False, "param_dtype": "bfloat16"}
        widths = [(16384, n) for n in (53248, 53248, 16384, 16384, 1024, 1024)] + [(53248, 16384)]

        def layer(rngs):
            return nnx.List([nnx.Linear(*shape, rngs=rngs, **half) for shape in widths])

        self.embed = nnx.Embed(128256, 16384, param_dtype="bfloat16", rngs=rngs())
        self.layers = stack(layer, 126)()
        self.head = linear(16384, 128256, **half)


def test_a_405b_model_is_laid_out_without_memory():  # marin#1903
    before = jax.live_arrays()
    layout = lay(Large, "fsdp", "data=512")
    assert len(jax.live_arrays()) == len(before)
    assert layout.total_bytes == 2 * 405_849_243_648
    assert layout.bytes_per_device == layout.total_bytes / 512
    assert layout["layers.0.kernel"].spec == P(None, "data")  # 104 lanes of the last dim


def layers(count, axis=0):
    return stack(lambda rngs: nnx.Linear(8, 16, rngs=rngs), count, axis)


# A stack of nnx.Linear(8, 16), its kernel's stacked dims, and the spec that fsdp gives it
STACKS = {
    "first": (layers(32), (0,), P(None, None, "data")),
    "middle": (layers(32, 1), (1,), P(None, None, "data")),
    "last": (layers(32, -1), (2,), P(None, "data")),
    "as many layers as inputs": (layers(8), (0,), P(None, None, "data")),
    "as many layers as outputs": (layers(16), (0,), P(None, None, "data")),
    "two deep": (stack(lambda _: layers(32)(), 64), (0, 1), P(None, None, None, "data")),
}


@pytest.mark.parametrize("case", STACKS)
def test_stacked_dims_are_known_and_never_split(case):  # flax#5112
    make, stacked, wanted = STACKS[case]
    leaf = lay(make, sw.fsdp("data", min_bytes=0))["kernel"]
    assert (leaf.stacked, leaf.spec) == (stacked, wanted)
    ranked = lay(make, sw.by_rank({2: P("data", "model"), 1: ROW}))
    entries = list(ranked["kernel"].spec) + [None]
    assert [entries.pop(dim) for dim in reversed(stacked)] == [None] * len(stacked)
    assert entries[:2] == ["data", "model"] and not sw.check(ranked)
    message = f"by_rank: a leaf of 2 dims, plus {len(stacked)} of stacked layers"
    assert ranked["kernel"].reason == message


def test_own_variables_in_a_stack_of_layers():
    class Own(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(8, 16, rngs=rngs)
            self.scale = nnx.Param(jnp.ones((16,)))
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    layout = lay(nnx.Dict({"blocks": stack(Own, 4)()}), sw.by_rank({1: ROW, 2: COLUMN}))
    assert {leaf.path.removeprefix("blocks."): leaf.spec for leaf in layout.leaves} == {
        **{"drop.rngs.count": P(), "drop.rngs.key": P(), "scale": COLUMN},
        **{"layer.bias": COLUMN, "layer.kernel": P(None, None, "model")},
    }


# --- shown ----------------------------------------------------------------------------------------

EXPLAINED = {
    "annotated": (
        lambda: lay(named, logical={"embed": None, "mlp": "model"}),
        """\
kernel  float32[8,16]  Param  on data=2,model=4
  spec P(None, 'model')  shard [8,4]  128 B of 512 B on each device  copies 2
  decided by annotation: the model's annotation with names P('embed', 'mlp')
  considered, in order:
    annotation: P(None, 'model') - the model's annotation with names P('embed', 'mlp')""",
    ),
    "patterns, then a strategy": (
        lambda: lay(linear, [{"kernel": ROW, "**.kernel": COLUMN}, sw.fsdp("data", min_bytes=0)]),
        """\
kernel  float32[8,16]  Param  on data=2,model=4
  spec P('model', 'data')  shard [2,8]  64 B of 512 B on each device  copies 1
  decided by patterns: path matches 'kernel'; then fsdp('data'): dim 1 (size 16) is the largest free dim divisible by 2
  considered, in order:
    patterns: P('model') - path matches 'kernel'
      'kernel' says P('model')
      '**.kernel' says P(None, 'model')
    fsdp('data'): P('model', 'data') - dim 1 (size 16) is the largest free dim divisible by 2""",
    ),
    "refused": (
        lambda: lay(lambda: linear(8, 6), [{"kernel": COLUMN}, sw.fsdp("data", min_bytes=0)]),
        """\
kernel  float32[8,6]  Param  on data=2,model=4
  spec P(None, 'model')
  error SW104: dim 1 (size 6) cannot be split 4 ways over axis 'model'; P('model', None) divides evenly
  decided by patterns: path matches 'kernel'
  considered, in order:
    patterns: P(None, 'model') - path matches 'kernel'
    fsdp('data'): no opinion - an earlier rule's spec does not fit the leaf""",
    ),
}


@pytest.mark.parametrize("case", EXPLAINED)
def test_explain(case):
    make, text = EXPLAINED[case]
    assert make().explain("kernel") == text


def wrong():
    """Returns a layout with an error, a warning and a dead pattern."""
    rules = {"up.kernel": P(("data", "model")), "*.bias": P("modle"), "down.kernel": ROW, "x": ROW}
    return lay(mlp, [rules, {"down.bias": P("data")}])


def test_table():
    text = """\
path         shape           spec                  shard        bytes/device  copies
down.bias    float32[16]     P('data')             [8]                  32 B       4
down.kernel  float32[32,16]  P('model')            [8,16]              512 B       2
up.bias      float32[32]     P('modle')            error SW101         128 B       -
up.kernel    float32[16,32]  P(('data', 'model'))  [2,32]              256 B       1
4 leaves on data=2,model=4: 928 B of 4.2 KiB on each of 8 devices (exact); 1 with errors, counted as replicated: see sw.check"""
    assert (str(wrong()), repr(wrong())) == (text, text)


def test_repeated_layers_are_folded():
    class Deep(nnx.Module):
        def __init__(self):
            self.grid = nnx.List([nnx.List([Table(jnp.zeros(4))]) for _ in range(12)])
            self.odd = nnx.List([Table(jnp.zeros(8 if i == 1 else 4)) for i in range(3)])
            self.parts = nnx.Dict({"<b>&'": Table(jnp.zeros(4))})

    rows = [line.partition("  ")[0] for line in str(lay(Deep)).splitlines()[1:-1]]
    assert rows == ["grid.{0..11}.0 ×12", "odd.* ×2", "odd.1", "parts.<b>&'"]


def test_an_unknown_path_names_the_nearest():
    with pytest.raises(KeyError) as caught:
        lay(mlp)["up.kernal"]
    message = "no leaf has the path 'up.kernal'; nearest: up.kernel, down.kernel"
    assert caught.value.args == (message,)


# --- saved ----------------------------------------------------------------------------------------


def test_a_lockfile_is_stable_and_has_one_line_for_each_leaf(tmp_path):
    layout = lay(Everything, sw.fsdp("data", min_bytes=64))
    layout.save(tmp_path / "a")
    layout.save(tmp_path / "b")
    text = (tmp_path / "a").read_text()
    assert (tmp_path / "b").read_text() == text and sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert len(re.findall(r'^    \{"path": .*\},?$', text, re.MULTILINE)) == len(layout.leaves)
    saved = json.loads(text)
    assert saved["mesh"] == {"data": 2, "model": 4}
    assert saved["axis_types"] == {"data": "Auto", "model": "Auto"}
    assert saved["versions"] == {m: version(m) for m in ("shardwise", "jax", "flax")}
    assert sw.load_layout(tmp_path / "a").abstract["parts"]["a.b"]["kernel"].shape == (8, 8)


@pytest.mark.parametrize(
    "make",
    [wrong, lambda: lay(named), lambda: lay(layers(3), {"kernel": ROW}), lambda: lay(Large)],
    ids=["errors", "unresolved names", "stacked", "warnings"],
)
def test_a_saved_layout_keeps_its_findings(tmp_path, make):
    make().save(tmp_path / "layout.json")
    loaded = sw.load_layout(tmp_path / "layout.json")
    assert str(loaded) == str(make()) and sw.check(make())
    assert sw.check(loaded).items == sw.check(make()).items


def row(**changed):
    fields = {"path": "w", "kind": "Param", "shape": [8], "dtype": "int8", "spec": "P()"}
    return {**fields, "reason": "", **changed}


def lockfile(leaf, **changed):
    head = {"format": 1, "mesh": {"x": 2}, "axis_types": {"x": "Auto"}, "dead_patterns": []}
    return json.dumps({**head, "leaves": [leaf], **changed}).encode()


# fmt: off
BAD_LOCKFILES = {
    "missing": (None, "the layout FILE cannot be read: No such file or directory"),
    "empty": (b"", "FILE is not a layout: it is empty"),
    "bytes": (b"\xff", "FILE is not a layout: it is not text (invalid start byte at byte 0)"),
    "a list": (b"[]", "FILE is not a layout of format 1: its format is None"),
    "other format": (b'{"format": 2}', "FILE is not a layout of format 1: its format is 2"),
    "no leaves": (b'{"format": 1, "mesh": {}, "dead_patterns": []}', "FILE is a damaged layout: it has no 'axis_types'"),
    "mesh": (lockfile(row(), mesh=[2]), "FILE is a damaged layout: mesh is a list"),
    "spec": (lockfile(row(spec="Q()")), "FILE is a damaged layout: 'Q()' is not a spec: write it as P(None, 'model') or P(('data', 'model'))"),
    "dtype": (lockfile(row(dtype="key<?>")), "FILE is a damaged layout: this version of JAX does not know the dtype 'key<?>'"),
    "keys": (lockfile(row(keys=["v"])), "FILE is a damaged layout: path 'w' and keys ('v',) disagree"),
}
# fmt: on


@pytest.mark.parametrize("case", BAD_LOCKFILES)
def test_bad_lockfiles(tmp_path, case):
    content, message = BAD_LOCKFILES[case]
    file = tmp_path / "layout.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        sw.load_layout(file)
    assert str(caught.value) == message.replace("FILE", str(file))


def test_a_failed_write_leaves_nothing_behind():
    with tempfile.TemporaryDirectory() as folder:
        for name, why in {
            "": "Is a directory",
            "/none/x": f"there is no folder {folder}/none",
        }.items():
            with pytest.raises(ValueError, match=f"cannot be written to {folder}{name}: {why}$"):
                lay(mlp).save(folder + name)
        os.chmod(folder, 0o555)
        user = os.geteuid()
        os.seteuid(user or 65534)  # root may write anywhere
        try:
            with pytest.raises(ValueError, match=f"to {folder}/x: Permission denied$"):
                lay(mlp).save(f"{folder}/x")
        finally:
            os.seteuid(user)
        assert not os.listdir(folder)
        assert not [name for name in os.listdir(os.path.dirname(folder)) if "partial" in name]


def test_diff_and_another_mesh():
    class Other(nnx.Module):
        def __init__(self):
            self.kernel, self.extra = nnx.Param(jnp.zeros((8, 16))), nnx.Param(jnp.zeros((4,)))

    old, new = lay(linear, {"kernel": COLUMN}), lay(Other, sw.fsdp("data", min_bytes=0), "data=4")
    text = """\
mesh data=2,model=4 -> data=4
- bias
+ extra
~ kernel  float32[8,16] P(None, 'model') -> float32[8,16] P(None, 'data')
192 B -> 132 B on each device (-60 B, exact)"""
    assert sw.diff(old, new) and str(sw.diff(old, new)) == text
    assert not sw.diff(old, old) and str(sw.diff(old, old)) == "no difference"
    real = old.on(sw.mesh("model=8", on="cpu:8"))
    assert real["kernel"].shard_shape == (8, 2) and real.mesh.devices.size == 8
    assert [f.code for f in sw.check(old.on(sw.mesh("model=3", on="none")))] == ["SW104"]
    with pytest.raises(ValueError, match="^diff compares two layouts, or two compilations, got a "):
        sw.diff(old, real.mesh)


def test_a_layout_with_tuples_as_keys_survives_a_round_trip(tmp_path):
    # `nnx.WeightNorm` keeps its scales in a dict by tuples, which JSON does not have.
    make = lambda: nnx.WeightNorm(  # noqa: E731
        nnx.Linear(64, 64, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)
    )
    layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), "fsdp")
    layout.save(tmp_path / "layout.json")
    read = sw.load_layout(tmp_path / "layout.json", layout.mesh)
    assert not sw.diff(read, layout)
    assert not sw.audit(read, sw.init(make, read))
