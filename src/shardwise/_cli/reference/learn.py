"""The command `learn`: lists lessons and exercises, and checks solutions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..._base import tell, tell_json, working
from ..help_text import Command
from ..options import Format, FormatOption, app

if TYPE_CHECKING:
    from ...learn import Marks, Outcome


LessonArgument = Annotated[int, typer.Argument(metavar="LESSON", help="The number of the lesson.")]

learn_app = typer.Typer(rich_markup_mode=None)
app.add_typer(learn_app, name="learn")


@learn_app.callback(
    invoke_without_command=True,
    help="""List the lessons and their exercises, write a file to start from, or check a solution.

Examples:

\b
  shardwise learn
  shardwise learn start 2 mine.py
  shardwise learn check 2 mine.py
  shardwise learn check 2 mine.py --only held

Exit status: 0 all exercises checked pass, 1 some do not, 2 could not run.""",
)
def learn(context: typer.Context, format: FormatOption = Format.text) -> None:
    """Lists the lessons."""
    if context.invoked_subcommand is not None:
        return
    from ...learn import LESSONS

    if format is Format.json:
        rows = [
            {
                "lesson": lesson.number,
                "title": lesson.title,
                "page": lesson.page,
                "exercises": [
                    {
                        "number": lesson.number_of(exercise),
                        "name": exercise.name,
                        "signature": exercise.signature,
                        "task": exercise.task,
                        "example": exercise.example,
                    }
                    for exercise in lesson.exercises
                ],
            }
            for lesson in LESSONS
        ]
        tell_json({"lessons": rows})
        return
    lines = []
    for lesson in LESSONS:
        lines.append(f"{lesson.number}  {lesson.title}  {lesson.page}")
        lines += [f"   {lesson.number_of(e)}  {e.signature}" for e in lesson.exercises]
    end = "shardwise learn start 1 writes a file to start from, shardwise learn check 1 FILE checks it"
    tell("\n".join([*lines, "", end]))


@learn_app.command(
    cls=Command,
    help="""Write a file with the functions of a lesson for you to fill in.

Example:

\b
  shardwise learn start 2 mine.py

Exit status: 0 written, 2 could not be written (an existing file is never overwritten).""",
)
def start(
    lesson: LessonArgument,
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="The file; lesson2.py for lesson 2.")
    ] = None,
) -> None:
    """Writes a skeleton."""
    from ...learn import find_lesson, skeleton

    found = find_lesson(lesson)
    path = file or f"lesson{lesson}.py"
    if not path.endswith(".py"):
        raise ValueError(f"{path} is not the name of a Python file: it must end in .py")
    if not Path(path).parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {Path(path).parent}")
    try:
        with open(path, "x", encoding="utf-8") as out:
            out.write(skeleton(found, path))
    except FileExistsError:
        raise ValueError(f"{path} already exists and is not overwritten: name another") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
    count = len(found.exercises)
    tell(f"wrote {path} with {count} functions; {found.page} explains them")
    tell(f"next: shardwise learn check {lesson} {path}")


@learn_app.command(
    cls=Command,
    help="""Run your functions on the cases of a lesson and show what differs.

The file runs in its own process, on eight virtual CPU devices. What it prints goes to stderr. An
exercise that takes longer than --limit seconds is stopped.

Examples:

\b
  shardwise learn check 2 mine.py
  shardwise learn check 2 mine.py --only held --format json

Exit status: 0 all pass, 1 something differs, 2 could not run.""",
)
def check(
    lesson: LessonArgument,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file with your functions.")],
    only: Annotated[
        str | None, typer.Option("--only", metavar="NAME", help="Check only this exercise.")
    ] = None,
    limit: Annotated[
        float, typer.Option("--limit", metavar="SECONDS", help="The time limit of each exercise.")
    ] = 60.0,
    format: FormatOption = Format.text,
) -> None:
    """Checks a solution."""
    from ...learn import check as check_file

    with working(f"checking {file}"):
        marks = check_file(lesson, file, only=only, seconds=limit)
    if format is Format.json:
        tell_json(marks.to_dict())
    else:
        tell(_show(marks))
    raise typer.Exit(0 if marks.passed == len(marks.outcomes) else 1)


def _show(marks: Marks) -> str:
    lesson = marks.lesson
    width = max(len(outcome.name) for outcome in marks.outcomes)
    lines = [f"lesson {lesson.number}: {lesson.title}, {os.path.basename(marks.file)}"]
    for outcome in marks.outcomes:
        lines += _lines(outcome, width)
    lines.append(f"{marks.passed} of {len(marks.outcomes)} exercises passed")
    if marks.passed < len(marks.outcomes):
        lines[-1] += f"; {lesson.page} teaches them"
    return "\n".join(lines)


def _lines(outcome: Outcome, width: int) -> list[str]:
    head = f"{outcome.number} {outcome.name:<{width}}  "
    if outcome.status == "passed":
        return [f"{head}passed {outcome.cases} cases"]
    if outcome.status in ("missing", "unwritten"):
        return [f"{head}{outcome.message}"]
    word = {"differs": "differs", "raised": "raised", "timeout": "stopped", "ended": "ended"}
    where = f" at case {outcome.cases + 1}" if outcome.call else ""
    lines = [f"{head}{word[outcome.status]}{where}: {outcome.message}"]
    details = {
        "case": outcome.call,
        "returned": outcome.returned,
        "expected": outcome.expected,
        "at": outcome.place,
        "hint": outcome.hint,
    }
    return lines + [f"      {name:<8}  {text}" for name, text in details.items() if text]
