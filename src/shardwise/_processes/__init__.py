"""Multiple processes: joining, monitoring, agreeing and launching."""

from .agree import ProcessesDiffer as ProcessesDiffer
from .agree import agreed_steps as agreed_steps
from .agree import exchange as exchange
from .agree import known_to_all as known_to_all
from .agree import odd_ones as odd_ones
from .agree import post as post
from .agree import posted as posted
from .agree import require_same_parts as require_same_parts
from .agree import together as together
from .elastic import AGAIN_EXIT_CODE as AGAIN_EXIT_CODE
from .elastic import COPIES as COPIES
from .elastic import MOST as MOST
from .elastic import Elastic as Elastic
from .elastic import elastic_run as elastic_run
from .joining import distributed as distributed
from .joining import distributed_address as distributed_address
from .launcher import launch as launch
from .lost import LostProcess as LostProcess
from .lost import end_named as end_named
from .lost import naming_lost_process as naming_lost_process
from .lost import noting_failure as noting_failure
from .peers import Processes as Processes
from .peers import pid_space as pid_space
from .supervisor import launch_elastic as launch_elastic
