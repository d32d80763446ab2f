"""Reads a compiled program: its collectives, flops, buffers, and the lines they come from."""

from .access import Access as Access
from .access import access_of as access_of
from .access import target_of as target_of
from .buffers import OTHER as OTHER
from .buffers import Buffer as Buffer
from .buffers import largest_buffers as largest_buffers
from .flops import bytes_accessed as bytes_accessed
from .flops import flops_of as flops_of
from .flops import work_of as work_of
from .program import Instruction as Instruction
from .program import Module as Module
from .program import Shape as Shape
from .program import parse_hlo as parse_hlo
from .program import parse_shapes as parse_shapes
from .resharding import Reshard as Reshard
from .resharding import reshards as reshards
from .source import EDGES as EDGES
from .source import Source as Source
from .source import source_of as source_of
from .source import user_place as user_place
from .traffic import Collective as Collective
from .traffic import by_axis as by_axis
from .traffic import collective_kind as collective_kind
from .traffic import collective_parts as collective_parts
from .traffic import collectives as collectives
from .traffic import replica_groups as replica_groups
