"""Layouts on disk: JSON with one line per leaf, so that a review shows what changed."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from .._base import read_json, require_form, rows_of, write_atomically
from .._mesh import AnyMesh, mesh_types, parse_spec, show_spec
from .._nnx import Follows, Leaf, Left, Opinion, show_path, split_path

FORMAT = 1
_KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


# What belongs to the step, beside the layout: the fields of a recipe, and a pipeline's microbatches.
STEP = {
    "remat": (str, type(None)),
    "accumulate": (int,),
    "loss_chunks": (int,),
    "offload": (str,),
    "microbatches": (int, type(None)),
}


_LEAF = {
    "path": str,
    "shape": list[int],
    "dtype": str,
    "kind": str,
    "spec": str,
    "reason": str,
    "keys?": list,
    "names?": str,
    "by?": str,
    "clashes?": list[list[str]],
    "intentional?": bool,
    "meant?": bool,
    "left?": str,
    "gathered?": list[str],
    "stacked?": list[int],
    "moments?": str,
    "gradients?": str,
    "*": Any,
}
_FORM = {
    "mesh": dict[str, int],
    "axis_types": dict[str, str],
    "dead_patterns": list[list[str]],
    "leaves": rows_of(_LEAF),
    "*": Any,
}


def text(
    mesh: AnyMesh,
    leaves: Sequence[Leaf],
    dead_patterns: Sequence[tuple[str, str]],
    step: Mapping[str, Any] | None = None,
) -> str:
    """Returns a lockfile's text."""
    head = {
        "format": FORMAT,
        "versions": _versions(),
        "mesh": dict(mesh.shape),
        "axis_types": mesh_types(mesh),
        "total_bytes": sum(leaf.bytes for leaf in leaves),
        "dead_patterns": [list(pair) for pair in dead_patterns],
        "bytes_per_device": sum(leaf.resident_bytes for leaf in leaves),
    }
    if step is not None:
        head["step"] = _step(step)
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    rows = [f"    {json.dumps(_row(leaf))}" for leaf in leaves]
    return "\n".join(["{", *lines, '  "leaves": [', ",\n".join(rows), "  ]", "}", ""])


@functools.cache  # the metadata of a package is a file that is parsed each time
def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("shardwise", "jax", "flax")}


def write(path: str | os.PathLike[str], text: str) -> None:
    """Writes a lockfile atomically."""
    try:
        write_atomically(path, text)
    except OSError as error:
        message = f"the layout cannot be written to {os.fspath(path)}: {error.strerror}"
        raise ValueError(message) from error


def read(
    path: str | os.PathLike[str],
) -> tuple[AbstractMesh, list[Leaf], tuple[tuple[str, str], ...]]:
    """Returns the abstract mesh, the leaves and the dead patterns of a lockfile.

    Raises:
        ValueError: the file cannot be read, or is not a lockfile.
    """
    try:
        data = read_json(path)
    except OSError as error:
        raise ValueError(f"the layout {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a layout: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, dict) else None
        raise ValueError(f"{path} is not a layout of format {FORMAT}: its format is {got!r}")
    try:
        require_form(data, _FORM)
        sizes = {str(axis): int(size) for axis, size in data["mesh"].items()}
        types = tuple(AxisType[data["axis_types"][axis]] for axis in sizes)
        if not all(size > 0 for size in sizes.values()):
            raise ValueError(f"the mesh is {sizes}")
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
        dead = tuple((str(pattern), str(near)) for pattern, near in data["dead_patterns"])
        return mesh, [_leaf(row, sizes) for row in data["leaves"]], dead
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__} "
        raise ValueError(f"{path} is a damaged layout: {kind}{str(error)[:500]}") from error


