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
import math
import pathlib
import re
import sys
import time

import jax
import optax
from flax import nnx
from published import CONFIGS, REASONS, ROWS, RUNS, Run

import shardwise as sw
from shardwise import models

# What the rows save and offload, in the names of the shipped decoder: MaxText's
# decoder_layer_input is `input`, query_proj `q`, out_proj `out`, mlpwo `down`.
REMAT = {
    6: "save:k,v+offload:input,down",
    8: "save:input,context,q,k,v",
    10: "offload:input",
    12: "offload:input,q,k,v",
    13: "offload:input,out,q,k,v",
    14: "offload:input,out,q,k,v",
    15: "offload:input,out,q,k,v",
    16: "offload:input,out,q,k,v",
    18: "offload:context,down",
    20: "save:q,k,v,context,out",
    21: "save:q,k,v,context,out",
    22: "save:q,k,v,context,out",
    23: "save:q,k,v,out,up,down",
    24: "save:q,k,v,context,out",
    25: "offload:q,k,v,out,up,down",
    26: "offload:input,q,k,v",
    27: "offload:input,q,k,v,out",
    28: "save:q,k,v,context,out",
}
ORDER = (15, 14, 16, 8, 12, 21, 23, 20, 25, 26, 27, 13, 22, 24, 28, 10, 18, 6, 33, 34)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Settings of a recipe, besides its model and batch."""

    remat: str
    loss_chunks: int
    offload: str = ""
    accumulate: int = 1

    def __str__(self):
        text = f"remat={self.remat}, loss_chunks={self.loss_chunks}"
        text += f", offload={self.offload}" if self.offload else ""
        return text + (f", accumulate={self.accumulate}" if self.accumulate > 1 else "")


def choices(run: Run):
    """Yields settings, those of the row first."""
    asked, parts = REMAT.get(run.row, "nothing_saveable"), run.accumulate
    yield Choice(asked, 8, accumulate=parts)
    if "context" in asked.partition("+")[0]:
        yield Choice("save:context", 8, accumulate=parts)
    if asked != "nothing_saveable":
        yield Choice("nothing_saveable", 8, accumulate=parts)
    if asked != "offload:input":
        yield Choice("offload:input", 16, accumulate=parts)
    yield Choice("offload:input", 16, offload="optimizer", accumulate=parts)
    devices = math.prod(int(size) for size in re.findall(r"=(\d+)", run.mesh))
    each = int(ROWS[run.row]["global_batch_seqs"]) // (run.slices * parts * devices)
    if each > 1:
        more = parts * next(n for n in range(2, each + 1) if each % n == 0)
        yield Choice("offload:input", 16, accumulate=more)


def recipe_of(run: Run, choice: Choice):
    row = ROWS[run.row]
    config = dataclasses.replace(CONFIGS[row["model"].lower()], scan=True, remat=choice.remat)
    return sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adamw(1e-4),
        batch=jax.ShapeDtypeStruct(
            (int(row["global_batch_seqs"]) // run.slices, int(row["seq_len"])), "int32"
        ),
        compute_dtype="bfloat16",
        accumulate=choice.accumulate,
        loss_chunks=choice.loss_chunks,
        offload=choice.offload,
        compiler_options=run.options,
    )


def find(run: Run):
    """Returns the attempts of one row, the last of which fits if any does."""
    tried = []
    for choice in choices(run):
        began = time.monotonic()
        recipe = recipe_of(run, choice)
        layout = sw.layout(recipe.model, sw.mesh(run.mesh, on=run.on), sw.fsdp("fsdp"))
        try:
            compiled = sw.compile(recipe, layout)
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
