"""`sw.search`: arithmetic prunes, partitioned programs rank, the compiler proves the best few."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from .._base import public
from .._chips import parse_chips
from .._nnx import Recipe, building_once
from .found import Candidate, Found
from .space import fixed_parts
from .stages import Searcher, growing

Progress = Callable[[str], None]


@public
def search(
    recipe: Recipe,
    on: str | Sequence[str],
    *,
    mesh: str | Mapping[str, int] | None = None,
    strategy: str | None = None,
    axes: Mapping[str, int] | None = None,
    remat: str | None = "free",
    accumulate: int | None = None,
    loss_chunks: int | None = None,
    offload: str | None = None,
    batch_per_device: int | Literal["free"] | None = None,
    compile: int = 3,
    limit: float | None = None,
    prices: Mapping[str, float] | None = None,
    calibration: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Found:
    """Returns the layouts of a step on some chips, ranked by how long a step takes.

    Arithmetic drops what cannot fit, the partitioned program ranks the rest without compiling, and
    the chips' own compiler proves the best. The global batch is never changed unless it is left
    open (`batch_per_device`). Ctrl-C and the time
    limit return what is known by then.

    Args:
        recipe: the model, loss, optimizer and batch.
        on: the chips, such as `"v5p:4x8x8"`; several; or a chip alone, `"v5p"`, to ask how many.
        mesh: a fixed mesh, such as `"data=8,model=4"`.
        strategy: a fixed strategy, such as `"fsdp+tensor"`.
        axes: fixed sizes of some axes, of `pipe`, `data`, `fsdp`, `expert`, `sequence` and `model`.
        remat: a fixed remat policy for the model's blocks; None for none.
        accumulate: a fixed number of microbatches.
        loss_chunks: a fixed number of chunks of the loss; by default, chunks are tried where a
            step does not fit without.
        offload: what is kept in the memory of the hosts, as in `sw.Recipe`; "" for nothing. By
            default, it is tried where a step does not fit without.
        batch_per_device: the samples for each device, instead of the recipe's global batch; or
            "free" for the number with the most samples per second that fits.
        compile: how many of the best to prove with the compiler; 0 for none.
        limit: seconds after which to stop ranking.
        prices: dollars for an hour of one chip, by its name.
        calibration: the file that `shardwise chips measure` wrote.
        progress: called with a line after each candidate, the best so far, and before each
            compilation.

    Raises:
        ValueError: there are no such chips, or a fixed part does not exist.

    Example:
        >>> import jax, optax, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(4096, 4096, use_bias=False, rngs=nnx.Rngs(0))
        >>> recipe = sw.Recipe(model=make, loss=lambda model, x: model(x).mean(),
        ...                    optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((64, 4096), "float32"))
        >>> found = sw.search(recipe, "h100:1x8", compile=0)
        >>> found.best.devices
        8
    """
    return run_search(
        recipe,
        on,
        {
            "mesh": mesh,
            "strategy": strategy,
            "axes": dict(axes or {}),
            "remat": remat,
            "accumulate": accumulate,
            "loss_chunks": loss_chunks,
            "offload": offload,
            "batch_per_device": batch_per_device,
        },
        compile=compile,
        limit=limit,
        prices=prices,
        calibration=calibration,
        progress=progress,
    )


@building_once()
def run_search(
    recipe: Recipe,
    on: str | Sequence[str],
    parts: Mapping[str, Any],
    *,
    compile: int = 3,
    limit: float | None = None,
    prices: Mapping[str, float] | None = None,
    calibration: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    seen: Callable[[Candidate], None] | None = None,
) -> Found:
    """Returns what `search` does.

    Args:
        recipe: the recipe.
        on: the chips.
        parts: the fixed parts, as `search` takes them.
        compile: how many of the best to prove.
        limit: seconds after which to stop ranking.
        prices: dollars for an hour of one chip.
        calibration: the file of measured rates.
        progress: called with lines.
        seen: called with each candidate when it is priced, and again when it is proved.
    """
    if not isinstance(recipe, Recipe):
        raise ValueError("sw.search takes a sw.Recipe: a model alone has no loss and no batch")
    began = time.monotonic()
    names = [on] if isinstance(on, str) else list(on)
    if not names:
        raise ValueError("on= names no chips: give 'v5p:4x8x8', several of these, or 'v5p'")
    if any(name.partition(":")[0] in ("cpu", "none") for name in names):
        raise ValueError(
            f"on={on!r} has no step time to search for: give chips, such as 'h100:1x8' or 'v5p'"
        )
    if compile < 0:
        raise ValueError(f"compile={compile} must be at least 0: how many of the best to prove")
    for name in prices or {}:
        parse_chips(f"{name}:{_one(name)}")
    fixed = fixed_parts(**parts)
    offload = fixed.offload
    dataclasses.replace(recipe, offload=recipe.offload if offload is None else offload)  # or raises
    searcher = Searcher(
        recipe,
        fixed,
        prices=dict(prices or {}),
        calibration=calibration,
        deadline=began + limit if limit is not None else None,
        progress=progress or (lambda line: None),
        seen=seen or (lambda candidate: None),
    )
    given = {name.partition(":")[0] for name in names}
    if unused := sorted(set(prices or {}) - given):
        searcher.note(f"prices of {', '.join(unused)} were not used: these chips are not searched")
    stopped = ""
    try:
        for name in names:
            if ":" in name:
                searcher.rank(str(parse_chips(name)))
            else:
                growing(searcher, name)
        if compile:
            searcher.prove(compile)
        ranked = searcher.ranked()
        if ranked and not any(c.fits for c in ranked):
            searcher.remedy(names, prove=bool(compile))
    except KeyboardInterrupt:
        stopped = "interrupted"
    except TimeoutError:
        stopped = f"the time limit of {limit:g} s"
    searcher.finish()
    return Found(
        candidates=tuple(searcher.ranked()),
        remedies=tuple(searcher.remedies),
        notes=tuple(searcher.notes),
        stopped=stopped,
        seconds=time.monotonic() - began,
    )


def _one(name: str) -> str:
    from .._chips import CHIPS

    chip: Any = CHIPS.get(name)
    return "x".join(["1"] * (chip.dims if chip is not None else 2))
