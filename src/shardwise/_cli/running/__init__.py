"""Commands that run on the devices present."""

from . import checkpoints as checkpoints
from . import demo as demo
from . import generate as generate
from . import launch as launch
from . import train as train
from . import weights as weights
