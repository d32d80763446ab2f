"""Checkpoints that are damaged, and directories of runs that are lost; used by `faults.py`."""

import collections
import functools
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import shardwise as sw

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
