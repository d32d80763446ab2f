"""Before a restore: compares what a checkpoint holds with what a recipe and a layout need."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .._base import count, public, show_bytes
from .._check import Allow, Finding, Findings, make_finding, sift
from .._mesh import normal_spec, parse_spec, show_mesh, show_spec
from .._step import Blueprint, named_arrays, show_array

_HELP_MODEL = "restore with the recipe that it was saved with, or restore another step"

_HELP_OPTIMIZER = (
    "resume with the optimizer that it was trained with; or restore with that optimizer, and start "
    "a new run from the restored model"
)


@public
@dataclasses.dataclass(frozen=True)
class Preflight:
    """What a restore would find, from metadata alone. Made by `Checkpoints.preflight`.

    Attributes:
        step: the step.
        findings: missing, extra and different arrays (errors), and changed layouts (warnings).
        read_bytes: for each process, the bytes of the distinct shards of its devices, which it
            must read (exact). If they are sharded differently than when they were saved, a process
            reads more than that: arrays are stored in chunks of up to 4 MiB, read as a whole.
        total_bytes: the bytes of the full state (exact).
    """

    step: int
    findings: Findings
    read_bytes: Mapping[int, int]
    total_bytes: int

    def __str__(self) -> str:
        """Returns the findings and the bytes."""
        most = max(self.read_bytes.values(), default=0)
        count = len(self.read_bytes)
        each = "one process" if count == 1 else f"each of {count} processes"
        return (
            f"{self.findings}\nstep {self.step}: {show_bytes(self.total_bytes)} in total; {each} reads "
            f"{'' if len(set(self.read_bytes.values())) == 1 else 'at most '}{show_bytes(most)} (exact)"
        )

    __repr__ = __str__


def flight_check(
    blueprint: Blueprint, about: Mapping[str, Any], *, allow: Allow | None = None
) -> Preflight:
    """Returns what restoring the checkpoint described by `about` to `blueprint` would find."""
    wanted = named_arrays(blueprint.abstract)
    findings = sift(_findings(blueprint, wanted, about), allow)
    frozen = {name for name, row in about["arrays"].items() if row.get("frozen")}
    sizes = _read_bytes(blueprint, {k: x for k, x in wanted.items() if k not in frozen})
    total = sum(math.prod(x.shape) * x.dtype.itemsize for x in wanted.values())
    return Preflight(about["step"], findings, sizes, total)


def array_rows(state: Any) -> dict[str, dict[str, Any]]:
    """Returns, for each array, the shape, dtype and spec that a checkpoint stores."""
    return {
        name: {
            "shape": list(x.shape),
            "dtype": str(x.dtype),
            "spec": show_spec(getattr(x.sharding, "spec", P())),
        }
        for name, x in named_arrays(state).items()
    }


def _findings(
    blueprint: Blueprint, wanted: Mapping[str, Any], about: Mapping[str, Any]
) -> Iterator[Finding]:
    saved = about["arrays"]
    moved = about["mesh"] != show_mesh(blueprint.layout.mesh)
    resharded: dict[tuple[str, str], list[str]] = {}
    # The optimizer's arrays follow from the model, so it is to blame only if the model is the same.
    models = ({name for name in names if name.startswith("model.")} for names in (wanted, saved))
    same_model = next(models) == next(models)

    def help_for(name: str) -> str:
        return _HELP_OPTIMIZER if same_model and name.startswith("optimizer.") else _HELP_MODEL

    for name, leaf in wanted.items():
        if name not in saved:
            yield make_finding(
                "SW401",
                show_array(name),
                f"the recipe has {leaf.dtype}{list(leaf.shape)}, but the checkpoint of step "
                f"{about['step']} has no such array",
                help_for(name),
            )
            continue
        shape, dtype = tuple(saved[name]["shape"]), saved[name]["dtype"]
        if shape != tuple(leaf.shape):
            yield make_finding(
                "SW403",
                show_array(name),
                f"the checkpoint has shape {shape}, the recipe has {tuple(leaf.shape)}",
                _HELP_MODEL,
            )
        elif dtype != str(leaf.dtype):
            yield make_finding(
                "SW404",
                show_array(name),
                f"the checkpoint has {dtype}, the recipe has {leaf.dtype}",
                "restore with the saved dtype, then cast",
            )
        else:
            before, after = parse_spec(saved[name]["spec"]), leaf.sharding.spec
            before, after = normal_spec(before), normal_spec(after)
            if before != after or (moved and after != P()):
                resharded.setdefault((show_spec(before), show_spec(after)), []).append(name)
    for (before, after), names in resharded.items():
        # One per change, not per array: restoring on another mesh is not an error.
        more = f"; likewise {count(len(names) - 1, 'more array')}" if len(names) > 1 else ""
        yield make_finding(
            "SW405",
            show_array(names[0]),
            f"saved as {before} on {about['mesh']}, restored as {after} on "
            f"{show_mesh(blueprint.layout.mesh)}{more}",
            "nothing to do if this is intentional: each process reads the parts it needs",
        )
    for name, row in saved.items():
        if name not in wanted:
            yield make_finding(
                "SW402",
                show_array(name),
                f"the checkpoint has {row['dtype']}{row['shape']}, but the recipe has no such array",
                help_for(name),
            )


def _read_bytes(blueprint: Blueprint, wanted: Mapping[str, Any]) -> dict[int, int]:
    """Returns, for each process, the bytes of the distinct shards that its devices hold."""
    mesh = blueprint.layout.mesh
    if not isinstance(mesh, Mesh):
        return {0: sum(math.prod(x.shape) * x.dtype.itemsize for x in wanted.values())}
    found: dict[int, int] = dict.fromkeys(sorted({d.process_index for d in mesh.devices.flat}), 0)
    for leaf in wanted.values():
        shard = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        shards: dict[int, set[Any]] = {}
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            key = tuple((part.start, part.stop) for part in index)
            shards.setdefault(device.process_index, set()).add(key)
        for process, parts in shards.items():
            found[process] += shard * len(parts)
    return found
