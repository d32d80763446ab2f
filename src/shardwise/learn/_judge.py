"""Judging one function by the cases of its exercise, in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import linecache
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from .._base import line_of, public
from ._compare import difference, show
from ._exercise import Case, Differs, Exercise

_LONGEST_MESSAGE = 300


@public
@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one exercise.

    Attributes:
        number: such as `2.3`.
        name: of the function.
        status: `passed`; `differs` (a case's result), `raised` (an error), `timeout` (it was
            stopped), `ended` (it ended the process), `unwritten` (it raises
            `NotImplementedError`), `missing` (it is not in the file).
        cases: how many were passed.
        call: the first case that was not, in words.
        returned: what came back then.
        expected: what should have.
        message: what is wrong, in one sentence.
        place: the user's own file and line, where there is one.
        hint: what to think of.
    """

    number: str
    name: str
    status: str
    cases: int = 0
    call: str = ""
    returned: str = ""
    expected: str = ""
    message: str = ""
    place: str = ""
    hint: str = ""


class _Late(BaseException):
    """The alarm rang: no `except Exception` of the user's stops it."""


@public
def judge(
    exercise: Exercise, function: Any, *, number: str = "", file: str = "", seconds: float = 0
) -> Outcome:
    """Returns what the cases of an exercise say of a function.

    Args:
        exercise: what it should do.
        function: the user's.
        number: of the exercise.
        file: the user's, to tell its lines from others.
        seconds: after which it is stopped, where the system has an alarm; 0 for never.

    Example:
        >>> from shardwise import learn
        >>> bubble = learn.find_lesson(5).exercise("bubble")
        >>> learn.judge(bubble, lambda stages, microbatches, rounds: 0.0).status
        'differs'
    """
    blank = Outcome(number, exercise.name, "passed")
    found = _misshapen(exercise, function)
    if found:
        return dataclasses.replace(blank, status="differs", message=found)
    passed = 0
    case: Case | None = None
    try:
        with _alarm(seconds):
            for case in exercise.cases():
                returned = _run(case, function)
                text = _compared(returned, case.expected)
                if text:
                    told = dataclasses.replace(
                        _at(blank, exercise, case, passed),
                        returned=show(returned),
                        expected=show(case.expected),
                    )
                    return dataclasses.replace(told, status="differs", message=text)
                passed += 1
    except _Raised as error:
        assert case is not None
        told = _at(blank, exercise, case, passed)
        return _failed(told, error.cause, file)
    except _Late as error:
        told = _at(blank, exercise, case, passed) if case else blank
        place = own_line(error, file)
        return dataclasses.replace(told, status="timeout", message=late(seconds), place=place)
    return dataclasses.replace(blank, cases=passed)


def late(seconds: float) -> str:
    """Returns that a function took too long, in words."""
    return f"it took more than {seconds:g} s"


def own_line(error: BaseException, file: str) -> str:
    """Returns the innermost of the user's own lines: `my.py:12: return x / 0`, or nothing."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        text = (error.text or "").strip()
        name = f"{os.path.basename(error.filename)}:{error.lineno}"
        return f"{name}: {text}" if text else name
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == file:
            line = frame.line or linecache.getline(file, frame.lineno or 0)
            return f"{os.path.basename(file)}:{frame.lineno}: {line.strip()}"
    return line_of(error)


def one_sentence(error: BaseException) -> str:
    """Returns an error's type and text on one line, not too long."""
    # A SyntaxError's own text repeats its place.
    told = error.msg if isinstance(error, SyntaxError) else str(error)
    text = " ".join(told.split())
    text = text if len(text) <= _LONGEST_MESSAGE else f"{text[: _LONGEST_MESSAGE - 1]}…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Raised(Exception):  # noqa: N818 - what the user's function raised, carried past our own code
    def __init__(self, cause: BaseException):
        super().__init__()
        self.cause = cause


def _run(case: Case, function: Callable[..., Any]) -> Any:
    try:
        return case.run(function) if case.run is not None else function(*case.arguments)
    except (Exception, SystemExit) as error:
        raise _Raised(error) from error


def _compared(returned: Any, expected: Any) -> str | None:
    try:
        return difference(returned, expected)
    except Exception as error:  # an object of the user's own that does not let itself be compared
        return f"it cannot be compared: {one_sentence(error)}"


def _at(blank: Outcome, exercise: Exercise, case: Case, passed: int) -> Outcome:
    call = case.call or f"{exercise.name}({', '.join(map(show, case.arguments))})"
    hint = case.hint or exercise.hint
    return dataclasses.replace(blank, cases=passed, call=call, hint=hint)


def _failed(told: Outcome, error: BaseException, file: str) -> Outcome:
    if isinstance(error, Differs):
        return dataclasses.replace(told, status="differs", message=str(error))
    if isinstance(error, NotImplementedError) and "NotImplementedError" in own_line(error, file):
        return dataclasses.replace(
            told, status="unwritten", call="", hint="", message="it is not written yet"
        )
    return dataclasses.replace(
        told, status="raised", message=one_sentence(error), place=own_line(error, file)
    )


def _misshapen(exercise: Exercise, function: Any) -> str:
    """Returns why a thing cannot be called as the exercise says, or nothing."""
    if not callable(function):
        return f"it is the {type(function).__name__} {show(function)}, not a function"
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError):  # built in, without a signature
        return ""
    try:
        parameters.bind(*exercise.parameters.split(", "))
    except TypeError:
        return f"it takes {parameters}, but is called as {exercise.signature}"
    return ""


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raises `_Late` in the main thread after so long, where the system can."""
    if not seconds or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(*_: Any) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
