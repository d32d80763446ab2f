"""What is in a device's memory during a step, and what put it there."""

from .buffers import OTHER as OTHER
from .buffers import Buffer as Buffer
from .buffers import largest_buffers as largest_buffers
from .buffers import workspace_bound as workspace_bound
