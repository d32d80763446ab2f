"""Loading and saving: compared with NumPy on whole arrays, and with what was saved, to the bit."""

import json
import math
import os
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise._weights import loading, reading
from shardwise._weights.portions import box_of, device_boxes


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.q = nnx.LinearGeneral(8, (4, 2), use_bias=False, rngs=rngs)
        self.up = nnx.Param(jnp.zeros((8, 2, 12)))
        self.drop = nnx.Dropout(0.1, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, stacked=False):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        if stacked:
            self.blocks = nnx.split_rngs(splits=4)(nnx.vmap(Block))(rngs)
        else:
            self.blocks = nnx.List([Block(rngs) for _ in range(4)])


def scanned():
    return Model(stacked=True)


LAYER = r"model\.layers\.(\d+)\."
HEADS = {"permute": (1, 0), "reshape": (8, 4, 2), "stored": (8, 8)}


def names(stacked=False):
    at = {"stack": 1} if stacked else {}
    block = "blocks" if stacked else r"blocks.\1"
    return {
        r"model\.embed_tokens\.weight": "embed.embedding",
        r"lm_head\.weight": sw.Name("embed.embedding", tie=True),
        LAYER + r"norm\.weight": sw.Name(f"{block}.norm.scale", **at),
        LAYER + r"q_proj\.weight": sw.Name(f"{block}.q.kernel", **HEADS, **at),
        LAYER + r"gate\.weight": sw.Name(f"{block}.up", permute=(1, 0), at=(None, 0), **at),
        LAYER + r"up\.weight": sw.Name(f"{block}.up", permute=(1, 0), at=(None, 1), **at),
        r".*\.inv_freq": None,
    }


def tensors():
    """Returns a checkpoint as Hugging Face has it, of bfloat16."""
    rng = np.random.default_rng(0)

    def some(*shape):
        return rng.normal(size=shape).astype(ml_dtypes.bfloat16)

    found = {"model.embed_tokens.weight": some(16, 8)}
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    for i in range(4):
        rows = {"norm": (8,), "q_proj": (8, 8), "gate": (12, 8), "up": (12, 8)}
        for key, shape in rows.items():
            found[f"model.layers.{i}.{key}.weight"] = some(*shape)
    return {**found, "model.inv_freq": some(4)}


def write(path, arrays):
    """Writes a file by the format's description alone."""
    header, place = {}, 0
    for key, x in arrays.items():
        kind = {"bfloat16": "BF16", "float32": "F32", "int8": "I8"}[str(x.dtype)]
        ends = [place, place + x.nbytes]
        header[key] = {"dtype": kind, "shape": list(x.shape), "data_offsets": ends}
        place += x.nbytes
    text = json.dumps(header).encode()
    data = b"".join(x.tobytes() for x in arrays.values())
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def expected(arrays):
    """Returns what NumPy makes of a checkpoint, by path of the unstacked model."""
    found = {"embed.embedding": arrays["model.embed_tokens.weight"]}
    for i in range(4):
        key, path = f"model.layers.{i}.", f"blocks.{i}."
        found[path + "norm.scale"] = arrays[key + "norm.weight"]
        found[path + "q.kernel"] = arrays[key + "q_proj.weight"].T.reshape(8, 4, 2)
        both = arrays[key + "gate.weight"].T, arrays[key + "up.weight"].T
        found[path + "up"] = np.stack(both, axis=1)
    return found


@pytest.fixture
def checkpoint(tmp_path):
    write(tmp_path / "model.safetensors", tensors())
    return tmp_path


def by_path(model):
    return {
        ".".join(map(str, path)): variable.get_value()
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }


def same_bits(one, other):
    one, other = np.asarray(one), np.asarray(other)
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


