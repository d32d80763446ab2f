"""The training loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._base import either, public, working
from .._checkpoint import CheckpointError, Checkpoints, digests, flight_check
from .._layout import Layout
from .._nnx import Recipe
from .._place import own_mesh, require_mesh
from .._processes import LostProcess, agreed_steps, known_to_all, naming_lost_process, together
from .._step import (
    Blueprint,
    Bound,
    NotFinite,
    TrainState,
    explained_tracing,
    index_bounds,
    named_arrays,
    show_array,
)
from .datasets import Data, open_batches
from .fingerprint import program_parts, require_same_run, require_same_step, run_parts
from .progress import RunLog, expected, require_logs
from .replicas import Replicas, ReplicasDiffer
from .stopping import Agreement, Stopped, Stopping
from .train import Step, begin, given_arrays, train_step

_PROFILED_STEPS = 5
_COMPARED_STEPS = 1000
_Error = TypeVar("_Error", bound=Exception)


@public
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
    model: Any = None,
    donate: bool = False,
) -> TrainState:
    """Returns the state after `steps` steps.

    On SIGTERM or SIGINT it finishes the step, saves a checkpoint and raises `sw.Stopped`, which
    ends the process; started again, it resumes from there. SIGUSR1 profiles the next five steps.

    Args:
        recipe: the recipe.
        layout: the layout of its model, on a mesh of available devices.
        data: from `sw.data`, or any iterable of batches (on resume, batches are skipped).
        steps: the total number of steps, including those before a resume.
        checkpoints: where to save; the last step is always saved.
        resume: whether to resume from the newest checkpoint, if there is one.
        evaluate: data to evaluate on, from `sw.data`.
        evaluate_every: how often to evaluate, in steps.
        evaluate_batches: how many batches to evaluate on, the same ones each time.
        logs: a folder for `metrics.jsonl`, TensorBoard's event files and profiles.
        log_every: how often to write logs, in steps, and to print a line if there is no progress
            bar.
        profile: the first of five steps to profile.
        show: whether to show progress.
        model: initial weights, in any form that `sw.train_state` accepts. A run that resumes has its
            own, but those that `Checkpoints(trained_only=True)` did not save.
        donate: whether the arrays of `model` are used up instead of copied, as `sw.train_state` does;
            without it, they stay in memory as long as you keep them.

    Raises:
        ProcessesDiffer: a process runs a different program, or has different data or checkpoints.
        ReplicasDiffer: devices hold different values of a replicated array.
        NotFinite: the loss became NaN or infinite; the last checkpoint is from before that.
        Stopped: the run was stopped by a signal.
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
    return fit_with(
        lambda: train_step(recipe, layout),
        data,
        steps=steps,
        checkpoints=checkpoints,
        resume=resume,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        evaluate_batches=evaluate_batches,
        logs=logs,
        log_every=log_every,
        profile=profile,
        show=show,
        model=model,
        donate=donate,
    )


