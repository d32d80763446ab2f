"""What a step would take, from the partitioned program, without compiling it."""

from .estimates import Estimate as Estimate
from .estimating import Partitioned as Partitioned
from .estimating import estimate as estimate
from .estimating import partition_step as partition_step
