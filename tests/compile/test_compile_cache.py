"""Kept compilations: whatever became of one on disk, it does no harm."""

import gzip
import json
import os
import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from forked import Forked
from jax._src.interpreters import mlir

from shardwise._compile.toolchain import cache
from shardwise._compile.toolchain import run as toolchain
from shardwise._compile.toolchain.cache import cache_folder, read_entry, write_entry

KEY = "0123456789abcdef" * 2
FIELDS = {"hlo": "HloModule x" * 100, "stats": {"a": 1}}


def compile_small(show=False):
    lowered = jax.jit(lambda x: jnp.sin(x) @ x).lower(jax.ShapeDtypeStruct((8, 8), "float32"))
    module = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    return toolchain.compile_absent(module, None, {"data": 1}, {}, lowered.as_text(), show=show)


def _emptied(path):
    path.write_bytes(b"")


def _cut_short(path):
    path.write_bytes(path.read_bytes()[:-7])


def _changed(path):
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(bytes(content))


def _longer(path):
    path.write_bytes(path.read_bytes() + b"x")


def _of_another_version(path):
    header, _, packed = path.read_bytes().partition(b"\n")
    path.write_bytes(
        header.replace(b'"shardwise_cache": 3', b'"shardwise_cache": 1') + b"\n" + packed
    )


def _of_another_program(path):
    write_entry(path.parent, KEY[::-1], FIELDS)
    path.write_bytes((path.parent / KEY[::-1]).read_bytes())


def _as_before_it_was_one_file(path):
    path.unlink()
    path.mkdir()
    (path / "hlo.txt.gz").write_bytes(gzip.compress(b""))
    (path / "program.json").write_text(json.dumps({"stats": {}, "refused": "", "noise": ""}))


DAMAGE = [
    _emptied, _cut_short, _changed, _longer, _of_another_version, _of_another_program,
    _as_before_it_was_one_file,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__.strip("_"))
def test_a_damaged_entry_is_not_read_and_is_replaced(tmp_path, damage):
    assert write_entry(tmp_path, KEY, FIELDS) == ""
    assert read_entry(tmp_path, KEY) == FIELDS
    damage(tmp_path / KEY)
    assert read_entry(tmp_path, KEY) is None
    assert write_entry(tmp_path, KEY, FIELDS) == ""
    assert read_entry(tmp_path, KEY) == FIELDS


def test_a_damaged_compilation_is_compiled_again_and_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    first = compile_small()
    (entry,) = tmp_path.iterdir()
    _emptied(entry)
    again, third = compile_small(), compile_small()
    assert [first.cached, again.cached, third.cached] == [False, False, True]
    assert first.hlo and again.hlo == third.hlo


def test_an_entry_without_a_program_is_no_program(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    made = compile_small()
    (entry,) = tmp_path.iterdir()
    fields = {**read_entry(tmp_path, entry.name), "hlo": ""}
    write_entry(tmp_path, entry.name, fields)
    again = compile_small()
    assert not again.cached and again.hlo and made.hlo


def _sealed(place, packed):
    """Writes an entry whose header is right, whatever it holds."""
    header = json.dumps(cache._header(place.name, packed)).encode()
    place.write_bytes(header + b"\n" + packed)


def _packed(value):
    return gzip.compress(json.dumps(value).encode())


# Each has a header that vouches for it: as another version, or a bug of this one, would write it.
WRONG = {
    "no gzip": lambda fields: b"text",
    "a broken stream": lambda fields: _packed(fields)[:10] + b"\xff" * 50,
    "half of a stream": lambda fields: _packed(fields)[:-40],
    "no JSON": lambda fields: gzip.compress(b"{"),
    "no UTF-8": lambda fields: gzip.compress(b'"\xff\xfe"'),
    "too deep": lambda fields: gzip.compress(b"[" * 100_000),
    "a list": lambda fields: _packed([1]),
    "null": lambda fields: _packed(None),
    "a field too few": lambda fields: _packed({k: v for k, v in fields.items() if k != "noise"}),
    "a field too many": lambda fields: _packed({**fields, "cached": True}),
    "a program that is no text": lambda fields: _packed({**fields, "hlo": 5}),
    "statistics in a list": lambda fields: _packed({**fields, "stats": [1]}),
    "statistics that are no numbers": lambda fields: _packed({**fields, "stats": {"a": "1"}}),
    "seconds that are none": lambda fields: _packed({**fields, "seconds": None}),
    "lifetimes of another form": lambda fields: _packed({**fields, "lifetimes": {"values": []}}),
    "lifetimes that are none": lambda fields: _packed(
        {**fields, "lifetimes": {"sequence": "a", "values": [["a", "b"]]}}
    ),
}


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWISE_CACHE", str(folder))
        compile_small()
    (entry,) = folder.iterdir()
    return entry.name, read_entry(folder, entry.name)


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG.keys())
def test_an_entry_of_another_version_is_a_miss(tmp_path, monkeypatch, compiled_once, make):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    key, fields = compiled_once
    _sealed(tmp_path / key, _packed(fields))
    assert toolchain._kept(key) is not None
    _sealed(tmp_path / key, make(fields))
    assert toolchain._kept(key) is None


