"""The kernels that a compiler makes of operations: what is fused, in which order they run, and what is alive."""

from .combining import combined as combined
from .combining import merged as merged
from .filters import LANES as LANES
from .filters import RELAYOUT as RELAYOUT
from .filters import groups_of as groups_of
from .filters import is_filter_gradient as is_filter_gradient
from .filters import labels_of as labels_of
from .filters import taps_of as taps_of
from .fused import COLLECTIVES as COLLECTIVES
from .fused import Block as Block
from .fused import size_of as size_of
from .hiding import Step as Step
from .hiding import hiding_order as hiding_order
from .hiding import is_copy as is_copy
from .hiding import lives_of as lives_of
from .lanes import heads_of as heads_of
from .lanes import padded as padded
from .memory import peak_of as peak_of
from .memory import placed as placed
from .rewrites import rewritten as rewritten
from .vector import LEFT as LEFT
from .vector import VECTOR as VECTOR
from .vector import nearby as nearby
from .vector import outside as outside
from .windows import Kernel as Kernel
