"""The kernels that a compiler makes of operations: what is fused, in which order they run, and what is alive."""

from .combining import combined as combined
from .combining import paired as paired
from .fused import Block as Block
from .graph import COLLECTIVES as COLLECTIVES
from .graph import Kernel as Kernel
from .graph import size_of as size_of
from .hiding import Step as Step
from .hiding import hiding_order as hiding_order
from .hiding import is_copy as is_copy
from .hiding import lives_of as lives_of
from .memory import peak_of as peak_of
from .memory import placed as placed
from .rewrites import is_added_up as is_added_up
from .rewrites import rewritten as rewritten
from .tpu import LANES as LANES
from .tpu import LEFT as LEFT
from .tpu import RELAYOUT as RELAYOUT
from .tpu import VECTOR as VECTOR
from .tpu import groups_of as groups_of
from .tpu import heads_of as heads_of
from .tpu import is_filter_gradient as is_filter_gradient
from .tpu import labels_of as labels_of
from .tpu import nearby as nearby
from .tpu import outside as outside
from .tpu import padded as padded
from .tpu import taps_of as taps_of
