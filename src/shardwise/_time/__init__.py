"""How long a program takes: what its instructions cost, when each runs, and why."""

from .calibration import Calibration as Calibration
from .calibration import load_calibration as load_calibration
from .cycles import torus_of as torus_of
from .links import Link as Link
from .pricing import HOT as HOT
from .pricing import SPREAD as SPREAD
from .pricing import Price as Price
from .pricing import attention_seconds as attention_seconds
from .pricing import gpu_rates as gpu_rates
from .pricing import product_seconds as product_seconds
from .result import Communication as Communication
from .result import Machine as Machine
from .result import Share as Share
from .result import StepTime as StepTime
from .result import is_recomputed as is_recomputed
from .result import largest as largest
from .result import mfu_of as mfu_of
from .result import rate_of as rate_of
from .result import time_of as time_of
from .timeline import Timeline as Timeline
from .timeline import timeline_of as timeline_of
