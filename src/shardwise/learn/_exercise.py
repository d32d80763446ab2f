"""What a lesson, an exercise and a case are."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from typing import Any

from .._base import public


class Differs(Exception):  # noqa: N818 - a verdict on the solution, not a failure of ours
    """A solution is wrong in a way that a returned value would not show: the text says how."""


@public
@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One use of the user's function, and what must come of it.

    Attributes:
        arguments: what the function is called with.
        expected: what must come back; computed by JAX or Shardwise when the case is made.
        run: how the function is used, where it is more than a call with `arguments`: a body is
            run by `jax.shard_map`, for instance. It may raise `Differs`.
        call: the use in words; `name(arguments)` if empty.
        hint: what to think of if this case differs; the exercise's own if empty.
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
        name: of the function.
        parameters: of the function, as they stand in its signature.
        task: what it is given and must return.
        example: a call, and what it returns.
        hint: what to think of if a case differs.
        cases: makes the cases, edge cases among them.
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
    """A page that teaches, and its exercises.

    Attributes:
        number: counted from 1.
        title: what it teaches.
        page: its file in the docs.
        exercises: numbered within the lesson from 1: the third of lesson 2 is 2.3.
    """

    number: int
    title: str
    page: str
    exercises: tuple[Exercise, ...]

    def number_of(self, exercise: Exercise) -> str:
        """Returns `2.3` for the third exercise of lesson 2."""
        return f"{self.number}.{self.exercises.index(exercise) + 1}"

    def exercise(self, name: str) -> Exercise:
        """Returns the exercise of that name.

        Raises:
            ValueError: the lesson has none; the nearest is named.
        """
        names = [exercise.name for exercise in self.exercises]
        if name in names:
            return self.exercises[names.index(name)]
        near = difflib.get_close_matches(name, names, n=1)
        help_text = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
        raise ValueError(f"lesson {self.number} has no exercise {name!r}: {help_text}")
