"""Lessons with checked exercises, which `shardwise learn` lists and runs."""

from ._check import Marks as Marks
from ._check import check as check
from ._exercise import Case as Case
from ._exercise import Exercise as Exercise
from ._exercise import Lesson as Lesson
from ._judge import Outcome as Outcome
from ._judge import judge as judge
from ._lessons import LESSONS as LESSONS
from ._lessons import find_lesson as find_lesson
from ._skeleton import skeleton as skeleton
