"""Kept compilations: whatever became of one on disk, it does no harm."""

import gzip
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
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


def test_a_cache_that_cannot_be_written_is_mentioned_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "file"))
    assert compile_small(show=True).hlo and compile_small(show=True).hlo
    assert capsys.readouterr().err == (
        f"note: compilations are not kept, since {tmp_path / 'file'} cannot be written: "
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
import importlib.util, sys
spec = importlib.util.spec_from_file_location("cache", sys.argv[1])
cache = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cache)
from pathlib import Path
folder, key, seen = Path(sys.argv[2]), sys.argv[3], set()
print("ready", flush=True)
sys.stdin.readline()
for i in range(100):
    fields = {"by": sys.argv[4], "hlo": sys.argv[4] * 5000 * (1 + i % 7)}
    assert cache.write_entry(folder, key, fields) == ""
    found = cache.read_entry(folder, key)
    assert found is not None and set(found["hlo"]) == {found["by"]}, found
    seen.add(found["by"])
"""


def test_two_processes_keep_the_same_entry_at_once(tmp_path):
    path = importlib.util.find_spec("shardwise._compile.toolchain.cache").origin
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, path, str(tmp_path), KEY, by],
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
