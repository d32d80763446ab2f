"""Model families: their `config.json` as a `Config` and back, and the names of their weights."""

from .reading import config_from_hf as config_from_hf
from .weights import weight_names as weight_names
from .writing import config_to_hf as config_to_hf
from .writing import require_same as require_same
