"""Breaks runs, checkpoints and files in every way that we know of, and counts what held.

    python benchmarks/faults.py --minutes 10 --seed 1

Rounds of all kinds take turns until the minutes are over. Each round is drawn from the seed, its kind
and its number alone: `--only hostile --first 17 --rounds 1` repeats one. A round holds if what it
broke is refused in one sentence that names it, or if the result is bitwise that of an undisturbed
run; anything else is printed, and the exit status is 1.

- file: a step of a checkpoint is damaged, and restored onto a random mesh, then the step before it.
- hostile: files of every kind that is read, mutated or made to exhaust their reader.
- spec: random specs on random shapes; what is found to be clean must be what JAX places.
- lost: the directory of a run is moved, replaced, emptied or made read-only between two saves.
- kill: SIGKILL at random moments of saves, in a process of its own.
- signal: SIGTERM or SIGINT at a random moment of `shardwise train`, which is then resumed.
- processes: SIGKILL, SIGTERM or an exception in one of two processes at a random moment; resumed.
- disk: saves to a full disk, a small tmpfs in a mount namespace (`unshare`).
- race: two processes save to one directory.

The tests have a short version (`tests/package/test_campaign.py`).
"""

import argparse
import collections
import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
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


@functools.cache
def pristine():
    """Returns the folder of a run with two steps, and the state that both hold."""
    folder, state = Path(tempfile.mkdtemp(prefix="faults-")), begin()
    kept = sw.Checkpoints(folder / "kept")
    for step in (1, 2):
        kept.save(step, state, position=step, layout=layout_of("data=8"))
    kept.close()
    return folder / "kept", state


def break_file(rng, folder):
    kept, state = pristine()
    shutil.copytree(kept, folder / "run")
    name, axes = rng.choice(list(FAULTS)), rng.choice(MESHES)
    checkpoints = sw.Checkpoints(folder / "run")
    FAULTS[name](folder / "run" / "2", rng, state)
    found, message = outcome(checkpoints, 2, axes, state)
    if found in ("WRONG", "RAW"):
        return f"{name} onto {axes}: {found} {message}"
    found, message = outcome(checkpoints, 1, axes, state)
    return "" if found == "equal" else f"{name}, the step before it onto {axes}: {found} {message}"


# --- hostile files: see hostile_files.py ----------------------------------------------------------


def read_hostile(rng, folder):
    import hostile_files

    return hostile_files.broken(rng, folder)


# --- random specs ---------------------------------------------------------------------------------


def place_spec(rng, folder):
    axes = rng.choice(["a=2,b=4", "a=8", "a=2,b=2,c=2", "a=1,b=8"])
    names = [part.split("=")[0] for part in axes.split(",")]
    shape = tuple(rng.choice([0, 1, 2, 3, 4, 6, 8, 16]) for _ in range(rng.randrange(4)))

    def entry():
        kind = rng.randrange(8)
        if kind < 3:
            return None
        if kind < 6:
            return rng.choice([*names, "nowhere"] if kind == 5 else names)
        return tuple(rng.choice(names) for _ in range(rng.randrange(3)))

    entries = [entry() for _ in range(max(0, len(shape) + rng.choice([-1, 0, 0, 0, 1])))]
    dtype = rng.choice(["float32", "bfloat16", "int8", "bool"])

    class One(nnx.Module):
        def __init__(self):
            self.x = nnx.Variable(jax.numpy.zeros(shape, dtype))

    text = f"{shape} {dtype} P{tuple(entries)} on {axes}"
    try:
        layout = sw.layout(
            One, sw.mesh(axes, on="cpu:8"), {"x": jax.sharding.PartitionSpec(*entries)}
        )
        clean = not sw.check(layout).errors
    except ValueError as error:
        return (
            "" if "\n" not in str(error).strip() or "error[" in str(error) else f"{text}: {error}"
        )
    try:
        placed = sw.init(One, layout).x.get_value()
    except ValueError as error:
        return f"{text}: clean, but {error}" if clean else ""
    if not clean:
        return f"{text}: has errors, but was placed"
    leaf = layout["x"]
    wrong = {shard.data.shape for shard in placed.addressable_shards} - {tuple(leaf.shard_shape)}
    return f"{text}: planned {leaf.shard_shape}, placed {wrong}" if wrong else ""


# --- lost directories -----------------------------------------------------------------------------


def lose_directory(rng, folder):
    kept, state = pristine()
    run = folder / "run"
    shutil.copytree(kept, run)
    checkpoints = sw.Checkpoints(run, keep=rng.choice([None, 1, 2]))
    how = rng.choice(["moved", "removed", "emptied", "a file", "in the way", "a link", "none"])
    when = rng.choice(["before", "between", "during"])
    if when != "before":
        checkpoints.save(3, state, position=3)
        if when == "between":
            checkpoints.wait()
    if how == "moved":
        run.rename(folder / "elsewhere")
    elif how != "none" and how != "in the way":
        shutil.rmtree(run, ignore_errors=True)
    if how == "emptied":
        run.mkdir(exist_ok=True)
    elif how == "a file":
        if not run.exists():
            run.write_text("something else")
    elif how == "a link":
        if not run.exists():
            run.symlink_to(folder / "nowhere")
    elif how == "in the way":
        (run / "4").mkdir()
    said = []
    for action in (
        lambda: checkpoints.save(4, state, position=4), checkpoints.wait, checkpoints.close,
        lambda: checkpoints.steps(), lambda: sw.Checkpoints(run).restore(RECIPE, layout_of("data=2")),
    ):  # fmt: skip
        try:
            action()
        except sw.CheckpointError as error:
            said.append(str(error))
            if "\n" in str(error):
                return f"{how} {when}: {error}"
        except Exception as error:
            return f"{how} {when}: RAW {type(error).__name__}: {error}"
    try:
        if 4 in sw.Checkpoints(run).steps():
            found, message = outcome(sw.Checkpoints(run), 4, "data=4", state)
            return "" if found == "equal" else f"{how} {when}: step 4 is {found} {message}"
    except sw.CheckpointError:
        pass
    return "" if said else f"{how} {when}: step 4 is missing, and nothing was said"


