"""What is in a device's memory during a step, and what put it there."""

from .buffers import OTHER as OTHER
from .buffers import Buffer as Buffer
from .buffers import largest_buffers as largest_buffers
from .buffers import workspace_bound as workspace_bound
from .lifetimes import Lifetimes as Lifetimes
from .lifetimes import compiled_lifetimes as compiled_lifetimes
from .lifetimes import modelled_lifetimes as modelled_lifetimes
from .live import LiveLoop as LiveLoop
from .live import LiveMemory as LiveMemory
from .live import Owner as Owner
from .live import live_of as live_of
from .owners import Kinds as Kinds
