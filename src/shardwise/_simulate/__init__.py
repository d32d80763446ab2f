"""Simulation of `shard_map` on one device."""

from .body import cast as cast
from .body import varying as varying
from .events import Event as Event
from .events import Shards as Shards
from .events import Trace as Trace
from .simulation import Simulation as Simulation
from .simulation import simulate as simulate
from .stacked import is_traced as is_traced
