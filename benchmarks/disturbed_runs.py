"""Processes that are killed, stopped or starved in saves and runs; used by `faults.py`."""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import shardwise as sw

ROOT = Path(__file__).parent.parent
PROCESSES = ROOT / "tests" / "scripts"
sys.path.insert(0, str(ROOT / "tests" / "support"))

import elastic  # noqa: E402
from forked import Forked, run  # noqa: E402

# How many kills, and how many losses of processes, one round has.
KILLS, LOSSES = 20, 2

# --- process and disk faults ----------------------------------------------------------------------


def plain_environment():
    dropped = ("JAX_", "SHARDWISE_", "XLA_FLAGS")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    path = os.pathsep.join([str(Path(sw.__file__).parents[1]), kept.get("PYTHONPATH", "")])
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def kill_saves(rng, folder):
    """Runs a script that fails unless every listed step restores bitwise after each kill."""
    done = run(
        [sys.executable, str(PROCESSES / "kill_save.py"), str(folder / "kills"), str(KILLS),
         str(rng.randrange(10**6))],
        env=plain_environment(), timeout=1200,
    )  # fmt: skip
    return done.stderr[-500:] if done.returncode else ""


def fill_disk(rng, folder):
    (folder / "disk").mkdir()
    unshare = ("unshare", "--map-root-user", "--mount", sys.executable)  # it cannot be forked
    done = subprocess.run(
        [*unshare, str(PROCESSES / "kill_disk.py"), "full", str(folder / "disk")],
        env=plain_environment(), capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    if done.returncode:
        return done.stderr[-500:]
    output = json.loads(done.stdout)
    for key in ("full", "full again"):
        if not str(output.get(key, "")).endswith("the disk is full") or output.get("older") != "ok":
            return str(output)
    return ""


def race(rng, folder):
    racers = [
        Forked(
            [sys.executable, str(PROCESSES / "write_race.py"), str(folder / "race"), str(first), "10"],
            env=plain_environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for first in (1000, 2000)
    ]  # fmt: skip
    for racer in racers:
        racer.stdout.readline()
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    outs = [racer.communicate(timeout=600) for racer in racers]
    there = sw.Checkpoints(folder / "race").steps()
    for racer, (out, err) in zip(racers, outs, strict=True):
        if racer.returncode:
            return err[-500:]
        found = json.loads(out)
        if missing := [step for step in found["saved"] if step not in there]:
            return f"saved, but not there: {missing}"
        for message in found["refused"]:
            if not re.search(
                "(process .*|another process) is saving there|has been saving", message
            ):
                return message
    return ""


# --- runs that are stopped and resumed ------------------------------------------------------------

TARGET = """
import os, signal, time
import jax, numpy as np, optax, shardwise as sw
from flax import nnx

def make():
    return nnx.Linear(8, 4, rngs=nnx.Rngs(0))

recipe = sw.Recipe(model=make, loss=lambda model, x: (model(x) ** 2).mean(),
                   optimizer=optax.adam(1e-2), batch=jax.ShapeDtypeStruct((8, 8), "float32"))

class Source:
    began = time.time()
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        after = os.environ.get("FAULT_AFTER")
        if after and os.environ.get("SHARDWISE_PROCESS", "0") == os.environ["FAULT_IN"]:
            if time.time() - self.began > float(after):
                if os.environ["FAULT_HOW"] == "raise":
                    raise RuntimeError("the source is broken")
                os.kill(os.getpid(), getattr(signal, os.environ["FAULT_HOW"]))
                os.environ["FAULT_AFTER"] = ""
        time.sleep(0.002)
        return np.random.default_rng(int(index)).normal(size=8).astype("float32")

data = sw.data(Source(), seed=0)
"""
STEPS = 60


def train(folder, processes, **fault):
    command = [
        sys.executable, "-m", "shardwise", "train", str(folder / "target.py") + ":recipe",
        "--mesh", f"data={processes}", "--strategy", "fsdp", "--min-bytes", "1B", "--steps",
        str(STEPS), "--every", "7", "--resume", "--checkpoints", str(folder / "run"),
    ]  # fmt: skip
    if processes > 1:
        launch = [sys.executable, str(PROCESSES / "launch.py"), str(processes), "1"]
        command = [*launch, *command]
    else:
        command += ["--on", "cpu:1"]
    return run(command, env=plain_environment() | fault, timeout=400)


@functools.cache
def undisturbed(processes):
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    (folder / "target.py").write_text(TARGET)
    done = train(folder, processes)
    assert done.returncode == 0, done.stderr[-2000:]
    return sw.Checkpoints(folder / "run").about()["arrays"]


def disturb(rng, folder, processes, hows):
    want = undisturbed(processes)
    (folder / "target.py").write_text(TARGET)
    how, victim = rng.choice(hows), rng.randrange(processes)
    after = f"{rng.uniform(0, 3):.2f}"
    text = f"{how} in process {victim} after {after} s"
    began = time.monotonic()
    done = train(folder, processes, FAULT_HOW=how, FAULT_AFTER=after, FAULT_IN=str(victim))
    seconds = time.monotonic() - began
    statuses = {"raise": 2, "SIGKILL": 137, "SIGTERM": 143, "SIGINT": 130}
    if processes == 1:
        statuses["SIGKILL"] = -9
    if done.returncode not in (0, statuses[how]):  # 0: it was too late
        return f"{text}: status {done.returncode} after {seconds:.0f} s: {done.stderr[-600:]}"
    if done.returncode and processes > 1 and how in ("raise", "SIGKILL"):
        named = f"shardwise: process {victim} "
        if named not in done.stderr:
            return f"{text}: another is named: {done.stderr[-600:]}"
    if "Traceback" in done.stderr and how != "SIGKILL":
        return f"{text}: {done.stderr[-900:]}"
    if seconds > 120:
        return f"{text}: took {seconds:.0f} s"
    again = train(folder, processes)
    if again.returncode:
        return f"{text}, resumed: {again.stderr[-600:]}"
    found = sw.Checkpoints(folder / "run").about()
    if found["step"] != STEPS or found["arrays"] != want:
        return f"{text}: step {found['step']} has other values than an undisturbed run"
    return ""


def stop_one(rng, folder):
    return disturb(rng, folder, 1, ["SIGTERM", "SIGINT", "SIGKILL", "raise"])


def lose_process(rng, folder):
    return disturb(rng, folder, 2, ["SIGKILL", "SIGKILL", "SIGTERM", "raise"])


def lose_and_go_on(rng, folder):
    """Loses processes of an elastic run; its losses must be those of one that nothing disturbs."""
    return elastic.broken(rng, folder, LOSSES)
