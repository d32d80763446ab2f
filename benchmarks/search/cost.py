"""What ranking layouts costs: processor time and memory against the number of chips.

    python benchmarks/search/cost.py rows.jsonl    # appends a row for each size; then prints the table

Each search runs in a process of its own with an empty cache, and compiles nothing. The batch is one
sequence for each chip, so that all sizes have the same meshes to choose from.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = ("v5p:4x4x4", "v5p:4x8x8", "v5p:8x8x16", "v5p:16x16x16")
MODEL, LENGTH = "llama3-70b", 4096


def measure(chips: str) -> dict[str, object]:
    """Returns what one search costs, after the imports that every command pays for."""
    import dataclasses
    import math

    import jax
    import optax
    from flax import nnx

    import shardwise as sw
    from shardwise import models

    jax.config.update("jax_platforms", "cpu")
    devices = math.prod(int(size) for size in chips.partition(":")[2].split("x"))
    config = dataclasses.replace(models.CONFIGS[MODEL], scan=True)
    recipe = sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adamw(1e-4),
        batch=jax.ShapeDtypeStruct((devices, LENGTH), "int32"),
        compute_dtype="bfloat16",
    )
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    found = sw.search(recipe, chips, compile=0)
    return {
        "chips": chips,
        "devices": devices,
        "candidates": len(found.candidates),
        "cpu_seconds": round(time.process_time() - began, 1),
        "mib_before": before.ru_maxrss // 1024,
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "best": f"{found.best.mesh} {found.best.strategy}",
    }


def table(path: Path) -> None:
    """Prints the rows."""
    print("| chips | devices | candidates | processor s | each | peak memory | found |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        each = row["cpu_seconds"] / row["candidates"]
        print(
            f"| {row['chips']} | {row['devices']} | {row['candidates']} | {row['cpu_seconds']} | "
            f"{each:.2f} | {row['mib']} MiB ({row['mib_before']} before) | {row['best']} |"
        )


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        print(json.dumps(measure(sys.argv[2])))
    elif len(sys.argv) == 2:
        rows = Path(sys.argv[1])
        for chips in SIZES:
            with tempfile.TemporaryDirectory() as cache:
                done = subprocess.run(
                    [sys.executable, __file__, "--one", chips],
                    env={**os.environ, "SHARDWISE_CACHE": cache},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
            with rows.open("a", encoding="utf-8") as file:
                file.write(done.stdout.splitlines()[-1] + "\n")
        table(rows)
    else:
        sys.exit(__doc__)
