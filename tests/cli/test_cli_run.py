"""The commands that run: `train`, `checkpoints`, `launch` and `demo`."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import forked
import numpy as np
import pages
import pytest

FILES = {
    "small.py": """
import jax
import numpy as np
import optax
import shardwise as sw
from flax import nnx

def make():
    return nnx.Linear(16, 32, rngs=nnx.Rngs(0))

def loss(model, x):
    return (model(x) ** 2).mean()

batch = jax.ShapeDtypeStruct((8, 16), "float32")
recipe = sw.Recipe(model=make, loss=loss, optimizer=optax.adamw(1e-3), batch=batch)
plain = sw.Recipe(model=make, loss=loss, optimizer=optax.sgd(1e-3), batch=batch)
data = sw.data(np.ones((64, 16), "float32"))
""",
    "bare.py": "from small import recipe",
    "train.py": """
import jax, optax
import shardwise as sw
from flax import nnx

recipe = sw.Recipe(
    model=lambda: nnx.Embed(64, 16, rngs=nnx.Rngs(0)), loss=lambda model, x: (model(x) ** 2).mean(),
    optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((8, 16), "int32"),
)
""",
}
pytestmark = pytest.mark.usefixtures("folder")
SCRIPTS = Path(__file__).parents[1] / "scripts"
RUN = ("--mesh", "data=8", "--on", "cpu:8", "--strategy", "dp")


def test_train_saves_and_resumes_and_checkpoints_lists(run):
    train = ("train", "small.py:recipe", *RUN, "--checkpoints", "runs/a", "--every", "2")
    status, out, err = run(*train, "--steps", "4", "--logs", "logs")
    assert (status or 0, out) == (0, "") and "step 4/4  loss " in err
    assert [
        json.loads(line)["step"] for line in Path("logs/metrics.jsonl").read_text().splitlines()
    ] == [1, 4]

    status, out, err = run(*train, "--steps", "6")
    assert status == 2
    assert err == (
        "shardwise: runs/a has checkpoints up to step 4: give --resume to continue from there, or "
        "another directory\n"
    )
    status, out, err = run(*train, "--steps", "6", "--resume")
    assert status in (None, 0) and "resumed from step 4" in err and "step 6/6" in err

    status, out, err = run("checkpoints", "runs/a")
    assert status in (None, 0)
    lines = out.splitlines()
    assert lines[0].split() == ["step", "size", "mesh", "devices", "processes", "saved"]
    assert [line.split()[0] for line in lines[1:4]] == ["2", "4", "6"]
    assert lines[1].split()[1:5] == ["6.4", "KiB", "data=8", "8"]
    assert lines[4].startswith("3 checkpoints in ")
    rows = json.loads(run("checkpoints", "runs/a", "--format", "json")[1])
    assert [(row["step"], row["position"]) for row in rows] == [(2, 16), (4, 32), (6, 48)]

    preflight = ("checkpoints", "runs/a", "--mesh", "data=4", "--strategy", "dp", "--preflight")
    status, out, err = run(*preflight, "small.py:recipe")
    assert status in (None, 0)
    assert out == ("no findings\nstep 6: 6.4 KiB in total; one process reads 6.4 KiB (exact)\n")
    status, out, err = run(*preflight, "small.py:plain", "--step", "4")
    assert status == 1 and out.startswith(
        "error[SW402] extra-in-checkpoint: optimizer.0.count\n"
        "  the checkpoint has int32[], but the recipe has no such array\n"
        "  help: resume with the optimizer that it was trained with; or restore with that optimizer, and "
        "start a new run from the restored model\n"
        "error[SW402] extra-in-checkpoint: optimizer.0.mu.**\n"
        "  2 arrays, the first optimizer.0.mu.bias: the checkpoint has float32["
    )
    assert out.count("error[SW402] extra-in-checkpoint") == 3 and "5 errors, 0 warnings" in out
    rows = json.loads(run(*preflight, "small.py:plain", "--format", "json")[1])["findings"]
    assert [row["path"] for row in rows] == [
        *("optimizer.0.count", "optimizer.0.mu.bias", "optimizer.0.mu.kernel"),
        *("optimizer.0.nu.bias", "optimizer.0.nu.kernel"),
    ]
    status, out, err = run("train", "small.py:plain", *train[2:], "--steps", "8", "--resume")
    assert status == 2 and err.splitlines()[-1].startswith(
        "shardwise: 5 findings: optimizer.0.count: SW402 the checkpoint has int32[], but the recipe has "
        "no such array; optimizer.0.mu.** (2 arrays, the first optimizer.0.mu.bias): SW402 "
    )
    assert err.endswith(
        " (help: resume with the optimizer that it was trained with; or restore with that optimizer, "
        "and start a new run from the restored model)\n"
    )

    rows = json.loads(run("checkpoints", "runs/a", "--step", "4", "--format", "json")[1])
    assert [row["step"] for row in rows] == [4]
    out = run("checkpoints", "runs/a", "--step", "4")[1]
    assert out.splitlines()[1].split()[0] == "4" and "1 checkpoint in " in out
    status, out, err = run("checkpoints", "runs/a", "--step", "3")
    assert status == 2 and err.endswith("runs/a has no step 3: it has 2, 4, 6\n")


WRONG = {
    **{
        f"{option} and no preflight": (
            ("checkpoints", "runs/a", option, value),
            f"{option} only applies to a preflight: also give --preflight TARGET, the Recipe to restore with",
        )
        for option, value in (
            *(("--mesh", "data=8"), ("--on", "cpu:8"), ("--strategy", "dp")),
            *(("--rules", "rules.py"), ("--inputs", "int32[8]")),
        )
    },
    "a negative step": (
        ("checkpoints", "runs/a", "--step", "-1"),
        "--step must be a non-negative integer, got -1",
    ),
    "no recipe": (
        ("train", "small.py:make", *RUN, "--steps", "1"),
        "target 'small.py:make' is a function: train needs a Recipe, which has a loss, an "
        "optimizer and a batch",
    ),
    "no data": (
        ("train", "bare.py:recipe", *RUN, "--steps", "1"),
        "there is no training data: give --data, such as --data tokens.npy --length 128, or define data in bare.py, as shardwise.examples.text does",
    ),
    "no such data": (
        ("train", "small.py:recipe", *RUN, "--steps", "1", "--data", "tokens.npy", "--length", "8"),
        "the token file tokens.npy does not exist",
    ),
    "resume from nowhere": (
        ("train", "small.py:recipe", *RUN, "--steps", "1", "--resume"),
        "--every, --minutes, --resume and --trained-only need --checkpoints DIR",
    ),
    "no steps": (
        ("train", "small.py:recipe", *RUN, "--steps", "0"),
        "--steps must be a positive integer, got 0",
    ),
    "no devices": (
        ("train", "small.py:recipe", "--mesh", "data=8", "--on", "none", "--steps", "1"),
        "the layout's mesh data=8 has no devices, so nothing can be placed on it: give "
        "--on here for the devices present, or --on cpu:8 for virtual ones",
    ),
    "nothing there": (
        ("checkpoints", "away"),
        "{folder}/away does not exist, so it has no checkpoints",
    ),
    "something else": (
        ("checkpoints", "."),
        "{folder} has no checkpoints: it contains bare.py, small.py, train.py",
    ),
    "a preflight onto nothing": (
        ("checkpoints", ".", "--preflight", "small.py:recipe"),
        "--preflight needs --mesh, the mesh to restore onto",
    ),
    "nothing to launch": (
        ("launch", "-n", "2", "--", "no-such-program"),
        None,
    ),
    "no processes": (("launch", "-n", "0", "--", "true"), None),
    "too short a demo": (
        ("demo", "--steps", "1"),
        "--steps must be at least 4, got 1",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_run_is_one_sentence(run, folder, case):
    arguments, message = WRONG[case]
    status, out, err = run(*arguments)
    assert (status, out) == (2, "") and err.count("\n") == 1
    if message is not None:
        assert err == f"shardwise: {message.format(folder=folder)}\n"


@pytest.mark.once
def test_launch_returns_the_status_of_its_processes():
    code = "import os, sys; print(os.environ['SHARDWISE_PROCESS']); sys.exit(3)"
    command = [sys.executable, "-m", "shardwise", "launch", "-n", "1", "--", sys.executable]
    done = subprocess.run([*command, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "[0] 0\n")


@pytest.mark.once
@pytest.mark.parametrize("example", [0, 1], ids=["plain", "elastic"])
def test_the_examples_of_launch_s_help_run(run, folder, example):
    line = pages.help_examples(run("launch", "--help")[1])[example]
    np.save(folder / "tokens.npy", np.arange(2000, dtype="uint16") % 64)
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    shell, *words = shlex.split(line)
    assert shell == "shardwise"
    command = [sys.executable, str(SCRIPTS / "launch.py"), *words]
    done = forked.run(command, env={**os.environ, "PATH": path}, cwd=folder)
    assert done.returncode == 0 and "step 2/2" in done.stdout + done.stderr, done.stderr


@pytest.mark.once
def test_demo_shows_a_whole_run(run, tmp_path):
    """As a user runs it: with the compilers for absent chips installed, JAX must not look for any."""
    (line,) = pages.help_examples(run("demo", "--help")[1])
    names = ("JAX_PLATFORMS", "XLA_FLAGS")
    plain = {name: text for name, text in os.environ.items() if name not in names}
    done = forked.run(
        [sys.executable, "-m", *shlex.split(line), "--checkpoints", "runs/demo"],
        env={**plain, "TMPDIR": str(tmp_path)},
        timeout=300,
    )
    out, err = done.stdout, done.stderr
    assert done.returncode == 0, err
    assert all(line.startswith(("step ", "resumed ")) for line in err.splitlines())
    titles = re.findall(r"^\d\. ([\w ]+):", out, re.MULTILINE)
    assert titles == ["Lay out", "Check", "Initialise", "Train", "Restore", "Compare"]
    assert "planned against live: no findings" in out
    apart = float(re.search(r"at most (\S+) from", out)[1])
    assert apart < 1e-5
    folder = re.search(r"^on disk +(.+): steps 2, 4$", out, re.MULTILINE)[1]
    assert folder.endswith("runs/demo") and f"resumed from step 2 in {folder}\n" in err
    assert "step 2/2" in err and "step 4/4" in err


ADVICE = {
    "nan": (
        ("nan.py:recipe", "--steps", "3"),
        "the loss is nan at step 1; nothing was saved: give --checkpoints DIR",
    ),
    "ended": (
        ("short.py:recipe", "--steps", "3"),
        "the data ended before step 3 of 3: give --steps 2, or data with more epochs",
    ),
    "length": (
        ("train.py:recipe", "--steps", "1", "--data", "tokens.npy"),
        "the token file tokens.npy must be cut into samples: "
        "give --length N, the number of tokens per sample",
    ),
    "dtype": (
        ("train.py:recipe", "--steps", "1", "--data", "tokens.bin", "--length", "16"),
        "the token file tokens.bin has no header with its dtype: give --dtype, such as uint16",
    ),
    "logs": (
        ("small.py:recipe", "--steps", "1", "--logs", "small.py/logs"),
        "logs cannot be written to small.py/logs: part of the path is a file",
    ),
}


@pytest.mark.parametrize("case", ADVICE)
def test_train_advises_in_options(case, run):
    Path("nan.py").write_text(
        "import small, dataclasses\n"
        "recipe = dataclasses.replace(small.recipe, loss=lambda m, x: small.loss(m, x) * float('nan'))\n"
        "data = small.data\n"
    )
    Path("short.py").write_text(
        "import numpy as np, shardwise as sw\nfrom small import recipe\n"
        "data = sw.data(np.ones((16, 16), 'float32'), epochs=1)\n"
    )
    np.save("tokens.npy", np.zeros(640, "int32"))
    np.zeros(640, "int32").tofile("tokens.bin")
    (target, *options), words = ADVICE[case]
    status, out, err = run("train", target, *RUN, *options)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1] == f"shardwise: {words}"


def test_train_makes_its_virtual_devices_itself(folder):
    """In a process of its own: here, the devices are there already."""
    command = [sys.executable, "-m", "shardwise", "train", "small.py:recipe", *RUN, "--steps", "1"]
    free = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    done = forked.run(command, cwd=folder, env=free, timeout=120)
    assert done.returncode == 0 and "step 1/1  loss " in done.stderr, done.stderr
