"""Which mesh, strategy, remat and accumulation: ranked by estimates, proved by the compiler."""

from .abilities import POLICIES as POLICIES
from .abilities import Abilities as Abilities
from .applied import parse_batch as parse_batch
from .applied import samples_of as samples_of
from .applied import with_batch as with_batch
from .applied import with_step as with_step
from .found import Candidate as Candidate
from .found import Found as Found
from .found import show_cost as show_cost
from .searching import run_search as run_search
from .searching import search as search
from .space import AXES as AXES
from .space import BATCH_AXES as BATCH_AXES
from .space import PARTS as PARTS
from .stages import sizes as sizes
from .strategies import best_layout as best_layout
from .strategies import rank_strategies as rank_strategies
from .strategies import strategies_of as strategies_of
