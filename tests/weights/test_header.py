"""Headers and folders: what is valid is read, and whatever else a file has is refused by name."""

import json
import math
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise._weights.files.folder import open_folder
from shardwise._weights.files.header import File, FileFault, parse_header, read_header

FIXTURE = Path(__file__).parent / "written_by_safetensors.safetensors"


def row(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def file_of(table, data=16):
    """Returns the bytes of a file with this header, and so many of data."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def test_a_file_that_safetensors_wrote():
    tensors, metadata = read_header(str(FIXTURE))
    assert metadata == {"format": "pt"}
    shown = {key: str(tensor) for key, tensor in tensors.items()}
    assert shown == {"a.weight": "BF16[3, 2]", "b": "F32[]", "c": "I64[4]", "d": "BOOL[2, 2]"}
    raw = FIXTURE.read_bytes()
    c = tensors["c"]
    assert np.frombuffer(raw[c.start : c.start + c.nbytes], "int64").tolist() == [1, -2, 3, 2**40]


WRONG = {
    "nothing": (b"", "fewer than the 8 of a length"),
    "a length alone": (struct.pack("<Q", 9), "claims 9 bytes, but the file has 8"),
    "a huge length": (struct.pack("<Q", 2**63) + bytes(99), "above the format's limit"),
    "no JSON": (file_of(b"{]"), "the header is not JSON"),
    "no UTF-8": (file_of(b"\xff\xfe"), "the header is not JSON"),
    "a list": (file_of(b"[]"), "is not a JSON object"),
    "deep": (file_of(b'{"a":' * 100_000), "nested too deeply"),
    "a key twice": (file_of(b'{"a": 1, "a": 2}'), "has 'a' twice"),
    "not a number": (file_of(b'{"a": NaN}'), "NaN is not JSON"),
    "a number of many digits": (file_of(b'{"a": ' + b"9" * 9999 + b"}"), "is not JSON"),
    "metadata": (file_of({"__metadata__": {"a": 1}}), "not a table of strings"),
    "no table": (file_of({"a": 3}), "does not have exactly dtype, shape and data_offsets"),
    "a dtype": (file_of({"a": row("F31")}), "unknown dtype 'F31'"),
    "a negative size": (file_of({"a": row(shape=(-2, -2))}), "not a list of sizes"),
    "a fraction": (file_of({"a": row(shape=(2.0, 2))}), "not a list of sizes"),
    "true": (file_of({"a": row(shape=(True, 4))}), "not a list of sizes"),
    "many dims": (file_of({"a": row(shape=(1,) * 65)}), "not a list of sizes"),
    "offsets turned round": (file_of({"a": row(offsets=(16, 0))}), "the bytes 16 to 0"),
    "offsets outside": (file_of({"a": row(shape=(8,), offsets=(0, 32))}), "is truncated"),
    "another size": (file_of({"a": row(shape=(3,))}), "has 16 bytes, but F32[3] takes 12"),
    "an overflow": (file_of({"a": row(shape=(2**31, 2**31, 2**31))}), "has 16 bytes, but"),
    "an overlap": (
        file_of({"a": row(), "b": row(shape=(2,), offsets=(8, 16))}),
        "overlaps the tensor before it",
    ),
    "a gap": (file_of({"a": row(shape=(2,), offsets=(8, 16))}), "follows a gap"),
    "more than tensors": (file_of({"a": row()}, 20), "the file has"),
    "a name of control characters": (file_of({"a\n": row()}), "is not the name of a tensor"),
    "no name": (file_of({"": row()}), "is not the name of a tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused(tmp_path, case):
    raw, text = WRONG[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(FileFault) as caught:
        read_header(str(path))
    assert text in caught.value.fact and (caught.value.code, caught.value.path) == (
        "SW607",
        str(path),
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
SIZES = st.lists(st.integers(-1, 4) | st.integers(2**62, 2**70), max_size=3)
ROWS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "X"]),
        "shape": SIZES,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2),
    }
)


@settings(deadline=None, max_examples=300)
@given(
    st.binary(max_size=60)
    | JSON.map(lambda x: json.dumps(x).encode())
    | st.dictionaries(st.text(max_size=4), ROWS | JSON, max_size=3).map(
        lambda x: json.dumps(x).encode()
    ),
    st.integers(0, 40),
)
def test_any_header_is_either_valid_or_refused(text, data):
    size = 8 + len(text) + data
    try:
        tensors, _ = parse_header(text, File("x", size, (0, 0)))
    except FileFault:
        return
    # What is valid covers the data, each byte once.
    spans = sorted((t.start, t.start + t.nbytes) for t in tensors.values())
    assert [a for a, _ in spans] + [size] == [8 + len(text)] + [b for _, b in spans]
    for tensor in tensors.values():
        if tensor.numpy_dtype is not None:
            assert np.empty(tensor.shape, tensor.numpy_dtype).nbytes == tensor.nbytes


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_change_of_a_valid_file_is_refused_or_stays_inside_of_it(tmp_path_factory, data):
    """Nearly valid headers get further than random ones."""
    shapes = data.draw(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=3))
    table, place = {}, 0
    for n, shape in enumerate(shapes):
        kind, size = data.draw(st.sampled_from([("F32", 4), ("BF16", 2), ("U8", 1)]))
        stop = place + size * math.prod(shape)
        table[f"t{n}"] = {"dtype": kind, "shape": shape, "data_offsets": [place, stop]}
        place = stop
    text = json.dumps(table).encode()
    raw = bytearray(struct.pack("<Q", len(text)) + text + bytes(place))
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    path.write_bytes(raw)
    assert list(read_header(str(path))[0]) == list(table)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        how = data.draw(st.sampled_from(["digit", "byte", "cut", "repeat", "remove"]))
        if how == "digit":  # a size, an offset, or what is around them
            digits = [n for n, byte in enumerate(raw) if 48 <= byte < 58] or [at]
            raw[data.draw(st.sampled_from(digits))] = data.draw(st.sampled_from(b"0123456789-e"))
        elif how == "byte":
            raw[at] = data.draw(st.integers(0, 255))
        elif how == "cut":
            del raw[at:]
        elif how == "repeat":
            raw[at:at] = raw[at : at + 9]
        else:
            del raw[at : at + 3]
        raw = raw or bytearray(1)
    path.write_bytes(raw)
    try:
        tensors, _ = read_header(str(path))
    except FileFault as fault:
        assert fault.code == "SW607" and len(fault.fact) < 600
        return
    for tensor in tensors.values():
        assert 8 <= tensor.start <= tensor.start + tensor.nbytes <= len(raw)
        if tensor.numpy_dtype is not None:
            assert np.empty(tensor.shape, tensor.numpy_dtype).nbytes == tensor.nbytes


def folder_of(tmp_path, listed, files=("a.safetensors",), index=None):
    for number, name in enumerate(files):
        (tmp_path / name).write_bytes(file_of({f"t{number}": row()}))
    text = json.dumps({"weight_map": listed}) if index is None else index
    (tmp_path / "model.safetensors.index.json").write_text(text)
    return open_folder(tmp_path)


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/a.safetensors", "a/../../b.safetensors", "", ".", "x.bin", 3]
)
def test_an_index_stays_inside_of_its_folder(tmp_path, name):
    (fault,) = folder_of(tmp_path, {"t0": name}).faults
    assert fault.code == "SW607" and "is not a file of this folder" in fault.fact


def test_a_folder_is_read_by_its_index_and_says_what_is_missing(tmp_path):
    found = folder_of(tmp_path, {"t0": "a.safetensors"})
    assert list(found.tensors) == ["t0"] and not found.faults and found.total_bytes == 16
    listed = {"t0": "a.safetensors", "t1": "b.safetensors", "t2": "a.safetensors"}
    faults = folder_of(tmp_path, listed).faults
    assert [(f.code, os.path.basename(f.path)) for f in faults] == [
        ("SW608", "b.safetensors"),
        ("SW608", "t2"),
    ]
    os.remove(tmp_path / "model.safetensors.index.json")
    os.mkfifo(tmp_path / "model.safetensors.index.json")  # reading it would never end
    assert "not a regular file" in open_folder(tmp_path).faults[0].fact
    os.remove(tmp_path / "model.safetensors.index.json")
    for text in ("{", "[]", "{}", '{"weight_map": []}'):
        (fault,) = folder_of(tmp_path, {}, index=text).faults
        assert fault.code == "SW607"


def test_a_folder_without_an_index(tmp_path):
    assert open_folder(tmp_path / "no").faults[0].code == "SW608"
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (fault,) = open_folder(tmp_path).faults
    assert "it has pytorch_model.bin" in fault.fact and "convert" in fault.help
    (tmp_path / "b.safetensors").write_bytes(file_of({"t": row()}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    found = open_folder(tmp_path)
    assert list(found.tensors) == ["t"] and found.config == {"model_type": "llama"}
    (tmp_path / "c.safetensors").write_bytes(file_of({"t": row()}))
    (fault,) = open_folder(tmp_path).faults
    assert fault.code == "SW603" and fault.path == "t"
