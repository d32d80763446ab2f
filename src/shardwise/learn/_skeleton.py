"""The file that a user starts from: every function of a lesson, not yet written."""

from __future__ import annotations

import textwrap

from .._base import public
from ._exercise import Exercise, Lesson

_IMPORTS = """import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw
"""


@public
def skeleton(lesson: Lesson, file: str) -> str:
    """Returns a module with the signatures and docstrings of a lesson's exercises.

    Example:
        >>> from shardwise import learn
        >>> print(learn.skeleton(learn.find_lesson(2), "mine.py").splitlines()[0])
        \"\"\"Lesson 2, PartitionSpec arithmetic: docs/learn/specs.md.
    """
    head = (
        f'"""Lesson {lesson.number}, {lesson.title}: {lesson.page}.\n\n'
        f'    shardwise learn check {lesson.number} {file}\n"""\n\n'
    )
    return head + _IMPORTS + "".join(f"\n\n{_function(e)}" for e in lesson.exercises)


def _function(exercise: Exercise) -> str:
    task = textwrap.fill(exercise.task, 92)
    first, *rest = f"{task}\n\nExample:\n{textwrap.indent(exercise.example, '    ')}".splitlines()
    docstring = "\n".join([f'"""{first}', *rest, '"""'])
    body = textwrap.indent(f"{docstring}\nraise NotImplementedError\n", "    ")
    return f"def {exercise.signature}:\n{body}"
