"""Checkpoints: saved in the background, restored on any mesh."""

from .checkpoints import Checkpoints as Checkpoints
from .digest import digests as digests
from .digest import words_of as words_of
from .errors import CheckpointError as CheckpointError
from .preflight import Preflight as Preflight
from .preflight import flight_check as flight_check
