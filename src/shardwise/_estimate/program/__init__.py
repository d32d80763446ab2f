"""The step as Shardy partitions it: its operations, simplified, and the memory orders of its arrays."""

from .orders import Orders as Orders
from .orders import dims_of as dims_of
from .orders import forward_of as forward_of
from .orders import numbers_of as numbers_of
from .orders import written as written
from .partitioning import Op as Op
from .partitioning import Program as Program
from .partitioning import partition as partition
from .rotations import rotated as rotated
from .simplify import simplified as simplified
