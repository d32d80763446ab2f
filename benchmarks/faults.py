"""Breaks checkpoints in every way that we know of, and counts the outcomes.

    python benchmarks/faults.py --faults 250

After each fault, a restore must return the saved values, bit for bit, or raise one sentence that
names the step or the directory. A restore that returns anything else counts as wrong, and any other
exception as raw. After each fault the step before it is restored too, each time onto a random mesh.
Kills happen in separate processes, at random moments of a save; the full disk is a small tmpfs in a
mount namespace (`unshare --map-root-user --mount`). This is not part of the tests, which have a
short version (`tests/checkpoint/test_faults.py`).
"""

import argparse
import collections
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import shardwise as sw

jax.config.update("jax_num_cpu_devices", 8)

PROCESSES = Path(__file__).parent.parent / "tests" / "scripts"
MESHES = ("data=1", "data=2", "data=4", "data=8", "data=2,model=2", "data=2,model=4")
WIDTH, DEPTH = 128, 96


def make():
    return nnx.Linear(DEPTH, WIDTH, rngs=nnx.Rngs(0))


RECIPE = sw.Recipe(
    model=make,
    loss=lambda model, x: model(x).mean(),
    optimizer=optax.adam(1e-2),
    batch=jax.ShapeDtypeStruct((8, DEPTH), "float32"),
)


def layout_of(axes):
    count = int(np.prod([int(part.split("=")[1]) for part in axes.split(",")]))
    rules = [sw.tensor("model")] if "model" in axes else []
    return sw.layout(make, sw.mesh(axes, on=f"cpu:{count}"), [*rules, sw.fsdp("data", min_bytes=0)])


def begin():
    """Returns a state in which no two values of an array are equal."""
    rng = np.random.default_rng(0)
    begun = sw.train_state(RECIPE, layout_of("data=8"))

    def fill(x):
        return rng.permutation(x.size).reshape(x.shape).astype(x.dtype) + 1

    return jax.tree.map(lambda x: jax.device_put(fill(x), x.sharding), begun)


# --- file faults: each changes something in the folder of a step ----------------------------------


def files_of(step):
    return sorted(path for path in step.rglob("*") if path.is_file())


def pick(step, rng):
    # Pick a file of arrays at least half of the time.
    arrays = [path for path in files_of(step) if path.parent.name == "d"]
    return rng.choice(rng.choice([files_of(step), arrays]))


def flip_bits(count):
    def fault(step, rng, state):
        path = pick(step, rng)
        data = bytearray(path.read_bytes())
        for _ in range(count):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)

    return fault


def truncate(step, rng, state):
    path = pick(step, rng)
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def empty(step, rng, state):
    pick(step, rng).write_bytes(b"")


def zero(step, rng, state):
    path = pick(step, rng)
    path.write_bytes(bytes(path.stat().st_size))


def lengthen(step, rng, state):
    path = pick(step, rng)
    path.write_bytes(path.read_bytes() + rng.randbytes(64))


def delete(step, rng, state):
    pick(step, rng).unlink()


def swap_files(step, rng, state):
    first = pick(step, rng)
    second = rng.choice([path for path in files_of(step) if path != first])
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


def swap_arrays(step, rng, state):
    """Swaps the files of two arrays of the same size."""
    by_size = collections.defaultdict(list)
    for path in files_of(step):
        if path.parent.name == "d":
            by_size[path.stat().st_size].append(path)
    pairs = [paths for paths in by_size.values() if len(paths) > 1]
    if not pairs:
        return swap_files(step, rng, state)
    first, second = rng.sample(rng.choice(pairs), 2)
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    return None


def crafted(change):
    """Changes values of a large array on disk, an even number of them."""

    def fault(step, rng, state):
        blocks = [np.asarray(x) for x in jax.tree.leaves(state) if x.size >= DEPTH * WIDTH]
        kernel = rng.choice(blocks)
        for shards in (1, 2, 4, 8):
            for part in np.split(kernel, shards, axis=0) + np.split(kernel, shards, axis=1):
                for path in files_of(step):
                    data = path.read_bytes()
                    # A file may hold any of these parts of the array.
                    place = data.find(part.tobytes())
                    if place >= 0:
                        new = part.copy()
                        change(new, rng)
                        assert new.tobytes() != part.tobytes()
                        end = place + len(part.tobytes())
                        path.write_bytes(data[:place] + new.tobytes() + data[end:])
                        return
        raise AssertionError("the array was not found on disk")

    return fault


def places(part, rng, count):
    return np.unravel_index(rng.sample(range(part.size), count), part.shape)


def flip_signs(part, rng):
    at = places(part, rng, 2 * rng.randrange(1, 9))
    part[at] = -part[at]


def negate(part, rng):
    part *= -1


def swap_elements(part, rng):
    at = places(part, rng, 2)
    part[at] = part[at][::-1]


def move_a_number(part, rng):
    at = places(part, rng, 2)
    part[at] += np.array([1, -1], part.dtype) * rng.randrange(1, 100)


def swap_rows(part, rng):
    i, j = rng.sample(range(len(part)), 2)
    part[[i, j]] = part[[j, i]]


def zero_a_block(part, rng):
    i = rng.randrange(len(part))
    part[i : i + 8] = 0


