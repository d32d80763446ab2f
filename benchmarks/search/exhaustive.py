"""The regret of `sw.search` against compiling every candidate, for absent chips.

    python benchmarks/search/exhaustive.py compile rows.jsonl    # every candidate; resumes
    python benchmarks/search/exhaustive.py table rows.jsonl      # what sw.search picks, and the table

Both take names of cases after the file; without, all.

A row is one candidate: a mesh of data, fsdp and the axes of the case, with every remat policy of the case, compiled for chips that need not be present. Seconds are those of the compiled program (modelled).
Regret is how much slower the candidate is that a search picks than the fastest row that fits.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

import shardwise as sw
from shardwise import models
from shardwise._chips import parse_chips
from shardwise._search.abilities import Abilities
from shardwise._search.applied import samples_of, with_choice
from shardwise._search.space import AXES, Choice, places

DENSE = models.Config(layers=2, width=1024, hidden=4096, heads=8, vocab=32768)
WIDE = models.Config(layers=2, width=2048, hidden=8192, heads=16, vocab=16384, scan=True)
EXPERTS = models.Config(
    layers=2, width=1024, hidden=2048, heads=8, vocab=16384, experts=8, capacity=1.25
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model on some chips, with the axes beyond data and fsdp that are tried."""

    config: models.Config
    batch: tuple[int, int]
    chips: str
    axes: tuple[str, ...]
    remats: tuple[str | None, ...] = (None,)

    @property
    def recipe(self) -> sw.Recipe:
        """Its recipe."""
        return sw.Recipe(
            model=lambda: models.Decoder(self.config, rngs=nnx.Rngs(0)),
            loss=models.next_token_loss,
            optimizer=optax.adamw(1e-4),
            batch=jax.ShapeDtypeStruct(self.batch, "int32"),
            compute_dtype="bfloat16",
        )


CASES = {
    "dense": Case(DENSE, (32, 2048), "h100:1x8", ("model",)),
    "wide": Case(WIDE, (32, 2048), "v6e:2x4", ("model",)),
    "experts": Case(EXPERTS, (16, 2048), "v5p:2x2x2", ("expert",)),
}


def candidates(case: Case) -> list[Choice]:
    """Returns every candidate of a case."""
    recipe = case.recipe
    devices = parse_chips(case.chips).device_count
    limits = {k: v for k, v in Abilities(recipe).limits[0].items() if k in case.axes}
    found = places(devices, samples_of(recipe), limits)
    return [
        Choice(case.chips, place.axes, place.strategy, remat, 1, samples=samples_of(recipe))
        for place in found
        for remat in case.remats
    ]


def compile_all(path: Path, names: list[str]) -> None:
    """Compiles what has no row yet, and appends a row for each."""
    known = {(row["case"], row["mesh"], row["remat"]) for row in read(path)}
    for name in names or CASES:
        case = CASES[name]
        for choice in candidates(case):
            if (name, choice.mesh, choice.remat) in known:
                continue
            began = time.process_time()
            row: dict[str, Any] = {"case": name, "mesh": choice.mesh, "strategy": choice.strategy}
            row["remat"] = choice.remat
            try:
                recipe = with_choice(case.recipe, choice)
                mesh = sw.mesh(choice.mesh, on=case.chips)
                layout = sw.layout(recipe, mesh, choice.strategy)
                compiled = sw.compile(recipe, layout, show=False)
                row |= {
                    "seconds": compiled.time.seconds if compiled.time else None,
                    "peak_bytes": compiled.memory.peak if compiled.memory else None,
                    "fits": bool(compiled.fits),
                }
            except ValueError as error:
                row["error"] = str(error).splitlines()[0][:200]
            row["cpu_seconds"] = round(time.process_time() - began, 1)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file; none if there is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(path: Path, names: list[str]) -> None:
    """Prints every row, and what a search picks."""
    rows = read(path)
    lines = ["| model | chips | candidates | fastest | search picks | regret | compilations |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    every = [
        "",
        "| model | mesh | strategy | step, compiled | peak | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in names or CASES:
        case = CASES[name]
        mine = [row for row in rows if row["case"] == name]
        fitting = [row for row in mine if row.get("fits") and row.get("seconds")]
        if not fitting:
            continue
        first = min(fitting, key=lambda row: row["seconds"])
        remat = case.remats[0] if len(case.remats) == 1 else "free"
        others = dict.fromkeys({*AXES} - {"data", "fsdp", *case.axes}, 1)
        found = sw.search(case.recipe, case.chips, remat=remat, accumulate=1, axes=others)
        best = found.best
        regret = best.seconds / first["seconds"] - 1
        proofs = sum(c.proof is not None for c in found.candidates)
        lines.append(
            f"| {name} | {case.chips} | {len(mine)} | {first['mesh']}, {1e3 * first['seconds']:.2f} ms | "
            f"{best.mesh}, {1e3 * best.seconds:.2f} ms | {max(0.0, regret):.1%} | {proofs} |"
        )
        for row in sorted(mine, key=lambda row: row.get("seconds") or 1e9):
            seconds = f"{1e3 * row['seconds']:.2f} ms" if row.get("seconds") else ""
            peak = f"{row['peak_bytes'] / 2**30:.2f} GiB" if row.get("peak_bytes") else ""
            note = row.get("error", "" if row.get("fits") else "does not fit")
            every.append(
                f"| {name} | {row['mesh']} | {row['strategy']} | {seconds} | {peak} | {note} |"
            )
    print("\n".join(lines + every))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if len(sys.argv) < 3 or sys.argv[1] not in ("compile", "table"):
        sys.exit(__doc__)
    if sys.argv[1] == "compile":
        compile_all(Path(sys.argv[2]), sys.argv[3:])
    else:
        table(Path(sys.argv[2]), sys.argv[3:])
