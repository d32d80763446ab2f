"""Training on many processes: the same losses, one checkpoint for all, and no hanging."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parent / "processes" / "fit.py"
TOLERANCE = 2e-5  # relative, float32: sums are rounded in another order
ENDS_WITHIN = 20  # seconds: the timeout of 10 that the script gives, and 10 more


def start(directory, axes, steps, processes, *options):
    devices = 8 // processes
    command = [sys.executable, "-m", "shardwise", "launch", "-n", str(processes)]
    command += ["--devices", str(devices), "--", sys.executable, str(SCRIPT)]
    command += [str(directory), axes, str(steps), *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )


def run(directory, axes, steps, processes):
    process = start(directory, axes, steps, processes)
    output = process.communicate(timeout=180)[0]
    assert process.returncode == 0, output[:4000]
    return losses(directory)


def losses(directory):
    """Returns the loss of each step, the last one told where a step was taken again."""
    lines = (Path(directory) / "logs" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["loss"] for row in rows}


def read_until(process, pattern, seconds=120):
    """Returns all matches' lines up to one that matches."""
    lines = []
    until = time.monotonic() + seconds
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
        assert time.monotonic() < until, "".join(lines)
    raise AssertionError("".join(lines))


def pids(lines):
    found = (re.search(r"pid (\d+) (\d+)", line) for line in lines)
    return {int(match[1]): int(match[2]) for match in found if match}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The losses of one process."""
    return run(tmp_path_factory.mktemp("one"), "data=8", 12, 1)


@pytest.mark.parametrize("processes", [2, 4])
def test_losses_are_those_of_one_process(straight, tmp_path, processes):
    found = run(tmp_path, "data=4,model=2" if processes == 4 else "data=8", 12, processes)
    np.testing.assert_allclose(
        [found[n] for n in range(1, 13)], [straight[n] for n in range(1, 13)], rtol=TOLERANCE
    )


def test_checkpoint_by_two_goes_on_by_four_and_by_one(straight, tmp_path):
    run(tmp_path, "data=8", 5, 2)
    assert json.loads((tmp_path / "5/about/about.json").read_text())["processes"] == 2
    run(tmp_path, "data=2,model=4", 10, 4)
    found = run(tmp_path, "data=8", 12, 1)
    assert sorted(found) == list(range(1, 13))
    np.testing.assert_allclose(
        [found[n] for n in range(1, 13)], [straight[n] for n in range(1, 13)], rtol=TOLERANCE
    )


def test_one_killed_is_named_and_all_end_and_a_resume_goes_on(straight, tmp_path):
    process = start(tmp_path, "data=8", 1000, 2, "--slow")
    lines = read_until(process, r"step 7/1000")
    os.kill(pids(lines)[1], signal.SIGKILL)
    killed = time.monotonic()
    output = process.communicate(timeout=60)[0]
    assert time.monotonic() - killed < ENDS_WITHIN
    assert process.returncode == 128 + signal.SIGKILL
    assert "process 1 was killed by SIGKILL" in output, output
    found = run(tmp_path, "data=8", 12, 2)
    np.testing.assert_allclose(found[12], straight[12], rtol=TOLERANCE)


def test_sigterm_to_one_stops_all_at_the_same_step(straight, tmp_path):
    process = start(tmp_path, "data=8", 1000, 2, "--slow")
    lines = read_until(process, r"step 6/1000")
    os.kill(pids(lines)[1], signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    stopped = int(re.search(r"stopped after step (\d+), saved to", output)[1])
    steps = [int(p.name) for p in tmp_path.iterdir() if p.name.isdecimal()]
    assert max(steps) == stopped
    found = run(tmp_path, "data=8", max(12, stopped + 2), 2)
    np.testing.assert_allclose(
        [found[n] for n in range(1, 13)], [straight[n] for n in range(1, 13)], rtol=TOLERANCE
    )
