"""Placing arrays on devices: initialising a model in its shards, or moving it to a layout."""

from .parts import put_anywhere as put_anywhere
from .parts import wrap_keys as wrap_keys
from .place import init as init
from .place import initialise as initialise
from .place import own_mesh as own_mesh
from .place import require_mesh as require_mesh
from .place import shard as shard
