"""Facts about accelerators: memory, links, topologies. Imports no JAX."""

from .chips import CHIPS as CHIPS
from .chips import MOST_DEVICES as MOST_DEVICES
from .chips import Chip as Chip
from .chips import Chips as Chips
from .chips import gpu_of_kind as gpu_of_kind
from .chips import parse_chips as parse_chips
from .chips import tpu_slices as tpu_slices
from .rings import MODEL as MODEL
from .rings import sent_bytes as sent_bytes
