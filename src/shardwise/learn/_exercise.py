"""Lessons, exercises and cases."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from typing import Any

from .._base import public


class Differs(Exception):  # noqa: N818 - a verdict on the solution, not a failure of ours
    """A solution is wrong in a way that its return value would not show; the text says how."""


@public
@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One use of the user's function, and the expected result.

    Attributes:
        arguments: the arguments of the call.
        expected: the expected result, computed by JAX or Shardwise when the case is built.
        run: runs the function, if that takes more than a call with `arguments`: `jax.shard_map`
            runs a body, for instance. It may raise `Differs`.
        call: a description of the call; `name(arguments)` if empty.
        hint: what to consider if this case fails; the exercise's own hint if empty.
    """

    arguments: tuple[Any, ...]
    expected: Any
    run: Callable[[Callable[..., Any]], Any] | None = None
    call: str = ""
    hint: str = ""


@public
@dataclasses.dataclass(frozen=True, slots=True)
class Exercise:
    """A function for the user to write.

    Attributes:
        name: the name of the function.
        parameters: its parameters, as written in its signature.
        task: what it takes and must return.
        example: a call, and what it returns.
        hint: what to consider if a case fails.
        cases: builds the cases, including edge cases.
    """

    name: str
    parameters: str
    task: str
    example: str
    hint: str
    cases: Callable[[], Iterable[Case]]

    @property
    def signature(self) -> str:
        """The function's name and parameters: `shard_shape(shape, spec, mesh)`."""
        return f"{self.name}({self.parameters})"


@public
@dataclasses.dataclass(frozen=True, slots=True)
class Lesson:
    """A page of the docs, and its exercises.

    Attributes:
        number: its number, counted from 1.
        title: what it teaches.
        page: its file in the docs.
        exercises: numbered from 1 within the lesson: the third of lesson 2 is 2.3.
    """

    number: int
    title: str
    page: str
    exercises: tuple[Exercise, ...]

    def number_of(self, exercise: Exercise) -> str:
        """Returns `2.3` for the third exercise of lesson 2."""
        return f"{self.number}.{self.exercises.index(exercise) + 1}"

    def exercise(self, name: str) -> Exercise:
        """Returns the exercise with that name.

        Raises:
            ValueError: if the lesson has none; the error suggests the closest name.
        """
        names = [exercise.name for exercise in self.exercises]
        if name in names:
            return self.exercises[names.index(name)]
        near = difflib.get_close_matches(name, names, n=1)
        help_text = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
        raise ValueError(f"lesson {self.number} has no exercise {name!r}: {help_text}")
