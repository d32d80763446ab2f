"""Compares `sw.estimate` with `sw.compile` on recipes in other hands' styles, fully sharded over eight H100s.

    python benchmarks/estimate_others.py run rows.jsonl      # needs shardwise[gpu]
    python benchmarks/estimate_others.py table rows.jsonl

The recipes are every second one of the sixth round of `step_time`, with eight times the batch. None was compiled for eight
devices before the rules of the estimate were frozen. (One of their steps on one device each was measured for `step_time`.)
"""

import dataclasses
import json
import os
import sys
import time

import jax

import shardwise as sw

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "step_time"))
import rounds  # noqa: E402 - of the step-time benchmark, which measures them on one device

ON, MESH, STRATEGY = "h100:1x8", "data=8", "fsdp"
NAMES = list(rounds.SIXTH)[::2]


def prepared(name):
    recipe = rounds.SIXTH[name]()
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((8 * leaf.shape[0], *leaf.shape[1:]), leaf.dtype),
        recipe.batch,
    )
    recipe = dataclasses.replace(recipe, batch=batch)
    return recipe, sw.layout(recipe, sw.mesh(MESH, on=ON), STRATEGY)


def figures(found, seconds, peak):
    sent = {axis: sum(b for _, b in kinds.values()) for axis, kinds in found.by_axis.items()}
    return {"seconds": seconds, "peak": peak, "sent": sum(sent.values())}


def run(path):
    """Estimates all recipes first, then compiles them; what fails is a row too."""
    rows = {}
    for name in NAMES:
        try:
            recipe, layout = prepared(name)
            start = time.process_time()
            found = sw.estimate(recipe, layout)
            made = figures(found, found.seconds, found.peak_bytes)
            rows[name] = {"name": name, "estimated": made, "took": time.process_time() - start}
        except ValueError as error:
            rows[name] = {"name": name, "error": str(error)[:200]}
    for name, row in rows.items():
        if "error" not in row:
            try:
                found = sw.compile(*prepared(name), show=False)
                row["compiled"] = figures(found, found.time.seconds, found.memory.peak)
            except (ValueError, RuntimeError) as error:
                row["error"] = str(error)[:200]
        with open(path, "w") as file:
            file.writelines(json.dumps(each) + "\n" for each in rows.values())
        print(name, row, flush=True)


def table(path):
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    print("| recipe | time | peak | bytes |\n| --- | --- | --- | --- |")
    off = {"seconds": [], "peak": [], "sent": []}
    for row in rows:
        if "compiled" not in row:
            print(f"| {row['name']} | {row.get('error', 'not compiled')} | | |")
            continue
        cells = []
        for name, errors in off.items():
            mine, theirs = row["estimated"][name], row["compiled"][name]
            errors.append(mine / theirs - 1)
            cells.append(f"{errors[-1]:+.1%}")
        print(f"| {row['name']} | {' | '.join(cells)} |")
    for name, errors in off.items():
        limit = 0.05 if name == "sent" else 0.1
        within = sum(abs(error) <= limit for error in errors)
        ordered = sorted(map(abs, errors))
        print(
            f"{name}: mean error {sum(ordered) / len(ordered):.1%}, median {ordered[len(ordered) // 2]:.1%}, "
            f"worst {ordered[-1]:.1%}, {within} of {len(errors)} within {limit:.0%}"
        )


if __name__ == "__main__":
    {"run": run, "table": table}[sys.argv[1]](sys.argv[2])
