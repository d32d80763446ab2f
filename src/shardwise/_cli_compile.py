"""The commands about chips: `compile`, `chips`, `models` and `doctor`."""

from __future__ import annotations

import dataclasses
import platform
import re
import subprocess
import sys
from typing import Annotated, Any

import typer

from ._chips import CHIPS
from ._cli_help import OUTPUT
from ._cli_options import (
    TARGETS,
    BatchOption,
    Format,
    FormatOption,
    InputsOption,
    MeshOption,
    MethodOption,
    MinBytesOption,
    OnOption,
    RematOption,
    RulesOption,
    StrategyOption,
    Target,
    command,
    compile_target,
    lay_out,
    require_devices,
    require_writable,
    save_to,
)
from ._terminal import tell, tell_json, working


@command(
    name="compile",
    help=f"""Compile the training step with the real compiler of the chips, which need not be here.

The verdict comes first: whether it fits, and how much is to spare. Then the memory of one device,
drawn against what it can hold, collectives by axis with the lines that caused them, and findings.
Of a model that is no recipe, the forward pass is compiled: say what it is called with.

{TARGETS}

Examples:

\b
  shardwise compile shardwise.examples.decoder:make --mesh data=2,model=4 --on v5e:2x4 \\
    --strategy fsdp+tensor --inputs "int32[8,128]"

\b
  shardwise compile train.py:recipe --mesh data=4 --on h100:1x4 --strategy fsdp --batch 64 \\
    --save compiled.json

\b
  shardwise compile train.py:recipe --mesh data=8 --on cpu:8 --strategy fsdp --format json

A published shape takes longer: llama3-8b on 64 H100 half a minute, llama3-70b on 256 v5p a whole
one. It is kept, so that the same question is answered at once.

Exit status: 0 fits, 1 does not fit, 2 could not run.""",
)
def compile_command(
    target: Target,
    mesh: MeshOption,
    on: OnOption = "here",
    strategy: StrategyOption = None,
    min_bytes: MinBytesOption = None,
    rules: RulesOption = None,
    inputs: InputsOption = None,
    method: MethodOption = None,
    batch: BatchOption = None,
    remat: RematOption = None,
    save: Annotated[
        str | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Write it as JSON, to compare with later.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Compiles a step and says what it costs."""
    require_devices(on)
    require_writable(save, inputs=(target, rules))
    found, made = lay_out(
        target, mesh, on, strategy, rules, inputs, batch, remat, method=method, min_bytes=min_bytes
    )
    compiled = compile_target(target, found, made, inputs, method)
    save_to(save, compiled)  # before anything is printed: whoever reads that may leave early
    if format is Format.json:
        tell_json(compiled.to_dict())
    else:
        from ._cli_bars import bar

        tell(compiled.verdict)
        if compiled.memory is not None:
            tell(bar(compiled.memory.parts, compiled.memory.capacity))
        tell(f"\n{compiled.details}")
    raise typer.Exit(1 if compiled.fits is False else 0)


@command(
    help="""Print what is known of each chip that a mesh can be made of.

Facts of the makers' datasheets, and of the compilers; the last column says which.

Example:

\b
  shardwise chips --format json"""
)
def chips(format: FormatOption = Format.text) -> None:
    """Prints the table of chips."""
    from ._table import show_bytes, text_table

    if format is Format.json:
        tell_json([dataclasses.asdict(chip) for chip in CHIPS.values()])
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
    tell(text_table(header, rows, right=range(3, 10)))


@command(
    help="""Print the published model shapes that compile, plan and check take by name.

Example:

\b
  shardwise models --format json"""
)
def models(format: FormatOption = Format.text) -> None:
    """Prints the models by name."""
    with working("counting the parameters of each model"):
        rows = _models()
    if format is Format.json:
        tell_json(rows)
        return
    from ._table import text_table

    cells = [
        (row["name"], f"{row['parameters'] / 1e9:.3f} B", str(row["layers"]), str(row["width"]))
        for row in rows
    ]
    tell(text_table(("model", "parameters", "layers", "width"), cells, right=(1, 2, 3)))


def _models() -> list[dict[str, Any]]:
    from ._layout import layout
    from ._mesh import mesh
    from ._named import make_named
    from .models import CONFIGS

    rows = []
    for name, config in CONFIGS.items():
        laid = layout(make_named(name), mesh("data=1", on="none"))
        sizes = {key: getattr(config, key) for key in ("layers", "width", "hidden", "heads")}
        count = sum(leaf.size for leaf in laid.leaves)
        rest = {"kv_heads": config.key_heads, "vocab": config.vocab, "experts": config.experts}
        rows.append({"name": name, "parameters": count, **sizes, **rest})
    return rows


@command(
    help="""Say which compilers and devices can be used here, and how to get the others.

Example:

\b
  shardwise doctor --format json"""
)
def doctor(format: FormatOption = Format.text) -> None:
    """Prints what is usable here."""
    with working("asking JAX for its devices"):
        found = _doctor()
    if format is Format.json:
        tell_json(found)
        return
    told = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    tell(f"Python {found['python']}, {told}")
    tell(f"devices here: {found['devices']}")
    for row in found["compilers"]:
        what = f"{row['platform'].upper()} compiler ({', '.join(row['chips'])})"
        if row["problem"]:
            tell(f"{what}: no; a mesh of them {row['problem']}")
        else:
            have = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
            tell(f"{what}: yes, {have}")
    cudnn = "cuDNN, for its attention on absent GPUs"
    if found["cudnn"]["version"]:
        tell(f"{cudnn}: yes, {found['cudnn']['version']}")
    else:
        package = found["cudnn"]["package"]
        tell(f"{cudnn}: no, XLA's attention is compiled instead; pip install {package}")


def _doctor() -> dict[str, Any]:
    import importlib.metadata  # slow, and help needs none of it

    from ._compilers import find_compiler

    names = ("shardwise", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    compilers = []
    for kind in ("tpu", "gpu"):
        found = find_compiler(kind)
        compilers.append(
            {
                "platform": kind,
                "chips": [chip.name for chip in CHIPS.values() if chip.platform == kind],
                "versions": found.versions,
                "problem": found.problem,
            }
        )
    cuda = "12" if "jax-cuda12-plugin" in compilers[-1]["versions"] else "13"
    package = f"nvidia-cudnn-cu{cuda}"
    try:
        cudnn = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        cudnn = None
    return {
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in names},
        "devices": _devices(),
        "compilers": compilers,
        "cudnn": {"package": package, "version": cudnn},
    }


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
