"""Commands that show what would happen, and need no devices."""

from . import check as check
from . import compile as compile
from . import plan as plan
from . import report as report
from . import search as search
from . import studio as studio
from . import transfer as transfer
