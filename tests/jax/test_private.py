"""What JAX may move: one place, reached when it is used, with an error that names the feature."""

import ast
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from packaging.version import Version
from schemas import validate

from shardwise import _jax
from shardwise._compile.toolchain import run
from shardwise._jax import private

doctor = importlib.import_module("shardwise._cli.reference.doctor")  # the door has the command

PACKAGE = Path(private.__file__).parents[1]
POISONED = Path(__file__).parents[1] / "scripts" / "poisoned.py"
# Where names without a promise may be written: the table, and the worker that is run without us.
PLACES = {"_jax/private.py", "_compile/toolchain/worker.py"}


def test_everything_in_the_table_is_here() -> None:
    assert [row for row in private.probe() if row.problem] == []


def test_the_versions_in_the_table_are_those_that_are_tested() -> None:
    """Here is one of them, or a release since, which `shardwise doctor` then calls untested."""
    for name, versions in private.TESTED.items():
        installed = importlib.metadata.version(name)
        assert installed in versions or Version(installed) > Version(versions[-1]), name


def _names(tree: ast.AST):
    """Yields every dotted name that a file imports, or reads as an attribute of what it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith("_pytree__") and node.value != "_pytree__":
                yield f"nnx.{node.value}"


def _promised(name: str) -> bool:
    first, *rest = name.split(".")
    if first in ("jaxlib", "tensorstore"):
        return False
    if first in ("jax", "flax", "nnx", "orbax", "ocp", "optax", "typer", "click"):
        private_step = any(step.startswith("_") and not step.startswith("__") for step in rest)
        return not private_step and rest[:1] != ["extend"]
    return True


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("from jax._src import distributed", False),
        ("import jaxlib.mlir.ir", False),
        ("from jax.extend.core import Jaxpr", False),
        ("x = jax._src.core", False),
        ("from flax import nnx\nnnx.Module", True),
        ("from jax.sharding import Mesh", True),
        ("getattr(node, '_pytree__nodes')", False),
    ],
)
def test_the_search_finds_what_it_searches_for(line, kept) -> None:
    assert all(map(_promised, _names(ast.parse(line)))) is kept


def test_nothing_without_a_promise_is_written_elsewhere() -> None:
    found = [
        f"{file.relative_to(PACKAGE)}: {name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.relative_to(PACKAGE).as_posix() not in PLACES
        for name in _names(ast.parse(file.read_text()))
        if not _promised(name)
    ]
    assert found == []


def test_a_name_that_is_gone_is_one_sentence(monkeypatch) -> None:
    monkeypatch.setitem(private._FEATURES, "jax._src.gone.thing", "sw.something")
    with pytest.raises(private.MissingInternal) as caught:
        private.reach("jax._src.gone.thing")
    version, tested = importlib.metadata.version("jax"), " and ".join(private.TESTED["jax"])
    assert str(caught.value) == (
        f"sw.something needs jax._src.gone.thing, which jax {version} does not have "
        f"(no jax._src.gone): Shardwise is tested with jax {tested}"
    )
    (row,) = [row for row in private.probe() if row.problem]
    assert (row.name, row.feature) == ("jax._src.gone.thing", "sw.something")
    assert row.problem == str(caught.value)


def test_the_door_has_all_of_it() -> None:
    """A room imports from the door; what is not there cannot be reached from another room."""
    own = {"reach", "equation_frames", "open_jaxpr", "tracer_searches"}
    functions = {
        name
        for name, value in vars(private).items()
        if getattr(value, "__module__", None) == private.__name__ and not name.startswith("_")
    }
    assert {name for name in functions - own if not hasattr(_jax, name)} == set()


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory) -> tuple[list[str], Path]:
    """What the script prints, and the folder that it was given."""
    folder = tmp_path_factory.mktemp("poisoned")
    done = subprocess.run(
        [sys.executable, str(POISONED), str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), folder


def test_planning_needs_none_of_it(poisoned) -> None:
    lines, folder = poisoned
    assert [line for line in lines if ": " not in line] == [
        *("mesh", "layout", "tensor", "check", "plan", "report", "shard", "init"),
        *("simulate", "blocked"),
    ]
    assert "<html" in (folder / "report.html").read_text()[:200]


def test_what_needs_it_says_so(poisoned) -> None:
    told = dict(line.split(": ", 1) for line in poisoned[0] if ": " in line)
    assert told.keys() == {"compile", "absent", "distributed", "save"}
    needs = {
        "compile": "sw.compile needs jaxlib.mlir.ir.Module, which jaxlib",
        "absent": "sw.compile needs jaxlib.mlir.ir.Module, which jaxlib",
        "distributed": "detecting a cluster in sw.distributed needs jax._src.clusters",
        "save": "sw.Checkpoints needs orbax.checkpoint.future",
    }
    for feature, sentence in needs.items():
        assert sentence in told[feature], feature
        assert "Shardwise is tested with" in told[feature]


def test_the_compilers_process_passes_it_on(tmp_path, monkeypatch) -> None:
    worker = tmp_path / "worker.py"
    lines = run._WORKER.read_text()
    assert "    device_list = reach(" in lines
    gone = "    import jaxlib._jax as names\n\n    del names.DeviceList\n    device_list = reach("
    worker.write_text(lines.replace("    device_list = reach(", gone))
    monkeypatch.setattr(run, "_WORKER", worker)
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    module = private.module_bytes(lowered.compiler_ir("stablehlo"))
    with pytest.raises(private.MissingInternal, match="sw.compile needs jaxlib._jax.DeviceList, "):
        run.compile_absent(module, None, {"data": 1}, {}, str(tmp_path), show=False)


def test_doctor_says_what_would_not_work(monkeypatch) -> None:
    monkeypatch.setitem(private.TESTED, "jax", ("0.1",))
    monkeypatch.setitem(private._FEATURES, "jax._src.gone.thing", "sw.something")
    monkeypatch.setattr(doctor, "_devices", lambda: "none")
    found = doctor._doctor()
    validate("doctor", found)
    assert found["untested"] == ["jax"]
    version = found["versions"]["jax"]
    assert doctor._tested(found).startswith("tested with jax 0.1, flax 0.12.8 and 0.12.12, optax ")
    assert doctor._tested(found).endswith(f"; not with jax {version}")
    (row,) = [row for row in found["internals"] if row["problem"]]
    assert row["problem"].startswith("sw.something needs jax._src.gone.thing, which jax ")
