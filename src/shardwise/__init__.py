"""Shardwise plans, checks, simulates, compiles and runs the sharding of Flax NNX models on JAX."""

from ._audit import audit as audit
from ._check import check as check
from ._diff import LayoutDiff as LayoutDiff
from ._diff import diff as diff
from ._findings import Finding as Finding
from ._findings import Findings as Findings
from ._findings import LayoutError as LayoutError
from ._layout import Layout as Layout
from ._layout import layout as layout
from ._layout import load_layout as load_layout
from ._leaf import Leaf as Leaf
from ._leaf import Opinion as Opinion
from ._mesh import mesh as mesh
from ._place import init as init
from ._place import shard as shard
from ._recipe import Recipe as Recipe
from ._rules import by_rank as by_rank
from ._rules import replicate as replicate
from ._simulate import Simulation as Simulation
from ._simulate import simulate as simulate
from ._strategies import fsdp as fsdp
from ._tensor import tensor as tensor
