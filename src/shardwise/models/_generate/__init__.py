"""Generating text: a decoder with a cache, sampling, and the loop over tokens."""

from .cache import Cache as Cache
from .layers import Attend as Attend
from .layers import over_one as over_one
from .layers import over_prompts as over_prompts
from .loop import generate as generate
