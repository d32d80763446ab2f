"""Commands that need no devices: what would happen."""

from . import check as check
from . import compile as compile
from . import plan as plan
from . import report as report
