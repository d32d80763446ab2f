"""Meshes by name, and arithmetic on PartitionSpecs."""

from .meshes import DATA_AXES as DATA_AXES
from .meshes import SEQUENCE_AXES as SEQUENCE_AXES
from .meshes import STAGES as STAGES
from .meshes import AnyMesh as AnyMesh
from .meshes import chips_of as chips_of
from .meshes import mesh as mesh
from .meshes import mesh_types as mesh_types
from .meshes import show_mesh as show_mesh
from .spec import Axes as Axes
from .spec import Fault as Fault
from .spec import closest_axis as closest_axis
from .spec import dim_axes as dim_axes
from .spec import divisible_dims as divisible_dims
from .spec import faults as faults
from .spec import make_spec as make_spec
from .spec import normal_spec as normal_spec
from .spec import padded as padded
from .spec import parse_spec as parse_spec
from .spec import places_for_names as places_for_names
from .spec import require_plain as require_plain
from .spec import require_spec as require_spec
from .spec import shard_shape as shard_shape
from .spec import show_spec as show_spec
from .spec import spec_axes as spec_axes
from .spec import ways as ways
