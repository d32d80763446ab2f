"""Times saving and restoring against plain Orbax, and measures the memory of a restore.

    python benchmarks/checkpoints.py

Saves a model with AdamW state on eight virtual CPU devices. Plain Orbax is `ocp.PyTreeCheckpointer`
and `ocp.AsyncCheckpointer` with their defaults, and again without compression, as Shardwise stores
arrays. All run in turn. Each save is waited for and synced to disk, so that none pays for the writes
of another. The times of Shardwise include its digests, which Orbax does not have. All figures are
measured.
"""

import argparse
import dataclasses
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import optax
import orbax.checkpoint as ocp
from flax import nnx

import shardwise as sw

WIDTH = 2048


class Stack(nnx.Module):
    """A stack of square kernels of 16 MiB each."""

    def __init__(self, layers, rngs):
        """Makes the layers."""
        self.layers = nnx.List(
            [nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(layers)]
        )


def make_recipe(gigabytes):
    layers = max(1, round(gigabytes * 2**30 / (3 * 4 * WIDTH * WIDTH)))
    return sw.Recipe(
        model=lambda: Stack(layers, nnx.Rngs(0)),
        loss=lambda model, x: x.mean(),
        optimizer=optax.adamw(1e-3),
        batch=jax.ShapeDtypeStruct((8,), "float32"),
    )


def as_tree(state):
    return {"model": state.model, "optimizer": state.optimizer, "step": state.step}


def _trained(state):
    """Returns the state with random moments, as after training: those of a new state are zeros."""

    def noise(x):
        return jax.random.normal(jax.random.key(0), x.shape, x.dtype)

    def fill(x):
        return jax.jit(noise, out_shardings=x.sharding)(x) if x.ndim else x

    return dataclasses.replace(state, optimizer=jax.tree.map(fill, state.optimizer))


def restore_plain(checkpointer, path, tree):
    args = ocp.checkpoint_utils.construct_restore_args(tree)
    return checkpointer.restore(path, args=ocp.args.PyTreeRestore(tree, restore_args=args))


def measure(gigabytes, repeats, folder):
    recipe = make_recipe(gigabytes)
    layout = sw.layout(recipe.model, sw.mesh("data=8", on="cpu:8"), "fsdp")
    state = _trained(sw.train_state(recipe, layout))
    tree = as_tree(state)
    size = sum(x.nbytes for x in jax.tree.leaves(tree)) / 2**30
    plain = {
        "orbax": ocp.PyTreeCheckpointHandler(),
        "orbax, uncompressed": ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False),
    }
    times = {name: ([], []) for name in ("shardwise", *plain)}
    blocked = []
    checkpoints = sw.Checkpoints(folder / "shardwise", keep=None)
    for turn in range(repeats + 1):
        for name in times:
            path = folder / f"{name.replace(', ', '-')}-{turn}"
            os.sync()
            start = time.perf_counter()
            if name == "shardwise":
                checkpoints.save(turn, state, layout=layout)
                inside = time.perf_counter() - start
                checkpoints.wait()
            else:
                saver = ocp.Checkpointer(plain[name])
                saver.save(path, args=ocp.args.PyTreeSave(tree))
            saved = time.perf_counter() - start
            start = time.perf_counter()
            if name == "shardwise":
                jax.block_until_ready(checkpoints.restore(recipe, layout, step=turn))
            else:
                jax.block_until_ready(restore_plain(saver, path, tree))
            restored = time.perf_counter() - start
            if turn:  # the first turn compiles and warms up
                times[name][0].append(saved)
                times[name][1].append(restored)
                if name == "shardwise":
                    blocked.append(inside / saved)
            shutil.rmtree(path if name != "shardwise" else folder / name / str(turn))
    checkpoints.close()
    print(f"{size:.2f} GiB on data=8, fsdp")
    for name, (saves, restores) in times.items():
        save, restore = (size / statistics.median(found) for found in (saves, restores))
        ours = [size / statistics.median(found) for found in times["shardwise"]]
        print(
            f"  {name:22} save {save:5.2f} GiB/s, restore {restore:5.2f} GiB/s; shardwise has "
            f"{ours[0] / save:5.2f} and {ours[1] / restore:5.2f} times its throughput"
        )
    print(
        f"  an asynchronous save blocks for {statistics.median(blocked):.3f} of the time of a "
        f"synchronous one"
    )


def restore_elsewhere(gigabytes, folder):
    """Restores onto another mesh and layout; prints the growth of the peak resident set."""
    recipe = make_recipe(gigabytes)
    layout = sw.layout(
        recipe.model, sw.mesh("data=2,model=4", on="cpu:8"), {"**": jax.P("model", "data")}
    )
    # Compile everything, digests included, before the peak is measured.
    small = make_recipe(0.01)
    other = sw.layout(small.model, layout.mesh, {"**": jax.P("model", "data")})
    warm = sw.Checkpoints(folder / "warm")
    warm.save(0, sw.train_state(small, other))
    warm.close()
    warm.restore(small, other)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _peak_bytes()
    state = sw.Checkpoints(folder / "saved").restore(recipe, layout)
    jax.block_until_ready(state)
    after = _peak_bytes()
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    print(
        f"  restored onto data=2,model=4: the peak grew by {(after - before) / size:.2f} times the "
        f"bytes of the state"
    )


def _peak_bytes():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--restore", type=Path, help="only restore this folder, onto another mesh")
    args = parser.parse_args()
    if args.restore:
        restore_elsewhere(args.gigabytes, args.restore)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure(args.gigabytes, args.repeats, folder)
        recipe = make_recipe(args.gigabytes)
        layout = sw.layout(recipe.model, sw.mesh("data=8", on="cpu:8"), "fsdp")
        checkpoints = sw.Checkpoints(folder / "saved")
        checkpoints.save(0, _trained(sw.train_state(recipe, layout)))
        checkpoints.close()
        command = [sys.executable, __file__, "--gigabytes", str(args.gigabytes)]
        subprocess.run([*command, "--restore", str(folder)], check=True)


if __name__ == "__main__":
    main()