# --- process and disk faults ----------------------------------------------------------------------


def plain_environment():
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "SHARDWISE_"))}
    path = os.pathsep.join([str(Path(sw.__file__).parents[1]), kept.get("PYTHONPATH", "")])
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "JAX_COMPILATION_CACHE_DIR": cache()}


@functools.cache
def cache():
    return tempfile.mkdtemp(prefix="faults-compiled-")


def run_script(script, *arguments, before=()):
    command = [*before, sys.executable, str(PROCESSES / script), *map(str, arguments)]
    return subprocess.run(
        command, env=plain_environment(), capture_output=True, text=True, timeout=1200
    )


def kill_saves(rng, folder):
    """Runs a script that fails unless every listed step restores bitwise after each kill."""
    done = run_script("kill_save.py", folder / "kills", KILLS, rng.randrange(10**6))
    return done.stderr[-500:] if done.returncode else ""


def fill_disk(rng, folder):
    (folder / "disk").mkdir()
    done = run_script(
        "kill_disk.py", "full", folder / "disk", before=("unshare", "--map-root-user", "--mount")
    )
    if done.returncode:
        return done.stderr[-500:]
    output = json.loads(done.stdout)
    for key in ("full", "full again"):
        if not str(output.get(key, "")).endswith("the disk is full") or output.get("older") != "ok":
            return str(output)
    return ""


def race(rng, folder):
    racers = [
        subprocess.Popen(
            [sys.executable, str(PROCESSES / "write_race.py"), folder / "race", str(first), "10"],
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
        launch = ["-m", "shardwise", "launch", "-n", str(processes), "--devices", "1", "--"]
        command = [sys.executable, *launch, *command]
    else:
        command += ["--on", "cpu:1"]
    return subprocess.run(
        command, env=plain_environment() | fault, capture_output=True, text=True, timeout=400
    )


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


# --- the campaign ---------------------------------------------------------------------------------

KILLS = 10
# How often each kind is tried in one turn, so that they share the time sensibly; and what one round
# counts for.
KINDS = {
    "file": (break_file, 10, 1),
    "hostile": (read_hostile, 40, 1),
    "spec": (place_spec, 40, 1),
    "lost": (lose_directory, 4, 1),
    "kill": (kill_saves, 1, KILLS),
    "signal": (stop_one, 1, 1),
    "processes": (lose_process, 1, 1),
    "disk": (fill_disk, 1, 2),
    "race": (race, 1, 20),
}


def attempt(kind, number, seed):
    """Returns what broke in one round, or an empty string."""
    rng = random.Random(f"{seed} {kind} {number}")
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        try:
            return KINDS[kind][0](rng, Path(name))
        except Exception as error:
            return f"RAW {type(error).__name__}: {error}"


def campaign(seed, kinds, *, minutes=None, rounds=None, first=0):
    """Returns how many rounds of each kind were tried and broke, and what was said of those."""
    until = time.monotonic() + 60 * (minutes or 1e9)
    tried, broke, said = collections.Counter(), collections.Counter(), []
    turn = 0
    while time.monotonic() < until and (rounds is None or turn < rounds):
        for kind in kinds:
            times = KINDS[kind][1] if rounds is None else 1
            for _ in range(times):
                if time.monotonic() > until:
                    break
                number = first + tried[kind]
                problem = attempt(kind, number, seed)
                tried[kind] += 1
                if problem:
                    broke[kind] += 1
                    said.append(f"{kind} {number}: {problem}")
                    print(said[-1], file=sys.stderr, flush=True)
        turn += 1
    return tried, broke, said


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, joined by commas")
    parser.add_argument("--rounds", type=int, help="of each kind, in place of --minutes")
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    args = parser.parse_args()
    kinds = args.only.split(",")
    minutes = None if args.rounds else args.minutes
    tried, broke, _ = campaign(
        args.seed, kinds, minutes=minutes, rounds=args.rounds, first=args.first
    )
    print(f"{'kind':12}{'rounds':>8}{'tried':>8}{'held':>8}{'broke':>8}")
    for kind in kinds:
        each = KINDS[kind][2]
        row = (tried[kind], each * tried[kind], each * (tried[kind] - broke[kind]), broke[kind])
        print(f"{kind:12}" + "".join(f"{n:8}" for n in row))
    sys.exit(1 if broke else 0)


if __name__ == "__main__":
    main()
