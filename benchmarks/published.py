"""Compares modelled step times with published ones of MaxText and AXLearn.

    python benchmarks/published.py model modelled.json [--only TEXT]…   # on any machine
    python benchmarks/published.py table modelled.json

`published_steps.csv` holds the published rows, each with its source. A row that a decoder of
`shardwise.models` can express is compiled for its chips and priced by `sw.compile(…).time`; every
other one is printed with the reason. No constant is fitted to a row. The null model is a constant
MFU: the median over the chip's other rows, compiled or not.
"""

import argparse
import csv
import dataclasses
import json
import math
import pathlib
import re
import statistics
import sys
import time

import jax
import optax
from flax import nnx

import shardwise as sw
from shardwise import models
from shardwise._chips import CHIPS

ROWS = list(csv.DictReader((pathlib.Path(__file__).parent / "published_steps.csv").open()))
LLAMA = models.CONFIGS["llama3-8b"]
_LLAMA2 = dataclasses.replace(LLAMA, hidden=11_008, kv_heads=None, vocab=32_000, rope_theta=1e4)
CONFIGS = {
    "llama3.1-8b": LLAMA,
    "llama3.1-70b": models.CONFIGS["llama3-70b"],
    "llama3.1-405b": models.CONFIGS["llama3-405b"],
    "gemma3-12b": models.CONFIGS["gemma3-12b"],
    "mistral-7b": dataclasses.replace(LLAMA, vocab=32_000),
    # AXLearn's fuji follows Llama: version 1 and 2 with 32,000 words.
    "fuji-7b-v1": _LLAMA2,
    "fuji-7b-v2": _LLAMA2,
    "fuji-70b-v2": dataclasses.replace(models.CONFIGS["llama3-70b"], vocab=32_000, rope_theta=1e4),
}
# What AXLearn saves where a row names nothing: its default for the layers of fuji.
_AXLEARN = ("q", "k", "v", "context", "out")
_FP8 = "published in fp8, most likely"
_V6E = ("q", "k", "v", "out")


# Collective matmul, as MaxText calls it, is a loop of permutes and partial products.
_NO_LOOPS = {
    "xla_tpu_enable_windowed_einsum_for_all_gather": False,
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
}


@dataclasses.dataclass(frozen=True)
class Run:
    """How one published row is compiled: its number in the file counts from 0.

    Attributes:
        row: the row.
        on: the chips.
        mesh: their mesh; weights are split over `fsdp`, the batch over all axes.
        saved: what the backward pass does not recompute.
        offloaded: what is kept in the host's memory until then.
        slices: how many slices of these chips run in data parallel; one is compiled.
        accumulate: in how many parts the batch is processed.
        options: those of XLA that the run's source states and that change its program.
        note: what the row leaves open.
    """

    row: int
    on: str
    mesh: str
    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    slices: int = 1
    accumulate: int = 1
    options: dict[str, bool] | None = None
    note: str = ""


RUNS = (
    Run(15, "v6e:2x4", "fsdp=8", offloaded=_V6E, options=_NO_LOOPS),
    Run(21, "v5p:4x8x8", "data=4,fsdp=64", _AXLEARN),
    Run(22, "h100:32x8", "data=32,fsdp=8", _AXLEARN),
    Run(8, "tpu7x:4x4x4", "fsdp=128", ("q", "k", "v", "context")),
    Run(24, "h100:32x8", "data=32,fsdp=8", _AXLEARN),
    Run(28, "h100:64x8", "data=4,fsdp=128", _AXLEARN),
    Run(14, "v6e:4x4", "fsdp=16", offloaded=_V6E, options=_NO_LOOPS),
    Run(23, "v5e:16x16", "fsdp=256", ("q", "k", "v", "out", "up", "down"), slices=4),
    Run(20, "v5e:16x16", "fsdp=256", _AXLEARN, slices=4),
    Run(25, "v5e:16x16", "fsdp=256", offloaded=("q", "k", "v", "out", "up", "down"), slices=4),
    Run(12, "v6e:4x8", "fsdp=32", offloaded=("q", "k", "v"), options=_NO_LOOPS),
    Run(6, "tpu7x:4x8x8", "fsdp=512", ("k", "v"), ("down",)),
    Run(18, "v5p:8x8x8", "fsdp=512", ("context",), ("down",)),
    Run(26, "v6e:16x16", "fsdp=256", offloaded=("q", "k", "v"), slices=4),
    Run(27, "v6e:16x16", "fsdp=256", offloaded=("q", "k", "v", "out"), accumulate=4),
    Run(33, "b200:32x8", "fsdp=256", note=_FP8),
    Run(34, "b200:32x8", "data=2,fsdp=128", note=_FP8),
    Run(16, "v6e:2x4", "fsdp=8", offloaded=_V6E, options=_NO_LOOPS),
    Run(13, "v6e:8x16", "fsdp=128", offloaded=_V6E, options=_NO_LOOPS),
    Run(10, "v6e:16x16", "fsdp=256", slices=2),
)
REASONS = {
    0: "fp8, and the model is not shipped", 1: "fp8, and the model is not shipped",
    2: "the model is not shipped", 3: "the model is not shipped",
    4: "the model is not shipped", 5: "the model is not shipped",
    6: "needs 143.1 of 94.7 GiB: the inputs of its layers, which the run offloads, stay on the device",
    7: "fp8", 9: "fp8, and attention split over the sequence",
    11: "the inputs of its layers, which the run offloads, stay on the device: 31.5 of 31.2 GiB",
    12: "needs 79.1 of 31.2 GiB in its smallest form: 24.6 GiB of state, and the inputs of its layers, which the run offloads, stay on the device",
    17: "the row states neither batch nor length",
    19: "the model is not shipped",
    29: "the row states neither batch nor length", 30: "the row states neither batch nor length",
    31: "the row states neither batch nor length", 32: "the row states neither batch nor length",
}  # fmt: skip


