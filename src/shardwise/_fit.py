"""The training loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ._checkpoints import CheckpointError, Checkpoints
from ._data import Data, open_batches
from ._digest import digests
from ._layout import Layout
from ._peers import LostProcess, naming_lost_process
from ._place import own_mesh, require_devices
from ._preflight import named_arrays
from ._recipe import Recipe
from ._state import TrainState
from ._step import Blueprint, blueprint
from ._stopping import Stopped, Stopping
from ._terminal import working
from ._train import Step, train_state
from ._watch import NotFinite, Watch

_PROFILED_STEPS = 5


def fit(
    recipe: Recipe,
    layout: Layout,
    data: Any,
    *,
    steps: int,
    checkpoints: Checkpoints | None = None,
    resume: bool = True,
    evaluate: Any = None,
    evaluate_every: int | None = None,
    evaluate_batches: int = 10,
    logs: str | Path | None = None,
    log_every: int = 10,
    profile: int | None = None,
    show: bool = True,
) -> TrainState:
    """Returns the state after `steps` steps.

    On SIGTERM and SIGINT it finishes the step, saves a checkpoint and raises `sw.Stopped`, which
    ends the process; started again, it goes on from there. SIGUSR1 profiles the next five steps.

    Args:
        recipe: the recipe.
        layout: the layout of its model, on a mesh of devices that are here.
        data: from `sw.data`, or any iterable of batches (which is wound forward to resume).
        steps: how many steps the run has in all, those before a resume included.
        checkpoints: where to save; the last step is always saved.
        resume: whether to go on from the newest checkpoint, if there is one.
        evaluate: data to evaluate on, from `sw.data`.
        evaluate_every: after how many steps.
        evaluate_batches: on how many batches, the same each time.
        logs: a folder for `metrics.jsonl`, TensorBoard's event files and profiles.
        log_every: after how many steps they are written, and a line is printed where the
            terminal has no progress bar.
        profile: the step from which five are profiled.
        show: whether to show progress.

    Raises:
        NotFinite: the loss became NaN or infinite; the last checkpoint is from before.
        Stopped: a signal came.
        CheckpointError: a checkpoint could not be written or read.

    Example:
        >>> import jax, numpy as np, optax, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(16, 1, rngs=nnx.Rngs(0))
        >>> loss = lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean()
        >>> samples = {"x": np.ones((256, 16), "float32"), "y": np.ones((256, 1), "float32")}
        >>> batch = {"x": jax.ShapeDtypeStruct((64, 16), "float32"),
        ...          "y": jax.ShapeDtypeStruct((64, 1), "float32")}
        >>> recipe = sw.Recipe(model=make, loss=loss, optimizer=optax.sgd(0.01), batch=batch)
        >>> layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), "dp")
        >>> state = sw.fit(recipe, layout, sw.data(samples), steps=10, show=False)
        >>> int(state.step)
        10
    """
    _require(steps, log_every, evaluate, evaluate_every, evaluate_batches, profile)
    _require_place(checkpoints, resume)
    plan = blueprint(recipe, layout)
    mesh = require_devices(plan.layout)
    step = Step(plan)
    shown = show and jax.process_index() == 0
    saved = checkpoints.steps() if checkpoints is not None else []
    if checkpoints is not None and (not saved or saved[-1] < steps):
        checkpoints.require_writable()
    if checkpoints is not None and saved:
        newest = saved[-1]
        with working(f"restoring step {newest}", show=shown):
            state = checkpoints.restore(recipe, layout, step=newest)
        position = checkpoints.about(newest)["position"]
    else:
        with working("initialising the model in its shards", show=shown):
            state, position = train_state(recipe, layout), 0
    first = int(state.step)
    saver = _Saver(plan, checkpoints, state)
    folder = Path(logs) if logs is not None else None
    tracer = _Profile(folder or (checkpoints.directory if checkpoints else Path.cwd()))
    judge = _Judge(plan, evaluate, evaluate_batches) if evaluate is not None else None
    watch = Watch(plan, steps=steps, first=first, logs=folder, every=log_every, show=show)

    with own_mesh(mesh), Stopping(mesh) as stop, watch:
        if first:
            watch.say(f"resumed after step {first} of {saver.place}")
        if first >= steps:
            return state
        batches = open_batches(data, plan, position)
        try:
            for number in range(first + 1, steps + 1):
                with naming_lost_process(f"step {number}"):
                    tracer.before(number, asked=stop.profile or number == profile)
                    stop.profile = False
                    state, metrics = step(state, _next(batches, number, steps))
                    tracer.after(number, metrics)
                    watch.add(number, metrics)
                    asked = stop.asked()
                    if evaluate_every and judge and number % evaluate_every == 0:
                        with watch.pause():
                            watch.note(number, judge(state))
                    if saver.due(number) or asked or number == steps:
                        watch.catch_up()
                        with watch.pause():
                            saver.save(number, state, batches.position)
                    if asked:
                        saver.wait()
                        watch.say(f"stopped after step {number}, {saver.told}")
                        raise Stopped(number, asked)
            saver.wait()
        except NotFinite as error:
            raise NotFinite(f"{saver.not_finite() or error}; {saver.last_good()}") from None
        except LostProcess:
            raise  # a save that is under way waits for all processes, in vain
        except Exception:
            # A save that is under way is finished, whatever ended the run.
            with contextlib.suppress(CheckpointError, NotFinite):
                saver.wait()
            raise
        finally:
            tracer.close()
        if stop.noted:  # it came while the last step was saved
            raise Stopped(steps, stop.noted)
    return state


class _Saver:
    """Saves when it is time, and never a state that is not finite."""

    def __init__(self, plan: Blueprint, checkpoints: Checkpoints | None, state: TrainState):
        self.plan, self.checkpoints = plan, checkpoints
        self.place = checkpoints.directory if checkpoints else ""
        self.told = f"saved to {self.place}" if checkpoints else "nothing was saved"
        self._saved_at = time.monotonic()
        # A finite loss does not mean that the update after it was: what is saved must be finite.
        # What is infinite from the start, such as a mask or the best loss so far, is meant so.
        self._finite = _finite_arrays(state) if checkpoints else []

    def due(self, number: int) -> bool:
        every = self.checkpoints.every if self.checkpoints else None
        if every and number % every == 0:
            return True
        minutes = self.checkpoints.minutes if self.checkpoints else None
        if not minutes:
            return False
        late = time.monotonic() - self._saved_at >= 60 * minutes
        return bool(_same_everywhere(late)) if jax.process_count() > 1 else late

    def save(self, number: int, state: TrainState, position: int) -> None:
        if self.checkpoints is None:
            return
        self.checkpoints.save(
            number, state, position=position, layout=self.plan.layout, finite=self._finite
        )
        self._saved_at = time.monotonic()

    def wait(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.close()

    def not_finite(self) -> NotFinite | None:
        """Returns what the save that is under way finds: the loss after it tells less."""
        try:
            self.wait()
        except NotFinite as error:
            return error
        return None

    def last_good(self) -> str:
        if self.checkpoints is None:
            return "nothing was saved: give fit checkpoints="
        steps = self.checkpoints.steps()
        if not steps:
            return f"no checkpoint was saved to {self.checkpoints.directory} before"
        return f"the last good checkpoint is step {steps[-1]} in {self.checkpoints.directory}"


class _Judge:
    """Evaluates a state on the same batches each time."""

    def __init__(self, plan: Blueprint, data: Any, count: int):
        if not isinstance(data, Data):
            raise ValueError(f"evaluate is a {type(data).__name__}: give sw.data(…)")
        self.plan, self.data, self.count = plan, data, count
        shardings = jax.tree.map(lambda leaf: leaf.sharding, plan.batch)
        self.jitted = jax.jit(
            plan.evaluate,
            in_shardings=(plan.shardings, shardings),
            out_shardings=NamedSharding(plan.layout.mesh, P()),
        )

    def __call__(self, state: TrainState) -> dict[str, float]:
        batches = zip(range(self.count), self.data.on(self.plan), strict=False)
        rows = [self.jitted(state, batch) for _, batch in batches]
        names = [name for name, value in rows[0].items() if value.size == 1]
        return {f"eval_{name}": float(np.mean([row[name] for row in rows])) for name in names}


class _Profile:
    """A profile of five steps, when asked for."""

    def __init__(self, folder: Path):
        self.folder = folder / "profile"
        self.until: int | None = None

    def before(self, number: int, *, asked: bool) -> None:
        if asked and self.until is None:
            jax.profiler.start_trace(str(self.folder))
            self.until = number + _PROFILED_STEPS - 1

    def after(self, number: int, metrics: Any) -> None:
        if number == self.until:
            jax.block_until_ready(metrics)
            self.close()

    def close(self) -> None:
        if self.until is not None:
            jax.profiler.stop_trace()
            self.until = None


def _next(batches: Iterator[Any], number: int, steps: int) -> Any:
    try:
        return next(batches)
    except StopIteration:
        raise ValueError(
            f"the data ended before step {number} of {steps}: give fewer steps, or data of more "
            f"epochs (sw.data(…, epochs=None) has no end)"
        ) from None


def _finite_arrays(state: TrainState) -> list[str]:
    arrays = {
        name: x
        for name, x in named_arrays(state).items()
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    }
    with own_mesh(state.step.sharding.mesh):
        return [name for name, digest in digests(arrays)().items() if digest.finite]


def _same_everywhere(mine: bool) -> Any:
    from jax.experimental import multihost_utils

    return multihost_utils.broadcast_one_to_all(np.asarray(mine))


def _require(
    steps: int,
    log_every: int,
    evaluate: Any,
    evaluate_every: int | None,
    evaluate_batches: int,
    profile: int | None,
) -> None:
    for name, value in (
        ("steps", steps),
        ("log_every", log_every),
        ("evaluate_every", 1 if evaluate_every is None else evaluate_every),
        ("evaluate_batches", evaluate_batches),
        ("profile", 1 if profile is None else profile),
    ):
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name}={value!r} is no number of steps: give 1 or more")
    if (evaluate is None) != (evaluate_every is None):
        raise ValueError("evaluate= and evaluate_every= go together: give both, or neither")


def _require_place(checkpoints: Any, resume: bool) -> None:
    if checkpoints is None:
        return
    if not isinstance(checkpoints, Checkpoints):
        raise ValueError(
            f"checkpoints is {checkpoints!r}: give sw.Checkpoints({str(checkpoints)!r})"
        )
    if not resume and checkpoints.steps():
        raise ValueError(
            f"resume=False would begin anew in {checkpoints.directory}, which has checkpoints up "
            f"to step {checkpoints.steps()[-1]}: give another directory, or remove them"
        )
