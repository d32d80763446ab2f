"""Training on several processes: the same losses, one shared checkpoint, and no hangs."""

import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import numpy as np
import pytest
from forked import Forked
from models import ZOO

HERE = Path(__file__).parents[1] / "scripts"
TOLERANCE = 2e-5  # relative, float32: sums are rounded in a different order
ENDS_WITHIN = 20  # seconds: the timeout of 10 that the script sets, plus 10
# Many small programs, each run a few times.
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def load(name):
    """Returns a script as a module, to run here, as one process, what it runs as one of many."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(processes, *arguments):
    # As `shardwise launch` does, without its imports.
    command = [sys.executable, str(HERE / "launch.py"), str(processes), str(8 // processes)]
    command += [sys.executable, str(HERE / "fit.py"), *map(str, arguments)]
    return Forked(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    )


def run(processes, *arguments):
    process = start(processes, *arguments)
    output = process.communicate(timeout=180)[0]
    assert process.returncode == 0, output[:4000]


def run_here(directory, axes, steps):
    load("fit").train(directory, axes, steps)
    return losses(directory)


def losses(directory):
    """Returns the loss of each step; for a repeated step, the last one reported."""
    lines = (Path(directory) / "logs" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["loss"] for row in rows}


def read_until(process, pattern, seconds=120):
    """Returns all lines up to the first one that matches."""
    lines = []
    until = time.monotonic() + seconds
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
        assert time.monotonic() < until, "".join(lines)
    raise AssertionError("".join(lines))


def wait_for(path, seconds=60):
    until = time.monotonic() + seconds
    while not path.is_dir():
        assert time.monotonic() < until, path
        time.sleep(0.05)


def pids(lines):
    found = (re.search(r"pid (\d+) (\d+)", line) for line in lines)
    return {int(match[1]): int(match[2]) for match in found if match}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The losses of one process."""
    return run_here(tmp_path_factory.mktemp("one"), "data=8", 12)


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    """The directory of a run on two processes."""
    directory = tmp_path_factory.mktemp("two")
    run(2, directory, "data=8", 12)
    return directory


@pytest.fixture(scope="module")
def by_four(by_two, tmp_path_factory):
    """The directories of two runs by the same four processes: a new one, and one begun by two."""
    new, begun = tmp_path_factory.mktemp("four"), tmp_path_factory.mktemp("two-four")
    shutil.copytree(by_two / "5", begun / "5")
    run(4, new, "data=4,model=2", 12, begun, "data=2,model=4", 10)
    return new, begun


def assert_same(found, straight, first=1, last=12):
    steps = range(first, last + 1)
    np.testing.assert_allclose(
        [found[n] for n in steps], [straight[n] for n in steps], rtol=TOLERANCE
    )


def test_losses_of_two_are_those_of_one_process(straight, by_two):
    assert_same(losses(by_two), straight)


def test_timed_saves_happen_at_the_same_steps_without_waiting(straight, tmp_path):
    run(2, tmp_path, "data=8", 8, "--timed", "--zero2")
    # A save that is due by time happens up to two steps later: no process waits for the others.
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdecimal()) == [3, 6, 8]
    assert_same(losses(tmp_path), straight, last=8)
    # Optimizer state and average were saved in shards, weights were not.
    about = json.loads((tmp_path / "8/about/about.json").read_text())["arrays"]
    names = ("model.up.kernel", "optimizer.0.mu.up.kernel", "ema.up.kernel")
    assert [about[name]["spec"] for name in names] == ["P()", *2 * ["P(None, 'data')"]]


def test_losses_of_four_are_those_of_one_process(straight, by_four):
    assert_same(losses(by_four[0]), straight)


def test_a_checkpoint_of_two_processes_resumes_on_four_and_on_one(straight, by_four):
    begun = by_four[1]
    assert json.loads((begun / "5/about/about.json").read_text())["processes"] == 2
    assert json.loads((begun / "10/about/about.json").read_text())["processes"] == 4
    found = run_here(begun, "data=8", 12)
    assert sorted(found) == list(range(6, 13))
    assert_same(found, straight, first=6)