def fit_with(
    make_step: Callable[[], Step],
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
    model: Any = None,
    donate: bool = False,
) -> TrainState:
    """Does what `fit` does, with a step that several runs may share: it is compiled once."""
    _require(steps, log_every, evaluate, evaluate_every, evaluate_batches, profile)
    _require_place(checkpoints)
    shown = show and jax.process_index() == 0
    folder = Path(logs) if logs is not None else None
    with together("preparing the run"):
        step = make_step()
        blueprint = step.blueprint
        mesh = require_mesh(blueprint.layout)
        given = given_arrays(model, blueprint) if model is not None else None
        if folder is not None and jax.process_index() == 0:
            require_logs(folder)
        arguments = {
            "steps": steps,
            "checkpoints": checkpoints and (checkpoints.every, checkpoints.minutes),
            "resume": resume,
            "evaluate": evaluate_every and (evaluate_every, evaluate_batches),
            "model": model is not None,
        }
        parts = run_parts(blueprint, data, evaluate, arguments)
    require_same_run(parts)
    saved = agreed_steps(checkpoints) if checkpoints is not None else []
    if checkpoints is not None and saved and not resume:
        raise ValueError(
            f"resume=False starts a new run, but {checkpoints.directory} already has checkpoints up "
            f"to step {saved[-1]}: use another directory, or remove them"
        )
    with _released_on_failure(checkpoints):
        if checkpoints is not None and (not saved or saved[-1] < steps):
            with together("preparing the checkpoints"):
                checkpoints.require_writable(until=steps)
        with together("tracing the step"), explained_tracing():
            # Traced only once: the first step finds it in JAX's cache.
            traced = step.jitted.trace(blueprint.abstract, blueprint.batch).jaxpr
            bounds = index_bounds(traced, len(jax.tree.leaves(blueprint.batch)))
            programs = program_parts(blueprint, traced, given)
        require_same_run(programs)
        if checkpoints is not None and saved:
            newest = saved[-1]
            # Check the metadata first: reading waits for all processes, even for one that failed.
            with together(f"checking step {newest}"):
                about = checkpoints.about(newest)
                flight_check(blueprint, about).findings.raise_if_errors()
            require_same_step(newest, about)
            with (
                together(f"restoring step {newest}"),
                working(f"restoring step {newest}", show=shown),
            ):
                state = checkpoints.restore_onto(blueprint, step=newest, given=given)
                position = about["position"]
        else:
            doing = "initialising the model in its shards"
            with together(doing), working(doing, show=shown):
                state, position = begin(blueprint, given, donate=donate), 0
        first = int(state.step)
        saver = _Saver(blueprint, checkpoints, state)
        evaluator = (
            _Evaluator(blueprint, evaluate, evaluate_batches, bounds)
            if evaluate is not None
            else None
        )
        watch = RunLog(
            blueprint,
            steps=steps,
            first=first,
            logs=folder,
            every=log_every,
            show=show,
            expected=lambda: expected(blueprint.recipe, blueprint.layout),
        )
        place = folder or (checkpoints.directory if checkpoints else Path.cwd())
        tracer = _Profile(place, watch.warn)

    with own_mesh(mesh), Stopping(mesh) as stop, watch:
        if saved:
            ignored = given is not None and checkpoints and not checkpoints.trained_only
            also = "; model= is ignored" if ignored else ""
            watch.say(f"resumed from step {first} in {saver.place}{also}")
        if first >= steps:
            watch.say(f"nothing to do: the run already has {first} of {steps} steps")
            return state
        try:
            with together("opening the data"):
                batches = open_batches(data, blueprint, position, bounds)
            saver.require_replicas(first, state)
            for number in range(first + 1, steps + 1):
                with naming_lost_process(f"step {number}"):
                    tracer.before(number, asked=stop.profile or number == profile)
                    stop.profile = False
                    state, metrics = step(state, _next(batches, number, steps))
                    tracer.after(number, metrics)
                    watch.add(number, metrics)
                    asked = stop.asked()
                    if evaluate_every and evaluator and number % evaluate_every == 0:
                        with watch.pause():
                            watch.note(number, evaluator(state))
                    due = saver.due(number) or asked or number == steps
                    if due or number % _COMPARED_STEPS == 0:
                        watch.catch_up()
                        with watch.pause():
                            saver.require_replicas(number, state)
                    if due:
                        with watch.pause():
                            saver.save(number, state, batches.position)
                    if asked:
                        saver.wait()
                        watch.say(f"stopped after step {number}, {saver.outcome}")
                        raise Stopped(number, asked)
            saver.wait()
        except NotFinite as error:
            raise saver.at_last_good(NotFinite, saver.not_finite() or error) from None
        except ReplicasDiffer as error:
            with contextlib.suppress(CheckpointError, NotFinite):
                saver.wait()
            full = saver.at_last_good(ReplicasDiffer, error)
            full.path, full.devices = error.path, error.devices
            raise known_to_all(full) from None
        except LostProcess:
            raise  # a save in progress waits for all processes, and would time out
        except Exception:
            # Finish a save in progress, whatever ended the run.
            with contextlib.suppress(CheckpointError, NotFinite):
                saver.wait()
            raise
        finally:
            tracer.close()
        if stop.noted:  # the signal arrived while the last step was saved
            raise Stopped(steps, stop.noted)
    return state


@contextlib.contextmanager
def _released_on_failure(checkpoints: Checkpoints | None) -> Iterator[None]:
    """Releases the directory to other runs if this one fails before its first step."""
    try:
        yield
    except BaseException:
        if checkpoints is not None:
            checkpoints.release()
        raise