def saving(config, names, offloaded):
    """Returns a remat policy: keep the products with these kernels, and attention's results."""
    shapes = {
        "q": (config.width, config.heads, config.head_depth),
        "k": (config.width, config.key_heads, config.head_depth),
        "v": (config.width, config.key_heads, config.head_depth),
        "out": (config.heads, config.head_depth, config.width),
        "up": (config.width, 2, config.hidden),
        "down": (config.hidden, config.width),
    }
    kept = {shapes[name] for name in names if name != "context"}
    moved = {shapes[name] for name in offloaded}
    offload = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    def policy(primitive, *operands, **params):
        if primitive.name == "dot_general":
            if any(x.shape in moved for x in operands):
                return offload(primitive, *operands, **params)
            return any(x.shape in kept for x in operands)
        if "context" not in names:
            return False
        if primitive.name in ("slice", "squeeze", "gather"):
            # Of the log-sums that splash returns for 128 lanes, the one that it keeps.
            return operands[0].dtype == "float32" and len(operands[0].shape) >= 3
        return primitive.name == "pallas_call" or "dot_product_attention" in primitive.name

    return policy


def attempts(run):
    """Yields the run as published, and then what needs less memory, with what is different."""
    yield run, ""
    if run.saved or run.offloaded:
        yield dataclasses.replace(run, saved=(), offloaded=()), "all recomputed"
    # Parts of the batch, as few as split what each device has.
    devices = math.prod(int(size) for size in re.findall(r"=(\d+)", run.mesh))
    each = int(ROWS[run.row]["global_batch_seqs"]) // (run.slices * run.accumulate * devices)
    if each > 1:
        parts = run.accumulate * next(n for n in range(2, each + 1) if each % n == 0)
        note = f"all recomputed, {parts} parts"
        yield dataclasses.replace(run, saved=(), offloaded=(), accumulate=parts), note


def recipe_of(run):
    row = ROWS[run.row]
    config = CONFIGS[row["model"].lower()]
    policy = "nothing_saveable"
    if run.saved or run.offloaded:
        # A config names its policy, as those of JAX are named.
        policy = f"_published_{run.row}"
        setattr(jax.checkpoint_policies, policy, saving(config, run.saved, run.offloaded))
    config = dataclasses.replace(config, scan=True, remat=policy)
    batch = int(row["global_batch_seqs"]) // run.slices, int(row["seq_len"])
    return config, sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adamw(1e-4),
        batch=jax.ShapeDtypeStruct(batch, "int32"),
        compute_dtype="bfloat16",
        accumulate=run.accumulate,
        compiler_options=run.options,
    )


def flops_of(config, row, parameters):
    """Returns the model's operations in one step: products and causal attention."""
    length = int(row["seq_len"])
    tokens = int(row["global_batch_seqs"]) * length
    attended = sum(
        min(length / 2, config.window or length) if config.is_local(i) else length / 2
        for i in range(config.layers)
    )
    return 6 * tokens * (parameters + 2 * attended * config.heads * config.head_depth)


