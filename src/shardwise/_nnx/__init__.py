"""What a user brings, a model or a recipe, as abstract state and leaves with paths."""

from .abstract import AbstractModel as AbstractModel
from .abstract import Model as Model
from .abstract import abstract_model as abstract_model
from .abstract import leaves_of as leaves_of
from .abstract import shape_of as shape_of
from .abstract import sharding_rules_of as sharding_rules_of
from .adapters import followed as followed
from .leaf import Follows as Follows
from .leaf import Leaf as Leaf
from .leaf import Left as Left
from .leaf import Opinion as Opinion
from .leaf import array_bytes as array_bytes
from .paths import Keys as Keys
from .paths import dotted as dotted
from .paths import keyed_leaves as keyed_leaves
from .paths import show_path as show_path
from .paths import split_path as split_path
from .qwix_models import adapter_scale as adapter_scale
from .qwix_models import dequantised as dequantised
from .qwix_models import is_bypassed as is_bypassed
from .qwix_models import plain_path as plain_path
from .qwix_models import quantiser as quantiser
from .recipe import Recipe as Recipe
from .recipe import Remat as Remat
from .recipe import policy_names as policy_names
from .recipe import remat_policy as remat_policy
