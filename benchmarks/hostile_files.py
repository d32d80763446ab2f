"""Files of every kind that is read, damaged or made to exhaust their reader; used by `faults.py`."""

import functools
import gzip
import hashlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import shardwise as sw
from shardwise._checkpoint.step_files import sealed
from shardwise._cli.rules_file import read_rules
from shardwise._compile.toolchain.cache import FORMAT, read_entry
from shardwise._time.calibration import load_calibration
from shardwise._weights.naming.names import read_names

SECONDS = 20


def make():
    return nnx.Linear(16, 8, rngs=nnx.Rngs(0))


@functools.cache
def valid():
    """Returns a folder with a valid file of every kind."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    layout = sw.layout(make, sw.mesh("data=2", on="cpu:2"), sw.fsdp("data", min_bytes=0))
    layout.save(folder / "layout.json")
    inputs = jax.ShapeDtypeStruct((8, 16), "float32")
    sw.compile(make, layout, inputs=inputs).save(folder / "compiled.json")
    calibration = {"format": 1, "chip": "h200", "device": "H200", "products": {"bfloat16": 1.01},
                   "bandwidth": 4e12, "attention": 0.9,
                   "collectives": [["all-reduce", 8, 1024, 1e-5]]}  # fmt: skip
    (folder / "calibration.json").write_text(json.dumps(calibration))
    (folder / "rules.toml").write_text(
        'strategy = "fsdp"\nmin_bytes = "64KiB"\n[logical]\nmlp = "model"\n'
        '[[rules]]\n"**.kernel" = "P(None, \'model\')"\n'
    )
    (folder / "names.toml").write_text("[names]\n'norm\\.weight' = \"norm.scale\"\n")
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "vocab_size": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
              "max_position_embeddings": 128, "hidden_act": "silu",
              "tie_word_embeddings": False}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    sw.save_weights(
        sw.init(make, layout), folder / "weights", names={"kernel": "kernel", "bias": "bias"}
    )
    np.save(folder / "tokens.npy", np.arange(1000, dtype="int32"))
    recipe = sw.Recipe(model=make, loss=lambda model, x: model(x).mean(), optimizer=optax.sgd(0.1),
                       batch=inputs)  # fmt: skip
    checkpoints = sw.Checkpoints(folder / "run")
    checkpoints.save(1, sw.train_state(recipe, layout), layout=layout)
    checkpoints.close()
    packed = gzip.compress(json.dumps({"rows": {}}).encode())
    (folder / ("0" * 32)).write_bytes(_entry(packed))
    return folder


def _entry(packed):
    digest = hashlib.sha256(packed).hexdigest()
    header = {"shardwise_cache": FORMAT, "key": "0" * 32, "bytes": len(packed), "sha256": digest}
    return json.dumps(header).encode() + b"\n" + packed


def read_checkpoint(path):
    """Returns the metadata of a step one of whose files is at a path, with a right checksum."""
    found = path.read_bytes()
    shutil.rmtree(path.parent / "run", ignore_errors=True)
    shutil.copytree(valid() / "run", path.parent / "run")
    inside = path.parent / "run" / "1" / "about" / path.name
    try:
        body = json.loads(found)
        body.pop("crc32", None)
        inside.write_text(sealed(body))
    except (ValueError, RecursionError, AttributeError, TypeError):
        inside.write_bytes(found)
    recipe = sw.Recipe(model=make, loss=lambda model, x: model(x).mean(), optimizer=optax.sgd(0.1),
                       batch=jax.ShapeDtypeStruct((8, 16), "float32"))  # fmt: skip
    layout = sw.layout(make, sw.mesh("data=2", on="cpu:2"), "dp")
    sw.Checkpoints(path.parent / "run").preflight(recipe, layout)


def read_weights(path):
    layout = sw.layout(make, sw.mesh("data=2", on="cpu:2"), "dp")
    sw.load(make, layout, path, names={"kernel": "kernel", "bias": "bias"})


def print_layout(path):
    layout = sw.load_layout(path)
    str(layout), str(sw.check(layout)), layout.report()


def print_compiled(path):
    compiled = sw.load_compiled(path)
    str(compiled), compiled.report()


READERS = {
    "layout.json": print_layout,
    "compiled.json": print_compiled,
    "calibration.json": load_calibration,
    "rules.toml": read_rules,
    "names.toml": read_names,
    "config.json": sw.models.config_from_hf,
    "run/1/about/about.json": read_checkpoint,
    "run/1/about/files.json": read_checkpoint,
    "weights/model.safetensors": read_weights,
    "tokens.npy": lambda path: sw.data(path, length=8),
    "0" * 32: lambda path: read_entry(path.parent, path.name),
}


def _nested(data, rng):
    depth = rng.choice([70, 1000, 50_000, 300_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}"), (b"(", b")")])
    return opening * depth + b"0" + closing * depth


def _bits(data, rng):
    data = bytearray(data)
    for _ in range(rng.choice([1, 3, 30])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _cut(data, rng):
    return data[: rng.randrange(len(data))]


def _value(rng, deep=2):
    kind = rng.randrange(16)
    if kind < 3 and deep:
        return [_value(rng, deep - 1) for _ in range(rng.randrange(4))]
    if kind < 5 and deep:
        return {_value(rng, 0).__str__(): _value(rng, deep - 1) for _ in range(rng.randrange(4))}
    return rng.choice(
        [None, True, 0, -1, 1, 2**62, 2**63, 10**400, 1e308, float("inf"), float("nan"), 0.5, "",
         "kernel", "\x1b[2J\x1b]0;title\x07", "\x00", "\ud800", "x" * 100_000, "P(" * 300,
         "P(None, 'data')", "key<fry>", "float99", "../../../etc/passwd", "/dev/zero", "[0-9",
         "(" * 5000, "a." * 5000, "{0..9}"]
    )  # fmt: skip


def _swapped(data, rng):
    """Replaces, removes or adds values inside of JSON."""
    body = json.loads(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        place = body
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys)
            inner = place[key]
            if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
                place = inner
                continue
            how = rng.randrange(6)
            if how == 0:
                del place[key]
            elif how == 1 and isinstance(place, dict):
                place[str(_value(rng, 0))] = inner
            else:
                place[key] = _value(rng)
            break
    return json.dumps(body).encode()


def _lines(data, rng):
    lines = data.split(b"\n")
    for _ in range(rng.randrange(1, 4)):
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(
            [b"a = " + b"[" * 5000, b".".join([b"a"] * 5000) + b" = 1", b"[" * 200, b"x = inf",
             b'"\\u001b[2J" = 1', b"x = 1979-05-27", b"'a' = 'P(" + b"(" * 900 + b"'", b"[logical]",
             b"logical = 3", b"rules = 4", b"'**' = \"P('nowhere')\"", b"[names]", b"\xff\xfe"]
        ))  # fmt: skip
    return b"\n".join(lines)


def _bomb(data, rng):
    return _entry(gzip.compress(b"[" * rng.choice([10**6, 3 * 10**7]), compresslevel=9))


def _header(data, rng):
    """Replaces the header of a .safetensors or .npy file."""
    if data[:6] == b"\x93NUMPY":
        text = rng.choice([b"(" * 9000, b"{'descr': '|O', 'fortran_order': False, 'shape': (9,)}",
                           b"{'descr': '<i4', 'fortran_order': False, 'shape': (%d,)}" % 10**18,
                           b"[" * 200 + b"]" * 200, b"{}"])  # fmt: skip
        return data[:8] + len(text).to_bytes(2, "little") + text + data[128:]
    length = int.from_bytes(data[:8], "little")
    try:
        text = _swapped(data[8 : 8 + length].rstrip(), rng)
    except ValueError:
        return _bits(data, rng)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def changed(name, data, rng):
    """Returns the contents of a hostile file of a kind."""
    ways = [_bits, _cut, _nested, lambda data, rng: b"", lambda data, rng: rng.randbytes(200)]
    if name.endswith(".json"):
        ways += [_swapped] * 6
    if name.endswith(".toml"):
        ways += [_lines] * 4
    if name.endswith((".safetensors", ".npy")):
        ways += [_header] * 4
    if name == "0" * 32:
        ways += [_bomb]
    return rng.choice(ways)(data, rng)


def broken(rng, folder):
    """Returns what went wrong with a hostile file, or an empty string."""
    name = rng.choice(list(READERS))
    path = folder / Path(name).name
    kind = rng.random()
    if kind < 0.02 and not name.startswith("run/"):
        os.mkfifo(path)
    elif kind < 0.03:
        path.mkdir()
        if name.startswith("run/"):
            return ""
    else:
        path.write_bytes(changed(name, (valid() / name).read_bytes(), rng))
    began = time.monotonic()
    try:
        READERS[name](path)
    except ValueError as error:
        if type(error).__module__.startswith(("json", "tomllib")) or isinstance(
            error, UnicodeError
        ):
            return f"{name}: RAW {type(error).__name__}: {error}"
        if len(str(error)) > 20_000:
            return f"{name}: a message of {len(str(error))} characters"
    except Exception as error:
        return f"{name}: RAW {type(error).__name__}: {str(error)[:300]}"
    seconds = time.monotonic() - began
    return f"{name}: took {seconds:.0f} s" if seconds > SECONDS else ""
