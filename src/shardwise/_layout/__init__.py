"""Layouts: every leaf's spec on one mesh, and who chose it."""

from .diff import LayoutDiff as LayoutDiff
from .diff import diff_layouts as diff_layouts
from .flow import Method as Method
from .flow import call_arguments as call_arguments
from .flow import method_of as method_of
from .layouts import Layout as Layout
from .layouts import layout as layout
from .layouts import load_layout as load_layout
from .layouts import require_layout as require_layout
from .lockfile import key_impl as key_impl
from .rows import fold_paths as fold_paths
from .rows import show_shape as show_shape
from .rules import Logical as Logical
from .rules import by_rank as by_rank
from .rules import pattern_regex as pattern_regex
from .rules import replicate as replicate
from .rules import steps_text as steps_text
from .strategies import FSDP_AXES as FSDP_AXES
from .strategies import Named as Named
from .strategies import fsdp as fsdp
from .strategies import stage_axes as stage_axes
from .strategies import stages as stages
from .tensor_parallel import tensor as tensor
