import gc
import os
import signal
import subprocess
import sys

# The compilers of absent chips are installed: without this, every process would look for chips.
os.environ["JAX_PLATFORMS"] = "cpu"
# Each process that a test starts would otherwise compile the package's source again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import jax
import programs
import pytest
from forked import Forked
from marks import marks_of

from shardwise import _cli
from shardwise._compile.toolchain import run as toolchain
from shardwise._nnx import building_once

# XLA reads this when a backend starts. Most of the time goes into compiling: quickly is better
# than well, and in one piece better than in many, where all cores have work anyway. What must hold
# to the bit is tested with the usual flags too: tests/package/test_usual_flags.py.
QUICK_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
given = os.environ.get("XLA_FLAGS", "")
# Fusions through MLIR take twice as long to compile; later versions have no other way.
if jax.__version_info__ < (0, 11):
    QUICK_FLAGS += " --xla_cpu_use_fusion_emitters=false"
# A worker inherits them: twice would be other flags to the cache of programs.
if os.environ.get("SHARDWISE_TESTS_XLA_FLAGS") != "usual" and QUICK_FLAGS not in given:
    os.environ["XLA_FLAGS"] = f"{given} {QUICK_FLAGS}"
# Before any backend starts: every test runs on eight virtual devices.
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # so that no test depends on whether another one started them


programs.remove_unused()
programs.keep()
os.environ.setdefault("SHARDWISE_CACHE", str(programs.absent()))
programs.claim_absent(toolchain)

# A shell that starts the tests in the background has SIGINT ignored, and so would all processes
# that they start: `shardwise launch` leaves it so, by intent, and forwards it no more.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# These take longest: they are begun first, so that no process has a long test left at the end.
LONGEST = (
    "processes",
    "usual_flags",
    "ending",
    "faults",
    "launch",
    "cli_run",
    "readme",
    "terminal",
)
LONGEST = (
    *LONGEST,
    "absent",
    "learn",
    "train",
    "models",
    "fit",
    "report",
    "examples",
    "properties",
)


@pytest.hookimpl(wrapper=True)  # around `-m`, which selects by the marks that are given here
def pytest_collection_modifyitems(config, items):
    ranks = {f"test_{name}": rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))
    for item in items:
        path = item.path.relative_to(config.rootpath / "tests").as_posix()
        for mark in marks_of(path, item.name):
            item.add_marker(mark)
    result = yield
    # Where the run with the usual flags is selected, it runs what is to the bit: once is enough.
    if any(item.name == "test_they_hold_with_the_usual_flags" for item in items):
        repeated = [item for item in items if item.get_closest_marker("bitwise")]
        config.hook.pytest_deselected(items=repeated)
        items[:] = [item for item in items if not item.get_closest_marker("bitwise")]
    return result


def pytest_collection_finish():
    # What is collected by now lives as long as the process, and what JAX keeps of each program too:
    # looking at all of it again and again takes a tenth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Each process gets whole files, whose tests share what they compile, and helps at the end."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


class Imported:
    """The module `subprocess` for what starts compilers, whose processes have imported JAX."""

    Popen = Forked

    def __getattr__(self, name):
        return getattr(subprocess, name)


@pytest.fixture(scope="session", autouse=True)
def forked_compilers():
    """The compilers for absent chips are forked from a process that has imported JAX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "subprocess", Imported())
        yield


@pytest.fixture
def fresh_compilers(monkeypatch):
    """The compilers for absent chips are started as users start them."""
    monkeypatch.setattr(toolchain, "subprocess", subprocess)


@pytest.fixture(scope="module")
def built_once():
    """Each factory of models is traced once, in a file that is not about how models are built."""
    with building_once():
        yield


@pytest.fixture
def folder(request, tmp_path, monkeypatch):
    """A folder of its own with the module's FILES; what a target imports is forgotten afterwards."""
    for name, text in request.module.FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in request.module.FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns a function that runs a command here; it returns its status, stdout and stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["shardwise", *arguments])
        with pytest.raises(SystemExit) as caught:
            _cli.main()
        return caught.value.code, *capsys.readouterr()

    return call
