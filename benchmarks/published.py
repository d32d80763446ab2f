"""Compares modelled step times with published ones of MaxText and AXLearn.

    python benchmarks/published.py model modelled.json [--only ROW]…      # on any machine; minutes a row
    python benchmarks/published.py estimate modelled.json [--only ROW]…   # the same without compiling
    python benchmarks/published.py table modelled.json

`published_steps.csv` holds the published rows, each with its source. A row that a decoder of
`shardwise.models` can express is compiled for its chips and priced by `sw.compile(…).time`, and
estimated by `sw.estimate`; every other one is printed with the reason. No constant is fitted to a row. The null model is a constant
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
from shardwise._chips import CHIPS, parse_chips
from shardwise._hlo import parse_hlo
from shardwise._time import product_seconds

ROWS = list(csv.DictReader((pathlib.Path(__file__).parent / "published_steps.csv").open()))
LLAMA = models.CONFIGS["llama3-8b"]
_FUJI = dataclasses.replace(
    LLAMA, hidden=11_008, kv_heads=None, vocab=32_768, rope_theta=1e4, tied=True
)
CONFIGS = {
    "llama3.1-8b": LLAMA,
    "llama3.1-70b": models.CONFIGS["llama3-70b"],
    "llama3.1-405b": models.CONFIGS["llama3-405b"],
    "gemma3-12b": models.CONFIGS["gemma3-12b"],
    "mistral-7b": dataclasses.replace(LLAMA, vocab=32_000),
    # AXLearn's fuji follows Llama: versions 1 and 2 with 32,768 words, 7B with a tied head.
    "fuji-7b-v1": _FUJI,
    "fuji-7b-v2": _FUJI,
    "fuji-70b-v2": dataclasses.replace(models.CONFIGS["llama3-70b"], vocab=32_768, rope_theta=1e4),
}
# AXLearn's default for the layers of fuji: `[qkvo]_proj`. What flash attention returns is not saved.
_AXLEARN = "save:q,k,v,out"
_TRILLIUM = "offload:input,out,q,k,v"


# Collective matmul, as MaxText calls it, is a loop of permutes and partial products.
_NO_LOOPS = {
    "xla_tpu_enable_windowed_einsum_for_all_gather": False,
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
}


def _scoped(kib):
    """Returns the option with which sources give kernels more of the vector memory."""
    return {"xla_tpu_scoped_vmem_limit_kib": str(kib)}


@dataclasses.dataclass(frozen=True)
class Run:
    """How one published row is compiled: its number in the file counts from 0.

    Attributes:
        row: the row.
        on: the chips.
        mesh: their mesh; weights are split over `fsdp`, the batch over all axes.
        remat: what the backward pass does not recompute, as the run's source says: MaxText's
            decoder_layer_input is `input`, query_proj `q`, out_proj `out`, mlpwo `down`.
        loss_chunks: in how many chunks the loss is computed.
        slices: how many slices of these chips run in data parallel; one is compiled.
        accumulate: in how many parts the batch is processed.
        options: those of XLA that the run's source states, that change its program, and that
            today's compiler takes.
        dtype: of the parameters.
        moment: the dtype of Adam's first moment, if not that of the parameters.
        fp8: whether products are priced as those of 8 bits, with the casts before them.
        note: what the row leaves open.
    """

    row: int
    on: str
    mesh: str
    remat: str = "nothing_saveable"
    loss_chunks: int = 8
    slices: int = 1
    accumulate: int = 1
    options: dict[str, bool | str] | None = None
    dtype: str = "float32"
    moment: str | None = None
    fp8: bool = False
    note: str = ""


_V6E = {**_NO_LOOPS, **_scoped(98304)}
RUNS = (
    Run(15, "v6e:2x4", "fsdp=8", _TRILLIUM, options=_V6E),
    Run(21, "v5p:4x8x8", "data=4,fsdp=64", "save:q,k,v,context,out,up,down"),
    Run(22, "h100:32x8", "data=32,fsdp=8", _AXLEARN),
    Run(8, "tpu7x:4x4x4", "fsdp=128", "save:input,context,q,k,v", moment="bfloat16"),
    Run(24, "h100:32x8", "data=32,fsdp=8", _AXLEARN),
    Run(28, "h100:64x8", "data=4,fsdp=128", _AXLEARN),
    Run(14, "v6e:4x4", "fsdp=16", _TRILLIUM, options=_V6E),
    Run(23, "v5e:16x16", "fsdp=256", "save:q,k,v,out,up,down", slices=4),
    Run(20, "v5e:16x16", "fsdp=256", _AXLEARN, slices=4),
    Run(25, "v5e:16x16", "fsdp=256", "offload:q,k,v,out,up,down", slices=4),
    Run(12, "v6e:4x8", "fsdp=32", "offload:input,q,k,v", options=_V6E, dtype="bfloat16"),
    Run(6, "tpu7x:4x8x8", "fsdp=512", "save:k,v+offload:input,down", 4, moment="bfloat16"),
    Run(18, "v5p:8x8x8", "fsdp=512", "offload:context,down", 4),
    Run(26, "v6e:16x16", "fsdp=256", "offload:input,q,k,v", slices=4, options=_V6E),
    Run(27, "v6e:16x16", "fsdp=256", "offload:q,k,v,out", accumulate=4, options=_V6E),
    Run(33, "b200:32x8", "fsdp=256", fp8=True),
    Run(34, "b200:32x8", "data=2,fsdp=128", fp8=True),
    Run(16, "v6e:2x4", "fsdp=8", _TRILLIUM, options=_V6E),
    Run(13, "v6e:8x16", "fsdp=128", _TRILLIUM, options=_scoped(98304)),
    Run(10, "2xv6e:16x16", "data=2,fsdp=256", loss_chunks=16, options=_scoped(122880)),
    Run(11, "2xv6e:16x16", "fsdp=512", "offload:input", options=_scoped(98304)),
)
REASONS = {
    0: "fp8, and the model is not shipped", 1: "fp8, and the model is not shipped",
    2: "the model is not shipped", 3: "the model is not shipped",
    4: "the model is not shipped", 5: "the model is not shipped",
    7: "fp8", 9: "fp8, and attention split over the sequence",
    17: "the row states neither batch nor length",
    19: "the model is not shipped",
    29: "the row states neither batch nor length", 30: "the row states neither batch nor length",
    31: "the row states neither batch nor length", 32: "the row states neither batch nor length",
}  # fmt: skip


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
    """Yields settings, those of the row first, then what needs less memory."""
    asked, parts = run.remat, run.accumulate
    yield Choice(asked, run.loss_chunks, accumulate=parts)
    if asked.startswith("save") and "context" in asked.partition("+")[0]:
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


def recipe_of(run: Run, choice: Choice | None = None):
    """Returns the decoder's config and the recipe of a run, with its own settings or others."""
    choice = choice or next(choices(run))
    row = ROWS[run.row]
    config = CONFIGS[row["model"].lower()]
    config = dataclasses.replace(config, scan=True, remat=choice.remat, param_dtype=run.dtype)
    batch = int(row["global_batch_seqs"]) // run.slices, int(row["seq_len"])
    return config, sw.Recipe(
        model=lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss=models.next_token_loss,
        optimizer=optax.adamw(1e-4, mu_dtype=run.moment),
        batch=jax.ShapeDtypeStruct(batch, "int32"),
        compute_dtype="bfloat16",
        accumulate=choice.accumulate,
        loss_chunks=choice.loss_chunks,
        offload=choice.offload,
        compiler_options=run.options,
    )