def test_any_flipped_or_missing_byte_is_a_miss(tmp_path, compiled_once):
    key, fields = compiled_once
    write_entry(tmp_path, key, fields)
    whole = (tmp_path / key).read_bytes()
    places = [*range(0, 200), *range(200, len(whole), max(1, len(whole) // 200))]
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        for content in (bytes(flipped), whole[:place]):
            (tmp_path / key).write_bytes(content)
            found = read_entry(tmp_path, key)
            # A flip may turn a space of the header into another, which says the same.
            assert found is None or found == fields, place


@pytest.mark.parametrize("kind", ["folder", "link to nothing", "loop", "file for a folder"])
def test_what_is_no_file_is_a_miss(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    place = tmp_path / KEY
    if kind == "folder":
        place.mkdir()
    elif kind == "link to nothing":
        place.symlink_to(tmp_path / "nothing")
    elif kind == "loop":
        place.symlink_to(place)
    else:
        monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "file"))
        (tmp_path / "file").write_text("")
    assert toolchain._kept(KEY) is None
    if kind != "file for a folder":
        assert write_entry(tmp_path, KEY, FIELDS) == "" and read_entry(tmp_path, KEY) == FIELDS


def test_another_version_of_shardwise_compiles_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    compile_small()
    version_of = toolchain.version_of
    monkeypatch.setattr(
        toolchain, "version_of", lambda name: "9.9" if name == "shardwise" else version_of(name)
    )
    assert not compile_small().cached
    assert compile_small().cached and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "value", "same"),
    [
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math=true", False),
        ("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=65536", False),
        # What JAX itself adds when it looks for TPUs.
        ("LIBTPU_INIT_ARGS", "--xla_tpu_use_enhanced_launch_barrier=true", True),
        ("JAX_OPTIMIZATION_LEVEL", "O1", False),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9", True),
    ],
)
def test_flags_in_the_environment_compile_anew(tmp_path, monkeypatch, name, value, same):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    monkeypatch.delenv(name, raising=False)
    compile_small()
    monkeypatch.setenv(name, value)
    assert compile_small().cached is same
    assert compile_small().cached


def test_flags_in_a_file_are_read(tmp_path, monkeypatch):
    flags = tmp_path / "flags.txt"
    monkeypatch.setenv("XLA_FLAGS", str(flags))
    seen = []
    for text in ("--xla_cpu_enable_fast_math=true", "--xla_cpu_enable_fast_math=false"):
        flags.write_text(text)
        seen.append(toolchain._environment())
    assert seen[0] != seen[1]


def test_a_cache_that_cannot_be_written_is_mentioned_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "file"))
    assert compile_small(show=True).hlo and compile_small(show=True).hlo
    assert capsys.readouterr().err == (
        f"note: compilations are not cached because {tmp_path / 'file'} cannot be written: "
        f"File exists (SHARDWISE_CACHE names another folder)\n"
    )


def test_a_full_disk_leaves_the_old_entry_and_nothing_else(tmp_path):
    write_entry(tmp_path, KEY, FIELDS)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
    try:
        problem = write_entry(tmp_path, KEY, {**FIELDS, "stats": {}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert problem == "File too large"
    assert read_entry(tmp_path, KEY) == FIELDS
    assert [path.name for path in tmp_path.iterdir()] == [KEY]


WRITER = """
import sys
from pathlib import Path
from shardwise._compile.toolchain import cache
folder, key, seen = Path(sys.argv[1]), sys.argv[2], set()
print("ready", flush=True)
sys.stdin.readline()
for i in range(100):
    fields = {"by": sys.argv[3], "hlo": sys.argv[3] * 5000 * (1 + i % 7)}
    assert cache.write_entry(folder, key, fields) == ""
    found = cache.read_entry(folder, key)
    assert found is not None and set(found["hlo"]) == {found["by"]}, found
    seen.add(found["by"])
"""


def test_two_processes_keep_the_same_entry_at_once(tmp_path):
    started = [
        Forked(
            [sys.executable, "-c", WRITER, str(tmp_path), KEY, by],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for by in "ab"
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in started:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert [path.name for path in tmp_path.iterdir()] == [KEY]


def test_the_entries_used_longest_ago_and_what_was_left_behind_go(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_MOST", 3)
    keys = [f"{i:032x}" for i in range(5)]
    long_ago = time.time() - 10 * 86_400
    for i, key in enumerate(keys):
        write_entry(tmp_path, key, FIELDS)
        os.utime(tmp_path / key, (long_ago + i, long_ago + i))
    (tmp_path / ".new-killed").write_text("")
    os.utime(tmp_path / ".new-killed", (long_ago, long_ago))
    (tmp_path / ".new-running").write_text("")
    (tmp_path / "notes.txt").write_text("")
    assert read_entry(tmp_path, keys[3]) == FIELDS  # hence the last used
    write_entry(tmp_path, KEY, FIELDS)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {keys[3], keys[4], KEY, ".new-running", "notes.txt"}


def test_a_user_without_a_home(monkeypatch):
    for name in ("SHARDWISE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pathlib.Path.home", _no_home)
    assert cache_folder() is None and read_entry(None, KEY) is None
    assert write_entry(None, KEY, FIELDS) == "this user has no home folder"


def _no_home():
    raise RuntimeError("Could not determine home directory.")
