"""Checkpoints of a run: saved in the background, restored on any mesh."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from .._base import public
from .._check import Allow
from .._layout import Layout
from .._mesh import show_mesh
from .._nnx import Recipe, keyed_leaves
from .._place import own_mesh, require_mesh
from .._processes import LostProcess, exchange, known_to_all, naming_lost_process
from .._step import (
    Blueprint,
    NotFinite,
    TrainState,
    make_blueprint,
    named_arrays,
    require_not_donated,
    show_array,
)
from .digest import ALGORITHM, digests
from .errors import CheckpointError, reason_for
from .preflight import Preflight, array_rows, flight_check
from .step_files import ABOUT, FORMAT, LAYOUT, UnknownFormat, read_about, sealed
from .stored_state import (
    from_tree,
    frozen_paths,
    in_memory,
    on_disk,
    to_tree,
    with_frozen,
    without,
    wrong_arrays,
)
from .writer_lock import LOCK, MARK, Taken, WriterLock, leave_mark, sees_mark

if TYPE_CHECKING:
    from .orbax import Writer

# Listing, retention and sweeping of steps are done here, on top of Orbax's `AsyncCheckpointer`, and
# not by its `CheckpointManager`, which (tried with 0.12.8) creates the directory when it is opened,
# unless it is read-only; takes any numbered folder for a step, even an empty one, and resumes from
# it if it is the newest; answers `all_steps` from a listing made when it was opened, unless asked to
# read again; and returns False from `save` for a step that exists or is older than the newest,
# where ours raises, or saves it.
_DELETED = ".deleted-"
_STEP = re.compile(r"0|[1-9]\d{0,17}", re.ASCII)
_PROBE_BYTES = 4096
# What we or Orbax, for us, left half done: nobody else's directory is ever removed.
_LEFT_BEHIND = re.compile(
    rf"{re.escape(_DELETED)}\d+|(\d+)\.orbax-checkpoint-tmp(-\d+)?|{re.escape(MARK)}[0-9a-f]{{16}}",
    re.ASCII,
)


@public
class Checkpoints:
    """The checkpoints of one run: a directory with one numbered subdirectory per step.

    A step appears only once it is completely written. Every process writes and reads its own
    shards. Each array is saved with a digest, which is verified when the array is restored.

    Example:
        >>> import tempfile, jax, optax, shardwise as sw
        >>> from flax import nnx
        >>> make = lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        >>> recipe = sw.Recipe(model=make, loss=lambda model, x: model(x).mean(),
        ...                    optimizer=optax.adam(0.1), batch=jax.ShapeDtypeStruct((8, 16), "float32"))
        >>> layout = sw.layout(make, sw.mesh("data=8", on="cpu:8"), "dp")
        >>> checkpoints = sw.Checkpoints(tempfile.mkdtemp(), keep=2)
        >>> checkpoints.save(0, sw.train_state(recipe, layout))
        >>> checkpoints.wait()
        >>> other = sw.layout(make, sw.mesh("data=4", on="cpu:4"), sw.fsdp("data", min_bytes=0))
        >>> state = checkpoints.restore(recipe, other)
        >>> state.model["kernel"].sharding.spec
        P(None, 'data')
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int | None = 3,
        every: int | None = None,
        minutes: float | None = None,
        trained_only: bool = False,
    ):
        """Sets the directory, which is created by the first save.

        Args:
            directory: where the checkpoints of the run are.
            keep: how many of the newest steps to keep; None keeps all.
            every: how often `sw.fit` saves, in steps.
            minutes: how often `sw.fit` saves, in minutes; may be combined with `every`. With
                neither, it saves only at the end.
            trained_only: whether `sw.fit` leaves out parameters that are not trained, such as the
                base of a model with adapters (LoRA). A resumed run takes them from where they came
                from, `fit(model=…)` or the recipe's function; digests prove that they are the same.
        """
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be a positive integer or None, got {keep}")
        if every is not None and every < 1:
            raise ValueError(f"every must be a positive integer or None, got {every}")
        if minutes is not None and not minutes > 0:
            raise ValueError(f"minutes must be positive, got {minutes}")
        self.directory = Path(directory).absolute()
        self.keep, self.every, self.minutes = keep, every, minutes
        self.trained_only = trained_only
        self._writer: Writer | None = None
        self._lock = WriterLock(self.directory, is_idle=lambda: self._writer is None)
        self._saving: int | None = None
        self._removing: list[threading.Thread] = []

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        position: int = 0,
        layout: Layout | None = None,
        finite: Collection[str] = (),
        frozen: Collection[str] = (),
    ) -> None:
        """Starts to save a step, and returns as soon as the state's buffers may be donated.

        Args:
            step: the step number; each step can be saved once.
            state: the state.
            position: how many samples have been read so far.
            layout: the model's layout; its lockfile is saved too, as `about/layout.json`.
            finite: paths of arrays (`kernel`, `optimizer.0.mu.kernel`) that must be finite. If one
                is not, the step is discarded, and the next save, or `wait`, raises `NotFinite`.
            frozen: paths of the model's arrays that never change. Only their digests are saved, and
                a restore needs them again.

        Raises:
            CheckpointError: this save could not be started, or the previous one failed.
            NotFinite: the previous save had an array that is not finite.
            ValueError: the state was donated to a step.
        """
        if isinstance(step, bool) or not hasattr(step, "__index__") or operator.index(step) < 0:
            raise ValueError(f"step must be a non-negative integer, got {step!r}")
        require_not_donated(state)
        self._settle()
        step = operator.index(step)
        could_not = f"step {step} could not be saved to {self.directory}"
        with self._explained(could_not):
            self._take_lock(could_not)
        try:
            with naming_lost_process(f"the save of step {step}"):
                self._begin(
                    step, state, could_not,
                    position=position, layout=layout, finite=finite, frozen=frozen,
                )  # fmt: skip
        except BaseException:
            self.release()
            raise
        self._saving = step

    def _begin(
        self,
        step: int,
        state: TrainState,
        could_not: str,
        *,
        position: int,
        layout: Layout | None,
        finite: Collection[str],
        frozen: Collection[str],
    ) -> None:
        target = self.directory / str(step)
        if os.path.lexists(target):
            if not _is_step(target):
                raise CheckpointError(f"{could_not}: {_in_the_way(target)}")
            raise CheckpointError(
                f"{self.directory} already has step {step}: each step can be saved only once"
            )
        rows = array_rows(state)
        for path in frozen:
            rows[f"model.{path}"]["frozen"] = True
        mesh = state.step.sharding.mesh
        arrays = on_disk(state)
        with own_mesh(mesh):
            digest_of = digests(named_arrays(arrays))
        arrays = without(arrays, frozen)
        about = {
            "format": FORMAT,
            "digest": ALGORITHM,
            "step": step,
            "position": int(position),
            "mesh": show_mesh(mesh),
            "processes": jax.process_count(),
            "devices": f"{mesh.size} {mesh.devices.flat[0].device_kind}",
            "bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays)),
            "saved_at": time.time(),
            "jax": jax.__version__,
        }

        def about_text() -> str:
            found = digest_of()
            by_path = {show_array(name): digest for name, digest in found.items()}
            wrong = [path for path in finite if not by_path[path].finite]
            if wrong:
                more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                verb = "are" if more else "is"
                raise NotFinite(f"{wrong[0]}{more} {verb} not finite after step {step}")
            for name, digest in found.items():
                rows[name]["digest"] = digest.value
            return sealed({**about, "arrays": rows})

        files: dict[str, Callable[[], str]] = {Path(ABOUT).name: about_text}
        if layout is not None:
            files[Path(LAYOUT).name] = layout.lockfile
        with self._explained(could_not, sweep=step), own_mesh(mesh):
            self._open().save(target, to_tree(arrays), files)

    def require_writable(self, until: int | None = None) -> None:
        """Creates the directory if needed, tests that it is writable, and locks out other runs.

        Call it before a run, so that a problem does not surface only at the first save.

        Args:
            until: the last step of the run; what has the name of a step up to there, after those
                that are saved, is in the way.

        Raises:
            CheckpointError: the directory cannot be written, another run saves there, or something
                that is no checkpoint has the name of a step.
        """
        could_not = f"checkpoints cannot be saved to {self.directory}"
        with self._explained(could_not):
            self._take_lock(could_not)
            with tempfile.TemporaryFile(dir=self.directory, buffering=0) as probe:
                probe.write(bytes(_PROBE_BYTES))  # a full disk may still create files
                os.fsync(probe.fileno())
            newest = max(self.steps(), default=-1)
            for path in self._entries():
                if int(path.name) > newest and (until is None or int(path.name) <= until):
                    raise CheckpointError(f"{could_not}: {_in_the_way(path)}")

    def require_shared(self) -> None:
        """Tests that all processes see the same directory; all of them call it.

        What process 0 writes there, the others must see. A directory that does not exist yet, or
        that process 0 cannot write to, is not tested.

        Raises:
            CheckpointError: a process does not see what process 0 wrote.
        """
        name = ""
        try:
            name = leave_mark(self.directory) if jax.process_index() == 0 else ""
            agreed = exchange(
                "marking the checkpoint directory", json.dumps([name, str(self.directory)])
            )
            mark, theirs = json.loads(agreed[0])
            if not mark:
                return
            problem = ""
            if not sees_mark(self.directory, mark):
                other = "" if theirs == str(self.directory) else f" to {theirs}"
                problem = (
                    f"checkpoints cannot be saved to {self.directory} or read from there: process "
                    f"{jax.process_index()} does not see there what process 0 wrote{other}: the "
                    f"directory must be on storage that all processes share"
                )
            if problem := _first(exchange("looking for the checkpoint directory", problem)):
                raise known_to_all(CheckpointError(problem))
        finally:
            if name:
                with contextlib.suppress(OSError):
                    (self.directory / name).unlink()

    def wait(self) -> None:
        """Waits until the current save is committed and old steps are removed.

        Raises:
            CheckpointError: the save failed; earlier steps are untouched.
            NotFinite: an array that must be finite is not; earlier steps are untouched.
        """
        self._settle()
        while self._removing:
            self._removing.pop().join()

    def _settle(self) -> None:
        if self._writer is None or self._saving is None:
            return
        step, self._saving = self._saving, None
        could_not = f"step {step} could not be saved to {self.directory}"
        with self._explained(could_not, sweep=step):
            self._writer.wait()
            if jax.process_index() == 0:
                self._require_saved(step, could_not)
        self._prune()

    def _require_saved(self, step: int, could_not: str) -> None:
        """Raises if Orbax reports a save as done but its files are missing."""
        try:
            read_about(self.directory / str(step))
        except ValueError as error:
            raise CheckpointError(f"{could_not}: after the save, {error}") from error

    def close(self) -> None:
        """Waits for the current save, and stops the writer threads; a later save restarts them."""
        ended = False
        try:
            self.wait()
            ended = True
        finally:
            writer, self._writer = self._writer, None
            try:
                if writer is not None and ended:
                    with self._explained(f"checkpoints could not be saved to {self.directory}"):
                        writer.close()
                elif writer is not None:
                    # It raises the same error again, which has been explained by now.
                    with contextlib.suppress(Exception):
                        writer.close()
            finally:
                self._lock.release()

    def release(self) -> None:
        """Releases the directory to other writers, unless a save is in progress."""
        if self._writer is None:
            self._lock.release()

    def steps(self) -> list[int]:
        """Returns the committed steps, in order."""
        if not self.directory.is_dir():
            return []
        # A step appears complete, by a rename: one that lacks a file was damaged afterwards.
        return sorted(int(path.name) for path in self._entries() if _is_step(path))

    def about(self, step: int | None = None) -> dict[str, Any]:
        """Returns the metadata of a step: its mesh, bytes, position and arrays.

        Raises:
            CheckpointError: the step does not exist, or one of its files is missing or damaged.
        """
        step = self._pick(step)
        try:
            about = read_about(self.directory / str(step))
            if about["step"] != step:
                raise ValueError(f"its directory is named {step}, but holds step {about['step']}")
            return about
        except UnknownFormat as error:
            raise CheckpointError(f"step {step} in {self.directory} {error}") from None
        except OSError as error:
            raise CheckpointError(
                f"step {step} in {self.directory} cannot be read: {reason_for(error)}"
                f"{self._others(step)}"
            ) from error
        except ValueError as error:
            raise CheckpointError(
                f"step {step} in {self.directory} is damaged: {error}{self._others(step)}"
            ) from error

    def preflight(
        self, recipe: Recipe, layout: Layout, *, step: int | None = None, allow: Allow | None = None
    ) -> Preflight:
        """Returns what a restore would find, from metadata alone; no array is read.

        Args:
            recipe: the recipe to continue with.
            layout: the layout to restore to, on devices that may be absent.
            step: the step; the newest by default.
            allow: intentional findings, by code and path pattern.
        """
        return flight_check(make_blueprint(recipe, layout), self.about(step), allow=allow)

    def restore(
        self, recipe: Recipe, layout: Layout, *, step: int | None = None, model: Any = None
    ) -> TrainState:
        """Returns the state of a step, read directly into this layout's shards.

        Args:
            recipe: the recipe to continue with.
            layout: any layout of its model, on any mesh of available devices; each process reads
                only the shards of its own devices.
            step: the step; the newest by default.
            model: the model with the parameters that a run with `trained_only` did not save; by
                default, they are initialised as the recipe's function does.

        Raises:
            LayoutError: the checkpoint does not match this recipe; no array is read.
            CheckpointError: there is no such checkpoint, it is damaged, or parameters that were not
                saved are not those that the run had.
        """
        blueprint = make_blueprint(recipe, layout)
        arrays = {}
        if model is not None:
            live = dict(keyed_leaves(nnx.split(model)[1]))
            arrays = {leaf.path: live.get(leaf.keys) for leaf in blueprint.layout.leaves}
        return self.restore_onto(blueprint, step=step, given=arrays)

    def restore_onto(
        self,
        blueprint: Blueprint,
        *,
        step: int | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> TrainState:
        """Returns the state of a step like `restore`, given the blueprint of a training step.

        Args:
            blueprint: what the training step is built from, `step.blueprint`; nothing is traced or
                checked again.
            step: the step to restore; the newest by default.
            given: arrays of the model by path, of which those are used that were not saved.
        """
        require_mesh(blueprint.layout)
        step = self._pick(step)
        about = self.about(step)
        flight_check(blueprint, about).findings.raise_if_errors()
        could_not = f"step {step} in {self.directory} could not be restored"
        with self._explained(could_not, self._others(step)), own_mesh(blueprint.layout.mesh):
            from .orbax import read_arrays

            frozen = frozen_paths(about)
            stored = without(on_disk(blueprint.abstract), frozen)
            read = read_arrays(self.directory / str(step) / "state", to_tree(stored))
            arrays = with_frozen(from_tree(read, stored), frozen, blueprint, given or {})
            wrong = wrong_arrays(arrays, about)
        if others := [path for path in wrong if path in frozen]:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise CheckpointError(
                f"step {step} in {self.directory} was trained with other values of {others[0]}{more}, "
                f"which are not trained and so not saved: start from the same weights"
            )
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise CheckpointError(
                f"step {step} in {self.directory} is damaged: the values of {wrong[0]}{more} "
                f"are not those that were saved{self._others(step)}"
            )
        with own_mesh(blueprint.layout.mesh):
            return in_memory(arrays, blueprint)

    def _take_lock(self, could_not: str) -> None:
        """Creates the directory and locks out other writers; all processes call it."""
        if self._lock.held:
            return
        problem = ""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock.take(on_disk=jax.process_index() == 0)
        except (Taken, OSError) as error:
            problem = f"{could_not}: {reason_for(error)}"
            if isinstance(error, Taken):
                problem = f"checkpoints cannot be saved to {self.directory}: {error}"
        problem = _first(exchange("locking the checkpoint directory", problem))
        try:
            if not problem:
                self.require_shared()
        except CheckpointError:
            self._lock.release()
            raise
        if problem:
            self._lock.release()
            raise CheckpointError(problem)

    def _open(self) -> Writer:
        if self._writer is None:
            from .orbax import Writer

            self._sweep()
            self._writer = Writer()
        return self._writer

    def _sweep(self, step: int | None = None) -> None:
        """Removes what a killed process left half written or half deleted.

        On a file system without locks another process may be writing: then only what is left of
        this step is removed.
        """
        if jax.process_index() != 0 or not self._lock.held:
            return
        for path in self.directory.glob("*"):
            found = _LEFT_BEHIND.fullmatch(path.name)
            if found is None or not (self._lock.real or found[1] == str(step)):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(MARK):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _entries(self) -> list[Path]:
        """Returns what is named as a step is: `15`, but not `015`."""
        try:
            return [path for path in self.directory.iterdir() if _STEP.fullmatch(path.name)]
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be read: {error.strerror}") from error

    def _prune(self) -> None:
        if self.keep is None or jax.process_index() != 0:
            return
        for step in self.steps()[: -self.keep]:
            # Renamed first, so that a process killed here leaves no incomplete step.
            deleted = self.directory / f"{_DELETED}{step}"
            with contextlib.suppress(OSError):
                (self.directory / str(step)).rename(deleted)
            # In the background: a large step takes a while to remove.
            thread = threading.Thread(target=shutil.rmtree, args=(deleted, True))
            thread.start()
            self._removing.append(thread)

    def _pick(self, step: int | None) -> int:
        steps = self.steps()
        if step is None and steps:
            return steps[-1]
        if step in steps:
            assert step is not None
            return step
        if step is not None and steps:
            raise CheckpointError(
                f"{self.directory} has no step {step}: it has {', '.join(map(str, steps))}"
            )
        if not self.directory.is_dir():
            what = "is a file" if self.directory.exists() else "does not exist"
            raise CheckpointError(f"{self.directory} {what}, so it has no checkpoints")
        own = (LOCK, MARK)
        names = sorted(p.name for p in self.directory.iterdir() if not p.name.startswith(own))
        found = f"it contains {', '.join(names[:5])}" if names else "it is empty"
        raise CheckpointError(f"{self.directory} has no checkpoints: {found}")

    def _others(self, step: int) -> str:
        rest = [s for s in self.steps() if s != step]
        if not rest:
            return ""
        return f"; remove it to continue from another step: {', '.join(map(str, rest))}"

    @contextlib.contextmanager
    def _explained(
        self, could_not: str, others: str = "", sweep: int | None = None
    ) -> Iterator[None]:
        """Turns errors of Orbax, TensorStore and the file system into one clear message."""
        try:
            with naming_lost_process(could_not.partition(" could not")[0]):
                yield
        except (CheckpointError, LostProcess):
            raise
        except Exception as error:
            if sweep is not None:
                self._sweep(sweep)  # a half-written step would keep a full disk full
            if isinstance(error, NotFinite):
                raise
            raise CheckpointError(f"{could_not}: {reason_for(error)}{others}") from error


def _is_step(path: Path) -> bool:
    try:
        return (path / "state").is_dir()
    except OSError:
        return True  # it cannot be read: the error for this step says why


def _in_the_way(path: Path) -> str:
    return (
        f"{path.name} there has the name of a step, but is not a checkpoint: remove it, or use another "
        f"directory"
    )


def _first(texts: list[str]) -> str:
    """Returns the first text that is not empty, so that all processes raise the same error."""
    return next(filter(None, texts), "")
