"""The stages of a search: what may fit, what is fast, what the compiler says."""

from .proving import Searcher as Searcher
from .topologies import growing as growing
from .topologies import sizes as sizes
