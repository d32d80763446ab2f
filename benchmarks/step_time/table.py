"""Compares modelled step times with measured ones.

    python benchmarks/step_time/table.py predict predicted.json [NAME | ROUND]…  # anywhere, with shardwise[gpu] and cuDNN
    python benchmarks/step_time/table.py table predicted.json measured.json [more.json]

The null model beside each row is a constant MFU: the median of the fitted recipes.
"""

import json
import pathlib
import sys

import numpy as np
from recipes import FITTED
from rounds import RECIPES, ROUNDS

import shardwise as sw


def predict(path, *names):
    found = {}
    chosen = [n for name in names for n in ROUNDS.get(name, (name,))]
    for name in chosen or RECIPES:
        recipe = RECIPES[name]()
        layout = sw.layout(recipe.model, sw.mesh("data=1", on="h200:1x1"))
        compiled = sw.compile(recipe, layout, show=False)
        time = compiled.time
        found[name] = {
            "seconds": time.seconds, "low": time.low, "high": time.high,
            "flops": compiled.flops, "peak": compiled.memory.peak, "bound": time.bound,
        }  # fmt: skip
        print(name, time.verdict, flush=True)
        with open(path, "w") as file:
            json.dump(found, file, indent=1)


def table(predicted, *measured):
    with open(predicted) as file:
        plan = json.load(file)
    real = {}
    for path in measured:
        with open(path) as file:
            real |= json.load(file)["recipes"]
    with open(pathlib.Path(__file__).parent / "predicted.json") as file:
        known = json.load(file)
    rates = [known[n]["flops"] / real[n]["seconds"] for n in FITTED]
    null = float(np.median(rates))
    print("| recipe | | modelled | bounds | measured | error | constant MFU |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    errors = {kind: [] for kind in ("fitted", "seen", *ROUNDS)}
    nulls = {kind: [] for kind in [*ROUNDS][1:]}
    for name, row in plan.items():
        if "seconds" not in real.get(name, {}):
            continue
        kind = kind_of(name)
        seconds = real[name]["seconds"]
        off, other = row["seconds"] / seconds - 1, row["flops"] / null / seconds - 1
        errors[kind].append(abs(off))
        if kind in nulls:
            nulls[kind].append(abs(other))
        print(
            f"| {name} | {kind} | {row['seconds'] * 1e3:.3f} ms | {row['low'] * 1e3:.3f} to "
            f"{row['high'] * 1e3:.3f} | {seconds * 1e3:.3f} ms | {off:+.1%} | {other:+.0%} |"
        )
    print()
    constant = {f"{kind}, null model": found for kind, found in nulls.items()}
    for kind, found in (errors | constant).items():
        if found:
            mean, worst = np.mean(found), max(found)
            print(f"- {kind}: {len(found)} recipes, mean {mean:.1%}, worst {worst:.1%}")


def kind_of(name):
    """Returns the set that a recipe belongs to, as the README explains them."""
    sets = {"fitted": FITTED, **ROUNDS}
    return next((kind for kind, names in sets.items() if name in names), "seen")


if __name__ == "__main__":
    {"predict": predict, "table": table}[sys.argv[1]](*sys.argv[2:])
