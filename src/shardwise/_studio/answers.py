"""The answers to a state: arithmetic at once, an estimate in a second or two, the compiler on request."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax

from .._base import count, show_seconds
from .._compile import compile as compile_step
from .._compile import plan_of, watched_compilers
from .._estimate import estimate
from .._layout import Layout
from .._mesh import chips_of
from .._nnx import Recipe
from .._report import candidate_row, plan_data
from .._search import Candidate, run_search, samples_of
from .choices import Abled, abilities, edited, offered
from .copies import command_of, python_of
from .lanes import Task, sentence
from .source import Source
from .state import State

# How many layouts are kept, and how many estimates: going back to one is free.
_KEPT = 48


class Answers:
    """Answers questions about states; several threads may ask."""

    def __init__(self, source: Source):
        """Takes what the states are about."""
        self.source = source
        self._laid: OrderedDict[str, tuple[Any, Layout]] = OrderedDict()
        self._estimates: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._abled: dict[tuple[Any, ...], Abled] = {}
        # The user's code is called by one thread at a time.
        self._lock = threading.RLock()

    def laid_out(self, state: State) -> tuple[Any, Layout]:
        """Returns what a state names, and its layout; each is made once."""
        with self._lock:
            found = self._laid.get(state.query)
            if found is None:
                found = self.source.lay_out(state)
            _keep(self._laid, state.query, found)
            return found

    def able(self, state: State) -> Abled:
        """Returns what a state's target can do; finding out takes a moment, once for a target."""
        with self._lock:
            plain = State(state.target, state.on, state.mesh, batch=state.batch)
            found = self.source.found(plain)
            key = (state.target, *(tuple(x.shape[1:]) for x in _batch(found)))
            if key not in self._abled:
                self._abled[key] = abilities(found)
            samples = samples_of(found) if isinstance(found, Recipe) else 0
            return dataclasses.replace(self._abled[key], samples=samples)

    def edited(self, state: State, edits: Sequence[Any]) -> State:
        """Returns a state after edits; see `choices.edited`."""
        return edited(state, edits, self.able)

    def offered(self, state: State) -> dict[str, Any]:
        """Returns what the controls offer in a state."""
        return {"state": state.to_dict(), "offered": offered(state, self.able(state))}

    def exact(self, state: State) -> dict[str, Any]:
        """Returns what arithmetic knows: the layout, its findings and bytes (exact)."""
        began = time.perf_counter()
        found: Any = None
        answer: dict[str, Any] = {"state": state.to_dict(), "label": "exact"}
        try:
            found, made = self.laid_out(state)
            plan = plan_of(found, made)
            answer["side"] = plan_data(name_of(state), plan)
            answer["errors"], answer["warnings"] = (
                len(plan.findings.errors),
                len(plan.findings.warnings),
            )
            answer["problem"] = plan.problem
        except Exception as error:
            answer["error"] = sentence(error)
        with contextlib.suppress(Exception):  # the same as above
            answer["batch"] = batch_of(found if found is not None else self.source.found(state))
        answer["command"] = command_of(state, self.source)
        answer["seconds"] = time.perf_counter() - began
        return answer

    def estimated(self, state: State) -> dict[str, Any]:
        """Returns what the partitioned program says (modelled)."""
        began = time.perf_counter()
        answer: dict[str, Any] = {"state": state.to_dict(), "label": "modelled"}
        try:
            found, made = self.laid_out(state)
            if chips_of(made.mesh) is None:
                raise ValueError(
                    "choose chips to have a step estimated: arithmetic alone has no time"
                )
            inputs = None if isinstance(found, Recipe) else self.source.inputs
            if not isinstance(found, Recipe) and inputs is None:
                raise ValueError("a model alone has no step: give --inputs, or name a Recipe")
            # A file of measured rates may be another by now: what it prices is not kept.
            keeps = self.source.calibration is None
            known = self._estimates.get(state.query)
            if known is None:
                estimated = estimate(
                    found, made, inputs=inputs, method=self.source.method if inputs else None,
                    calibration=self.source.calibration,
                )  # fmt: skip
                known = {**estimated.to_dict(), "verdict": estimated.verdict}
            if keeps:
                _keep(self._estimates, state.query, known)
            answer["estimate"] = known
        except Exception as error:
            answer["error"] = sentence(error)
        answer["seconds"] = time.perf_counter() - began
        return answer

    def compiled(self, state: State, task: Task) -> dict[str, Any]:
        """Returns what the chips' own compiler says (compiled); it may be cancelled."""
        task.say("laying out")
        found, made = self.laid_out(state)
        chips = chips_of(made.mesh)
        if chips is None:
            raise ValueError("choose chips to compile for")
        inputs = None if isinstance(found, Recipe) else self.source.inputs
        task.say(f"tracing the step for {count(made.mesh.size, 'device')} of {chips}")
        with watched_compilers(task.watch):
            compiled = compile_step(
                found, made, inputs=inputs, method=self.source.method if inputs else None,
                calibration=self.source.calibration, show=False,
            )  # fmt: skip
        how = "in the cache" if compiled.cached else f"compiled in {show_seconds(compiled.seconds)}"
        task.say(f"{how}; reading the program")
        plan = dataclasses.replace(plan_of(found, made), compiled=compiled)
        memory = compiled.memory
        return {
            "state": state.to_dict(),
            "label": "compiled",
            "side": plan_data(name_of(state), plan),
            "peak_bytes": memory.peak if memory is not None else None,
            "capacity": memory.capacity if memory is not None else None,
            "fits": compiled.fits,
            "cached": compiled.cached,
        }

    def searched(self, state: State, parts: dict[str, Any], task: Task) -> dict[str, Any]:
        """Returns how a search over layouts ended; its points are found on the way.

        Args:
            state: where the search begins: target, chips, batch and optimizer.
            parts: `compile`, how many of the best to prove; `keep`, the fields that stay as they are.
            task: what each point is reported to.
        """
        if state.on == "none":
            raise ValueError("choose chips to search on")
        plain = dataclasses.replace(
            state, rules=(), remat="", accumulate=0, loss_chunks=0, offload="", microbatches=0
        )
        with self._lock:
            recipe = self.source.found(plain)
        if not isinstance(recipe, Recipe):
            raise ValueError("a search needs a Recipe, which has a loss, an optimizer and a batch")
        keep = parts.get("keep", ())
        fixed: dict[str, Any] = {}
        if "strategy" in keep and state.strategy:
            fixed["strategy"] = state.strategy
        if "remat" in keep and state.remat:
            fixed["remat"] = None if state.remat == "none" else state.remat
        if "accumulate" in keep:
            fixed["accumulate"] = state.accumulate or recipe.accumulate
        task.say(f"searching layouts of {state.target} on {state.on}")

        def seen(candidate: Candidate) -> None:
            task.find(point_of(candidate, state, recipe))

        with watched_compilers(task.watch):
            found = run_search(
                dataclasses.replace(recipe, remat=None) if state.remat else recipe,
                state.on,
                fixed,
                compile=parts.get("compile", 0),
                prices=self.source.prices or None,
                calibration=self.source.calibration,
                progress=task.say,
                seen=seen,
            )
        fits = [c for c in found.candidates if c.fits]
        return {
            "stopped": found.stopped,
            "notes": list(found.notes),
            "seconds": found.seconds,
            "candidates": len(found.candidates),
            "best": point_of(found.best, state, recipe) if fits else None,
            "remedies": [point_of(c, state, recipe) for c in found.remedies],
        }

    def python(self, state: State) -> str:
        """Returns a program that makes the same layout."""
        return python_of(state, self.source, self.laid_out(state)[0])

    def lockfile(self, state: State) -> str:
        """Returns the layout as a lockfile, with what the state says of the step."""
        found, made = self.laid_out(state)
        step = {}
        if isinstance(found, Recipe):
            for name in ("accumulate", "loss_chunks", "microbatches"):
                if value := getattr(state, name):
                    step[name] = value
            if state.remat:
                step["remat"] = None if state.remat == "none" else state.remat
            if state.offload:
                step["offload"] = "" if state.offload == "none" else state.offload
        return made.lockfile(step or None)