LAYOUTS = {
    "dp": ("data=8", "dp"),
    "fsdp": ("data=8", sw.fsdp("data", min_bytes=0)),
    "rows": ("data=2,model=4", {"**.q.kernel": P(None, "model", "data"), "**.up": P("model")}),
    "columns": ("a=2,b=4", {"**.up": P("a", None, "b"), "**.embedding": P(None, "b")}),
    "both on one dim": ("a=2,b=4", {"**.embedding": P(("b", "a")), "**.q.kernel": P("b")}),
}


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("case", LAYOUTS)
def test_shards_have_what_numpy_makes_of_the_checkpoint(checkpoint, case, dtype):
    axes, rules = LAYOUTS[case]
    layout = sw.layout(Model, sw.mesh(axes, on="cpu:8"), rules)
    seen = []
    model = sw.load(
        Model, layout, checkpoint, names=names(), dtype=dtype, progress=lambda *n: seen.append(n)
    )
    live = by_path(model)
    for path, array in expected(tensors()).items():
        want = array.astype(dtype or "float32")
        assert same_bits(live[path], want), path
        for shard in live[path].addressable_shards:
            assert same_bits(shard.data, want[shard.index])
    if dtype is None:
        assert not sw.audit(layout, model)
        fresh = by_path(sw.init(Model, layout))
        # Random keys are initialised.
        for path in fresh.keys() - expected(tensors()).keys():
            one, other = (x[path] for x in (fresh, live))
            if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
                one, other = map(jax.random.key_data, (one, other))
            assert same_bits(one, other) and one.sharding.is_equivalent_to(other.sharding, one.ndim)
    found = sw.check_weights(Model, layout, checkpoint, names=names(), dtype=dtype)
    used = sum(
        x.nbytes for k, x in tensors().items() if k not in ("lm_head.weight", "model.inv_freq")
    )
    assert found.read_bytes == {0: used} and seen[-1] == (used, used)
    assert {p.rpartition(".")[2] for p in found.initialised} == {"key", "count"}


@pytest.mark.parametrize("rules", ["dp", {"**": P("x")}], ids=["replicated", "split by layer"])
def test_stacked_layers(checkpoint, rules):
    mesh = sw.mesh("x=4,y=2", on="cpu:8")
    rules = {"blocks.up": P("x"), "blocks.q.kernel": P("x", "y")} if rules != "dp" else "dp"
    layout = sw.layout(scanned, mesh, rules)
    live = by_path(sw.load(scanned, layout, checkpoint, names=names(stacked=True)))
    flat = expected(tensors())
    for name in ("norm.scale", "q.kernel", "up"):
        want = np.stack([flat[f"blocks.{i}.{name}"] for i in range(4)]).astype("float32")
        assert same_bits(live[f"blocks.{name}"], want)


def test_a_load_is_trained_on_and_shares_no_buffers(checkpoint):
    """On CPU devices the shards are what was read: donating them must not change a replica."""
    layout = sw.layout(Model, sw.mesh("data=8", on="cpu:8"), "dp")
    model = sw.load(Model, layout, checkpoint, names=names())
    table = model.embed.embedding[...]
    other = sw.load(Model, layout, checkpoint, names=names()).embed.embedding[...]
    done = jax.jit(lambda x: x * 2, donate_argnums=0)(table)
    assert np.array_equal(done, 2 * np.asarray(other))
    want = expected(tensors())["embed.embedding"].astype("float32")
    assert all(same_bits(shard.data, want) for shard in other.addressable_shards)


def test_blocks_and_batches_of_other_devices(checkpoint, monkeypatch):
    """With blocks of a few bytes, and with shards that are placed in turn, as on accelerators."""
    monkeypatch.setattr(reading, "BLOCK_BYTES", 20)
    monkeypatch.setattr(reading, "MOST_BLOCK_BYTES", 20)
    monkeypatch.setattr(loading, "_WAITING_BYTES", 100)
    monkeypatch.setattr(loading, "_is_on_host", lambda device: False)
    layout = sw.layout(Model, sw.mesh("data=8", on="cpu:8"), sw.fsdp("data", min_bytes=0))
    live = by_path(sw.load(Model, layout, checkpoint, names=names()))
    for path, array in expected(tensors()).items():
        assert same_bits(live[path], array.astype("float32"))


