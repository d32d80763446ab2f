"""Strategies: rules that see the whole model first, alone and by name."""

from .by_name import FSDP_AXES as FSDP_AXES
from .by_name import PART_AXES as PART_AXES
from .by_name import TENSOR_AXES as TENSOR_AXES
from .by_name import Named as Named
from .by_name import flatten_rules as flatten_rules
from .depth import stage_axes as stage_axes
from .depth import stages as stages
from .fully_sharded import Fsdp as Fsdp
from .fully_sharded import fsdp as fsdp
from .tensor_parallel import tensor as tensor
from .zero import Zero as Zero
from .zero import zero1 as zero1
from .zero import zero2 as zero2
from .zero import zero_axes as zero_axes