def read_step(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what a lockfile says of the step; empty if it has only a layout.

    Raises:
        ValueError: it cannot be read, or names what no step has.
    """
    try:
        return _step(read_json(path, {"step?": dict, "*": Any}).get("step", {}))
    except OSError as error:
        raise ValueError(f"the layout {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is a damaged layout: {error}") from error


def _step(step: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in step.items():
        if name not in STEP or type(value) not in STEP[name]:
            raise ValueError(
                f"step has {name!r}: {value!r}; it may have {', '.join(STEP)}, as sw.search finds them"
            )
    return dict(step)


def _row(leaf: Leaf) -> dict[str, Any]:
    row = {name: value for name, value in leaf.to_dict().items() if value is not None}
    if _keys(leaf.path) != leaf.keys:
        row["keys"] = list(leaf.keys)
    # What a check needs beyond the spec, so that a saved layout has the same findings.
    if leaf.names is not None:
        row["names"] = show_spec(P(*leaf.names))
    deciders = [o for o in leaf.trail if o.spec is not None and not o.refines]
    if deciders:
        row["by"] = deciders[-1].source
        if deciders[-1].clashes:
            row["clashes"] = [[p, show_spec(spec)] for p, spec in deciders[-1].clashes]
    if leaf.intentional:
        row["intentional"] = True
    if leaf.left:
        row["left"] = leaf.left
    if leaf.gathered:
        row["gathered"] = sorted(leaf.gathered)
    if leaf.stacked:
        row["stacked"] = list(leaf.stacked)
    return row


def _leaf(row: Mapping[str, Any], sizes: Mapping[str, int]) -> Leaf:
    keys = _hashable(row["keys"]) if "keys" in row else _keys(row["path"])
    if show_path(keys) != row["path"]:
        raise ValueError(f"path {row['path']!r} and keys {keys!r} disagree")
    spec = parse_spec(row["spec"])
    clashes = tuple((pattern, parse_spec(said)) for pattern, said in row.get("clashes", ()))
    trail = (Opinion(spec, row["reason"], row["by"], clashes=clashes),) if "by" in row else ()
    return Leaf(
        path=row["path"],
        keys=keys,
        shape=_shape(row["shape"]),
        dtype=_dtype(row["dtype"]),
        kind=row["kind"],
        sizes=sizes,
        spec=spec,
        reason=row["reason"],
        names=tuple(parse_spec(row["names"])) if "names" in row else None,
        trail=trail,
        # Version 0.1 wrote "meant".
        intentional=bool(row.get("intentional", row.get("meant", False))),
        left=_left(row.get("left", "")),
        gathered=frozenset(row.get("gathered", ())),
        stacked=tuple(row.get("stacked", ())),
        moments=parse_spec(row["moments"]) if "moments" in row else None,
        gradients=parse_spec(row["gradients"]) if "gradients" in row else None,
        follows=_follows(row["follows"]) if "follows" in row else None,
    )


def _follows(row: Mapping[str, Any]) -> Follows:
    dims = tuple(map(_shape, row["dims"]))
    rank = row["rank"]
    if rank is not None and not 0 <= rank < len(dims):
        raise ValueError(f"the rank of {row['role']!r} is dim {rank!r} of {len(dims)}")
    return Follows(str(row["base"]), str(row["role"]), dims, rank)


def _hashable(keys: Any) -> Any:
    """Returns keys as tuples again, which JSON turns into lists (`nnx.WeightNorm` has such keys)."""
    return tuple(map(_hashable, keys)) if isinstance(keys, list) else keys


def _left(why: Any) -> Left:
    if why not in get_args(Left):
        raise ValueError(f"unknown value {why!r} for left")
    return why


def _shape(sizes: Any) -> tuple[int, ...]:
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise ValueError(f"{sizes!r} is not a shape")
    return tuple(sizes)


def _keys(path: str) -> tuple[Any, ...]:
    return tuple(int(step) if step.isdecimal() else step for step in split_path(path))


def _dtype(name: str) -> Any:
    if not name.startswith("key<"):
        return jnp.dtype(name)
    return jax.eval_shape(lambda: jax.random.key(0, impl=key_impl(name))).dtype


def key_impl(name: str) -> str:
    """Returns the implementation of random keys that has this dtype name.

    Raises:
        ValueError: this version of JAX has no such implementation.
    """
    for impl in _KEY_IMPLS:
        if str(jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype) == name:
            return impl
    raise ValueError(f"this version of JAX does not know the dtype {name!r}")
