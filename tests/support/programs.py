"""What is compiled is kept: no program is compiled twice by two tests, processes or runs.

JAX's keys have the program, the flags and the versions, so an entry cannot be out of date. Programs
for absent chips are kept by the package's own cache, in a folder for each version of what compiles
and reads them. All is in the user's cache, so that a fresh clone begins with what another has
compiled; SHARDWISE_TESTS_PROGRAMS names another folder.
"""

import contextlib
import hashlib
import os
import shutil
import sys
import time
import types
from pathlib import Path

import jax
from jax._src import compilation_cache, compilation_cache_interface, compiler

_WEEK = 7 * 24 * 3600


class Programs(compilation_cache_interface.CacheInterface):
    """One file for each program, whole or not there at all.

    JAX's own cache of files would be shared with processes that are killed while they write to it.
    """

    def __init__(self, folder):
        self.found, self.folder = {}, folder

    def get(self, key):
        if key not in self.found:
            with contextlib.suppress(OSError):
                file = self.folder / key
                self.found[key] = file.read_bytes()
                os.utime(file)
        return self.found.get(key)

    def put(self, key, value):
        self.found[key] = value
        partial = self.folder / f"{key}.{os.getpid()}"
        partial.write_bytes(value)
        partial.replace(self.folder / key)


def folder():
    """Returns the folder of programs, made where there is none."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    named = os.environ.get("SHARDWISE_TESTS_PROGRAMS")
    found = Path(named or Path(home) / "shardwise-tests")
    found.mkdir(parents=True, exist_ok=True)
    return found


def absent():
    """Returns the folder of programs for absent chips: another one for other code that makes them."""
    source = Path(__file__).parents[2] / "src" / "shardwise" / "_compile" / "toolchain"
    version = hashlib.sha256(sys.version.encode())
    for file in sorted(source.rglob("*.py")):
        version.update(file.read_bytes())
    found = folder() / f"absent-{version.hexdigest()[:16]}"
    found.mkdir(exist_ok=True)
    os.utime(found)
    return found


def remove_unused():
    """Removes what no run has used for a week."""
    for file in folder().iterdir():
        with contextlib.suppress(OSError):  # another worker was faster
            if time.time() - file.stat().st_mtime > _WEEK:
                shutil.rmtree(file) if file.is_dir() else file.unlink()


def _by_any_process(write):
    """Returns JAX's function that writes an entry, for every process of several.

    JAX leaves it to process 0, although the CPU's programs have another key in each process: all
    others would compile theirs again in every run.
    """
    first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
    names = {**vars(compiler), "distributed": first}
    return types.FunctionType(write.__code__, names, write.__name__, write.__defaults__)


def keep():
    """Keeps what this process compiles, and uses what was kept."""
    compilation_cache._cache = Programs(folder())
    compiler._cache_write = _by_any_process(compiler._cache_write)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