def model(run, hlo=None):
    """Returns what is modelled of one run."""
    began = time.monotonic()
    for attempt, note in attempts(run):
        config, recipe = recipe_of(attempt)
        mesh = sw.mesh(run.mesh, on=run.on)
        layout = sw.layout(recipe.model, mesh, sw.fsdp("fsdp"))
        compiled = sw.compile(recipe, layout)
        if compiled.time is not None:
            break
        print(f"{ROWS[run.row]['model']} on {run.on}, {note}: {compiled.verdict}", flush=True)
    else:
        raise ValueError("it fits in no form")
    found = compiled.time
    spent = time.monotonic() - began
    if hlo:
        (hlo / f"{run.row}.hlo").write_text(compiled.hlo)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.eval_shape(recipe.model)))
    chip = CHIPS[run.on.partition(":")[0]]
    # The gradient's all-reduce between slices, in float32 and not hidden.
    chips = int(ROWS[run.row]["n_chips"]) // run.slices
    between = 2 * (run.slices - 1) / run.slices * 4 * parameters / chips
    between /= chip.network_bytes_per_second
    return {
        "seconds": found.seconds + between,
        "low": found.low + between,
        "high": found.high + between,
        "between_slices": between,
        "parts": found.parts,
        "communication": [
            (",".join(c.axes), c.link, c.seconds, c.exposed) for c in found.communication
        ],
        "unpriced": found.unpriced,
        "note": note,
        "fits": compiled.fits,
        "compile_seconds": spent,
    }


def table(found):
    """Prints every row, the mean errors by chip, and what could not be modelled."""
    runs = [run for run in RUNS if str(run.row) in found]
    chip_of = {run.row: run.on.partition(":")[0] for run in RUNS}
    mfu = {}
    for run in RUNS:
        config, recipe = recipe_of(run)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.eval_shape(recipe.model)))
        row = ROWS[run.row]
        peak = CHIPS[chip_of[run.row]].bf16_flops_per_second * int(row["n_chips"])
        seconds = flops_of(config, row, parameters) / peak
        mfu[run.row] = (seconds, seconds / float(row["step_time_s"]))
    print(
        "| model | chips | layout | published s | modelled s | low to high | error | "
        "exposed communication | null s | null's error | note |\n" + "| --- " * 11 + "|"
    )
    errors, nulls = {}, {}
    for run in sorted(runs, key=lambda run: (chip_of[run.row], run.row)):
        row, one, chip = ROWS[run.row], found[str(run.row)], chip_of[run.row]
        published = float(row["step_time_s"])
        others = [mfu[r][1] for r in mfu if r != run.row and chip_of[r] == chip]
        null = mfu[run.row][0] / statistics.median(others) if others else published
        error, off = one["seconds"] / published - 1, null / published - 1
        errors.setdefault(chip, []).append(error)
        nulls.setdefault(chip, []).append(off)
        slices = f"{run.slices} × " if run.slices > 1 else ""
        exposed = one["parts"].get("communication", 0.0) + one["between_slices"]
        print(
            f"| {row['model']}, {row['global_batch_seqs']} × {row['seq_len']} | {slices}{run.on} | "
            f"{run.mesh} | {published:g} | {one['seconds']:.2f} | "
            f"{one['low']:.2f} to {one['high']:.2f} | {error:+.0%} | {exposed:.2f} | "
            f"{null:.2f} | {off:+.0%} | {one['note'] or run.note} |"
        )
    print(
        "\n| chip | rows | mean error | mean, signed | the null's mean error |\n"
        + "| --- " * 5
        + "|"
    )
    everything = (("all", sum(errors.values(), []), sum(nulls.values(), [])),)
    for chip, these, others in [*((c, errors[c], nulls[c]) for c in sorted(errors)), *everything]:
        size = [statistics.mean(map(abs, e)) for e in (these, others)]
        print(
            f"| {chip} | {len(these)} | {size[0]:.1%} | {statistics.mean(these):+.1%} | "
            f"{size[1]:.1%} |"
        )
    print("\n| not modelled | chips | published s | why |\n| --- | --- | --- | --- |")
    for number, row in enumerate(ROWS):
        if str(number) not in found:
            why = REASONS.get(number, "can be modelled, not compiled yet")
            print(
                f"| {row['model']} | {row['n_chips']} {row['hardware']} | {row['step_time_s']} | {why} |"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("model", "table"))
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--only", action="append", default=[], help="numbers of rows, from 0")
    parser.add_argument("--hlo", type=pathlib.Path, help="a folder for the optimised programs")
    options = parser.parse_args()
    found = json.loads(options.file.read_text()) if options.file.exists() else {}
    if options.what == "table":
        table(found)
        return
    for run in RUNS:
        if options.only and str(run.row) not in options.only:
            continue
        try:
            found[str(run.row)] = model(run, options.hlo)
        except Exception as fault:
            print(f"{run}: {type(fault).__name__}: {fault}", file=sys.stderr, flush=True)
            continue
        options.file.write_text(json.dumps(found, indent=1))
        one, published = found[str(run.row)], float(ROWS[run.row]["step_time_s"])
        print(
            f"{ROWS[run.row]['model']} on {run.on}: {one['seconds']:.2f} s, published {published} "
            f"({one['seconds'] / published - 1:+.0%}; {one['compile_seconds']:.0f} s to compile; "
            f"fits {one['fits']})",
            flush=True,
        )


if __name__ == "__main__":
    main()
