"""Going on with fewer processes: the layouts for them, planned ahead, and the state in memory."""

from .ahead import compile_ahead as compile_ahead
from .copies import Copies as Copies
from .copies import DamagedCopy as DamagedCopy
from .copies import Found as Found
from .plan import ElasticPlan as ElasticPlan
from .plan import Smaller as Smaller
from .plan import device_capacity as device_capacity
from .plan import elastic_plan as elastic_plan
from .plan import scaled as scaled