def _keep(kept: OrderedDict[str, Any], query: str, found: Any) -> None:
    """Keeps what was found for a state, and forgets what was asked for longest ago."""
    kept[query] = found
    kept.move_to_end(query)
    while len(kept) > _KEPT:
        kept.popitem(last=False)


def name_of(state: State) -> str:
    """Returns a short name of a state."""
    parts = [
        state.axes,
        state.strategy or "annotations",
        *([state.on] if state.on != "none" else []),
    ]
    return " ".join(parts)


def batch_of(found: Any) -> list[dict[str, Any]]:
    """Returns the shapes of a recipe's batch."""
    return [{"shape": list(x.shape), "dtype": str(x.dtype)} for x in _batch(found)]


def _batch(found: Any) -> list[Any]:
    return jax.tree.leaves(found.batch) if isinstance(found, Recipe) else []


def point_of(candidate: Candidate, state: State, recipe: Recipe) -> dict[str, Any]:
    """Returns a point of a search, with the link that loads it into the controls."""
    choice = candidate.choice
    batch = state.batch
    first, times, rest = (batch or "").partition("x")
    if batch and first != str(choice.samples):
        batch = f"{choice.samples}{times}{rest}"
    led = dataclasses.replace(
        state,
        on=choice.chips,
        mesh=choice.axes,
        strategy=choice.strategy,
        rules=(),
        batch=batch,
        remat=state.remat if choice.remat == "" else choice.remat or "none",
        accumulate=choice.accumulate if choice.accumulate != recipe.accumulate else 0,
        loss_chunks=choice.loss_chunks if choice.loss_chunks != recipe.loss_chunks else 0,
        offload=(choice.offload or "none") if choice.offload != recipe.offload else "",
        microbatches=choice.microbatches or 0,
    )
    return {**candidate_row(candidate), "key": choice.key, "query": led.query}
