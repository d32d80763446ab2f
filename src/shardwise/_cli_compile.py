"""The commands about chips: `compile`, `chips`, `models` and `doctor`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from typing import Annotated

import typer

from ._chips import CHIPS
from ._cli_options import (
    TARGETS,
    BatchOption,
    InputsOption,
    MeshOption,
    OnOption,
    RematOption,
    RulesOption,
    StrategyOption,
    Target,
    app,
    compile_target,
    lay_out,
    require_devices,
    require_writable,
    save_to,
)
from ._cli_plan import PlanFormat
from ._compilers import find_compiler
from ._table import show_bytes, text_table


@app.command(
    name="compile",
    help=f"""Compile the training step with the real compiler of the chips, which need not be here.

The verdict comes first: whether it fits, and how much is to spare. Then memory, collectives by axis
with the lines that caused them, and findings.

{TARGETS}

Examples:

\b
  shardwise compile llama3-8b --mesh data=64 --on h100:8x8 --strategy fsdp --batch 128x4096

\b
  shardwise compile llama3-70b --mesh data=64,model=4 --on v5p:4x8x8 --strategy fsdp+tensor \\
    --batch 256x4096

\b
  shardwise compile train.py:recipe --mesh data=8 --on cpu:8 --strategy fsdp --format json

Exit status: 0 fits, 1 does not fit, 2 could not run.""",
)
def compile_command(
    target: Target,
    mesh: MeshOption,
    on: OnOption = "here",
    strategy: StrategyOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    batch: BatchOption = None,
    remat: RematOption = None,
    save: Annotated[
        str | None,
        typer.Option("--save", metavar="FILE", help="Write it as JSON, to compare with later."),
    ] = None,
    format: Annotated[
        PlanFormat, typer.Option("--format", help="How to print it.")
    ] = PlanFormat.text,
) -> None:
    """Compiles a step and says what it costs."""
    require_devices(on)
    require_writable(save)
    found, made = lay_out(target, mesh, on, strategy, rules, inputs, batch, remat)
    compiled = compile_target(target, found, made, inputs)
    if format is PlanFormat.json:
        typer.echo(json.dumps(compiled.to_dict(), indent=2))
    else:
        typer.echo(str(compiled))
    save_to(save, compiled)
    raise typer.Exit(1 if compiled.fits is False else 0)


@app.command(help="Print what is known of each chip that a mesh can be made of.")
def chips(
    format: Annotated[
        PlanFormat, typer.Option("--format", help="How to print it.")
    ] = PlanFormat.text,
) -> None:
    """Prints the table of chips."""
    if format is PlanFormat.json:
        typer.echo(json.dumps([dataclasses.asdict(chip) for chip in CHIPS.values()], indent=2))
        return
    header = (
        "chip", "JAX calls it", "topology", "HBM", "usable by a device", "HBM/s", "bf16 flop/s",
        "link/s", "network/s", "devices/chip", "source",
    )  # fmt: skip
    rows = [
        (
            chip.name,
            chip.kind,
            "hosts x GPUs" if chip.platform == "gpu" else "x".join("ABC"[: chip.dims]),
            f"{chip.hbm_bytes / 1e9:.0f} GB",
            show_bytes(chip.capacity_bytes),
            f"{chip.hbm_bytes_per_second / 1e12:.2f} TB",
            f"{chip.bf16_flops_per_second / 1e12:.0f} T",
            f"{chip.link_bytes_per_second / 1e9:.0f} GB",
            f"{chip.network_bytes_per_second / 1e9:.1f} GB",
            str(chip.devices_per_chip),
            chip.source,
        )
        for chip in CHIPS.values()
    ]
    typer.echo(text_table(header, rows, right=range(3, 10)))


@app.command(help="Print the published model shapes that compile, plan and check take by name.")
def models() -> None:
    """Prints the models by name."""
    from ._layout import layout
    from ._mesh import mesh
    from ._named import make_named
    from .models import CONFIGS

    rows = []
    for name, config in CONFIGS.items():
        laid = layout(make_named(name), mesh("data=1", on="none"))
        count = sum(leaf.size for leaf in laid.leaves)
        rows.append((name, f"{count / 1e9:.3f} B", str(config.layers), str(config.width)))
    typer.echo(text_table(("model", "parameters", "layers", "width"), rows, right=(1, 2, 3)))


@app.command(help="Say which compilers and devices can be used here, and how to get the others.")
def doctor() -> None:
    """Prints what is usable here."""
    versions = {
        name: importlib.metadata.version(name)
        for name in ("shardwise", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    }
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    typer.echo(f"Python {platform.python_version()}, {told}")
    typer.echo(f"devices here: {_devices()}")
    for kind, chips_of in (("tpu", "TPU"), ("gpu", "GPU")):
        found = find_compiler(kind)
        names = ", ".join(chip.name for chip in CHIPS.values() if chip.platform == kind)
        if found.problem:
            typer.echo(f"{chips_of} compiler ({names}): no; a mesh of them {found.problem}")
        else:
            have = ", ".join(f"{name} {version}" for name, version in found.versions.items())
            typer.echo(f"{chips_of} compiler ({names}): yes, {have}")
    cudnn_name = f"nvidia-cudnn-cu{'12' if 'jax-cuda12-plugin' in found.versions else '13'}"
    try:
        cudnn = importlib.metadata.version(cudnn_name)
        typer.echo(f"cuDNN, for its attention on absent GPUs: yes, {cudnn}")
    except importlib.metadata.PackageNotFoundError:
        typer.echo(
            "cuDNN, for its attention on absent GPUs: no, XLA's attention is compiled instead; "
            f"pip install {cudnn_name}"
        )


def _devices() -> str:
    """Returns what JAX finds, asked in a process of its own: it may print, hang or crash."""
    code = "import jax; d = jax.devices(); print(len(d), d[0].platform, d[0].device_kind, sep=';')"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return "JAX did not say within two minutes"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return f"none: {lines[-1] if lines else 'JAX ended the process'}"
    count, kind, name = done.stdout.strip().splitlines()[-1].split(";", 2)
    told = f"{count} x {name}" if name == kind else f"{count} x {name} ({kind})"
    # Here alone is said why an accelerator that is here is not used.
    why = re.findall(r"^\w*Error: .*$", done.stderr, re.M)
    return f"{told}; of others JAX says: {why[-1]}" if kind == "cpu" and why else told
