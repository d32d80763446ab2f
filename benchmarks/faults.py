"""Breaks runs, checkpoints and files in every way that we know of, and counts what held.

    python benchmarks/faults.py --minutes 10 --seed 1
    python benchmarks/faults.py --rounds kill=50,file=500,elastic=25

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
- elastic: SIGKILL or SIGSTOP to processes of an elastic run, which must go on with those that are
  left; the losses of all its steps are compared with those of an undisturbed run, to the bit.

The tests have a short version (`tests/package/test_campaign.py`).
"""

import argparse
import collections
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import jax
from flax import nnx

import shardwise as sw

jax.config.update("jax_num_cpu_devices", 8)

import damaged_checkpoints as checkpoints  # noqa: E402
import disturbed_runs as runs  # noqa: E402
import hostile_files  # noqa: E402

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


# --- the campaign ---------------------------------------------------------------------------------

# How often each kind is tried in one turn, so that they share the time sensibly; and what one round
# counts for.
KINDS = {
    "file": (checkpoints.break_file, 10, 1),
    "hostile": (hostile_files.broken, 40, 1),
    "spec": (place_spec, 40, 1),
    "lost": (checkpoints.lose_directory, 4, 1),
    "kill": (runs.kill_saves, 1, runs.KILLS),
    "signal": (runs.stop_one, 1, 1),
    "processes": (runs.lose_process, 1, 1),
    "disk": (runs.fill_disk, 1, 2),
    "race": (runs.race, 1, 20),
    "elastic": (runs.lose_and_go_on, 1, runs.LOSSES),
}


def attempt(kind, number, seed):
    """Returns what broke in one round, or an empty string."""
    rng = random.Random(f"{seed} {kind} {number}")
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        try:
            return KINDS[kind][0](rng, Path(name))
        except Exception as error:
            return f"RAW {type(error).__name__}: {error}"


class Campaign:
    """Counts what was tried of each kind, what broke, and how long it took."""

    def __init__(self, seed, first):
        self.seed, self.first = seed, first
        self.tried, self.broke = collections.Counter(), collections.Counter()
        self.seconds, self.busy = collections.Counter(), collections.Counter()

    def one(self, kind):
        began, busy = time.monotonic(), processor_seconds()
        number = self.first + self.tried[kind]
        problem = attempt(kind, number, self.seed)
        self.tried[kind] += 1
        self.seconds[kind] += time.monotonic() - began
        self.busy[kind] += processor_seconds() - busy
        if problem:
            self.broke[kind] += 1
            print(f"{kind} {number}: {problem}", file=sys.stderr, flush=True)

    def row(self, kind):
        each, tried, broke = KINDS[kind][2], self.tried[kind], self.broke[kind]
        numbers = (tried, each * tried, each * (tried - broke), broke)
        took = f"{self.seconds[kind]:9.0f}{self.busy[kind]:9.0f}{os.getloadavg()[0]:8.1f}"
        print(f"{kind:12}" + "".join(f"{n:8}" for n in numbers) + took, flush=True)

    def for_minutes(self, kinds, minutes):
        """Lets all kinds take turns, and prints their rows at the end."""
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until:
            for kind in kinds:
                for _ in range(KINDS[kind][1]):
                    if time.monotonic() < until:
                        self.one(kind)
        for kind in kinds:
            self.row(kind)

    def for_rounds(self, rounds):
        """Tries one kind after the other, and prints its row when it is done."""
        for kind, count in rounds.items():
            try:
                for _ in range(count):
                    self.one(kind)
            finally:  # also when it is interrupted
                self.row(kind)


def processor_seconds():
    """Returns what this process, and those that it has waited for, have used of a processor."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def rounds_of(text, kinds):
    """Returns the rounds of each kind: `8` of all kinds, or `kill=50,file=500`."""
    if text.isdecimal():
        return dict.fromkeys(kinds, int(text))
    pairs = dict(part.split("=") for part in text.split(","))
    if unknown := pairs.keys() - KINDS.keys():
        sys.exit(f"unknown kinds: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    return {kind: int(count) for kind, count in pairs.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, joined by commas")
    parser.add_argument("--rounds", help="of each kind, or of some: kill=50,file=500")
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    args = parser.parse_args()
    campaign, kinds = Campaign(args.seed, args.first), args.only.split(",")
    heads = ("rounds", "tried", "held", "broke")
    print(
        f"{'kind':12}"
        + "".join(f"{h:>8}" for h in heads)
        + f"{'seconds':>9}{'CPU s':>9}{'load':>8}"
    )
    if args.rounds:
        campaign.for_rounds(rounds_of(args.rounds, kinds))
    else:
        campaign.for_minutes(kinds, args.minutes)
    sys.exit(1 if campaign.broke else 0)


if __name__ == "__main__":
    main()