class _Saver:
    """Saves when a save is due, and never a state that is not finite."""

    def __init__(self, blueprint: Blueprint, checkpoints: Checkpoints | None, state: TrainState):
        self.blueprint, self.checkpoints = blueprint, checkpoints
        self.place = checkpoints.directory if checkpoints else ""
        self.outcome = f"saved to {self.place}" if checkpoints else "nothing was saved"
        self._saved_at = time.monotonic()
        # The update may be non-finite even if the loss before it was finite, so check what is saved.
        # Arrays that are infinite from the start, such as a mask or the best loss so far, are
        # intentional.
        self._finite = _finite_arrays(state) if checkpoints else []
        self._replicas: Replicas | None = None
        timed = checkpoints is not None and checkpoints.minutes and jax.process_count() > 1
        self._late = Agreement(state.step.sharding.mesh) if timed else None

    def due(self, number: int) -> bool:
        every = self.checkpoints.every if self.checkpoints else None
        if every and number % every == 0:
            return True
        minutes = self.checkpoints.minutes if self.checkpoints else None
        if not minutes:
            return False
        late = time.monotonic() - self._saved_at >= 60 * minutes
        # Clocks differ: when a save is due on one process, all save, at most two steps later.
        return late if self._late is None else bool(self._late.highest(late))

    def save(self, number: int, state: TrainState, position: int) -> None:
        if self.checkpoints is None:
            return
        self.checkpoints.save(
            number, state, position=position, layout=self.blueprint.layout, finite=self._finite,
            frozen=self.blueprint.frozen if self.checkpoints.trained_only else (),
        )  # fmt: skip
        if self._late is not None:
            self._late.settle()  # what was due before this save no longer is
        self._saved_at = time.monotonic()

    def wait(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.close()

    def not_finite(self) -> NotFinite | None:
        """Returns the error of the save in progress, which says more than the loss after it."""
        try:
            self.wait()
        except NotFinite as error:
            return error
        return None

    def require_replicas(self, number: int, state: TrainState) -> None:
        """Compares the replicas of the state, if there are several processes."""
        if jax.process_count() == 1:
            return
        if self._replicas is None:
            self._replicas = Replicas(state)
        self._replicas.check(state, number)

    def at_last_good(self, kind: type[_Error], error: Exception) -> _Error:
        """Returns the error, with the checkpoint to continue from."""
        if self.checkpoints is None:
            return kind(
                f"{error}; nothing was saved: "
                + either("give fit checkpoints=", "give --checkpoints DIR")
            )
        steps = self.checkpoints.steps()
        if not steps:
            return kind(f"{error}; {self.checkpoints.directory} has no earlier checkpoint")
        where = f"step {steps[-1]} in {self.checkpoints.directory}"
        return kind(f"{error}; the last good checkpoint is {where}")


class _Evaluator:
    """Evaluates a state on the same batches each time."""

    def __init__(self, blueprint: Blueprint, data: Any, count: int, bounds: Sequence[Bound]):
        if not isinstance(data, Data):
            raise ValueError(f"evaluate has type {type(data).__name__}: give sw.data(…)")
        self.blueprint, self.data, self.count, self.bounds = blueprint, data, count, bounds
        shardings = jax.tree.map(lambda leaf: leaf.sharding, blueprint.batch)
        self.jitted = jax.jit(
            blueprint.evaluate,
            in_shardings=(blueprint.shardings, shardings),
            out_shardings=NamedSharding(blueprint.layout.mesh, P()),
        )

    def __call__(self, state: TrainState) -> dict[str, float]:
        batches = zip(
            range(self.count), self.data.on(self.blueprint, bounds=self.bounds), strict=False
        )
        rows = [self.jitted(state, batch) for _, batch in batches]
        names = [name for name, value in rows[0].items() if value.size == 1]
        return {f"eval_{name}": float(np.mean([row[name] for row in rows])) for name in names}


class _Profile:
    """Profiles five steps on request."""

    def __init__(self, folder: Path, say: Callable[[str], None]):
        self.folder, self.say = folder / "profile", say
        self.until: int | None = None

    def before(self, number: int, *, asked: bool) -> None:
        if asked and self.until is None:
            with self._going_on():
                jax.profiler.start_trace(str(self.folder))
                self.until = number + _PROFILED_STEPS - 1

    def after(self, number: int, metrics: Any) -> None:
        if number == self.until:
            jax.block_until_ready(metrics)
            self.close()

    def close(self) -> None:
        if self.until is not None:
            self.until = None
            with self._going_on():
                jax.profiler.stop_trace()

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Reports errors and continues: a profile that cannot be written must not end the run."""
        try:
            yield
        except Exception as error:
            self.say(f"the profile could not be written to {self.folder}: {error}")


def _next(batches: Iterator[Any], number: int, steps: int) -> Any:
    try:
        return next(batches)
    except StopIteration:
        raise ValueError(
            f"the data ended before step {number} of {steps}: "
            + either(
                "give fewer steps, or data with more epochs (sw.data(…, epochs=None) never ends)",
                f"give --steps {number - 1}, or data with more epochs",
            )
        ) from None


def _finite_arrays(state: TrainState) -> list[str]:
    arrays = {
        name: x
        for name, x in named_arrays(state).items()
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    }
    with own_mesh(state.step.sharding.mesh):
        return [show_array(name) for name, digest in digests(arrays)().items() if digest.finite]


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
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if (evaluate is None) != (evaluate_every is None):
        raise ValueError("evaluate= and evaluate_every= must be given together")


def _require_place(checkpoints: Any) -> None:
    if checkpoints is None:
        return
    if not isinstance(checkpoints, Checkpoints):
        raise ValueError(
            f"checkpoints is {checkpoints!r}: give sw.Checkpoints({str(checkpoints)!r})"
        )