def same_bit_twice(part, rng):
    at = places(part, rng, 2)
    words = part.view(np.uint32)
    words[at] ^= np.uint32(1 << rng.randrange(32))


FAULTS = {
    "a bit flipped": flip_bits(1),
    "two bits flipped": flip_bits(2),
    "truncated": truncate,
    "empty": empty,
    "zeroed": zero,
    "lengthened": lengthen,
    "deleted": delete,
    "two files swapped": swap_files,
    "two arrays' files swapped": swap_arrays,
    "signs flipped, an even number": crafted(flip_signs),
    "negated": crafted(negate),
    "two elements swapped": crafted(swap_elements),
    "added here, taken away there": crafted(move_a_number),
    "two rows swapped": crafted(swap_rows),
    "a block of zeros": crafted(zero_a_block),
    "one bit of two elements": crafted(same_bit_twice),
}


def outcome(checkpoints, step, axes, state):
    """Returns `equal`, `refused`, `WRONG` or `RAW`, and the error message."""
    try:
        restored = checkpoints.restore(RECIPE, layout_of(axes), step=step)
    except sw.CheckpointError as error:
        message = str(error)
        named = f"step {step}" in message or str(checkpoints.directory) in message
        return ("refused" if named and "\n" not in message else "RAW"), message
    except Exception as error:
        return "RAW", f"{type(error).__name__}: {error}"
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True)
    same = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    return ("equal" if same else "WRONG"), ""


def break_files(count, seed, folder):
    state = begin()
    kept = sw.Checkpoints(folder / "kept")
    for step in (1, 2):
        kept.save(step, state, position=step, layout=layout_of("data=8"))
    kept.close()
    rng, table, bad = random.Random(seed), collections.defaultdict(collections.Counter), []
    for number in range(count):
        name = list(FAULTS)[number % len(FAULTS)]
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.copytree(kept.directory, folder / "run")
        checkpoints = sw.Checkpoints(folder / "run")
        FAULTS[name](folder / "run" / "2", rng, state)
        axes = rng.choice(MESHES)
        for step in (2, 1):
            found, message = outcome(checkpoints, step, axes, state)
            if step == 1 and found != "equal":
                found = "WRONG"
            if step == 2 or found != "equal":
                table[name][found] += 1
            if found in ("WRONG", "RAW"):
                bad.append(f"{name}, step {step} onto {axes}: {found} {message}")
    return table, bad


# --- process and disk faults ----------------------------------------------------------------------


def run_script(script, *arguments, before=()):
    command = [*before, sys.executable, str(PROCESSES / script), *map(str, arguments)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    return subprocess.run(
        command, env=env | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=1200
    )


def kill_saves(count, seed, folder, table, bad):
    """Runs a script that fails unless every listed step restores bitwise after each kill."""
    done = run_script("kill_save.py", folder / "kills", count, seed)
    if done.returncode:
        bad.append(f"SIGKILL: {done.stderr[-500:]}")
        table["SIGKILL during a save"]["WRONG"] += 1
        return
    found = json.loads(done.stdout)
    table["SIGKILL during a save"]["equal"] += found["kills"]


def fill_disk(folder, table, bad):
    (folder / "disk").mkdir()
    done = run_script(
        "kill_disk.py", "full", folder / "disk", before=("unshare", "--map-root-user", "--mount")
    )
    output = json.loads(done.stdout) if done.returncode == 0 else {"script": done.stderr[-500:]}
    for key, want in {"full": "the disk is full", "full again": "the disk is full"}.items():
        is_right = str(output.get(key, "")).endswith(want) and output.get("older") == "ok"
        table["a full disk"]["refused" if is_right else "RAW"] += 1
        if not is_right:
            bad.append(f"a full disk: {output}")


def race(tries, folder, table, bad):
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    racers = [
        subprocess.Popen(
            [
                sys.executable,
                str(PROCESSES / "write_race.py"),
                folder / "race",
                str(first),
                str(tries),
            ],
            env=env | {"JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for first in (1000, 2000)
    ]
    for racer in racers:
        racer.stdout.readline()
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    outs = [racer.communicate(timeout=600) for racer in racers]
    there = sw.Checkpoints(folder / "race").steps()
    for racer, (out, err) in zip(racers, outs, strict=True):
        if racer.returncode:
            bad.append(f"two writers: {err[-500:]}")
            table["two writers"]["RAW"] += 1
            continue
        found = json.loads(out)
        for step in found["saved"]:
            table["two writers"]["equal" if step in there else "WRONG"] += 1
        for message in found["refused"]:
            named = re.search("(process .*|another process) is saving there", message)
            table["two writers"]["refused" if named else "RAW"] += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=250, help="number of file faults")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--races", type=int, default=30, help="saves by each of two writers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table, bad = break_files(args.faults, args.seed, folder)
        kill_saves(args.kills, args.seed, folder, table, bad)
        fill_disk(folder, table, bad)
        race(args.races, folder, table, bad)
    columns = ("equal", "refused", "WRONG", "RAW")
    print(f"{'fault':34}" + "".join(f"{column:>9}" for column in columns))
    for name, row in table.items():
        print(f"{name:34}" + "".join(f"{row[column]:9}" for column in columns))
    totals = [sum(row[column] for row in table.values()) for column in columns]
    print(f"{f'all {sum(totals)}':34}" + "".join(f"{total:9}" for total in totals))
    for line in bad:
        print(line)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
