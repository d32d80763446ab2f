"""Models in Flax NNX that know nothing of meshes: their dims have names, a layout says the rest."""

from ._config import Config as Config
from ._configs import CONFIGS as CONFIGS
from ._decoder import Decoder as Decoder
from ._decoder import next_token_loss as next_token_loss
