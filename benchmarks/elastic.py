"""Kills random processes of an elastic run at random moments, and verifies what is left of it.

python benchmarks/elastic.py --kills 50 [--seed 0] [--processes 4] [--silent 0.1] [--keep]

Each kill is SIGKILL, or SIGSTOP for a share of them, to one process, at any moment: while it starts,
restores, trains, copies or saves. Each process stands for a host: what it held in memory is lost with it.
At the end the run is stopped, and the losses of all its steps are compared

- to the bit with those of a run that nothing disturbs, on the same numbers of processes from the same
  steps on (`elastic_reference.py`);
- with those of one process on the same meshes. It rounds sums otherwise than Gloo does, which training
  enlarges without end, so only the first steps count.

Also verified: how many steps were repeated, that the data were read in the same order, and that each
loss was survived. `faults.py` does the same in short runs.
"""

import argparse
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

import elastic_reference

RELATIVE, UNTIL = 1e-4, 1000
SCRIPTS = Path(__file__).parent.parent / "tests" / "scripts"


class Run:
    """The run, and what is known of it from what it prints."""

    def __init__(self, directory, processes, log, *, forks=False, back=20.0, seconds=0.06):
        train = [
            sys.executable,
            str(SCRIPTS / "elastic.py"),
            str(directory),
            "1000000",
            str(seconds),
        ]
        command = [sys.executable, "-m", "shardwise", "launch", "-n", str(processes), "--elastic",
                   "--devices", "1", "--as-hosts", "--back-after", str(back), "--", *train]  # fmt: skip
        start = subprocess.Popen
        if forks:
            from forked import Forked

            start = Forked
            command = [sys.executable, str(SCRIPTS / "launch.py"), "--elastic", str(back),
                       str(processes), "1", *train]  # fmt: skip
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SHARDWISE_", "JAX_"))}
        kept.pop("XLA_FLAGS", None)
        self.began = time.monotonic()
        self.process = start(
            command, env=kept | {"JAX_PLATFORMS": "cpu"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.log = log.open("w")
        self.pids, self.count, self.step = {}, 0, 0
        self.grows, self.grown, self.last = False, 0, 0
        self.losing = False
        self.segments, self.repeated, self.seconds, self.loads = [], [], [], []
        self.sources = {"memory": 0, "checkpoint": 0, "nothing": 0}
        self.finished = threading.Event()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.note(line)
            if found := re.match(r"\[(\d+)\] pid \d+ (\d+) (\d+)", line):
                if int(found[3]) != self.count or int(found[1]) in self.pids:
                    self.pids, self.count = {}, int(found[3])
                self.pids[int(found[1])] = int(found[2])
            elif found := re.match(r"\[0\] resumed from step (\d+) in (.*)", line):
                self.resumed(int(found[1]), "memory" if found[2] == "memory" else "checkpoint")
            elif "nothing was saved yet" in line:
                self.resumed(0, "nothing")
            elif found := re.match(r"\[0\] step (\d+)/", line):
                self.step = max(self.step, int(found[1]))
                if not self.losing:  # else it is a step from before the loss
                    self.finished.set()
            elif found := re.match(r"shardwise: step \d+ finished (\S+) s after", line):
                self.seconds.append(float(found[1]))
                self.loads.append(os.getloadavg()[0])
            elif found := re.match(r"\[0\] stopped after step (\d+)", line):
                self.last = int(found[1])
            elif re.match(r"shardwise: .*starting again", line):
                self.pids, self.grows = {}, "a checkpoint was saved" in line
                self.losing = False
                self.finished.clear()

    def note(self, line):
        self.log.write(f"{time.monotonic() - self.began:8.2f} {line}")
        self.log.flush()

    def resumed(self, step, source):
        if self.grows:
            self.grown += 1
        else:
            self.sources[source] += 1
            self.repeated.append((self.step - step, source))
        self.segments.append((step, self.count))
        self.step = step

    def end(self):
        """Stops the run once it trains again, and returns what was wrong with how it ended."""
        if not self.finished.wait(300):
            return "it did not go on for 300 s"
        time.sleep(0.5)
        while self.process.poll() is None and not self.finished.is_set():  # it grows
            time.sleep(0.1)
        if (code := self.process.poll()) is None:
            self.process.send_signal(signal.SIGTERM)
            code = self.process.wait(120)
        self.reader.join(10)
        return "" if code == 143 and self.last else f"exit code {code}, last step {self.last}"


def kill(run, kills, silent, rng, pause=6.0):
    """Kills so many processes, and returns how many of them with which signal."""
    done = {"SIGKILL": 0, "SIGSTOP": 0}
    while sum(done.values()) < kills and run.process.poll() is None:
        # Most while it trains, some while it starts or restores.
        if rng.random() < 0.8:
            run.finished.wait(120)
            time.sleep(rng.uniform(0, pause))
        else:
            time.sleep(rng.uniform(0, 2 * pause))
        victims = sorted(run.pids.items())
        if not victims:
            continue
        number = signal.SIGSTOP if rng.random() < silent else signal.SIGKILL
        index, pid = rng.choice(victims)
        run.losing = True
        run.finished.clear()
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # it has ended by itself, since it lost another
            continue
        done[number.name] += 1
        run.note(f"--- {number.name} {index}\n")
        del run.pids[index]
    return done


def losses_of(directory, last):
    """Returns the loss of each step up to the last, and which steps have none.

    Later steps may be there too, from before a loss, if the run had not come as far again.
    """
    with (directory / "logs/metrics.jsonl").open() as lines:
        losses = {row["step"]: row["loss"] for row in map(json.loads, lines) if row["step"] <= last}
    return losses, sorted(set(range(1, last + 1)) - set(losses))


def differing(losses, segments, processes, folder):
    """Returns the steps whose loss is not, to the bit, that of a run that nothing disturbs."""
    wanted = elastic_reference.losses_of(segments, processes, max(losses), folder)
    return [step for step in sorted(losses) if losses[step] != wanted.get(step)]


def broken(rng, folder, kills):
    """Returns what is wrong with a short run that loses some processes, or an empty string."""
    processes = rng.choice([2, 2, 3])
    run = Run(
        folder / "run", processes, folder / "log.txt", forks=True, back=rng.choice([1, 2, 60])
    )
    try:
        kill(run, kills, 0.1, rng, pause=1.0)
        wrong = run.end()
    finally:
        run.process.kill()
    most = 2 * elastic_reference.script().COPIES - 1
    if not wrong:
        losses, missing = losses_of(folder / "run", run.last)
        repeated = [steps for steps, source in run.repeated if source == "memory" and steps > most]
        differ = differing(losses, run.segments, processes, folder / "reference")
        wrong = f"no losses of steps {missing[:5]}" if missing else ""
        wrong = wrong or (f"{repeated[0]} steps were repeated" if repeated else "")
        wrong = wrong or (f"the loss of step {differ[0]} is another" if differ else "")
    said = (folder / "log.txt").read_text()[-3000:]
    return f"{processes} processes, {run.segments}: {wrong}\n{said}" if wrong else ""


def in_one_process(losses, segments, processes):
    """Returns the largest relative difference to one process, in the first steps and in all."""
    import jax

    jax.config.update("jax_num_cpu_devices", processes)
    found = [
        abs(losses[step] - loss) / abs(loss)
        for step, loss in elastic_reference.script().losses_on(segments, processes, max(losses))
    ]
    return max(found[:UNTIL]), max(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--silent", type=float, default=0.1)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="elastic-"))
    began = time.monotonic()
    run = Run(directory / "run", args.processes, directory / "log.txt")
    try:
        done = kill(run, args.kills, args.silent, random.Random(args.seed))
        wrong = run.end()
    finally:
        run.process.kill()
    assert not wrong, f"{wrong}: see {directory}/log.txt"
    seconds, loads = sorted(run.seconds), sorted(run.loads)
    print(f"seed {args.seed}, {args.processes} processes, {time.monotonic() - began:.0f} s")
    print(f"killed {done['SIGKILL']}, stopped {done['SIGSTOP']}; "
          f"started again {len(run.segments)} times: {run.grown} to grow; after a loss from memory {run.sources['memory']}, from a "
          f"checkpoint {run.sources['checkpoint']}, from nothing {run.sources['nothing']}")  # fmt: skip
    print(f"meshes {[count for _, count in run.segments]}")
    most = 2 * elastic_reference.script().COPIES - 1
    memory = [steps for steps, source in run.repeated if source == "memory"]
    print(f"repeated steps from memory: {max(memory, default=0)} at most, {most} promised")
    if seconds:
        print(f"from a loss that was found to the next finished step: median "
              f"{seconds[len(seconds) // 2]:.1f} s, {seconds[-1]:.1f} s at most; load of the machine: "
              f"median {loads[len(loads) // 2]:.1f}, {loads[-1]:.1f} at most", flush=True)  # fmt: skip
    losses, missing = losses_of(directory / "run", run.last)
    differ = differing(losses, run.segments, args.processes, directory / "reference")
    print(f"{len(losses)} steps, {len(missing)} missing; {len(differ)} losses differ from those of an undisturbed run "
          f"on as many processes", flush=True)  # fmt: skip
    first, worst = in_one_process(losses, run.segments, args.processes)
    print(
        f"from those in one process: {first:.1e} at most in {UNTIL} steps, {worst:.1e} in all (relative)"
    )
    broke = [f"steps {missing[:5]} are missing"] * bool(missing)
    broke += [f"loss of step {differ[0]}"] if differ else []
    broke += ["other losses in one process"] * (first > RELATIVE)
    broke += ["repeated steps"] * (max(memory, default=0) > most)
    print("held" if not broke else f"broke: {'; '.join(broke)}; {directory} is kept")
    if not (args.keep or broke):
        shutil.rmtree(directory)
    return 1 if broke else 0


if __name__ == "__main__":
    sys.exit(main())
