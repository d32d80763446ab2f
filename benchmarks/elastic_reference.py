"""The losses of a run that nothing disturbs, on the same numbers of processes from the same steps on.

For `elastic.py`. As many processes as each stretch had compute it over Gloo, so that sums are
rounded alike and losses are equal to the bit. The processes are started once for each number of
them and take turns; the state passes from one stretch to the next in a file, all of its values.
None of that uses checkpoints, copies or the launcher of elastic runs.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))


@functools.cache
def script():
    """Returns the module of the run, whose name is that of the benchmark too."""
    path = ROOT / "tests" / "scripts" / "elastic.py"
    spec = importlib.util.spec_from_file_location("elastic_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses_of(segments, processes, last, folder):
    """Returns the loss of each step when processes took over at these steps, to the last one."""
    from forked import Forked

    kept = [(first, count) for first, count in script().final(segments, processes) if first < last]
    ends = [*(first for first, _ in kept[1:]), last]
    plan = [(first, end, count) for (first, count), end in zip(kept, ends, strict=True)]
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"processes": processes, "plan": plan}))
    dropped = ("SHARDWISE_", "XLA_FLAGS", "JAX_")
    plain = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    launch = str(ROOT / "tests" / "scripts" / "launch.py")
    groups = [
        Forked(
            [sys.executable, launch, str(count), "1", sys.executable, __file__, str(folder), str(count)],
            env=plain | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"errors-{count}").open("wb"),
        )
        for count in sorted({count for _, _, count in plan})
    ]  # fmt: skip
    try:
        for group in groups:
            if group.wait(3600):
                raise RuntimeError(f"the reference failed: see {folder}/errors-*")
    finally:
        for group in groups:
            group.kill()
    found = {}
    for path in folder.glob("losses-*.json"):
        found |= {int(step): loss for step, loss in json.loads(path.read_text()).items()}
    return found


def take_turns(folder, count):
    """Computes all stretches of so many processes, each once the one before it is done."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    import shardwise as sw
    from shardwise._checkpoint import in_memory, on_disk
    from shardwise._elastic import scaled

    run, here = script(), sw.distributed()
    asked = json.loads((folder / "plan.json").read_text())
    layout = run.layout_on(sw.mesh("data=-1"))
    step = sw.train_step(scaled(run.RECIPE, layout, count, asked["processes"]), layout)
    begun = sw.train_state(step.blueprint.recipe, layout)
    data = run.data_of()
    for turn, (first, end, processes) in enumerate(asked["plan"]):
        if processes != count:
            continue
        state = begun
        if turn:
            while not (folder / f"state-{turn}.npz").exists():
                time.sleep(0.02)
            with np.load(folder / f"state-{turn}.npz") as kept:
                plain = on_disk(begun)
                leaves, shape = jax.tree.flatten(plain)
                values = [
                    jax.make_array_from_callback(
                        x.shape, x.sharding, lambda i, v=kept[str(n)]: v[i]
                    )
                    for n, x in enumerate(leaves)
                ]
                state = in_memory(jax.tree.unflatten(shape, values), step.blueprint)
        else:
            # The step uses up what it is given.
            state = jax.tree.map(lambda x: x.copy(), begun)
        batches = data.on(step.blueprint, position=first * run.BATCH)
        losses = {}
        for number in range(first + 1, end + 1):
            state, metrics = step(state, next(batches))
            losses[number] = float(metrics["loss"])
        whole = multihost_utils.process_allgather(on_disk(state), tiled=True)
        if here.index == 0:
            (folder / f"losses-{turn}.json").write_text(json.dumps(losses))
            arrays = {str(n): x for n, x in enumerate(jax.tree.leaves(whole))}
            part = folder / f".state-{turn + 1}.npz"
            np.savez(part, **arrays)
            part.replace(folder / f"state-{turn + 1}.npz")


if __name__ == "__main__":
    take_turns(Path(sys.argv[1]), int(sys.argv[2]))
