"""Measures how long a compiled step takes to price, and how large its timeline is.

    python benchmarks/pricing.py [--model NAME] [--unrolled] [CHIPS AXES]…

Without arguments: Llama 3 70B, scanned, on 256 H100s and on 256 v5p chips. The limits are 2 s and
20 MB. Processor time is counted, so that other work on the machine does not matter.
"""

import argparse
import dataclasses
import pathlib
import tempfile
import time

import jax
import optax
from flax import nnx

import shardwise as sw
from shardwise import models
from shardwise._hlo import parse_hlo
from shardwise._time import time_of

DEFAULTS = ("h100:32x8", "fsdp=256", "v5p:4x8x8", "data=4,fsdp=64")


def compiled_step(name, scan, on, axes):
    config = dataclasses.replace(models.CONFIGS[name], scan=scan, remat="nothing_saveable")
    recipe = sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adamw(1e-4),
        batch=jax.ShapeDtypeStruct((256, 4096), "int32"),
        compute_dtype="bfloat16",
    )
    return sw.compile(recipe, sw.layout(recipe.model, sw.mesh(axes, on=on), sw.fsdp("fsdp")))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("where", nargs="*", default=DEFAULTS, metavar="CHIPS AXES")
    parser.add_argument("--model", default="llama3-70b")
    parser.add_argument("--unrolled", action="store_true")
    options = parser.parse_args()
    print("| model | chips | instructions | parsed s | priced s | timeline s | timeline MB |")
    print("| --- " * 7 + "|")
    for on, axes in zip(options.where[::2], options.where[1::2], strict=True):
        compiled = compiled_step(options.model, not options.unrolled, on, axes)
        began = time.process_time()
        module = parse_hlo(compiled.hlo)
        parsed = time.process_time()
        time_of(module, compiled.machine, compiled.paths, compiled.time.tokens)
        priced = time.process_time()
        timeline = compiled.timeline()
        drawn = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "step.json")
            timeline.save(file)
            size = file.stat().st_size
        count = sum(map(len, module.computations.values()))
        form = "unrolled" if options.unrolled else "scanned"
        print(
            f"| {options.model}, {form} | {on}, {axes} | {count:,} | {parsed - began:.2f} | "
            f"{priced - parsed:.2f} | {drawn - priced:.2f} | {size / 1e6:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