@pytest.mark.parametrize("stacked", [False, True])
def test_what_is_saved_is_loaded_to_the_bit(checkpoint, tmp_path, stacked):
    make = scanned if stacked else Model
    mesh = sw.mesh("x=2,y=4", on="cpu:8")
    rules = {"**.q.kernel": P(None, None, "y") if stacked else P("x", "y"), "**.embedding": P("y")}
    layout = sw.layout(make, mesh, rules)
    model = sw.load(make, layout, checkpoint, names=names(stacked))
    folder = tmp_path / "again"
    sw.save_weights(
        model, folder, names=names(stacked), dtype="bfloat16", max_file_bytes=500, config={"a": 1}
    )
    assert json.loads((folder / "config.json").read_text()) == {"a": 1}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    given = {k: x for k, x in tensors().items() if k not in ("lm_head.weight", "model.inv_freq")}
    assert set(index["weight_map"]) == set(given)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in given.values())
    for key, file in index["weight_map"].items():
        raw = (folder / file).read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + size])
        start, stop = header[key]["data_offsets"]
        assert header[key]["shape"] == list(given[key].shape)
        assert raw[8 + size + start : 8 + size + stop] == given[key].tobytes()
        largest = max(math.prod(row["shape"]) * 2 for k, row in header.items() if k in given)
        assert sum(math.prod(r["shape"]) * 2 for k, r in header.items() if k in given) <= max(
            500, largest
        )
    other = sw.layout(make, sw.mesh("data=8", on="cpu:8"), sw.fsdp("data", min_bytes=0))
    again = by_path(sw.load(make, other, folder, names=names(stacked)))
    assert all(same_bits(x, again[p]) for p, x in by_path(model).items() if "rngs" not in p)
    # Without names, keys are paths; and a checkpoint can be a model for names of any form.
    sw.save_weights(model, tmp_path / "paths.safetensors")
    plain = by_path(sw.load(make, other, tmp_path / "paths.safetensors"))
    assert all(same_bits(x, plain[p]) for p, x in by_path(model).items() if "rngs" not in p)
    table = names(stacked)
    mapped = {k.replace(r"(\d+)", r"\d+"): v for k, v in table.items() if "embed" in k}
    mapped |= {k: v for k, v in table.items() if "embed" not in k}
    sw.save_weights(model, tmp_path / "like", names=mapped, dtype="bfloat16", like=folder)
    assert (tmp_path / "like/model.safetensors").stat().st_size > 0
    assert not [p for p in os.listdir(tmp_path) if "partial" in p]


def test_third_party_forms_of_fused_and_split_keys(tmp_path):
    """A key that is divided among leaves, and leaves that reshape the stored tensor first."""

    class Fused(nnx.Module):
        def __init__(self):
            for name, heads in (("q", 4), ("k", 2), ("v", 2)):
                setattr(self, name, nnx.Param(jnp.zeros((8, heads, 3))))

    stored = np.arange(24 * 8, dtype="float32").reshape(24, 8)
    write(tmp_path / "a.safetensors", {"qkv": stored})
    table = {
        "qkv": [
            sw.Name(n, view=(8, 3, 8), split=(0, a, b), permute=(2, 0, 1), stored=(24, 8))
            for n, a, b in (("q", 0, 4), ("k", 4, 6), ("v", 6, 8))
        ]
    }
    layout = sw.layout(Fused, sw.mesh("x=2,y=4", on="cpu:8"), {"q": P(None, "y"), "k": P("x")})
    live = sw.load(Fused, layout, tmp_path / "a.safetensors", names=table)
    whole = stored.reshape(8, 3, 8).transpose(2, 0, 1)
    assert np.array_equal(live.q[...], whole[:, :4])
    assert np.array_equal(live.k[...], whole[:, 4:6]) and np.array_equal(live.v[...], whole[:, 6:])
    sw.save_weights(live, tmp_path / "b.safetensors", names=table)
    assert np.array_equal(
        sw.load(Fused, layout, tmp_path / "b.safetensors", names=table).v[...], whole[:, 6:]
    )


def test_a_model_keeps_what_the_checkpoint_does_not_have(checkpoint):
    model = Model()
    table = {**names(), LAYER + r"norm\.weight": None}
    layout = sw.layout(model, sw.mesh("data=8", on="cpu:8"), "dp")
    with pytest.raises(sw.WeightsError, match="SW602"):
        sw.load(model, layout, checkpoint, names=table)
    model.blocks[0].norm.scale.set_value(jnp.full(8, 3.0))
    loaded = sw.load(model, layout, checkpoint, names=table, allow={"SW602": "blocks.*.norm.scale"})
    assert np.array_equal(loaded.blocks[0].norm.scale[...], np.full(8, 3.0))
    made = sw.load(Model, layout, checkpoint, names=table, allow={"SW602": "blocks.*.norm.scale"})
    assert np.array_equal(made.blocks[0].norm.scale[...], np.ones(8))
    abstract = nnx.eval_shape(Model)
    with pytest.raises(ValueError, match="is abstract, and no key goes to it"):
        sw.load(abstract, layout, checkpoint, names=names())


