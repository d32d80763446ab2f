"""Parallelism written by hand: pipelines and ring attention."""

from .adapting import is_adapting as is_adapting
from .attention import sequence_parallel_attention as sequence_parallel_attention
from .pipelines import Pipeline as Pipeline
from .pipelines import pipeline as pipeline
from .timetable import Timetable as Timetable
