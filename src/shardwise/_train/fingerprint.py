"""Fingerprints: what must be the same on every process of a run, in named parts.

JAX runs whatever program each process traced. If the learning rate, seed, loss or data of one
process differs, all of them run to the end with replicas that drift apart, so compare them first.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from .._jax import is_jaxpr, is_literal, opened
from .._processes import require_same_parts
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
    "step": "the program of the training step (the loss, the optimizer and its hyperparameters)",
    "weights": "the initial weights",
}
_HELP = "all processes must run the same code with the same arguments"


def run_parts(
    blueprint: Blueprint, data: Any, evaluate: Any, arguments: Mapping[str, Any]
) -> dict[str, str]:
    """Returns the parts that describe this process's run; empty if there is one process.

    Args:
        blueprint: what is run.
        data: the training data.
        evaluate: the evaluation data.
        arguments: the arguments that determine which collectives run, and when.
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
    """Returns the parts for this process's programs and weights; empty if there is one process.

    Args:
        blueprint: what is run.
        traced: the step's jaxpr.
        given: the initial weights, if any.
    """
    if jax.process_count() == 1:
        return {}
    return {
        "init": program_digest(blueprint.model.program),
        "step": program_digest(traced),
        "weights": _weights_digest(given or {}),
    }


def require_same_run(parts: Mapping[str, str]) -> None:
    """Raises if the processes are about to run different things.

    Raises:
        ProcessesDiffer: a process differs; the message names it and the first part that differs.
    """
    if jax.process_count() > 1:
        require_same_parts(parts, WHAT, _HELP)


def require_same_step(step: int, about: Mapping[str, Any]) -> None:
    """Raises if the processes would restore different checkpoints under one number.

    Raises:
        ProcessesDiffer: a process has another; the message names it.
    """
    if jax.process_count() > 1:
        text = json.dumps(about, sort_keys=True)
        parts = {"checkpoint": hashlib.sha256(text.encode()).hexdigest()[:16]}
        what = {"checkpoint": f"the checkpoint of step {step}"}
        require_same_parts(parts, what, "the directory must be shared by all processes")


def program_digest(closed: Any) -> str:
    """Returns a digest of a jaxpr that is the same in every process for the same program.

    Variables are numbered in order of appearance, and constants are included by their bytes. Of
    objects whose text is not reproducible, such as functions and sets, only the reproducible part
    is included.
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
    # Sets inside other objects have no order, so their text differs between processes.
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
    """Returns a digest of some numbers of each array that is fully addressable."""
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
    """Returns a description of the data, with a digest of some of its samples."""
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
        # A source with random augmentation cannot be compared.
        found.update(mine if mine == again else b"random")
    return found.hexdigest()[:16]


def _sample_bytes(sample: Any) -> bytes:
    leaves = [np.asarray(x) for x in jax.tree.leaves(sample)]
    return b"".join(f"{x.dtype}{x.shape}".encode() + x.tobytes() for x in leaves)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
