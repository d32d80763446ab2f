"""The command `doctor`: what works on this machine, and how to get what does not."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from typing import Any

from ..._base import tell, tell_json, working
from ..._chips import CHIPS
from ..options import (
    Format,
    FormatOption,
    command,
)


@command(
    help="""Show which compilers and devices can be used on this machine, and how to get the others.

Example:

\b
  shardwise doctor --format json"""
)
def doctor(format: FormatOption = Format.text) -> None:
    """Prints what can be used on this machine."""
    with working("asking JAX for its devices"):
        found = _doctor()
    if format is Format.json:
        tell_json(found)
        return
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    tell(f"Python {found['python']}, {versions}")
    tell(_tested(found))
    problems = [row["problem"] for row in found["internals"] if row["problem"]]
    for problem in problems:
        tell(f"does not work: {problem}")
    tell(f"devices: {found['devices']}")
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


def _tested(found: dict[str, Any]) -> str:
    names = [f"{name} {' and '.join(versions)}" for name, versions in found["tested"].items()]
    untested = [f"{name} {found['versions'][name]}" for name in found["untested"]]
    which = f"not with {', '.join(untested)}" if untested else "the installed ones are among these"
    return f"tested with {', '.join(names)}; {which}"


def _doctor() -> dict[str, Any]:
    import dataclasses
    import importlib.metadata  # slow, and help needs none of it

    from ..._compile import find_compiler
    from ..._jax import TESTED, probe

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
    versions = {name: importlib.metadata.version(name) for name in names}
    return {
        "python": platform.python_version(),
        "versions": versions,
        "tested": {name: list(tested) for name, tested in TESTED.items()},
        "untested": [name for name, tested in TESTED.items() if versions[name] not in tested],
        "internals": [dataclasses.asdict(row) for row in probe()],
        "devices": _devices(),
        "compilers": compilers,
        "cudnn": {"package": package, "version": cudnn},
    }


def _devices() -> str:
    """Returns what JAX finds, asked in a process of its own: it may print, hang or crash."""
    code = "import jax; d = jax.devices(); print(len(d), d[0].platform, d[0].device_kind, sep=';')"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return "unknown: JAX timed out after 120 s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return f"none: {lines[-1] if lines else 'JAX ended the process'}"
    count, kind, name = done.stdout.strip().splitlines()[-1].split(";", 2)
    devices = f"{count} x {name}" if name == kind else f"{count} x {name} ({kind})"
    # Only doctor says why an accelerator that is present is not used.
    why = re.findall(r"^\w*Error: .*$", done.stderr, re.M)
    return f"{devices}; other backends failed: {why[-1]}" if kind == "cpu" and why else devices