def layout_of(run: Run, recipe: sw.Recipe):
    """Returns where the parameters of a run are."""
    return sw.layout(recipe.model, sw.mesh(run.mesh, on=run.on), sw.fsdp("fsdp"))


def compile_run(run: Run, choice: Choice):
    """Returns a run, compiled for its chips."""
    _, recipe = recipe_of(run, choice)
    return sw.compile(recipe, layout_of(run, recipe))


def settings_of(run: Run, choice: Choice):
    """Returns what was compiled, in a few words."""
    found = [str(choice)]
    if run.dtype != "float32":
        found.append(f"parameters and AdamW state in {run.dtype}")
    if run.moment:
        found.append(f"first moments in {run.moment}")
    if run.options:
        off = ["no collective matmul"] if _NO_LOOPS.keys() <= run.options.keys() else []
        off += [
            f"{int(n) // 1024} MiB of scoped memory" for k, n in run.options.items() if "kib" in k
        ]
        found += off
    found += ["products priced in fp8"] if run.fp8 else []
    return ", ".join(found)


def eight_bits(module, machine):
    """Returns a step whose products are of 8 bits, and the same step in 16 bits, in seconds.

    The library's own rate of such products; before each, its operands are read in 16 bits and
    written in 8.
    """
    size = (8192, 8192, 8192)
    rate = product_seconds(machine.gpu, "f8e4m3fn", *size) / product_seconds(
        machine.gpu, "bf16", *size
    )

    def scale(price):
        if price.kind != "product":
            return 1.0
        return rate + price.bytes / machine.gpu.bandwidth / price.seconds

    return machine.schedule(module, scale).seconds, machine.schedule(module).seconds


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
    for choice in choices(run):
        compiled = compile_run(run, choice)
        if compiled.time is not None:
            break
        print(f"{ROWS[run.row]['model']} on {run.on}, {choice}: {compiled.verdict}", flush=True)
    else:
        raise ValueError("it fits in no form")
    spent = time.monotonic() - began
    if hlo:
        (hlo / f"{run.row}.hlo").write_text(compiled.hlo)
    return modelled(run, choice, compiled, spent)


