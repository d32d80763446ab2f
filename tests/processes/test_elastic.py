"""Elastic runs of real processes: they lose some, go on, and end with the losses they would have had."""

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from forked import Forked

from shardwise._processes import Elastic, launch_elastic
from shardwise._processes.elastic import keep_pulse

SCRIPTS = Path(__file__).parents[1] / "scripts"
TOLERANCE = 2e-5


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Run:
    """An elastic run, and what it has printed so far."""

    def __init__(self, processes, back_seconds, directory, steps, seconds, script="elastic.py"):
        command = [sys.executable, str(SCRIPTS / "launch.py"), "--elastic", str(back_seconds)]
        command += [str(processes), "1", sys.executable, str(SCRIPTS / script)]
        names = ("SHARDWISE_", "XLA_FLAGS", "JAX_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        self.directory, self.lines = directory, []
        self.process = Forked(
            [*command, *map(str, (directory, steps, seconds))],
            env=kept | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()

    @property
    def text(self):
        return "".join(self.lines)

    def until(self, pattern, seconds=120):
        """Reads until a line matches, and returns the match."""
        end = time.monotonic() + seconds
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
            assert time.monotonic() < end, self.text
        raise AssertionError(self.text)

    def send(self, number, index):
        """Sends a signal to a process of the current round."""
        found = [line for line in self.lines if re.match(rf"\[{index}\] pid {index} ", line)]
        os.kill(int(found[-1].split()[3]), number)

    def end(self, code=0):
        self.lines += self.process.communicate(timeout=120)[0].splitlines(keepends=True)
        assert self.process.returncode == code, self.text
        return self.text

    def segments(self, processes):
        """Returns from which step on the run was on how many processes."""
        found, count = [], processes
        for line in self.lines:
            if match := re.search(r"starting again with (\d+) of", line):
                count = int(match[1])
            elif match := re.match(r"\[0\] resumed from step (\d+) in", line):
                found.append((int(match[1]), count))
            elif "nothing was saved yet" in line:
                found.append((0, count))
        return found

    def assert_losses(self, processes, last):
        assert_losses(self.directory, self.segments(processes), processes, last)


def assert_losses(directory, segments, processes, last):
    """Every step is there, with the loss of a run that was on the same meshes."""
    rows = map(json.loads, (directory / "logs/metrics.jsonl").read_text().splitlines())
    found = {row["step"]: row["loss"] for row in rows}
    wanted = dict(load("elastic").losses_on(segments, processes, last))
    assert sorted(found) == sorted(wanted)
    steps = sorted(wanted)
    np.testing.assert_allclose(
        [found[n] for n in steps], [wanted[n] for n in steps], rtol=TOLERANCE
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_four_that_lose_two_end_with_the_losses_that_they_would_have_had(tmp_path):
    with Run(4, 600, tmp_path, 40, 0.005) as run:
        run.until(r"step 9/40")
        run.send(signal.SIGKILL, 0)  # the coordinator
        run.until(r"process 0 was killed by SIGKILL; starting again with 3 of 4 processes")
        first = int(run.until(r"resumed from step (\d+) in memory")[1])
        assert (
            first >= 4
        )  # steps 5 to 8 are repeated if the kill came before their copy was complete
        seconds = float(run.until(r"step \d+ finished (\S+) s after the loss \(measured\)")[1])
        assert seconds < 60
        run.until(rf"step {first + 9}/40")
        run.send(signal.SIGSTOP, 2)  # one that falls silent
        run.until(r"process 2 stopped responding; starting again with 2 of 4 processes")
        second = int(run.until(r"resumed from step (\d+) in memory")[1])
        assert second >= first + 9 - 7
        text = run.end()
    assert "going on with 3 processes of 4: accumulate=2 instead of 1" in text
    assert "going on with 2 processes of 4: accumulate=2 instead of 1" in text
    assert "copies in memory every 4 steps, on two hosts" in text
    run.assert_losses(4, 40)


def test_one_killed_in_a_save_comes_back_and_the_run_grows_again(tmp_path):
    with Run(2, 1, tmp_path, 60, 0.01) as run:
        run.until(r"step 1/60")
        until = time.monotonic() + 60
        while not [*tmp_path.glob("10*tmp*")]:  # the save of step 10 has begun
            assert time.monotonic() < until
            time.sleep(0.002)
        run.send(signal.SIGKILL, 1)
        run.until(r"process 1 was killed by SIGKILL; starting again with 1 of 2 processes")
        assert int(run.until(r"resumed from step (\d+) in")[1]) in (8, 10)
        saved = int(run.until(r"saved to .* at step (\d+), to go on with more processes")[1])
        assert saved % 10 == 0
        run.until(r"a checkpoint was saved; starting again with 2 of 2 processes")
        assert int(run.until(r"resumed from step (\d+) in")[1]) == saved
        # One is asked to stop, as a host that is preempted: the other goes on.
        run.until(rf"step {saved + 2}/60")
        run.send(signal.SIGTERM, 0)
        run.until(r"process 0 was asked to stop and has saved; starting again with 1 of 2")
        run.until(r"resumed from step (\d+) in")
        # All are asked to stop: the run ends.
        run.until(r"step \d+ finished")
        run.process.send_signal(signal.SIGTERM)
        run.end(143)
        last = int(re.findall(r"stopped after step (\d+)", run.text)[-1])
    run.assert_losses(2, last)


def tasks_of_slurm(count, directory, memory, port):
    """Starts the tasks of a Slurm step, each on a host of its own."""
    names = ("SHARDWISE_", "XLA_FLAGS", "JAX_", "SLURM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    common = {
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(count),
        "SLURM_STEP_NUM_TASKS": str(count),
        "JAX_COORDINATOR_PORT": str(port),
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_PLATFORMS": "cpu",
        "SHARDWISE_ELASTIC_MOST": "2",
    }
    return [
        Forked(
            [sys.executable, str(SCRIPTS / "elastic.py"), str(directory), "30", "0.002"],
            env=kept
            | common
            | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}
            | {"SHARDWISE_COPIES": str(memory / f"host-{i}")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(count)
    ]


def test_slurm_starts_fewer_tasks_which_find_the_copies_of_the_host_that_is_left(tmp_path):
    """What `examples/cluster/slurm_elastic.sh` does, with processes that stand for hosts."""
    tasks = tasks_of_slurm(2, tmp_path / "run", tmp_path, free_port())
    for line in tasks[0].stdout:
        if "step 9/30" in line:
            break
    tasks[1].kill()
    text, _ = tasks[0].communicate(timeout=60)
    assert tasks[0].returncode == 75, text
    tasks[1].communicate()
    shutil.rmtree(tmp_path / "host-1")
    (task,) = tasks_of_slurm(1, tmp_path / "run", tmp_path, free_port())
    text, _ = task.communicate(timeout=60)
    assert task.returncode == 0, text
    assert "going on with 1 process of 2: accumulate=2 instead of 1" in text
    first = int(re.search(r"resumed from step (\d+) in memory", text)[1])
    assert first in (4, 8)
    assert_losses(tmp_path / "run", [(first, 1)], 2, 30)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"least": 0}, "the number of processes to go on with must be a positive integer, got 0"),
        ({"least": 3}, "cannot go on with at least 3 processes, since it has 2"),
        ({"back_seconds": -1.0}, "must be a finite number of at least 0, got -1.0"),
    ],
    ids=["no minimum", "more than there are", "before it is lost"],
)
def test_wrong_inputs(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        launch_elastic([sys.executable, "-c", ""], 2, **options)


def test_an_error_of_the_program_ends_the_run(capfd):
    code = "import os, sys; print(os.environ['SHARDWISE_COPIES']); sys.exit(3)"
    assert launch_elastic([sys.executable, "-c", code], 1) == 3
    out, err = capfd.readouterr()
    assert "process 0 exited with code 3, which ends the run" in err
    folder = Path(out.split()[1])
    assert folder.name == "memory" and not folder.parent.exists()


def test_what_a_killed_launcher_left_in_memory_is_removed_by_the_next():
    code = "import os, time; print(os.environ['SHARDWISE_ELASTIC'], flush=True); time.sleep(60)"
    command = "import sys; from shardwise._processes import launch_elastic as f; f(sys.argv[1:], 1)"
    with Forked(
        [sys.executable, "-c", command, sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        folder = Path(launcher.stdout.readline().split()[1])
        launch_elastic([sys.executable, "-c", ""], 1)
        assert folder.exists()  # its launcher is alive
        launcher.kill()
    launch_elastic([sys.executable, "-c", ""], 1)
    assert not folder.exists()


def test_losses_without_a_step_in_between_end_the_run(capfd):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert launch_elastic([sys.executable, "-c", code], 2, back_seconds=0) == 75
    assert "lost 5 times in a row before a step was finished" in capfd.readouterr().err


def test_the_only_process_that_is_left_falls_silent(capfd):
    code = """if True:
        import os, pathlib, signal
        round = os.environ["SHARDWISE_ELASTIC_ROUND"]
        pathlib.Path(os.environ["SHARDWISE_ELASTIC"], f"pulse-{round}").write_text("0.3")
        if round == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
    """
    assert launch_elastic([sys.executable, "-c", code], 1, back_seconds=0) == 0
    said = capfd.readouterr().err
    assert "process 0 stopped responding; starting again with 1 of 1 processes" in said


def test_a_process_that_is_alone_shows_that_it_responds(tmp_path, monkeypatch):
    elastic = Elastic(tmp_path, 2, None, 3)
    for name, value in elastic.variables().items():
        monkeypatch.setenv(name, value)
    assert elastic.pulse() is None
    keep_pulse(0.06)
    seconds, first = elastic.pulse()
    assert seconds == 0.06
    until = time.monotonic() + 10
    while elastic.pulse()[1] == first:
        assert time.monotonic() < until
        time.sleep(0.01)
    (tmp_path / "pulse-3").unlink()  # as the launcher does at the end, which ends it
