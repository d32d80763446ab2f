"""The demo: every part of a run, on eight virtual CPU devices."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from rich.text import Text

from ..._base import show_bytes, tell, working
from ..._check import audit, check
from ..._checkpoint import Checkpoints
from ..._layout import Layout, fsdp, layout, tensor
from ..._mesh import mesh, show_mesh
from ..._step import TrainState
from ..._train import fit, fit_with, train_state, train_step


def run_tour(steps: int, directory: Path | None) -> None:
    """Shows a run from its layout to a restore on another mesh, on stdout.

    Raises:
        ValueError: the run is too short, or the folder has checkpoints already.
    """
    if steps < 4:
        raise ValueError(f"--steps must be at least 4, got {steps}")
    began = time.perf_counter()
    heading = _Headings()
    # No accelerator is needed: without this, JAX looks for one and warns about it.
    jax.config.update("jax_platforms", "cpu")
    # The mesh comes first: the example may start a backend with too few devices.
    first = mesh("data=2,model=4", on="cpu:8")
    from ...examples import text

    recipe, samples = text.recipe, text.data()
    store = Checkpoints(directory or tempfile.mkdtemp(prefix="shardwise-"), every=steps)
    if store.steps():
        raise ValueError(f"{store.directory} already has checkpoints: give another folder")

    heading(
        "Lay out", "a decoder that knows nothing about meshes, with tensor parallelism and FSDP"
    )
    rules = [tensor("model"), fsdp("data", min_bytes=2**14)]
    with working("laying out"):
        plan = layout(recipe.model, first, rules, inputs=recipe.batch)
    tell(str(plan))

    heading("Check", "every problem at once")
    tell(str(check(plan)))

    heading("Initialise", "straight into the shards")
    with working("initialising"):
        state = jax.block_until_ready(train_state(recipe, plan))
    model = state.to_model(recipe.model)
    tell(f"planned against live: {audit(plan, model)}")
    moments = plan.for_optimizer(recipe.optimizer)
    planned = plan.bytes_per_device + moments.bytes_per_device
    tell(
        f"each device holds {show_bytes(_resident_bytes(state))} (measured); planned: "
        f"{show_bytes(planned)} of {show_bytes(plan.total_bytes + moments.total_bytes)} (exact)"
    )

    half = steps // 2
    heading("Train", f"{half} steps on {show_mesh(first)}, then save")
    step = train_step(recipe, plan)
    fit_with(lambda: step, samples, steps=half, checkpoints=store, log_every=10)

    second = mesh("data=4,model=2", on="cpu:8")
    heading("Restore", f"the checkpoint of step {half} onto {show_mesh(second)}, and continue")
    with working("laying out again"):
        other = layout(recipe.model, second, rules, inputs=recipe.batch)
        found = store.preflight(recipe, other, step=half)
    tell(str(found))
    again = fit(recipe, other, samples, steps=steps, checkpoints=store, log_every=10)
    with working("training without the interruption"):
        straight = fit_with(lambda: step, samples, steps=steps, show=False)
    apart = max(
        float(np.max(np.abs(np.asarray(straight.model[path]) - np.asarray(again.model[path]))))
        for path in straight.model
    )
    tell(
        f"after {steps} steps, half of them on the other mesh, parameters differ by at most "
        f"{apart:.1e} from those of the uninterrupted run (measured)"
    )

    heading("Compare", "the same parameter on each mesh, and on disk")
    path = "blocks.0.up"
    for name, laid_out, live in (("planned", plan, straight), ("restored", other, again)):
        tell(f"{name:9}{show_mesh(laid_out.mesh):16}{path} {_where(laid_out, live, path)}")
    tell(f"{'on disk':9}{store.directory}: steps {', '.join(map(str, store.steps()))}")
    tell(f"\n{time.perf_counter() - began:.0f} seconds. Next: shardwise train --help")


def _resident_bytes(state: TrainState) -> int:
    """Returns the bytes that the first device holds."""
    device = jax.local_devices()[0]
    return sum(
        shard.data.nbytes
        for x in jax.tree.leaves(state)
        for shard in x.addressable_shards
        if shard.device == device
    )


def _where(layout: Layout, live: TrainState, path: str) -> str:
    shards = live.model[path].addressable_shards
    leaf = layout[path]
    return (
        f"{list(leaf.shape)} as {leaf.spec}: {len(shards)} shards of {list(shards[0].data.shape)}, "
        f"{leaf.copies} of each"
    )


class _Headings:
    """Prints numbered headings."""

    def __init__(self):
        self.number = 0

    def __call__(self, title: str, subtitle: str) -> None:
        self.number += 1
        tell(Text(f"\n{self.number}. {title}: {subtitle}", "bold"))
