"""What earlier searches found of the same program, on disk: estimates, and what compilers said."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import typing
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from .._base import require_form
from .._check import LayoutError
from .._compile import Compiled, cache_folder, read_entry, write_entry
from .._estimate import Estimate
from .._nnx import Recipe

# Part of every key: change it when the contents of entries change.
_FORMAT = 1
# What decides over figures, whether or not it is in the program.
_PACKAGES = (
    "shardwise", "jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda12-plugin",
    "jax-cuda13-plugin",
)  # fmt: skip
_FILE = re.compile(r'"([^"\n]+\.py)"')


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """What the chips' own compiler made of a candidate.

    Attributes:
        seconds: one step, by the compiled program (modelled).
        peak_bytes: the memory of one device at its peak (compiled).
        fits: whether that is within a device's memory.
        mfu: the share of the chips' peak that the model's own operations use.
        bound: the largest part of the step.
        parts: how the seconds divide.
    """

    seconds: float
    peak_bytes: int
    fits: bool
    mfu: float
    bound: str
    parts: Mapping[str, float]


def proof_of(compiled: Compiled, estimate: Estimate) -> Proof:
    """Returns what a compilation says; times are the estimate's where there is no program."""
    time, memory = compiled.time, compiled.memory
    return Proof(
        seconds=time.seconds if time is not None else estimate.seconds,
        peak_bytes=memory.peak if memory is not None else estimate.peak_bytes,
        fits=bool(compiled.fits),
        mfu=(time.mfu or 0.0) if time is not None else estimate.mfu,
        bound=time.bound if time is not None else estimate.bound,
        parts=dict(time.parts) if time is not None else dict(estimate.parts),
    )


def _form_of(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


_PROOF = {**_form_of(Proof), "parts": dict[str, float]}
_ESTIMATE = _form_of(Estimate)


class Remembered:
    """The results of one program, by choice: one entry of the cache of compilations."""

    def __init__(
        self,
        recipe: Recipe,
        calibration: str | os.PathLike[str] | None,
        unsplit: Callable[[], Any],
    ):
        """Reads what is there; a damaged entry counts as none.

        Args:
            recipe: the recipe.
            calibration: the file of measured rates.
            unsplit: returns the recipe's step on one device, traced, or raises a ValueError.
        """
        self.key, self.refused = "", ""
        try:
            self.key = _fingerprint(recipe, calibration, unsplit())
        except (LayoutError, ValueError) as error:
            # Nothing is kept of a step that cannot be traced unsplit; on a mesh it may be.
            self.refused = str(error)
        self.folder = cache_folder()
        self.rows: dict[str, Any] = self._read()
        self.new: dict[str, Any] = {}

    def _read(self) -> dict[str, Any]:
        found = read_entry(self.folder, self.key) if self.key else None
        rows = found.get("rows") if found is not None else None
        return rows if isinstance(rows, dict) else {}

    def estimate(self, name: str) -> Estimate | str | None:
        """Returns an estimate; or why there is none; or None if nobody asked before."""
        row = self.rows.get(f"estimate {name}")
        if not isinstance(row, dict):
            return row if isinstance(row, str) else None
        try:
            by_axis = {
                axis: {kind: tuple(pair) for kind, pair in kinds.items()}
                for axis, kinds in row["by_axis"].items()
            }
            require_form(row, {**_ESTIMATE, "by_axis": dict[str, dict[str, list[int]]]})
            return Estimate(**{**row, "by_axis": by_axis})
        except (TypeError, KeyError, AttributeError, ValueError):
            return None

    def proof(self, name: str) -> Proof | None:
        """Returns what a compiler said before."""
        row = self.rows.get(f"proof {name}")
        try:
            if isinstance(row, dict):
                require_form(row, _PROOF)
                return Proof(**row)
        except (TypeError, ValueError):
            pass
        return None

    def state_bytes(self, name: str) -> int | None:
        """Returns the bytes of the state on one device."""
        row = self.rows.get(f"state {name}")
        return row if isinstance(row, int) else None

    def keep(self, name: str, found: Estimate | Proof | str | int) -> None:
        """Keeps an estimate, a proof, why there is none, or the bytes of the state."""
        kinds = {Proof: "proof", int: "state"}
        plain = found if isinstance(found, str | int) else dataclasses.asdict(found)
        self.new[f"{kinds.get(type(found), 'estimate')} {name}"] = plain

    def write(self) -> None:
        """Writes what is new, next to what other searches wrote meanwhile."""
        if self.new and self.key:
            write_entry(self.folder, self.key, {"rows": {**self._read(), **self.new}})
            self.new = {}


def _fingerprint(recipe: Recipe, calibration: str | os.PathLike[str] | None, unsplit: Any) -> str:
    """Returns what tells a recipe's program from all others.

    The unsplit step, the source files that it comes from (a model may behave differently on another
    mesh), what prices it, and the versions of what compiles it.
    """
    text = unsplit.lower(lowering_platforms=("cpu",)).as_text(debug_info=True)
    parts = [f"search {_FORMAT}", _without_places(text), os.environ.get("XLA_FLAGS", "")]
    parts += [str(sorted((recipe.compiler_options or {}).items())), str(recipe.batch_spec)]
    for name in _PACKAGES:
        try:
            parts.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    own = Path(__file__).parent.parent
    files = {Path(name) for name in _FILE.findall(text)} | set(own.rglob("*.py"))
    given = [Path(calibration)] if calibration is not None else []
    for file in [*sorted(files), *given]:
        try:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError:
            continue
    return digest.hexdigest()[:32]


def _without_places(text: str) -> str:
    """Returns StableHLO's text without the lines and references of locations."""
    kept = [line for line in text.splitlines() if not line.startswith("#loc")]
    return re.sub(r" loc\(#loc\d*\)| loc\([^()]*\)", "", "\n".join(kept))