def modelled(run, choice, compiled, spent):
    """Returns what the table shows of a compiled run."""
    found = compiled.time
    config, recipe = recipe_of(run, choice)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.eval_shape(recipe.model)))
    between = between_slices(run, parameters)
    factor = 1.0
    if run.fp8:
        narrow, wide = eight_bits(parse_hlo(compiled.hlo), compiled.machine)
        factor = narrow / wide
    return {
        "seconds": factor * found.seconds + between,
        "low": factor * found.low + between,
        "high": factor * found.high + between,
        "seconds_in_16_bits": found.seconds,
        "between_slices": between,
        "parts": found.parts,
        "communication": [
            (",".join(c.axes), c.link, c.seconds, c.exposed) for c in found.communication
        ],
        "unpriced": found.unpriced,
        "note": "" if choice == next(choices(run)) else "with less memory than published",
        "settings": settings_of(run, choice),
        "fits": compiled.fits,
        "memory": dataclasses.asdict(compiled.memory) if compiled.memory else None,
        "compile_seconds": spent,
        "jax": jax.__version__,
    }


def between_slices(run, parameters):
    """Returns the seconds of the gradient's all-reduce between slices, in float32 and not hidden."""
    chips = int(ROWS[run.row]["n_chips"]) // run.slices
    moved = 2 * (run.slices - 1) / run.slices * 4 * parameters / chips
    return moved / CHIPS[chip_of(run)].network_bytes_per_second


def estimated(run):
    """Returns what is estimated of one run, as published."""
    _, recipe = recipe_of(run)
    found = sw.estimate(recipe, layout_of(run, recipe))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.eval_shape(recipe.model)))
    between = between_slices(run, parameters)
    return {name: getattr(found, name) + between for name in ("seconds", "low", "high")}


def chip_of(run):
    """Returns the name of a run's chips: `v6e` of `2xv6e:16x16`."""
    return parse_chips(run.on).chip.name


def null_seconds(runs):
    """Returns what a constant MFU says of each run: the median over the chip's other runs."""
    least = {}
    for run in runs:
        config, recipe = recipe_of(run)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.eval_shape(recipe.model)))
        chip, row = CHIPS[chip_of(run)], ROWS[run.row]
        peak = chip.bf16_flops_per_second * int(row["n_chips"])
        least[run.row] = (chip.name, flops_of(config, row, parameters) / peak)
    found = {}
    for row, (chip, seconds) in least.items():
        others = [
            best / float(ROWS[other]["step_time_s"])
            for other, (same, best) in least.items()
            if other != row and same == chip
        ]
        own = float(ROWS[row]["step_time_s"])
        found[row] = seconds / statistics.median(others) if others else own
    return found


