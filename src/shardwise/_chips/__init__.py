"""Facts about accelerators: memory, links, topologies. Imports no JAX."""

from .chips import CHIPS as CHIPS
from .chips import MOST_DEVICES as MOST_DEVICES
from .chips import Target as Target
from .chips import parse_target as parse_target
from .rings import MODEL as MODEL
from .rings import sent_bytes as sent_bytes
