"""Which compilers for absent chips are installed, and how to install the others."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re

from ..._base import option
from ..._chips import Chips


@dataclasses.dataclass(frozen=True, slots=True)
class Compiler:
    """One compiler, as installed on this machine.

    Attributes:
        platform: `tpu` or `gpu`.
        versions: the version of each of its packages that is installed.
        problem: why it cannot be used, with the command that fixes it; empty if it can.
    """

    platform: str
    versions: dict[str, str]
    problem: str


def find_compiler(platform: str) -> Compiler:
    """Returns the compiler for a platform, with what is missing if anything is."""
    return _tpu() if platform == "tpu" else _gpu()


def require_compiler(chips: Chips) -> Compiler:
    """Returns the compiler for the chips.

    Raises:
        ValueError: it is not installed, or has the wrong version.
    """
    found = find_compiler(chips.platform)
    if found.problem:
        raise ValueError(f"{option('on', str(chips))} {found.problem}")
    return found


def version_of(package: str) -> str | None:
    """Returns the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tpu() -> Compiler:
    installed = version_of("libtpu")
    if installed is None:
        return Compiler(
            "tpu",
            {},
            'needs the TPU compiler, which is not installed: pip install "shardwise[tpu]"',
        )
    jax = version_of("jax") or ""
    wanted = ""
    for line in importlib.metadata.requires("jax") or ():
        pinned = re.match(r"libtpu\s*==\s*([\w.*]+)\s*;.*extra\s*==\s*['\"]tpu", line)
        wanted = pinned[1] if pinned else wanted
    problem = ""
    if wanted and not installed.startswith(wanted.removesuffix("*").removesuffix(".")):
        problem = (
            f"needs libtpu {wanted} with jax {jax}, but {installed} is installed: "
            f'pip install "jax[tpu]=={jax}"'
        )
    return Compiler("tpu", {"libtpu": installed}, problem)


def _gpu() -> Compiler:
    jaxlib = version_of("jaxlib") or ""
    for cuda in ("13", "12"):
        names = (f"jax-cuda{cuda}-plugin", f"jax-cuda{cuda}-pjrt")
        versions = {name: version_of(name) for name in names}
        if not any(versions.values()):
            continue
        have = {name: version for name, version in versions.items() if version}
        wrong = [name for name in names if versions[name] != jaxlib]
        problem = ""
        if wrong:
            got = versions[wrong[0]] or "not installed"
            commands = " ".join(f"{name}=={jaxlib}" for name in names)
            problem = (
                f"needs {wrong[0]} {jaxlib}, the version of jaxlib, but it is {got}: "
                f"pip install {commands}"
            )
        return Compiler("gpu", have, problem)
    return Compiler(
        "gpu", {}, 'needs the GPU compiler, which is not installed: pip install "shardwise[gpu]"'
    )
