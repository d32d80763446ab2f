"""Targets and the files beside them that are called like installed packages or Python's modules."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES: dict[str, str] = {}
MODEL = """
import dataclasses, inspect, pickle
import flax, jax, numpy, optax, types
from flax import nnx

@dataclasses.dataclass
class Config:
    size: int = 16

class Model(nnx.Module):
    def __init__(self, config, rngs):
        self.up = nnx.Linear(config.size, 32, rngs=rngs)

def make():
    import shardwise
    for module in (flax, jax, numpy, optax, types, shardwise):
        assert not hasattr(module, "mine"), module
    assert pickle.loads(pickle.dumps(Config(8))) == Config(8)
    assert pickle.loads(pickle.dumps(make)) is make
    assert "class Model" in inspect.getsource(Model)
    return Model(Config(), nnx.Rngs(0))

mine = True
"""
BESIDE = "mine = True\n"
MESH = ("--mesh", "data=8", "--on", "none", "--strategy", "fsdp", "--format", "json")
NAMES = ("flax", "shardwise", "optax", "types", "model")


def start(*arguments: str, module: bool = False) -> subprocess.CompletedProcess[str]:
    script = [str(Path(sys.executable).with_name("shardwise"))]
    command = [sys.executable, "-m", "shardwise"] if module else script
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def leaves(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [leaf["path"] for leaf in json.loads(done.stdout)["leaves"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_target_takes_no_packages_name(folder, name) -> None:
    Path(f"{name}.py").write_text(MODEL)
    done = start("plan", f"{name}.py:make", *MESH)
    assert (leaves(done), done.stderr) == (["up.bias", "up.kernel"], "")


@pytest.mark.parametrize(
    ("target", "module"),
    [("model.py:make", False), ("model:make", True), ("sub/model.py:make", False)],
)
def test_files_beside_a_target_take_no_packages_name(folder, target, module) -> None:
    where = Path("sub") if target.startswith("sub") else Path()
    where.mkdir(exist_ok=True)
    (where / "model.py").write_text(f"import helper\n{MODEL}")
    (where / "helper.py").write_text("value = 1\n")
    # With `python -m`, Python itself stumbles over its own names before it comes to us.
    own = () if module else ("types", "json")
    for name in ("flax", "optax", "tensorstore", *own):
        (where / f"{name}.py").write_text(BESIDE)
    done = start("plan", target, *MESH, module=module)
    assert leaves(done) == ["up.bias", "up.kernel"]
    notes = done.stderr.splitlines()
    assert len(notes) == (2 if module else 3)  # those that it imports
    assert all(note.startswith("note: model.py imports ") for note in notes)
    assert any("imports flax, which is " in note for note in notes)
    assert all(note.endswith(".py if that one is wanted") for note in notes)


def test_a_failed_import_names_the_file_that_was_passed_over(folder) -> None:
    Path("model.py").write_text("from typer import widths\n")
    Path("typer.py").write_text("widths = (1, 2)\n")
    done = start("plan", "model.py:make", *MESH)
    assert (done.returncode, done.stdout) == (2, "")
    assert "importing model.py failed: ImportError: cannot import name 'widths'" in done.stderr
    assert "model.py imports typer, which is " in done.stderr
    assert "not typer.py beside it: rename typer.py if that one is wanted" in done.stderr


def test_a_module_target_that_an_installed_one_hides(folder) -> None:
    Path("flax.py").write_text(MODEL)
    done = start("plan", "flax:make", *MESH)
    assert done.returncode == 2
    assert "note: flax is the module " in done.stderr
    assert "not flax.py: write path/to/file.py:name for a file" in done.stderr
    assert "target 'flax:make': flax has no 'make'" in done.stderr


def test_another_targets_helper_is_never_taken_for_ones_own(folder) -> None:
    for name in ("a", "b"):
        Path(name).mkdir()
        Path(name, "model.py").write_text(f"import helper\n{MODEL}")
        Path(name, "helper.py").write_text(f"value = {name!r}\n")
    other = ("--against", "b/model.py:make", "--against-mesh", "data=8")
    options = ("--mesh", "data=8", "--on", "none", "--strategy", "fsdp", "-o", "page.html")
    done = start("report", "a/model.py:make", *other, *options)
    assert done.returncode == 2, done.stderr
    assert "model.py imports helper, which is " in done.stderr
    assert "a/helper.py, not helper.py beside it: rename helper.py if that one" in done.stderr


@pytest.mark.parametrize("name", ["flax", "types"])
def test_an_exercises_file_takes_no_packages_name(folder, name) -> None:
    Path(f"{name}.py").write_text(
        "import helper\n\ndef bubble(s, m, r):\n    import flax.nnx, optax, types\n"
        "    return (s - 1) / (m * r)\n"
    )
    Path("helper.py").write_text("value = 1\n")
    Path("optax.py").write_text(BESIDE)
    done = start("learn", "check", "5", f"{name}.py", "--only", "bubble")
    assert done.returncode == 0, done.stderr + done.stdout