def test_every_model_of_the_zoo_runs_on_two_processes_as_on_one(tmp_path):
    """Two steps, and one after a restore, of all of them as parts of one model."""
    command = [sys.executable, str(HERE / "launch.py"), "2", "4"]
    command += [sys.executable, str(HERE / "zoo.py"), str(tmp_path)]
    done = forked.run(command, env=os.environ | QUICK, timeout=400)
    line = next((x for x in done.stdout.splitlines() if '"losses"' in x), None)
    assert done.returncode == 0 and line, done.stdout[-2000:] + done.stderr[-4000:]
    two = json.loads(line.removeprefix("[0] "))["losses"]
    one = load("zoo").losses()
    assert len(one) == len(ZOO) and one.keys() == two.keys()
    for name, found in two.items():
        np.testing.assert_allclose(found, one[name], rtol=2e-4, err_msg=name)
        assert len({*found}) == 3, name


def test_one_killed_is_named_and_a_resume_goes_on_until_sigterm_stops_all(straight, tmp_path):
    with start(2, tmp_path, "data=8", 1000, "--slow") as process:
        lines = read_until(process, r"step 7/1000")
        wait_for(tmp_path / "5")  # saves are asynchronous
        os.kill(pids(lines)[1], signal.SIGKILL)
        killed = time.monotonic()
        output = process.communicate(timeout=60)[0]
        assert time.monotonic() - killed < ENDS_WITHIN
    assert process.returncode == 128 + signal.SIGKILL
    assert "process 1 was killed by SIGKILL" in output, output

    with start(2, tmp_path, "data=8", 1000, "--slow") as process:
        lines = read_until(process, r"resumed from step \d+")
        resumed = int(re.search(r"resumed from step (\d+)", lines[-1])[1])
        assert resumed % 5 == 0
        lines += read_until(process, rf"step {resumed + 2}/1000")
        # To one of them: both stop, at the same step.
        os.kill(pids(lines)[1], signal.SIGTERM)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    stopped = int(re.search(r"stopped after step (\d+), saved to", output)[1])
    assert max(int(p.name) for p in tmp_path.iterdir() if p.name.isdecimal()) == stopped

    found = run_here(tmp_path, "data=8", max(12, stopped + 2))
    assert sorted(found) == list(range(1, max(12, stopped + 2) + 1))
    assert_same(found, straight)


# --- processes that differ, and processes that fail -----------------------------------------------


def differ(directory, *options):
    """Returns the exit code, and the output of all processes."""
    command = [sys.executable, str(HERE / "launch.py"), "2", "2"]
    command += [sys.executable, str(HERE / "differ.py"), str(directory), *options]
    done = forked.run(command, timeout=180)
    return done.returncode, done.stdout + done.stderr


NAMED = r"process 1 of 2 \(pid \d+ on host \S+\)"
DIFFERENCES = {
    "rate": "differs from the others in the program of the training step",
    "seed": "differs from the others in the program that initialises the model",
    "loss": "differs from the others in the program of the training step",
    "data": r"differs from the others in the data \(digest of some samples=\w+ instead of ",
    "arguments": r"differs from the others in the arguments of fit \(steps=3 instead of steps=4\): ",
}


@pytest.fixture(scope="module")
def differing(tmp_path_factory):
    """A directory and what two processes wrote that differ in one way after the other."""
    directory = tmp_path_factory.mktemp("differing")
    modes = ["stale", *DIFFERENCES, "corrupt", "directory", "unshared"]
    code, output = differ(directory, ",".join(modes), "exit")
    assert code == 4, output
    return directory, output


def test_processes_that_differ_are_named_by_all(differing):
    _, output = differing
    # The run waits for a directory that one process sees late.
    assert output.count("stale: ran to the end") == 2, output
    for mode, words in DIFFERENCES.items():
        for index in range(2):
            line = rf"\[{index}\] {mode}: ProcessesDiffer: {NAMED} {words}"
            assert re.search(line, output), (mode, index, output)


def test_a_copy_that_changed_on_one_device_is_named_and_not_saved(differing):
    directory, output = differing
    words = (
        r"corrupt: ReplicasDiffer: the replicas of kernel differ after step 2: cpu \d+ of "
        r"process 1 has different values from the other devices; the last good checkpoint is step 2 in"
    )
    assert all(re.search(rf"\[{index}\] {words}", output) for index in range(2)), output
    assert [p.name for p in (directory / "corrupt").iterdir()] == ["2"]


