"""Which mesh, strategy, remat and accumulation: ranked by estimates, proved by the compiler."""

from .found import Candidate as Candidate
from .found import Found as Found
from .found import show_cost as show_cost
from .searching import search as search
from .space import with_remat as with_remat
from .strategies import rank_strategies as rank_strategies
