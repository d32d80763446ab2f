"""Each file under examples/ runs simulated and on eight devices, and is right both times."""

import runpy
import sys
from pathlib import Path

import forked
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("real", [False, True], ids=["simulated", "real"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_equals_the_unsplit_computation(file, real, capsys):
    # The largest difference of values that add up to thousands, in float32.
    assert runpy.run_path(str(file))["main"](real) < 5e-4
    assert ("(modelled)" in capsys.readouterr().out) == (not real and "pipeline" not in file.stem)


def test_there_are_four():
    names = {"data_parallel", "tensor_parallel", "pipeline_parallel", "ring_attention"}
    assert {file.stem for file in FILES} == names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_is_one_page(file):
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 80
    assert f"python examples/{file.name} --real" in "\n".join(lines[:6])


@pytest.mark.once
def test_lora_from_a_folder_to_a_folder_and_text(tmp_path, run):
    pytest.importorskip("qwix")
    file = EXAMPLES / "finetune" / "lora.py"
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 130
    losses, text = runpy.run_path(str(file))["main"](tmp_path, steps=6, show=False)
    assert (
        losses[-1] < losses[0] - 0.02 and text.startswith(b"a rose is a rose") and len(text) == 40
    )
    # The commands that it names; the run is complete, and finds that its base is the same.
    options = ["--mesh", "data=2,model=4", "--on", "cpu:8", "--strategy", "fsdp+tensor"]
    status, out, _ = run("check", f"{file}:recipe", *options)
    assert status == 0 and out.endswith("no findings\n"), out
    more = ["--steps", "6", "--checkpoints", str(tmp_path / "run"), "--resume", "--trained-only"]
    status, _, err = run(
        "train", f"{file}:recipe", *options, *more, "--weights", str(tmp_path / "base")
    )
    assert status == 0, err
    status, _, err = run("train", f"{file}:recipe", *options, *more)
    assert status == 2 and "was trained with other values of blocks.0.attention.k" in err


@pytest.mark.once
def test_the_budget_of_a_user_s_own_test():
    """As a user would run it."""
    path = EXAMPLES / "ci" / "test_budget.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    done = forked.run(command, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "..." in done.stdout
