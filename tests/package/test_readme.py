"""What the README shows is run: its Python, what it prints, and both sides of its diff."""

import os
import re
import sys
from pathlib import Path

import forked
import jax
import numpy as np
import pages
from flax import nnx

import shardwise as sw

README = Path(__file__).parents[2] / "README.md"


# As a script of a user's own: what it initialises, trains, saves and digests are 21 million
# parameters, which take twice as long without the compiler's usual optimisation.
SCRIPT = """
import pathlib, sys, warnings
warnings.simplefilter("error")
import pages
print(pages.run_all(pathlib.Path(sys.argv[1]), "train.py"))
"""


def test_readme_blocks_print_what_they_show(tmp_path):
    usual = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    usual["PYTHONPATH"] = os.pathsep.join(sys.path)  # as pytest has it, with tests/support
    done = forked.run([sys.executable, "-c", SCRIPT, str(README)], cwd=tmp_path, env=usual)
    # The compiler may say that it replicates one array of the step; nothing else is printed.
    rest = re.sub(r"(?m)^W\d{4} .*Involuntary full rematerialization.*\n", "", done.stderr)
    assert (done.returncode, done.stdout, rest) == (0, "3\n", "")


def test_both_sides_of_the_diff_place_the_same_kernels():
    (diff,) = [text for language, text in pages.blocks(README) if language == "diff"]
    models = {}
    for side in "-+":
        lines = [line[1:] for line in diff.splitlines() if line[:1] in (side, " ")]
        scope = {
            "jax": jax,
            "nnx": nnx,
            "sw": sw,
            "mesh": sw.mesh("data=2,model=4", on="cpu:8"),
            "init": nnx.initializers.lecun_normal(),
            "x": jax.ShapeDtypeStruct((8, 64), "float32"),
        }
        pages.run("\n".join(lines), "README.md", scope)
        models[side] = scope["model"]
    for name in ("up", "down"):
        before, after = (getattr(models[side], name).kernel.get_value() for side in "-+")
        assert before.sharding.is_equivalent_to(after.sharding, 2), name
        assert not after.is_fully_replicated
        np.testing.assert_array_equal(before, after)


def test_it_has_the_two_commands_that_ci_runs():
    lines = README.read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line.startswith("python3 -m venv")]
    assert [command.split(".venv/bin/")[-1] for command in commands] == [
        "shardwise demo",
        "pytest -n 2",
    ]


def test_it_is_read_in_four_minutes():
    assert len(README.read_text(encoding="utf-8").split()) < 1200
