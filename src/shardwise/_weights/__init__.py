"""Weights in and out: `.safetensors` checkpoints straight into the shards of a layout, and back."""

from .loading import load as load
from .naming import Name as Name
from .naming import NameMap as NameMap
from .naming import read_names as read_names
from .preflight import WeightsError as WeightsError
from .preflight import WeightsPreflight as WeightsPreflight
from .preflight import check_weights as check_weights
from .proposing import ProposedNames as ProposedNames
from .proposing import propose_names as propose_names
from .saving import save_weights as save_weights
