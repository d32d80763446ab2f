"""A layout and its compilation as one HTML page."""

from .data import plan_data as plan_data
from .report import Report as Report
from .report import asset as asset
from .report import report_of as report_of
from .report import report_of_plans as report_of_plans
from .search import candidate_row as candidate_row
from .search import report_of_search as report_of_search
