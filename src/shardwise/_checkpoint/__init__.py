"""Checkpoints: saved in the background, restored on any mesh."""

from .checkpoints import Checkpoints as Checkpoints
from .digest import digests as digests
from .digest import words_of as words_of
from .errors import CheckpointError as CheckpointError
from .preflight import Preflight as Preflight
from .preflight import array_rows as array_rows
from .preflight import flight_check as flight_check
from .stored_state import in_memory as in_memory
from .stored_state import on_disk as on_disk