def table(found):
    """Prints every row, the mean errors by chip, and what could not be modelled."""
    runs = [run for run in RUNS if str(run.row) in found]
    nulls = null_seconds(RUNS)
    print(
        "| model | chips | layout | published s | compiled s | low to high | error | exposed "
        "communication | estimated s | error | null s | error | settings |\n" + "| --- " * 13 + "|"
    )
    errors = []
    for run in sorted(runs, key=lambda run: (chip_of(run), run.row)):
        row, one = ROWS[run.row], found[str(run.row)]
        published = float(row["step_time_s"])
        guess, null = one.get("estimated", {}).get("seconds"), nulls[run.row]
        cells = [
            f"{row['model']}, {row['global_batch_seqs']} × {row['seq_len']}",
            (f"{run.slices} × " if run.slices > 1 else "") + run.on,
            run.mesh,
            f"{published:g}",
            *[""] * 4,
            f"{guess:.2f}" if guess else "",
            f"{guess / published - 1:+.0%}" if guess else "",
            f"{null:.2f}",
            f"{null / published - 1:+.0%}",
            "; ".join(filter(None, (one.get("settings"), one.get("note"), run.note))),
        ]
        if "seconds" in one:
            exposed = one["parts"].get("communication", 0.0) + one["between_slices"]
            cells[4:8] = (
                f"{one['seconds']:.2f}",
                f"{one['low']:.2f} to {one['high']:.2f}",
                f"{one['seconds'] / published - 1:+.0%}",
                f"{exposed:.2f}",
            )
        print("| " + " | ".join(cells) + " |")
        answers = one.get("seconds"), guess, null
        errors.append((chip_of(run), [s / published - 1 if s else None for s in answers]))
    summary(errors)
    print("\n| not modelled | chips | published s | why |\n| --- | --- | --- | --- |")
    for number, row in enumerate(ROWS):
        if str(number) not in found:
            why = REASONS.get(number, "can be modelled, not compiled yet")
            where = f"{row['n_chips']} {row['hardware']}"
            print(f"| {row['model']} | {where} | {row['step_time_s']} | {why} |")


def summary(errors):
    """Prints the mean errors by chip: compiled, estimated, and of the null model."""
    print(
        "\n| chips | compiled: rows | mean error | signed | the null's, same rows | "
        "estimated: rows | mean error | signed | the null's, same rows |\n" + "| --- " * 9 + "|"
    )
    gpus = {"h100", "b200"}
    names = sorted({chip for chip, _ in errors})
    sets = [(name, {name}) for name in names]
    sets += [("TPUs", set(names) - gpus), ("GPUs", gpus), ("all", set(names))]
    for name, chosen in sets:
        cells = [name]
        for kind in (0, 1):
            some = [e for chip, e in errors if chip in chosen and e[kind] is not None]
            if not some:
                cells += ["0", "", "", ""]
                continue
            own = [e[kind] for e in some]
            cells += [
                str(len(some)),
                f"{statistics.mean(map(abs, own)):.1%}",
                f"{statistics.mean(own):+.1%}",
                f"{statistics.mean(abs(e[2]) for e in some):.1%}",
            ]
        print("| " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("model", "estimate", "table"))
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
        if options.what == "estimate" and run.fp8:
            continue  # the estimate prices what is written: products of 16 bits
        one, published = found.setdefault(str(run.row), {}), float(ROWS[run.row]["step_time_s"])
        try:
            if options.what == "estimate":
                new = one["estimated"] = estimated(run)
            else:
                new = model(run, options.hlo)
                one.update(new)
        except Exception as fault:
            print(f"{run}: {type(fault).__name__}: {fault}", file=sys.stderr, flush=True)
            continue
        options.file.write_text(json.dumps(found, indent=1))
        print(
            f"{ROWS[run.row]['model']} on {run.on}: {new['seconds']:.2f} s, published {published} "
            f"({new['seconds'] / published - 1:+.0%})",
            flush=True,
        )


if __name__ == "__main__":
    main()
