"""Training: the data, the jitted step, and the loop."""

from .datasets import Data as Data
from .datasets import data as data
from .loop import fit as fit
from .loop import fit_with as fit_with
from .replicas import ReplicasDiffer as ReplicasDiffer
from .stopping import Stopped as Stopped
from .train import Step as Step
from .train import train_state as train_state
from .train import train_step as train_step