def test_everything_that_is_wrong_is_found_at_once(checkpoint):
    arrays = tensors()
    arrays["model.layers.0.q_proj.weight"] = np.zeros((8, 6), "float32")
    arrays["model.layers.1.up.weight"] = np.zeros((12, 8), "int8")
    arrays["model.layers.4.up.weight"] = np.zeros((12, 8), "float32")
    arrays["extra"] = np.zeros(3, "float32")
    del arrays["model.layers.3.gate.weight"], arrays["model.layers.2.norm.weight"]
    write(checkpoint / "model.safetensors", arrays)
    layout = sw.layout(Model, sw.mesh("data=64", on="none"), "dp")
    found = sw.check_weights(Model, layout, checkpoint, names=names()).findings
    rows = [(f.code, f.path) for f in found]
    assert sorted(rows) == [
        ("SW601", "extra"),
        ("SW601", "model.layers.4.up.weight"),
        ("SW602", "blocks.2.norm.scale"),
        ("SW604", "blocks.3.up"),
        ("SW604", "model.layers.0.q_proj.weight"),
        ("SW605", "model.layers.1.up.weight"),
    ]
    text = {f.path: f for f in found}
    assert "1 key fills 96 of its 192 elements" in text["blocks.3.up"].message
    assert "none fills index 0 of dim 1" in text["blocks.3.up"].message
    assert "reshape=(8, 4, 2)" in text["model.layers.0.q_proj.weight"].context
    assert "the nearest leaf is blocks.3.up" in text["model.layers.4.up.weight"].help
    with pytest.raises(sw.WeightsError) as caught:
        here = sw.layout(Model, sw.mesh("data=8", on="cpu:8"), "dp")
        sw.load(Model, here, checkpoint, names=names())
    assert len(caught.value.findings) == 6


def test_what_a_missing_file_has_is_not_missed_again(checkpoint):
    """Gate and up of a leaf are in two files, of which one is not there."""
    arrays = tensors()
    os.remove(checkpoint / "model.safetensors")
    gates = {key: x for key, x in arrays.items() if "gate" in key}
    rest = {key: x for key, x in arrays.items() if key not in gates}
    write(checkpoint / "b.safetensors", rest)
    listed = dict.fromkeys(gates, "a.safetensors") | dict.fromkeys(rest, "b.safetensors")
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    layout = sw.layout(Model, sw.mesh("data=8", on="none"), "dp")
    (found,) = sw.check_weights(Model, layout, checkpoint, names=names()).findings
    assert found.code == "SW608" and "for 4 tensors" in found.message


def test_a_layout_with_errors_is_refused_before_the_weights(checkpoint):
    layout = sw.layout(Model, sw.mesh("data=3", on="none"), {"**.embedding": P("data")})
    with pytest.raises(sw.LayoutError, match="SW104"):
        sw.check_weights(Model, layout, checkpoint, names=names())


def test_third_party_maps_of_a_convolutional_model(tmp_path):
    """Patterns with ends, digits inside of a name, running statistics, and PyTorch's own counter."""

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.conv0 = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs)
            self.bn0 = nnx.BatchNorm(8, rngs=rngs)

    rng = np.random.default_rng(0)
    arrays = {"stem.0.conv.weight": rng.normal(size=(8, 3, 3, 3)).astype("float32")}
    for name in ("weight", "bias", "running_mean", "running_var"):
        arrays[f"stem.0.norm.{name}"] = rng.normal(size=8).astype("float32")
    write(tmp_path / "a.safetensors", {**arrays, "stem.0.norm.num_batches_tracked": np.int8(3)})
    table = {
        r"^stem\.([0-3])\.conv\.weight$": (r"conv\1.kernel", ((2, 3, 1, 0), None, False)),
        r"^stem\.([0-3])\.norm\.weight$": (r"bn\1.scale", None),
        r"^stem\.([0-3])\.norm\.bias$": (r"bn\1.bias", None),
        r"^stem\.([0-3])\.norm\.running_(mean|var)$": (r"bn\1.\2", None),
    }
    layout = sw.layout(Net, sw.mesh("data=8", on="cpu:8"), sw.fsdp("data", min_bytes=0))
    with pytest.raises(sw.WeightsError, match="num_batches_tracked"):
        sw.load(Net, layout, tmp_path, names=table)
    allow = {"SW601": "**.num_batches_tracked"}
    live = sw.load(Net, layout, tmp_path, names=table, allow=allow)
    kernel = arrays["stem.0.conv.weight"].transpose(2, 3, 1, 0)
    assert np.array_equal(live.conv0.kernel[...], kernel)
    assert np.array_equal(live.bn0.var[...], arrays["stem.0.norm.running_var"])


