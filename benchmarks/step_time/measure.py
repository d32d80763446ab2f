"""Measures the recipes on the accelerator of this machine.

    python benchmarks/step_time/measure.py measured.json [--only NAME]… [--round NAME] [--profile FOLDER]

Each recipe runs in a separate process, one at a time on the device: `sw.train_step` on random
batches, without waiting between steps. The step time is the median of seven rounds. With
`--profile`, each kernel's time and the optimised program are written too.
"""

import argparse
import collections
import fcntl
import gzip
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

import shardwise as sw


def batch_of(shapes):
    rng = np.random.default_rng(0)

    def one(leaf):
        if np.issubdtype(leaf.dtype, np.integer):
            return rng.integers(0, 2 if len(leaf.shape) == 1 else 8000, leaf.shape, leaf.dtype)
        return rng.standard_normal(leaf.shape, "float32").astype(leaf.dtype)

    return jax.tree.map(one, shapes)


def seconds_of(run, state, rounds=7):
    """Returns the seconds of one step in each round, and the last state."""
    jax.block_until_ready(state)
    start = time.perf_counter()
    for _ in range(3):
        state, metrics = run(state)
    jax.block_until_ready((state, metrics))
    steps = max(3, int(0.25 / ((time.perf_counter() - start) / 3)))
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(steps):
            state, metrics = run(state)
        jax.block_until_ready((state, metrics))
        found.append((time.perf_counter() - start) / steps)
    return found, state


def kernels_of(run, state, steps=3):
    """Returns each kernel's HLO instruction, name, count and microseconds in `steps` steps.

    A kernel may be launched before the one ahead of it has ended, and waits: it counts from there.
    """
    folder = tempfile.mkdtemp()
    with jax.profiler.trace(folder):
        for _ in range(steps):
            state, metrics = run(state)
        jax.block_until_ready((state, metrics))
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    rows, spans = collections.Counter(), []
    times = collections.Counter()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if "GPU:" not in plane.name:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                key = (str(stats.get("hlo_op", "")), event.name)
                spans.append((event.start_ns, event.start_ns + event.duration_ns, key))
    first, last = min((s[0] for s in spans), default=0), 0
    for start, end, key in sorted(spans):
        rows[key] += max(0, end - max(start, last)) / 1e3
        times[key] += 1
        last = max(last, end)
    return {
        "steps": steps,
        "span_us": (last - first) / 1e3,
        "busy_us": sum(rows.values()),
        "kernels": [[*key, times[key], us] for key, us in rows.items()],
    }, state


def measure(name, profile):
    from rounds import RECIPES

    recipe = RECIPES[name]()
    layout = sw.layout(recipe.model, sw.mesh("data=1"))
    step = sw.train_step(recipe, layout)
    batch = batch_of(recipe.batch)
    traced = step.jitted.trace(step.blueprint.abstract, step.blueprint.batch)
    with open(os.path.join(tempfile.gettempdir(), "gpu.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = sw.train_state(recipe, layout)
        batch = jax.device_put(batch, jax.tree.map(lambda x: x.sharding, step.blueprint.batch))
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        compiling = time.perf_counter() - start
        found, state = seconds_of(lambda s: step(s, batch), state)
        row = {
            "seconds": float(np.median(found)),
            "rounds": found,
            "peak": jax.devices()[0].memory_stats()["peak_bytes_in_use"],
            "loss": float(metrics["loss"]),
            "compile": compiling,
            "device": jax.devices()[0].device_kind,
        }
        if profile:
            # Without CUDA graphs, in which kernels lose the names of their instructions.
            alone = traced.lower().compile({"xla_gpu_enable_command_buffer": ""})
            found, state = seconds_of(lambda s: alone(s, batch), state, rounds=3)
            row["seconds_without_graphs"] = float(np.median(found))
            kernels, state = kernels_of(lambda s: alone(s, batch), state)
            safe = "".join(c if c.isalnum() else "_" for c in name)
            path = pathlib.Path(profile, f"{safe}.json.gz")
            path.write_bytes(
                gzip.compress(json.dumps({"hlo": alone.as_text(), **kernels}).encode())
            )
            row |= {"busy_us": kernels["busy_us"] / kernels["steps"]}
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?")
    parser.add_argument("--only", action="append", help="a recipe's name")
    parser.add_argument("--round", help="only the recipes of this round, such as `sixth`")
    parser.add_argument("--profile", help="a folder for each recipe's kernels")
    parser.add_argument("--one", help="measure this recipe in this process")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.profile)))
        return
    from rounds import RECIPES, ROUNDS

    chosen = ROUNDS[args.round] if args.round else RECIPES
    names = list(args.only or chosen)
    found, waiting, running = {}, names[::-1], {}
    profile = ["--profile", args.profile] if args.profile else []
    # Five at a time trace and start up; a lock lets one of them at a time use the device.
    while waiting or running:
        while waiting and len(running) < 5:
            name = waiting.pop()
            log = tempfile.TemporaryFile("w+")
            command = [sys.executable, __file__, "--one", name, *profile]
            running[name] = (subprocess.Popen(command, stdout=log, stderr=log, text=True), log)
        for name, (process, log) in list(running.items()):
            if process.poll() is None:
                continue
            del running[name]
            log.seek(0)
            text = log.read()
            lines = [line for line in text.splitlines() if line.startswith("{")]
            found[name] = json.loads(lines[-1]) if lines else {"error": text[-2000:]}
            print(name, {k: v for k, v in found[name].items() if k != "rounds"}, flush=True)
            with open(args.path, "w") as file:
                json.dump({"jax": jax.__version__, "recipes": found}, file, indent=1)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
