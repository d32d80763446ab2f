import os
import sys

import jax
import pytest

from shardwise import _cli

# XLA reads this when a backend starts. Most of the time goes into compiling: quickly is better
# than well.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
# Before any backend starts: every test runs on eight virtual devices.
jax.config.update("jax_num_cpu_devices", 8)


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
