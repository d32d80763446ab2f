"""What the instructions of a program cost on a GPU, and the speeds that say so."""

from .kernels import GpuPricer as GpuPricer
from .kernels import attention_seconds as attention_seconds
from .kernels import product_seconds as product_seconds
from .price import FREE as FREE
from .price import HOT as HOT
from .price import SPREAD as SPREAD
from .price import Price as Price
from .rates import GpuRates as GpuRates
from .rates import gpu_rates as gpu_rates
