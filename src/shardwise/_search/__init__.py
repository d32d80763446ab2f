"""Which mesh, strategy, remat and accumulation: ranked by estimates, proved by the compiler."""

from .applied import with_step as with_step
from .found import Candidate as Candidate
from .found import Found as Found
from .found import show_cost as show_cost
from .searching import search as search
from .strategies import best_layout as best_layout
from .strategies import rank_strategies as rank_strategies
