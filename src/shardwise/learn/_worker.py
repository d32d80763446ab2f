"""Runs a user's file against exercises; a process of its own, so that it may hang or end.

    python -m shardwise.learn._worker FILE LESSON SECONDS NAME…

Each line that it writes is JSON: what begins, then what came of it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TextIO

import jax

from .._base import load_file
from ._judge import Outcome, judge, one_sentence, own_line
from ._lessons import find_lesson

DEVICES = 8
"""Virtual CPU devices: what every exercise is checked on."""


def main(arguments: Sequence[str]) -> None:
    """Judges the named exercises, and writes what came of each."""
    file, lesson_number, seconds, *names = arguments
    # What the user prints goes to the terminal; these lines are for the process that asked.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.devices()  # a file that asks for others is told by JAX that it is too late
    _say(lines, begin="")
    try:
        module = load_file(file)
    except (Exception, SystemExit) as error:
        place = own_line(error, file)
        _say(lines, failed=f"{one_sentence(error)}{', at ' if place else ''}{place}")
        return
    lesson = find_lesson(int(lesson_number))
    for exercise in lesson.exercises:
        if exercise.name not in names:
            continue
        _say(lines, begin=exercise.name)
        number = lesson.number_of(exercise)
        if hasattr(module, exercise.name):
            function = getattr(module, exercise.name)
            found = judge(exercise, function, number=number, file=file, seconds=float(seconds))
        else:
            message = _missing(exercise.name, module, file)
            found = Outcome(number, exercise.name, "missing", message=message)
        _say(lines, outcome=dataclasses.asdict(found))
    _say(lines, done=True)


def _missing(name: str, module: ModuleType, file: str) -> str:
    own = [
        other
        for other, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    near = difflib.get_close_matches(name, own, n=1)
    hint = f"; it has {near[0]!r}" if near else ""
    return f"{os.path.basename(file)} has no function {name!r}{hint}"


def _say(lines: TextIO, **row: Any) -> None:
    lines.write(f"{json.dumps(row)}\n")
    lines.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
