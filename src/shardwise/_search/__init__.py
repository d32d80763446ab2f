"""Which mesh, strategy, remat and accumulation: ranked by estimates, proved by the compiler."""

from .found import Candidate as Candidate
from .found import Found as Found
from .searching import search as search
