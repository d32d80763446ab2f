"""Models in Flax NNX that know nothing of meshes."""

from ._decoder import Config as Config
from ._decoder import Decoder as Decoder
from ._decoder import next_token_loss as next_token_loss
