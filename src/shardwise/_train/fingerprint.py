"""Fingerprints: what must be the same on every process of a run, in parts that have names.

JAX runs whatever program each process traced. With another learning rate, seed, loss or data on
one of them all go on to the end, with replicas that drift apart: so it is compared first.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from .._jax import is_jaxpr, is_literal, opened
from .._processes import differing_parts
from .._step import Blueprint
from .datasets import Data

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_SAMPLES = 8
_WEIGHTS = 4096

WHAT = {
    "versions": "the versions of Python and the packages",
    "arguments": "the arguments of fit",
    "layout": "the layout",
    "data": "the data",
    "evaluate": "the data to evaluate on",
    "init": "the program that initialises the model (its code, its seed)",
    "step": "the program of a step (the loss, the optimizer and its numbers)",
    "weights": "the weights that were given",
}
_HELP = "all processes must run the same code with the same arguments"


def run_parts(
    blueprint: Blueprint, data: Any, evaluate: Any, arguments: Mapping[str, Any]
) -> dict[str, str]:
    """Returns what this process is asked to run, in parts; empty on one process.

    Args:
        blueprint: what is run.
        data: what it is run on.
        evaluate: what it is evaluated on.
        arguments: the arguments that decide which collectives are run, and when.
    """
    if jax.process_count() == 1:
        return {}
    return {
        "versions": _versions(),
        "arguments": "; ".join(f"{name}={value}" for name, value in arguments.items()),
        "layout": _digest(blueprint.layout.lockfile().encode()),
        "data": _data_text(data),
        "evaluate": _data_text(evaluate),
    }


def program_parts(
    blueprint: Blueprint, traced: Any, given: Mapping[str, Any] | None
) -> dict[str, str]:
    """Returns the programs of this process, and the weights it begins with; empty on one process.

    Args:
        blueprint: what is run.
        traced: the step's jaxpr.
        given: arrays to begin with.
    """
    if jax.process_count() == 1:
        return {}
    return {
        "init": program_digest(blueprint.model.program),
        "step": program_digest(traced),
        "weights": _weights_digest(given or {}),
    }


def require_same_run(parts: Mapping[str, str]) -> None:
    """Refuses processes that differ in what they are about to run.

    Raises:
        ProcessesDiffer: a process differs; it is named with the first part that does.
    """
    if jax.process_count() > 1:
        differing_parts(parts, WHAT, _HELP)


def program_digest(closed: Any) -> str:
    """Returns a digest of a jaxpr that two processes compute alike for the same program.

    Variables are numbered as they come, constants count by their bytes, and of what has no
    reproducible text, such as functions and sets, only what is reproducible counts.
    """
    found = hashlib.sha256()
    for piece in _pieces(closed):
        found.update(piece if isinstance(piece, bytes) else piece.encode())
        found.update(b"\0")
    return found.hexdigest()[:16]


def _pieces(value: Any) -> Iterator[str | bytes]:
    if is_jaxpr(value):
        jaxpr, consts = opened(value)
        for const in consts:
            yield from _pieces(const)
        yield from _jaxpr_pieces(jaxpr)
    elif isinstance(value, jax.Array | np.ndarray | np.generic):
        yield from _array_pieces(value)
    elif isinstance(value, set | frozenset):
        yield from sorted(map(_text, value))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=_text):
            yield _text(key)
            yield from _pieces(value[key])
    elif isinstance(value, tuple | list):
        yield f"{len(value)}"
        for one in value:
            yield from _pieces(one)
    elif callable(value):
        yield getattr(value, "__qualname__", type(value).__name__)
    else:
        yield _text(value)


def _jaxpr_pieces(jaxpr: Any) -> Iterator[str | bytes]:
    numbers: dict[Any, int] = {}

    def atom(v: Any) -> Iterator[str | bytes]:
        if is_literal(v):
            yield str(v.aval)
            yield from _pieces(np.asarray(v.val))
        else:
            yield f"{numbers.setdefault(v, len(numbers))} {v.aval}"

    for v in (*jaxpr.constvars, *jaxpr.invars):
        yield from atom(v)
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for v in eqn.invars:
            yield from atom(v)
        for name in sorted(eqn.params):
            yield name
            yield from _pieces(eqn.params[name])
        for v in eqn.outvars:
            yield from atom(v)
    for v in jaxpr.outvars:
        yield from atom(v)


def _array_pieces(value: Any) -> Iterator[str | bytes]:
    yield f"{value.dtype}{value.shape}"
    if isinstance(value, jax.Array):
        if not value.is_fully_addressable:
            return
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
    yield np.asarray(value).tobytes()


def _text(value: Any) -> str:
    # Sets within other objects have no order, and their text differs between processes.
    text = _ADDRESS.sub("", str(value))
    return "".join(sorted(text)) if "frozenset({" in text else text


def _versions() -> str:
    names = ("jax", "jaxlib", "flax", "optax", "shardwise")
    found = []
    for name in names:
        try:
            found.append(f"{name}={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name}=?")
    return "; ".join([f"Python={platform.python_version()}", *found])


def _weights_digest(given: Mapping[str, Any]) -> str:
    """Returns a digest of some numbers of each array that this process has all of."""
    found = hashlib.sha256()
    for path, x in sorted(given.items()):
        found.update(path.encode())
        if isinstance(x, jax.Array):
            if not x.is_fully_addressable:
                continue
            if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
                x = jax.random.key_data(x)
        flat = np.asarray(x).reshape(-1)
        found.update(flat[:: max(1, flat.size // _WEIGHTS)].tobytes())
    return found.hexdigest()[:16]


def _data_text(data: Any) -> str:
    """Returns what is known of the data, with a digest of some of its samples."""
    if not isinstance(data, Data):
        return type(data).__qualname__
    code = getattr(data.transform, "__code__", None)
    transform = getattr(data.transform, "__qualname__", type(data.transform).__name__)
    if code is not None:
        transform += f" {_digest(code.co_code)}"
    known = {
        "samples": len(data),
        "shuffle": data.shuffle,
        "seed": data.seed,
        "epochs": data.epochs,
        "transform": transform,
        "digest of some samples": _samples_digest(data.samples),
    }
    return "; ".join(f"{name}={value}" for name, value in known.items())


def _samples_digest(samples: Any) -> str:
    count = len(samples)
    rows = sorted({i * (count - 1) // max(_SAMPLES - 1, 1) for i in range(_SAMPLES)})
    found = hashlib.sha256()
    for row in rows:
        mine, again = _sample_bytes(samples[row]), _sample_bytes(samples[row])
        # A source that augments at random says nothing.
        found.update(mine if mine == again else b"random")
    return found.hexdigest()[:16]


def _sample_bytes(sample: Any) -> bytes:
    leaves = [np.asarray(x) for x in jax.tree.leaves(sample)]
    return b"".join(f"{x.dtype}{x.shape}".encode() + x.tobytes() for x in leaves)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
