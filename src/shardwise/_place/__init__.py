"""Placing arrays on devices: initialising a model in its shards, or moving it to a layout."""

from .merging import merge_adapters as merge_adapters
from .parts import put_anywhere as put_anywhere
from .parts import wrap_keys as wrap_keys
from .place import init as init
from .place import initialise as initialise
from .place import initialise_some as initialise_some
from .place import own_mesh as own_mesh
from .place import require_devices as require_devices
from .place import require_mesh as require_mesh
from .place import shard as shard
from .planned_moves import Move as Move
from .planned_moves import Transfer as Transfer
from .planned_moves import TransferTooLarge as TransferTooLarge
from .planned_moves import transfer as transfer
