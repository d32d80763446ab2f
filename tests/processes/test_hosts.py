"""Elastic runs on hosts with a network, a name and memory of their own, started as on clusters."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from forked import Forked
from hosts import Hosts, why_not
from test_elastic import SCRIPTS, assert_losses

import shardwise as sw

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
WHY = why_not()
# Where namespaces may be made, CI requires it: what fails then is no reason to skip.
REQUIRED = os.environ.get("SHARDWISE_TESTS_HOSTS") == "required"
pytestmark = pytest.mark.skipif(
    bool(WHY) and not REQUIRED, reason=f"hosts cannot be made here: {WHY}"
)


class Job:
    """`slurm_elastic.sh` on hosts, as `sbatch` would run it on the first of them."""

    def __init__(self, hosts, folder, train):
        text = (EXAMPLES / "slurm_elastic.sh").read_text()
        # Of its lines, these are other here: one task for each node, what is run, and a short wait.
        for line, other in {
            "per_node=8": "per_node=1",
            "python examples/cluster/train.py": " ".join(train),
            "sleep 10": "sleep 0.5",
            "SHARDWISE_COPIES=/dev/shm/": "SHARDWISE_COPIES=/dev/shm/test-",
        }.items():
            assert text.count(line) == 1 or line.startswith("python"), line
            text = text.replace(line, other)
        (folder / "job.sh").write_text(text)
        (folder / "hosts.json").write_text(json.dumps(hosts.about()))
        programs = folder / "bin"
        programs.mkdir()
        for name in ("srun", "scontrol", "sinfo"):
            (programs / name).write_text(
                f'#!/bin/sh\nexec {sys.executable} {SCRIPTS}/slurm.py {name} "$@"\n'
            )
            (programs / name).chmod(0o755)
        dropped = ("SHARDWISE_", "XLA_FLAGS", "JAX_", "SLURM_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        self.lines = []
        self.process = subprocess.Popen(
            ["bash", str(folder / "job.sh")],
            env=kept
            | {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_HOSTS": str(folder / "hosts.json")}
            | {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": ",".join(hosts.names)}
            | {"SLURM_JOB_NUM_NODES": str(len(hosts.names)), "PYTHONUNBUFFERED": "1"}
            | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()

    def until(self, pattern, seconds=150):
        end = time.monotonic() + seconds
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
            assert time.monotonic() < end, "".join(self.lines)
        raise AssertionError("".join(self.lines))


def test_the_slurm_script_goes_on_without_a_host_that_is_cut_off_and_one_that_dies(tmp_path):
    names = [f"node{i}" for i in range(3)]
    train = [sys.executable, str(SCRIPTS / "elastic.py"), str(tmp_path / "run"), "40", "0.002"]
    with Hosts(*names) as hosts, Job(hosts, tmp_path, train) as job:
        job.until("attempt 0: 3 of 3 tasks on node0 node1 node2")
        job.until(r"node0: step 9/40")
        hosts.cut("node2")  # silently: its processes run on, and nothing reaches them
        job.until("attempt 1: 2 of 3 tasks on node0 node1")
        first = int(job.until(r"node0: resumed from step (\d+) in memory")[1])
        assert first >= 4
        job.until(rf"node0: step {first + 9}/40")
        hosts.kill("node0")  # the coordinator, with its memory
        job.until("attempt 2: 1 of 3 tasks on node1")
        second = int(job.until(r"node1: resumed from step (\d+) in memory")[1])
        assert second >= first + 9 - 7
        job.lines += job.process.communicate(timeout=120)[0].splitlines(keepends=True)
        text = "".join(job.lines)
        assert job.process.returncode == 0, text
    assert "going on with 2 processes of 3: accumulate=2 instead of 1" in text
    assert "going on with 1 process of 3: accumulate=3 instead of 1" in text
    assert "copies in memory every 4 steps, on two hosts" in text
    # Those that are left name it, and so does it: from where it is, the others are gone.
    assert re.search(
        r"node[01]: shardwise: process 2 of 3 \(pid \d+ on host node2\) was lost", text
    )
    assert_losses(tmp_path / "run", [(first, 2), (second, 1)], 3, 40)


class Pods:
    """The pods of `jobset.yaml` on hosts, as many as are given, with what Kubernetes tells each."""

    def __init__(self, hosts, folder, arguments):
        (jobset,) = [
            part
            for part in yaml.safe_load_all((EXAMPLES / "jobset.yaml").read_text())
            if part["kind"] == "JobSet"
        ]
        (kind,) = jobset["spec"]["replicatedJobs"]
        pod = kind["template"]["spec"]["template"]["spec"]
        assert kind["template"]["spec"]["completionMode"] == "Indexed"
        (container,) = pod["containers"]
        assert container["command"] == ["python", "examples/cluster/train.py"]
        dropped = ("SHARDWISE_", "XLA_FLAGS", "JAX_", "SLURM_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        kept |= {row["name"]: row["value"] for row in container["env"]}
        kept |= {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JAX_PLATFORMS": "cpu"}
        about = {
            "jobset": jobset["metadata"]["name"],
            "job": f"{jobset['metadata']['name']}-{kind['name']}-0",
            "pods": hosts.address,
            "parallelism": len(hosts.names),
        }
        self.processes = [
            Forked(
                [sys.executable, str(SCRIPTS / "enter_host.py"), str(holder["pid"]),
                 str(SCRIPTS / "pod.py"), json.dumps(about), *arguments],
                env=kept
                | {"HOSTNAME": name, "JOB_COMPLETION_INDEX": str(index)}
                | {"JAX_NUM_CPU_DEVICES": "1"},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for index, (name, holder) in enumerate(
                (name, hosts.about()[name]) for name in hosts.names
            )
        ]  # fmt: skip
        self.lines = []

    def until(self, pattern):
        """Reads what pod 0 prints until a line matches."""
        for line in self.processes[0].stdout:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError("".join(self.lines))

    def end(self):
        """Waits for all, and returns their exit codes."""
        for process in self.processes:
            text, _ = process.communicate(timeout=100)
            self.lines += text.splitlines(keepends=True)
        return [process.returncode for process in self.processes]


def test_pods_are_started_again_with_fewer_and_with_all(tmp_path):
    names = ["shardwise-train-0-0", "shardwise-train-0-1"]
    train = [str(SCRIPTS / "elastic.py"), str(tmp_path / "run")]
    with Hosts(*names, domain="shardwise") as hosts:
        pods = Pods(hosts, tmp_path, [*train, "30", "0.05"])
        pods.until(r"step 12/30")
        while 10 not in sw.Checkpoints(tmp_path / "run").steps():  # saved meanwhile
            time.sleep(0.01)
        hosts.kill(names[1])
        # JAX may abort the other before it has found out whom it lost: then it cannot name it.
        codes = pods.end()
        assert codes[0] in (75, -6) and codes[1] == -9, "".join(pods.lines)
    # A node is gone: the JobSet is applied again with one pod. Its memory is new.
    with Hosts(names[0], domain="shardwise") as hosts:
        pods = Pods(hosts, tmp_path, [*train, "20", "0"])
        pods.until("going on with 1 process of 2: accumulate=2 instead of 1")
        first = int(pods.until(rf"resumed from step (\d+) in {tmp_path}")[1])
        assert first == 10 and pods.end() == [0]
    with Hosts(*names, domain="shardwise") as hosts:
        pods = Pods(hosts, tmp_path, [*train, "30", "0"])
        assert int(pods.until(rf"resumed from step (\d+) in {tmp_path}")[1]) == 20
        assert pods.end() == [0, 0], "".join(pods.lines)
    assert_losses(tmp_path / "run", [(10, 1), (20, 2)], 2, 30)