def test_a_file_that_changes_while_it_is_read(checkpoint, monkeypatch):
    layout = sw.layout(Model, sw.mesh("data=8", on="cpu:8"), "dp")
    path = checkpoint / "model.safetensors"
    fill = reading._fill

    def change(change):
        def filled(*given):
            monkeypatch.setattr(reading, "_fill", fill)
            change()
            return fill(*given)

        monkeypatch.setattr(reading, "_fill", filled)

    change(lambda: os.truncate(path, 1500))
    with pytest.raises(sw.WeightsError, match="the file (ends at byte|changed)"):
        sw.load(Model, layout, checkpoint, names=names())
    write(path, tensors())
    change(lambda: os.utime(path, ns=(1, 1)))
    with pytest.raises(sw.WeightsError, match="the file changed while it was read"):
        sw.load(Model, layout, checkpoint, names=names())


def test_a_save_that_fails_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    layout = sw.layout(Model, sw.mesh("data=8", on="cpu:8"), "dp")
    model = sw.load(Model, layout, checkpoint, names=names())
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match="exists already"):
        sw.save_weights(model, checkpoint)
    with pytest.raises(ValueError, match="there is no folder"):
        sw.save_weights(model, tmp_path / "no/where")
    with pytest.raises(ValueError, match="give it stored="):
        sw.save_weights(model, tmp_path / "new", names={"q": ("embed.embedding", (None, (16, 8)))})
    with pytest.raises(ValueError, match="names is a function"):
        sw.save_weights(model, tmp_path / "new", names=lambda key: key)
    with pytest.raises(sw.WeightsError, match=r"SW602.*\n.*0 of its 128 elements"):
        sw.save_weights(model, tmp_path / "new", names={"a": "b"})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        sw.save_weights(model, tmp_path / "new", names=names())
    assert sorted(os.listdir(tmp_path)) == before


def test_arguments(checkpoint):
    layout = sw.layout(Model, sw.mesh("data=8", on="cpu:8"), "dp")
    with pytest.raises(ValueError, match="dtype='int8' is not a floating-point dtype"):
        sw.load(Model, layout, checkpoint, names=names(), dtype="int8")
    with pytest.raises(ValueError, match="has no devices"):
        sw.load(Model, sw.layout(Model, sw.mesh("data=8", on="none"), "dp"), checkpoint)
    with pytest.raises(sw.LayoutError, match="SW202"):
        sw.load(scanned, layout, checkpoint)
    with pytest.raises(sw.WeightsError, match="SW608"):
        sw.load(Model, layout, checkpoint / "no")
    with pytest.raises(ValueError, match="names file"):
        sw.load(Model, layout, checkpoint, names=checkpoint / "no.toml")


def test_boxes_of_absent_devices_are_those_of_jax():
    make = lambda: nnx.Linear(32, 64, use_bias=False, rngs=nnx.Rngs(0))  # noqa: E731
    for spec in (P(), P("b"), P(None, ("b", "a")), P("a", "b"), P(("a", "b"))):
        layout = sw.layout(make, sw.mesh("a=2,b=4", on="cpu:8"), {"kernel": spec})
        indices = layout.shardings.kernel.devices_indices_map((32, 64))
        wanted = [box_of(indices[device], (32, 64)) for device in layout.mesh.devices.flat]
        assert device_boxes(layout["kernel"]) == wanted


def test_bytes_of_absent_processes():
    """Each host of eight reads what its own devices need, from the chips' own topology."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        make = lambda: nnx.Linear(4096, 64, use_bias=False, rngs=nnx.Rngs(0))  # noqa: E731
        write(f"{folder}/w.safetensors", {"kernel": np.zeros((4096, 64), "float32")})
        mesh = sw.mesh("x=64", on="h100:8x8")
        rows = sw.check_weights(make, sw.layout(make, mesh, {"kernel": P("x")}), folder)
        assert rows.read_bytes == dict.fromkeys(range(8), 4096 * 64 * 4 // 8)
        full = sw.check_weights(make, sw.layout(make, mesh, "dp"), folder)
        assert full.read_bytes == dict.fromkeys(range(8), 4096 * 64 * 4)
        # Columns of 32 bytes, in rows of 256: the bytes between are read rather than skipped.
        columns = sw.check_weights(make, sw.layout(make, mesh, {"kernel": P(None, "x")}), folder)
        assert columns.read_bytes == dict.fromkeys(range(8), 4095 * 256 + 32)
        assert "each of 8 processes reads 1023.8 KiB (exact)" in str(columns)