def test_a_directory_that_processes_do_not_share_is_refused_before_training(differing):
    _, output = differing
    words = r"process 1 does not see there what process 0 wrote( to \S+)?: the directory must be on"
    for index, mode in itertools.product(range(2), ("directory", "unshared")):
        line = rf"\[{index}\] {mode}: CheckpointError: checkpoints cannot .*: {words}"
        assert re.search(line, output), output


def losing(directory, mode):
    command = [sys.executable, str(HERE / "launch.py"), "2", "2"]
    command += [sys.executable, str(HERE / "losing.py"), str(directory), mode]
    began = time.monotonic()
    done = forked.run(command, timeout=180)
    assert time.monotonic() - began < 100
    return done.returncode, done.stdout + done.stderr


def test_a_process_that_fails_while_it_saves_is_the_one_that_is_named(tmp_path):
    code, output = losing(tmp_path / "run", "raise")
    assert code == 1 and "shardwise: process 1 exited with code 1; terminating" in output, output
    assert re.search(rf"\[0\] .*{NAMED} failed.*: OSError: the file is away", output), output


def test_a_process_that_is_lost_at_the_start_of_a_save_is_named(tmp_path):
    code, output = losing(tmp_path / "run", "kill")
    assert code == 137 and "shardwise: process 1 was killed by SIGKILL" in output, output
    assert re.search(rf"\[0\] .*{NAMED} was lost", output), output
    assert "CheckpointError" not in output and "donated" not in output, output
    # 127.0.0.1 alone, as the kernel writes it: the coordinator and Gloo.
    (addresses,) = re.findall(r"\[0\] listens on (.*)", output)
    assert set(addresses.split()) <= {"0100007F", "0000000000000000FFFF00000100007F"}, addresses


def test_a_mesh_has_devices_of_every_process(tmp_path):
    code, output = differ(tmp_path, "mesh")
    assert code == 1, output
    words = r"mesh: ValueError: the mesh has 2 of the 4 devices, but none from process 1: each of"
    assert all(re.search(rf"\[{index}\] {words}", output) for index in range(2)), output


def test_a_restore_that_fails_on_one_process_is_raised_by_all(tmp_path):
    code, output = differ(tmp_path, "restore")
    assert code == 1, output
    assert "[1] restore: CheckpointError: its disk is away" in output
    words = rf"\[0\] restore: LostProcess: {NAMED} failed while checking step 2: its disk is away"
    assert re.search(words, output), output


def test_a_read_that_fails_on_one_process_ends_all(tmp_path):
    code, output = differ(tmp_path, "read")
    assert code == 1, output
    assert "process 1 exited with code 1" in output
    assert "[1] read: OSError: the file is away" in output


@pytest.mark.parametrize("wrong", ["target", "data"])
def test_train_fails_on_all_when_one_process_cannot_begin(wrong, tmp_path):
    np.save(tmp_path / "tokens.npy", np.zeros(64 * 64, "int32"))
    right = ["shardwise.examples.text:recipe", "--data", str(tmp_path / "tokens.npy")]
    other = [right[0].replace("recipe", "recipes"), *right[1:]] if wrong == "target" else None
    other = other or [*right[:2], str(tmp_path / "away.npy")]
    options = "--length 64 --mesh data=4 --strategy dp --steps 1".split()
    code = f"""
import os, runpy, sys
lines = {[right + options, other + options]}
sys.argv = ["shardwise", "train", *lines[int(os.environ["SHARDWISE_PROCESS"])]]
runpy.run_module("shardwise", run_name="__main__")
"""
    command = [sys.executable, str(HERE / "launch.py"), "2", "2", sys.executable, "-c", code]
    done = forked.run(command, timeout=120)
    assert done.returncode == 2, done.stderr
    why = {"target": "has no 'recipes'", "data": "away.npy does not exist"}[wrong]
    assert re.search(rf"\[1\] shardwise: .*{why}", done.stderr), done.stderr
    assert re.search(rf"\[0\] shardwise: .*{NAMED} failed while loading .*{why}", done.stderr)
