"""The lessons, in order."""

from __future__ import annotations

from ..._base import public
from .._exercise import Lesson
from . import into_a_mesh, parallelism, shard_map, spec_arithmetic, state_and_layout

LESSONS: tuple[Lesson, ...] = (
    Lesson(1, "state and layout", "docs/learn/state_and_layout.md", state_and_layout.EXERCISES),
    Lesson(2, "PartitionSpec arithmetic", "docs/learn/specs.md", spec_arithmetic.EXERCISES),
    Lesson(3, "shard_map by simulation", "docs/learn/shard_map.md", shard_map.EXERCISES),
    Lesson(4, "initialising into a mesh", "docs/learn/into_a_mesh.md", into_a_mesh.EXERCISES),
    Lesson(5, "six kinds of parallelism", "docs/learn/parallelism.md", parallelism.EXERCISES),
)


@public
def find_lesson(number: int) -> Lesson:
    """Returns the lesson of that number.

    Raises:
        ValueError: there is none.

    Example:
        >>> from shardwise import learn
        >>> learn.find_lesson(2).page
        'docs/learn/specs.md'
    """
    if not 1 <= number <= len(LESSONS):
        raise ValueError(f"lesson {number} does not exist: they are 1 to {len(LESSONS)}")
    return LESSONS[number - 1]
