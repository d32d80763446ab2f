"""One HTML page that shows it all."""

from .report import Report as Report
from .report import report_of as report_of
from .report import report_of_plans as report_of_plans
