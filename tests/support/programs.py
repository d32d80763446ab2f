"""What is compiled is kept: no program is compiled twice by two tests, processes or runs.

JAX's keys have the program, the flags and the versions, so an entry cannot be out of date. Programs
for absent chips are kept by the package's own cache, in a folder for each version of what compiles
and reads them. All is in the user's cache, so that a fresh clone begins with what another has
compiled; SHARDWISE_TESTS_PROGRAMS names another folder.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import sys
import threading
import time
import types
from pathlib import Path

import jax
from jax._src import cache_key, compilation_cache, compilation_cache_interface, compiler

_WEEK = 7 * 24 * 3600
# Seconds for which a process waits for what another compiles, before it compiles it too.
_PATIENCE = 30


class Claims:
    """What one process compiles, all others wait for: those of one run compile the same at once."""

    def __init__(self):
        self.held = threading.local()

    def take(self, path, read):
        """Returns what another process wrote, or None once this one is to write it.

        Args:
            path: the file that stands for it while it is compiled.
            read: returns what is written, or None.
        """
        self.release()
        until, claim = time.monotonic() + _PATIENCE, os.open(path, os.O_RDWR | os.O_CREAT)
        while time.monotonic() < until:
            free = False
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free = True
            found = read()
            if free and found is None:
                self.held.claim = (path, claim)
                return None
            if found is not None:
                os.close(claim)
                return found
            time.sleep(0.02)
        os.close(claim)
        return None

    def release(self):
        """Lets others compile what this thread compiled, or could not."""
        path, claim = vars(self.held).pop("claim", (None, None))
        if claim is not None:
            path.unlink(missing_ok=True)
            os.close(claim)


class Programs(compilation_cache_interface.CacheInterface):
    """One file for each program, whole or not there at all.

    JAX's own cache of files would be shared with processes that are killed while they write to it.
    """

    def __init__(self, folder):
        self.found, self.folder, self.claims = {}, folder, Claims()

    def get(self, key):
        if key not in self.found and self._read(key) is None:
            self.claims.take(self.folder / f"{key}.claim", lambda: self._read(key))
        return self.found.get(key)

    def put(self, key, value):
        self.found[key] = value
        partial = self.folder / f"{key}.{os.getpid()}"
        partial.write_bytes(value)
        partial.replace(self.folder / key)

    def _read(self, key):
        with contextlib.suppress(OSError):
            file = self.folder / key
            self.found[key] = file.read_bytes()
            os.utime(file)
        return self.found.get(key)


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


def claim_absent(run):
    """Lets one process at a time compile a program for absent chips.

    Args:
        run: the module that compiles, and keeps what is compiled.
    """
    claims, read, keep, mine = Claims(), run._kept, run._keep, absent()

    def kept(key):
        found = read(key)
        if found is not None or run.cache_folder() != mine:
            return found
        return claims.take(mine / f"{key}.claim", lambda: read(key))

    def kept_by_all(*arguments):
        try:
            keep(*arguments)
        finally:
            claims.release()

    run._kept, run._keep = kept, kept_by_all


def remove_unused():
    """Removes what no run has used for a week."""
    for file in folder().iterdir():
        with contextlib.suppress(OSError):  # another worker was faster
            if time.time() - file.stat().st_mtime > _WEEK:
                shutil.rmtree(file) if file.is_dir() else file.unlink()


def _writes(write, programs):
    """Returns JAX's function that writes an entry, for every process of several.

    JAX leaves it to process 0, although each process may be the one that compiles.
    """
    first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
    names = {**vars(compiler), "distributed": first}
    by_any = types.FunctionType(write.__code__, names, write.__name__, write.__defaults__)

    def written(*arguments):
        try:
            return by_any(*arguments)
        finally:
            programs.claims.release()

    return written


def _machine(hashed, devices):
    """Hashes what a program for some devices is compiled for: not which process asks.

    JAX's key of the CPU has that too, so that each process of several would compile everything.
    """
    hashed.update(f"{[d.device_kind for d in devices.flat]} {_processor()}".encode())


@functools.cache
def _processor():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _on_any_devices(hash_options):
    """Returns JAX's function that hashes options, without which devices of a process will run it.

    JAX does so for GPUs, for the same reason.
    """

    def hashed(hash_object, options, strip_device_assignment=False):
        return hash_options(hash_object, options, strip_device_assignment=True)

    return hashed


def keep():
    """Keeps what this process compiles, and uses what was kept."""
    programs = Programs(folder())
    compilation_cache._cache = programs
    compiler._cache_write = _writes(compiler._cache_write, programs)
    cache_key._hash_accelerator_config = _machine
    cache_key._hash_serialized_compile_options = _on_any_devices(
        cache_key._hash_serialized_compile_options
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
