"""Finds settings with which published runs fit on their chips, as the chips' own compilers say.

    python benchmarks/fits.py find fits.json [--only ROW]…   # on any machine
    python benchmarks/fits.py table fits.json

Every row of `published_steps.csv` ran. For each whose architecture is shipped, settings are tried
in order until one fits: what the row itself saves and offloads, with the loss in chunks; then only
the layers' inputs, offloaded; then the optimizer's state in host memory too. Attempts that do not
fit are kept with what they need.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

import jax
from published import REASONS, ROWS, RUNS, Choice, Run, choices, compile_run

ORDER = (15, 14, 16, 8, 12, 21, 23, 20, 25, 26, 27, 13, 22, 24, 28, 10, 11, 18, 6, 33, 34)


def find(run: Run):
    """Returns the attempts of one row, the last of which fits if any does."""
    tried = []
    for choice in choices(run):
        began = time.monotonic()
        try:
            compiled = compile_run(run, choice)
        except ValueError as error:
            found = {"choice": dataclasses.asdict(choice), "error": str(error)[:500]}
        else:
            found = {
                "choice": dataclasses.asdict(choice),
                "fits": compiled.fits,
                "memory": dataclasses.asdict(compiled.memory) if compiled.memory else None,
                "seconds": compiled.time.seconds if compiled.time is not None else None,
                "verdict": compiled.verdict,
            }
        tried.append({**found, "compile_seconds": time.monotonic() - began, "jax": jax.__version__})
        name = f"{ROWS[run.row]['model']} on {run.on}"
        print(f"{name}: {choice}: {found.get('verdict', found.get('error'))}", flush=True)
        if found.get("fits"):
            break
    return tried


def table(found):
    """Prints every row: the settings that fit, or why there are none."""
    gib = 2**30
    print(
        "| model | chips | mesh | settings that fit | needs | of | in host memory | modelled s | "
        "published s | attempts that do not fit |\n" + "| --- " * 10 + "|"
    )
    runs = {run.row: run for run in RUNS}
    for number in ORDER:
        if str(number) not in found:
            continue
        run, row, tried = runs[number], ROWS[number], found[str(number)]
        *others, last = tried
        others = [*others, last] if not last.get("fits") else others
        missed = "; ".join(
            f"{Choice(**one['choice'])}: "
            + (
                f"{one['memory']['peak'] / gib:.1f} GiB"
                if one.get("memory")
                else one.get("error", "no memory reported")
            )
            for one in others
        )
        slices = f"{run.slices} × " if run.slices > 1 else ""
        head = (
            f"| {row['model']}, {row['global_batch_seqs']} × {row['seq_len']} | {slices}{run.on} "
        )
        head += f"| {run.mesh} | "
        if last.get("fits"):
            memory = last["memory"]
            host = memory["host_state"] + memory["host_temporaries"]
            seconds = f"{last['seconds']:.2f}" if last["seconds"] else ""
            head += (
                f"`{Choice(**last['choice'])}` | {memory['peak'] / gib:.1f} GiB | "
                f"{memory['capacity'] / gib:.1f} GiB | {host / gib:.1f} GiB | {seconds} | "
            )
        else:
            head += "none found | | | | | "
        print(f"{head}{row['step_time_s']} | {missed} |")
    print("\n| not tried | chips | why |\n| --- | --- | --- |")
    for number, row in enumerate(ROWS):
        if str(number) not in found:
            why = "not compiled yet" if number in runs else REASONS.get(number, "")
            print(f"| {row['model']} | {row['n_chips']} {row['hardware']} | {why} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("find", "table"))
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--only", action="append", default=[], help="numbers of rows, from 0")
    options = parser.parse_args()
    found = json.loads(options.file.read_text()) if options.file.exists() else {}
    if options.what == "table":
        table(found)
        return
    runs = {run.row: run for run in RUNS}
    for number in map(int, options.only) if options.only else ORDER:
        try:
            found[str(number)] = find(runs[number])
        except (ValueError, RuntimeError) as fault:
            print(f"{number}: {type(fault).__name__}: {fault}", file=sys.stderr, flush=True)
            continue
        options.file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
