"""Fits the constants of `a100_model.py`, and says how well they predict models left out.

    python benchmarks/search/a100_fit.py benchmarks/search/a100_layouts.csv            # minutes
    python benchmarks/search/a100_fit.py benchmarks/search/a100_layouts.csv --by row --folds 5

The logarithms of predicted over measured times are fitted, with a loss that outliers do not rule.
The few rows across nodes weigh as much as the many within one. Then each fold (by default each
model: width, layers, sequence) is predicted with constants that were fitted without it.
"""

import argparse
import dataclasses
import math
import pathlib
import zlib

from a100 import read_rows, summary
from a100_model import FITTED, NODE, Constants, step_seconds
from scipy.optimize import least_squares

NAMES = [field.name for field in dataclasses.fields(Constants)]


def fit(rows, start=FITTED, steps=12):
    """Returns the constants that suit measured rows best."""
    across = sum(row.layout.devices > NODE for row in rows)
    weight = math.sqrt((len(rows) - across) / across) if 0 < across < len(rows) else 1.0

    def scaled(shifts):
        values = zip(NAMES, shifts, strict=True)
        return Constants(**{name: getattr(start, name) * math.exp(by) for name, by in values})

    def residuals(shifts):
        constants = scaled(shifts)
        found = [
            (weight if row.layout.devices > NODE else 1.0)
            * math.log(1e3 * step_seconds(row.layout, constants) / row.measured)
            for row in rows
        ]
        # What the rows leave open stays where it was.
        return found + [0.03 * by for by in shifts]

    best = least_squares(
        residuals, [0.0] * len(NAMES), loss="soft_l1", f_scale=0.1, diff_step=1e-3, max_nfev=steps
    )
    return scaled(best.x)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--by", choices=("model", "group", "row"), default="model")
    parser.add_argument("--folds", type=int, default=12, help="at most so many folds")
    options = parser.parse_args()
    rows, _ = read_rows(options.file)
    best = fit(rows)
    for name in NAMES:
        print(f"    {name}={getattr(best, name):.4g},")
    predicted = [1e3 * step_seconds(row.layout, best) for row in rows]
    print("\nfitted to all rows\n\n" + "\n".join(summary(rows, predicted)), flush=True)
    key = {
        "model": lambda row: row.group[:4],
        "group": lambda row: row.group,
        "row": lambda row: (zlib.crc32(str(row.layout).encode()), row.layout),  # in random order
    }[options.by]
    keys = [key(row) for row in rows]
    fold = {key: i % options.folds for i, key in enumerate(sorted(set(keys), key=str))}
    for left in range(max(fold.values()) + 1):
        kept = [row for row, key in zip(rows, keys, strict=True) if fold[key] != left]
        constants = fit(kept, best, steps=6)
        for i, (row, key) in enumerate(zip(rows, keys, strict=True)):
            if fold[key] == left:
                predicted[i] = 1e3 * step_seconds(row.layout, constants)
    print(f"\neach {options.by} left out\n\n" + "\n".join(summary(rows, predicted)))


if __name__ == "__main__":
    main()
