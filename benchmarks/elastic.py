"""Kills random processes of an elastic run at random moments, and verifies what is left of it.

python benchmarks/elastic.py --kills 50 [--seed 0] [--processes 4] [--silent 0.1] [--keep]

Each kill is SIGKILL, or SIGSTOP for a share of them, to one process, at any moment: while it starts,
restores, trains, copies or saves. Each process stands for a host: what it held in memory is lost with it.
At the end the run is stopped, and the losses of all its steps are compared with those of a run in one
process that was on the same meshes, from the same steps on. Also verified: how many steps were repeated,
that the data were read in the same order, and that each loss was survived. Samples are slow, so that the run has
few steps: after some 5,000, a difference in rounding may decide on which side of zero a ReLU is, and grows.
"""

import argparse
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

RELATIVE = 1e-4
SCRIPT = Path(__file__).parent.parent / "tests" / "scripts" / "elastic.py"


class Run:
    """The run, and what is known of it from what it prints."""

    def __init__(self, directory, processes, log):
        command = [sys.executable, "-m", "shardwise", "launch", "-n", str(processes), "--elastic"]
        command += ["--devices", "1", "--as-hosts", "--back-after", "20", "--", sys.executable]
        command += [str(SCRIPT), str(directory), "1000000", "0.06"]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.log = log.open("w")
        self.pids, self.count, self.step = {}, 0, 0
        self.grows, self.grown = False, 0
        self.segments, self.repeated, self.seconds = [], [], []
        self.sources = {"memory": 0, "checkpoint": 0, "nothing": 0}
        self.finished = threading.Event()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.log.write(f"{time.monotonic() - self.began:8.2f} {line}")
            self.log.flush()
            if found := re.match(r"\[(\d+)\] pid \d+ (\d+) (\d+)", line):
                if int(found[3]) != self.count or int(found[1]) in self.pids:
                    self.pids, self.count = {}, int(found[3])
                self.pids[int(found[1])] = int(found[2])
            elif found := re.match(r"\[0\] resumed from step (\d+) in (.*)", line):
                self.note(int(found[1]), "memory" if found[2] == "memory" else "checkpoint")
            elif "nothing was saved yet" in line:
                self.note(0, "nothing")
            elif found := re.match(r"\[0\] step (\d+)/", line):
                self.step = max(self.step, int(found[1]))
            elif found := re.match(r"shardwise: step \d+ finished (\S+) s after", line):
                self.seconds.append(float(found[1]))
                self.finished.set()
            elif re.match(r"shardwise: .*starting again", line):
                self.pids, self.grows = {}, "a checkpoint was saved" in line

    def note(self, step, source):
        if self.grows:
            self.grown += 1
        else:
            self.sources[source] += 1
            self.repeated.append((self.step - step, source))
        self.segments.append((step, self.count))
        self.step = step


def kill(run, kills, silent, seed):
    """Kills so many processes, and returns how many of them with which signal."""
    rng, done = random.Random(seed), {"SIGKILL": 0, "SIGSTOP": 0}
    while sum(done.values()) < kills and run.process.poll() is None:
        run.finished.clear()
        # Most while it trains, some while it starts or restores.
        if rng.random() < 0.8 and done["SIGKILL"] + done["SIGSTOP"]:
            run.finished.wait(120)
            time.sleep(rng.uniform(0, 6))
        else:
            time.sleep(rng.uniform(0, 12))
        victims = sorted(run.pids)
        if not victims:
            continue
        number = signal.SIGSTOP if rng.random() < silent else signal.SIGKILL
        index = rng.choice(victims)
        try:
            os.kill(run.pids[index], number)
        except (ProcessLookupError, KeyError):
            continue
        done[number.name] += 1
        run.log.write(f"{time.monotonic() - run.began:8.2f} --- {number.name} {index}\n")
    return done


def script():
    spec = importlib.util.spec_from_file_location("elastic_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verify(run, directory, processes):
    """Returns the largest relative difference of losses, and how many steps were compared."""
    rows = [json.loads(line) for line in (directory / "logs/metrics.jsonl").open()]
    losses = {row["step"]: row["loss"] for row in rows}
    last = max(losses)
    missing = set(range(1, last + 1)) - set(losses)
    assert not missing, f"steps without a loss: {sorted(missing)[:10]}"
    import jax

    jax.config.update("jax_num_cpu_devices", processes)
    worst, first = 0.0, None
    for number, loss in script().losses_on(run.segments, processes, last):
        difference = abs(losses[number] - loss) / abs(loss)
        if difference > RELATIVE and first is None:
            first = (number, losses[number], loss)
        worst = max(worst, difference)
    return worst, last, first


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--silent", type=float, default=0.1)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="elastic-"))
    load = os.getloadavg()
    run = Run(directory / "run", args.processes, directory / "log.txt")
    try:
        done = kill(run, args.kills, args.silent, args.seed)
        run.finished.clear()
        run.finished.wait(120)
        time.sleep(5)
        assert run.process.poll() is None, f"the run ended: see {directory}/log.txt"
        run.process.send_signal(signal.SIGTERM)
        code = run.process.wait(120)
        assert code == 143, f"exit code {code}: see {directory}/log.txt"
    finally:
        run.process.kill()
    worst, last, first = verify(run, directory / "run", args.processes)
    most = 2 * script().COPIES - 1
    memory = [steps for steps, source in run.repeated if source == "memory"]
    seconds = sorted(run.seconds)
    print(f"seed {args.seed}, {args.processes} processes, load at the start {load[0]:.1f}, "
          f"at the end {os.getloadavg()[0]:.1f}")  # fmt: skip
    print(f"killed {done['SIGKILL']}, stopped {done['SIGSTOP']}; "
          f"started again {len(run.segments)} times: {run.grown} to grow; after a loss from memory {run.sources['memory']}, from a "
          f"checkpoint {run.sources['checkpoint']}, from nothing {run.sources['nothing']}")  # fmt: skip
    print(f"meshes {[count for _, count in run.segments]}")
    print(
        f"{last} steps; losses differ by {worst:.1e} at most (relative) from the same in one process"
    )
    print(f"repeated steps from memory: {max(memory, default=0)} at most, {most} promised")
    if seconds:
        middle = seconds[len(seconds) // 2]
        print(f"from a loss that was found to the next finished step: median {middle:.1f} s, "
              f"{seconds[-1]:.1f} s at most")  # fmt: skip
    broke = [f"loss of step {first}"] * (first is not None)
    broke += ["repeated steps"] * (max(memory, default=0) > most)
    print("held" if not broke else f"broke: {'; '.join(broke)}; {directory} is kept")
    if not (args.keep or broke):
        shutil.rmtree(directory)
    return 1 if broke else 0


if __name__ == "__main__":
    sys.exit(main())
